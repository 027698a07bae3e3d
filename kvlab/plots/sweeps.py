"""Layer 4: gaps along one dimension: context length, top-k, share of zero tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvlab.errors import RunError
from kvlab.plots.axes import log_axis
from kvlab.plots.style import (
    DASHES,
    FAINT,
    INK,
    SERIES_COLOURS,
    VERDICT_STYLE,
    draw_interval,
    draw_margin,
    gap_limits,
    need,
    new_figure,
    percent_axis,
    shorten,
    styled,
    tokens,
    verdict_style,
)

_NEEDED = ("model", "case", "mode", "arm", "margin", "phase", "gap", "ci90_lo", "ci90_hi", "verdict")
# Columns that tell lines apart, and what to call a value; the first ones always, the others where a line would
# otherwise hold two gaps at one place.
_ALWAYS: dict[str, Callable[[Any], str]] = {"model": shorten, "phase": str, "mode": str, "contents": shorten}
_WHERE_NEEDED: dict[str, Callable[[Any], str]] = {
    "context": lambda n: f"{tokens(n)} tokens",
    "topk": lambda k: f"top-{k:.0f}" if pd.notna(k) else "dense",
    "batch": lambda n: f"{n:.0f} request{'s' if n != 1 else ''}",
    "query": lambda n: f"{tokens(n)} query tokens",
    "routing": lambda name: f"{name} routing",
    "gpu": shorten,
    "engine": str,
    "vllm": lambda version: f"vllm {version}",
    "torch": lambda version: f"torch {version}",
    "run": shorten,
    "case": shorten,
}
_MOST_BELOW = 4  # lines whose legend has room below the axes


@styled
def plot_context_sweep(gaps: pd.DataFrame, *, arm: str = "random", title: str | None = None) -> tuple[Figure, Axes]:
    """Gap against context length: one line per phase, and a model, batch or mode where there are several.

    Args:
        gaps: `Run.gaps`, or several put together; `context` in tokens.
        arm: whose gaps.

    Raises:
        RunError: when no row is of the arm.
    """
    rows = _of_arm(gaps, arm)
    fig, ax = _sweep(rows, "context", title or f"Gap of {arm} KV by context length")
    log_axis(ax, rows["context"], tokens)
    ax.set_xlabel("context (tokens of KV of the longest request)")
    ax.set_ylabel(f"time under {shorten(arm, 28)} KV\nagainst zero KV (gap)")
    return fig, ax


@styled
def plot_topk_sweep(gaps: pd.DataFrame, *, arm: str = "random", title: str | None = None) -> tuple[Figure, Axes]:
    """Gap against the indexer's top-k; dense cases (`topk` NaN) are left out.

    Args:
        gaps: `Run.gaps`, or several put together; `topk` in tokens.
        arm: whose gaps.

    Raises:
        RunError: when no row is of the arm and has a top-k.
    """
    need(gaps, ("topk",), "gaps")
    rows = _of_arm(gaps, arm)
    rows = rows[rows["topk"].notna()]
    if rows.empty:
        raise RunError("no gap of a model with a top-k to plot: all are dense")
    fig, ax = _sweep(rows, "topk", title or f"Gap of {arm} KV by top-k")
    log_axis(ax, rows["topk"], lambda k: f"{k:,.0f}")
    ax.set_xlabel("top-k (tokens that a query attends to)")
    ax.set_ylabel(f"time under {shorten(arm, 28)} KV\nagainst zero KV (gap)")
    return fig, ax


@styled
def plot_zero_fraction(gaps: pd.DataFrame, *, title: str | None = None) -> tuple[Figure, Axes]:
    """Gap against the share of zero tokens: `random` at 0, `random(zero_fraction=f)` at f, `zeros_again` at 1.

    Without a gap of `zeros_again` the line ends in a cross at 1, where the gap is 0 by definition. Arms of other
    contents are left out; other random ones (`std=0.5`) are lines of their own.

    Args:
        gaps: `Run.gaps`, or several put together.

    Raises:
        RunError: when no row is of such an arm.
    """
    need(gaps, _NEEDED, "gaps")
    parsed = {arm: zero_fraction(arm) for arm in dict.fromkeys(gaps["arm"])}
    rows = gaps[[parsed[arm] is not None for arm in gaps["arm"]]]
    if rows.empty:
        raise RunError("no gap of random or partly zero KV to plot; add --arm 'random(zero_fraction=0.5)'")
    rows = rows.assign(
        contents=[parsed[arm][0] for arm in rows["arm"]],  # type: ignore[index]
        zero_fraction=[parsed[arm][1] for arm in rows["arm"]],  # type: ignore[index]
    )
    whole = rows["contents"] == ""
    families = list(dict.fromkeys(rows.loc[~whole, "contents"])) or ["random"]
    # All zero is the end of every family's line.
    ends = [rows[whole].assign(contents=family) for family in families]
    rows = pd.concat([rows[~whole], *ends], ignore_index=True)
    fig, ax = _sweep(rows, "zero_fraction", title or "Gap by the share of zero tokens in the KV cache", end=(1.0, 0.0))
    if not (rows["zero_fraction"] == 1).any():
        ax.plot([1], [0], marker="+", color=INK, markersize=9, linestyle="none", zorder=4)
        ax.annotate("zeros, by definition", (1, 0), (4, -12), textcoords="offset points", ha="right", fontsize=8)
    ax.set_xlim(-0.06, 1.06)
    ax.set_xlabel("share of the tokens whose KV is zero")
    ax.set_ylabel("time against zero KV (gap)")
    return fig, ax


def zero_fraction(arm: str) -> tuple[str, float] | None:
    """The random contents that an arm mixes with zeros, and the share of zeros; None for other contents.

    `zeros_again` is all zeros of whatever contents: `("", 1.0)`.
    """
    if arm in ("zeros", "zeros_again"):
        return "", 1.0
    found = re.fullmatch(r"random(?:\((.*)\))?", arm)
    if found is None:
        return None
    given = [item.strip() for item in (found[1] or "").split(",") if item.strip()]
    share, others = 0.0, []
    for item in given:
        name, _, number = item.partition("=")
        if name.strip() == "zero_fraction":
            share = float(number)
        else:
            others.append(item)
    return (f"random({', '.join(others)})" if others else "random"), share


def _of_arm(gaps: pd.DataFrame, arm: str) -> pd.DataFrame:
    need(gaps, (*_NEEDED, "context"), "gaps")
    rows = gaps[gaps["arm"] == arm]
    if rows.empty:
        found = ", ".join(dict.fromkeys(gaps["arm"]))
        raise RunError(f"no gap of arm {arm!r} to plot; the run has {found}")
    return rows


def _sweep(rows: pd.DataFrame, x: str, title: str, end: tuple[float, float] | None = None) -> tuple[Figure, Axes]:
    """The figure but for its x axis; a line that does not reach `end` is drawn on to it."""
    lines = _lines(rows, x)
    beside = len(lines) > _MOST_BELOW
    fig = new_figure(3.6 + 0.16 * max(0, len(lines) - 12), title, width=9.6 if beside else 7.2)
    ax = fig.subplots()
    margins = draw_margin(ax, rows["margin"], vertical=False)
    limits = gap_limits(rows)
    handles: list[Any] = []
    # Apart by a hair, so that intervals at one place do not hide each other.
    hair = min(0.007, 0.05 / len(lines))
    if x != "zero_fraction":
        hair *= max(1.0, math.log2(rows[x].max() / rows[x].min()))
    for i, (name, line) in enumerate(lines.items()):
        colour, dash = SERIES_COLOURS[i % len(SERIES_COLOURS)], DASHES[i % len(DASHES)]
        line = line.sort_values(x, kind="stable")
        shift = (i - (len(lines) - 1) / 2) * hair
        at = [v + shift if x == "zero_fraction" else v * 2**shift for v in line[x]]
        known = [(a, g) for a, g in zip(at, line["gap"], strict=True) if math.isfinite(g)]
        if end and known and not (line[x] == end[0]).any():
            known.append(end)
        ax.plot(*(zip(*known, strict=True) if known else ([], [])), color=colour, linestyle=dash, lw=1.2, zorder=2)
        for place, (_, row) in zip(at, line.iterrows(), strict=True):
            _point(ax, place, row, colour, limits)
        handles.append(Line2D([], [], color=colour, linestyle=dash, lw=1.2, label=name))
    for verdict in sorted(set(rows["verdict"]), key=lambda v: [*VERDICT_STYLE, v].index(v)):
        filled = verdict not in ("inconclusive", "invalid")
        how: dict[str, Any] = {"markerfacecolor": FAINT if filled else "white", "markeredgecolor": FAINT}
        handles.append(Line2D([], [], linestyle="none", marker=verdict_style(verdict)[1], label=str(verdict), **how))
    handles += margins
    ax.set_ylim(*limits)
    percent_axis(ax.yaxis)
    ax.grid(axis="x", color="#EEEEEE")
    if beside:
        fig.legend(handles=handles, loc="outside right upper")
    else:
        fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return fig, ax


def _point(ax: Axes, place: float, row: Any, colour: str, limits: tuple[float, float]) -> None:
    marker = verdict_style(row["verdict"])[1]
    if math.isfinite(row["gap"]):
        filled = row["verdict"] not in ("inconclusive", "invalid")
        draw_interval(ax, place, row, colour, marker, vertical=True, limits=limits, filled=filled)
    else:
        # Nothing was timed: a mark on the axis says that the place was tried.
        how: dict[str, Any] = {"marker": marker, "color": colour, "markerfacecolor": "white", "clip_on": False}
        ax.plot([place], [0.0], transform=ax.get_xaxis_transform(), linestyle="none", zorder=4, **how)


def _lines(rows: pd.DataFrame, x: str) -> dict[str, pd.DataFrame]:
    """Name -> rows of each line: no further apart than needed for one gap a place."""
    named = {**_ALWAYS, **_WHERE_NEEDED}
    by = [c for c in _ALWAYS if c in rows and rows[c].nunique(dropna=False) > 1]
    for column in _WHERE_NEEDED:
        if column == x or column not in rows:
            continue
        crowded = rows.duplicated([*by, x], keep=False)
        if crowded.any() and rows.loc[crowded, [*by, x, column]].drop_duplicates().duplicated([*by, x]).any():
            by.append(column)
    if not by:
        return {str(rows["phase"].iloc[0]): rows}
    groups = rows.groupby(by, dropna=False, sort=False)
    return {
        ", ".join(named[column](value) for column, value in zip(by, values, strict=True)): line
        for values, line in groups
    }
