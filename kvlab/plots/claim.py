"""Layer 4: the claim in one picture: each step's gap in both modes against the margin, models below each other."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvlab.plots.style import (
    FAINT,
    MODES,
    VERDICT_STYLE,
    draw_interval,
    draw_margin,
    gap_limits,
    head_note,
    label_rows,
    need,
    new_figure,
    note,
    percent_axis,
    place_rows,
    shorten,
    styled,
    verdict_style,
)

_WIDTH, _ROW = 8.6, 0.3  # inches
_NEEDED = ("mode", "margin", "verdict", "gap", "ci90_lo", "ci90_hi")


@styled
def plot_claim(
    gaps: pd.DataFrame, *, group: str = "model", label: str = "step", title: str | None = None
) -> tuple[Figure, Axes]:
    """Gaps with their 90 % intervals, a row a label under a heading a group; both modes in one row.

    The colour is the verdict's, the mark the mode's; beside each row its verdict in words.

    Args:
        gaps: as `Run.gaps`, with the columns `group` and `label`; rows in their order.

    Raises:
        RunError: for an empty table.
    """
    need(gaps, (*_NEEDED, group, label), "gaps")
    keys = list(dict.fromkeys(zip(gaps[group], gaps[label], strict=True)))
    keys.sort(key=lambda key: list(dict.fromkeys(gaps[group])).index(key[0]))
    places, headings = place_rows([shorten(head, 60) for head, _ in keys])
    fig = new_figure(1.5 + _ROW * (places[-1] + 1), title or "Gap of random against zero KV", width=_WIDTH)
    ax = fig.subplots()
    handles = draw_margin(ax, gaps["margin"], vertical=True)
    limits = gap_limits(gaps)
    modes = [mode for mode in (*MODES, *gaps["mode"].unique()) if mode in set(gaps["mode"])]
    modes = list(dict.fromkeys(modes))
    for y, (head, name) in zip(places, keys, strict=True):
        rows = gaps[(gaps[group] == head) & (gaps[label] == name)].drop_duplicates("mode")
        for mode, row in zip(rows["mode"], (row for _, row in rows.iterrows()), strict=True):
            shift = 0.36 * (modes.index(mode) - (len(modes) - 1) / 2) if len(modes) > 1 else 0.0
            marker, filled = (MODES[mode][2], mode == "isolated") if mode in MODES else ("D", True)
            draw_interval(ax, y + shift, row, verdict_style(row["verdict"])[0], marker, limits=limits, filled=filled)
        note(ax, y, verdict_words(rows), 8)
    head_note(ax, "verdict", 8)
    for mode in modes:
        _, _, marker, said = MODES.get(mode, (FAINT, "-", "D", mode))
        face = FAINT if mode == "isolated" else "white"
        handles.append(Line2D([], [], ls="", marker=marker, color=FAINT, mfc=face, label=said))
    for verdict in [verdict for verdict in VERDICT_STYLE if (gaps["verdict"] == verdict).any()]:
        handles.append(Line2D([], [], color=verdict_style(verdict)[0], lw=1.8, label=verdict))
    label_rows(ax, places, [shorten(name, 44) for _, name in keys], headings)
    ax.set_xlim(*limits)
    percent_axis(ax.xaxis)
    ax.grid(axis="x", color="#EEEEEE")
    ax.set_xlabel("time against zero KV (gap, 90 % interval)")
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles) if len(handles) < 5 else 3)
    return fig, ax


def verdict_words(rows: pd.DataFrame) -> str:
    """The verdict of a step's modes: one word where they agree, else one each, isolated first."""
    said: dict[Any, Any] = dict(zip(rows["mode"], rows["verdict"], strict=True))
    ordered = [said[mode] for mode in sorted(said, key=lambda mode: [*MODES, mode].index(mode))]
    return " / ".join(dict.fromkeys(map(str, ordered)))
