"""Layer 4: gaps case by case, of one run and of two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from kvlab.errors import RunError
from kvlab.plots.style import (
    BLUE,
    FAINT,
    QUIET,
    VERMILION,
    draw_interval,
    draw_margin,
    gap_limits,
    head_note,
    label_rows,
    need,
    new_figure,
    note,
    percent,
    percent_axis,
    percent_interval,
    place_rows,
    shorten,
    styled,
    verdict_style,
)
from kvlab.provenance import device_name

_WIDTH, _ROW = 8.6, 0.36  # inches
_NEEDED = ("model", "case", "mode", "margin", "verdict", "gap", "ci90_lo", "ci90_hi")
_FLOOR = ("aa_gap", "aa_ci90_lo", "aa_ci90_hi")


@styled
def plot_gaps(verdicts: pd.DataFrame, *, title: str | None = None) -> tuple[Figure, Axes]:
    """Each case's gap with its 90 % interval against the margin, the A/A floor below it.

    Args:
        verdicts: `Run.verdicts`, or several put together; one row per case, top to bottom.

    Raises:
        RunError: for an empty table.
    """
    if verdicts.empty:
        raise RunError("no verdict to plot: the run has no finished case yet")
    need(verdicts, (*_NEEDED, *_FLOOR), "verdicts")
    rows = verdicts.reset_index(drop=True)
    places, headings = place_rows([shorten(model) for model in rows["model"]])
    fig = new_figure(1.55 + _ROW * (places[-1] + 1), title or _title(rows), width=_WIDTH)
    ax = fig.subplots()
    handles = draw_margin(ax, rows["margin"], vertical=True)
    limits = gap_limits(rows)
    aa = limits if rows["aa_gap"].notna().any() else None
    for y, (_, row) in zip(places, rows.iterrows(), strict=True):
        colour, marker = verdict_style(row["verdict"])
        draw_interval(ax, y - 0.1, row, colour, marker, limits=limits)
        draw_interval(ax, y + 0.24, row, FAINT, "|", size=5, columns=_FLOOR, limits=aa)
        note(ax, y, percent(row["gap"]), 8)
        note(ax, y, percent_interval(row["ci90_lo"], row["ci90_hi"]), 58, QUIET)
        _mark(ax, y, row["verdict"], 150)
    for text, points in (("gap", 8), ("90 % interval", 58), ("verdict", 158)):
        head_note(ax, text, points)
    handles.append(Line2D([], [], color=FAINT, lw=1.8, marker="|", label="zeros against zeros (A/A)"))
    label_rows(ax, places, _names(rows), headings)
    ax.set_xlim(*limits)
    percent_axis(ax.xaxis)
    ax.set_xlabel("time under random KV against zero KV (gap, 90 % interval)")
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig, ax


@styled
def plot_compare(
    gaps_a: pd.DataFrame,
    gaps_b: pd.DataFrame,
    labels: Sequence[str] = ("before", "after"),
    *,
    arm: str = "random",
    title: str | None = None,
) -> tuple[Figure, Axes]:
    """Two runs' gaps with their 90 % intervals, case by case: before and after an upgrade, say.

    Args:
        gaps_a, gaps_b: `Run.gaps`; rows meet by model, case and mode (by case and mode where each is of one model).
        labels: what to call the two.
        arm: whose gaps.

    Raises:
        RunError: when the two have no case in common.
    """
    need(gaps_a, (*_NEEDED, "arm"), "gaps")
    need(gaps_b, (*_NEEDED, "arm"), "gaps")
    sides = [gaps[gaps["arm"] == arm] for gaps in (gaps_a, gaps_b)]
    one_model = all(side["model"].nunique() == 1 for side in sides)
    keys = ["case", "mode"] if one_model else ["model", "case", "mode"]
    rows = sides[0].merge(sides[1], on=keys, suffixes=("", "_b"), sort=False)
    if rows.empty:
        raise RunError(f"the two runs have no case in common under arm {arm!r}; compare runs of the same cases")
    if one_model:
        rows["model"] = sides[0]["model"].iloc[0]
    rows = rows.reset_index(drop=True)
    places, headings = place_rows([shorten(model) for model in rows["model"]])
    heading = title or f"Gap of {arm} KV: {labels[0]} and {labels[1]}"
    fig = new_figure(1.55 + _ROW * (places[-1] + 1), heading, width=_WIDTH)
    ax = fig.subplots()
    handles = draw_margin(ax, pd.concat([rows["margin"], rows["margin_b"]]), vertical=True)
    both = pd.concat([side.loc[:, list(_NEEDED)] for side in sides])
    limits = gap_limits(both)
    columns_b = ("gap_b", "ci90_lo_b", "ci90_hi_b")
    for y, (_, row) in zip(places, rows.iterrows(), strict=True):
        draw_interval(ax, y - 0.16, row, BLUE, "o", limits=limits, filled=False)
        draw_interval(ax, y + 0.16, row, VERMILION, "s", limits=limits, columns=columns_b)
        note(ax, y, f"{percent(row['gap'])} → {percent(row['gap_b'])}", 8)
        moved = row["verdict"] != row["verdict_b"]
        note(ax, y, f"{row['verdict']} → {row['verdict_b']}" if moved else str(row["verdict"]), 108)
    for text, points in (("gap", 8), ("verdict", 108)):
        head_note(ax, text, points)
    for colour, marker, face, label in ((BLUE, "o", "white", labels[0]), (VERMILION, "s", VERMILION, labels[1])):
        handles.append(Line2D([], [], color=colour, marker=marker, mfc=face, lw=1.8, label=shorten(label)))
    label_rows(ax, places, _names(rows), headings)
    ax.set_xlim(*limits)
    percent_axis(ax.xaxis)
    ax.set_xlabel(f"time under {shorten(arm)} KV against zero KV (gap, 90 % interval)")
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig, ax


def _names(rows: pd.DataFrame) -> list[str]:
    several_modes = rows["mode"].nunique() > 1
    return [
        shorten(case, 32) + (f", {mode}" if several_modes else "")
        for case, mode in zip(rows["case"], rows["mode"], strict=True)
    ]


def _mark(ax: Axes, y: float, verdict: Any, points: float) -> None:
    """A verdict's mark and name to the right of a row."""
    colour, marker = verdict_style(verdict)
    place = offset_copy(ax.get_yaxis_transform(), ax.get_figure(root=True), points, 0, units="points")
    ax.plot([1], [y], transform=place, color=colour, marker=marker, markersize=6, clip_on=False)
    note(ax, y, str(verdict), points + 8)


def _title(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    device = device_name(first["gpu"])
    models = ", ".join(shorten(model) for model in dict.fromkeys(rows["model"]))
    modes = " and ".join(dict.fromkeys(rows["mode"]))
    return f"{models} on {device}, {first['engine']} engine, {modes}"
