"""Layer 4: gaps along one dimension as small multiples: one panel per model and phase, gaps of a phase on one scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvlab.errors import RunError
from kvlab.kernel_names import REST
from kvlab.plots.axes import log_axis
from kvlab.plots.style import (
    BLACK,
    BLUE,
    FAINT,
    GREEN,
    MODES,
    ORANGE,
    PURPLE,
    SKY,
    VERDICT_STYLE,
    VERMILION,
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

_NEEDED = ("model", "mode", "phase", "margin", "gap", "ci90_lo", "ci90_hi", "verdict")
_PHASES = {
    "decode": "decode",
    "verify": "verify",
    "prefill": "prefill",
    "chunk": "chunk",
    "hit": "prefill after a\nprefix-cache hit",
}
# A line's colour and dash; what is not named here takes the next.
_PARTS: dict[str, tuple[str, Any]] = {
    "whole step": (BLACK, "-"),
    "top-k": (VERMILION, "--"),
    "attention": (BLUE, "-."),
    "indexer scores": (GREEN, ":"),
    "gather/remap": (PURPLE, (0, (1, 1))),
}
_OTHERS = ((ORANGE, (0, (5, 1))), (SKY, (0, (3, 1, 1, 1))), (FAINT, "-"))
_MOST_PARTS = 5
_LEAST = 0.001  # of the step: a part that never adds more is not drawn
_PANEL = (2.15, 1.75)  # inches
_WIDTHS = (7.2, 11.4)
_TICK = 0.4


@styled
def plot_context_panels(
    gaps: pd.DataFrame, *, arm: str = "random", title: str | None = None
) -> tuple[Figure, np.ndarray]:
    """Gap against context length: one column per model, one row per phase, one line per mode.

    Args:
        gaps: `Run.gaps`, or several put together; `context` in tokens, one gap a place.
        arm: whose gaps.

    Returns:
        The figure and its axes [phases, models].

    Raises:
        RunError: when no row is of the arm.
    """
    need(gaps, (*_NEEDED, "arm", "context"), "gaps")
    rows = gaps[gaps["arm"] == arm].assign(panel=lambda table: table["model"], line=lambda table: table["mode"])
    if rows.empty:
        raise RunError(f"no gap of arm {arm!r} to plot; the runs have {', '.join(dict.fromkeys(gaps['arm']))}")
    styles = {mode: (colour, dash) for mode, (colour, dash, _, _) in MODES.items()}
    fig, axes = _panels(rows, "context", styles, title or f"Gap of {arm} against zero KV by context length")
    for ax in axes.flat:
        log_axis(ax, rows["context"], tokens, apart=_room(axes))
    _label_below(axes, "context (tokens)")
    return fig, axes


@styled
def plot_topk_panels(parts: pd.DataFrame, *, title: str | None = None) -> tuple[Figure, np.ndarray]:
    """Gap of random KV against the indexer's top-k: the whole step's, and what its kernels add where that is known.

    Args:
        parts: `kvlab.evidence.sparsity_gaps(runs, "topk")`: gaps with `topk` and `part`.

    Returns:
        The figure and its axes [phases, models].

    Raises:
        RunError: for no rows.
    """
    need(parts, (*_NEEDED, "topk", "part"), "gaps")
    rows = _named(parts, "topk")
    fig, axes = _panels(rows, "topk", _part_styles(rows), title or "Gap of random against zero KV by top-k")
    for ax in axes.flat:
        log_axis(ax, rows["topk"], lambda k: f"{k:.0f}", apart=_room(axes))
    _label_below(axes, "top-k (tokens)")
    return fig, axes


@styled
def plot_zero_panels(parts: pd.DataFrame, *, title: str | None = None) -> tuple[Figure, np.ndarray]:
    """Gap against the share of zero tokens, as `plot_topk_panels`; at 1 it is 0 by definition.

    Args:
        parts: `kvlab.evidence.sparsity_gaps(runs, "zero_fraction")`: gaps with `zero_fraction` and `part`.

    Raises:
        RunError: for no rows.
    """
    need(parts, (*_NEEDED, "zero_fraction", "part"), "gaps")
    rows = _named(parts, "zero_fraction")
    heading = title or "Gap by the share of zero tokens in the KV cache"
    fig, axes = _panels(rows, "zero_fraction", _part_styles(rows), heading, end=(1.0, 0.0))
    for ax in axes.flat:
        ax.set_xlim(-0.06, 1.06)
        ax.set_xticks([0, 0.5, 1], ["all random", "half zero", "all zero"])
    _label_below(axes, "share of the tokens that are zero")
    return fig, axes


def _room(axes: np.ndarray) -> float:
    """What the label of a tick takes, as a share of a panel's width."""
    return _TICK * axes.shape[1] / (0.85 * axes[0, 0].get_figure().get_figwidth())


def _label_below(axes: np.ndarray, text: str) -> None:
    for ax in axes[-1]:
        ax.set_xlabel(text, fontsize=8.5)


def _named(parts: pd.DataFrame, x: str) -> pd.DataFrame:
    """The rows with `panel` and `line`: panels by model, and by context and mode where there are several."""
    parts = parts[parts["part"] != REST]
    whole = parts["part"] == "whole step"
    largest = parts[~whole].groupby("part")["gap"].apply(lambda gaps: gaps.abs().max()).sort_values(ascending=False)
    largest = largest[largest >= _LEAST]
    kept = [part for part in largest.index if part in _PARTS]
    kept += [part for part in largest.index if part not in _PARTS][: max(0, _MOST_PARTS - len(kept))]
    rows = parts[whole | parts["part"].isin(kept)]
    panel, line = rows["model"].map(lambda name: shorten(name, 26)), rows["part"]
    if x != "topk" and rows.groupby("model")["topk"].nunique().gt(1).any():
        panel = panel + rows["topk"].map(lambda topk: f"\ntop-{topk:.0f}" if topk == topk else "\ndense")
    if "context" in rows and rows["context"].nunique() > 1:
        panel = panel + "\n" + rows["context"].map(tokens) + " tokens"
    if rows["mode"].nunique() > 1:
        panel, line = (panel + "\n" + rows["mode"], line) if kept else (panel, rows["mode"])
    return rows.assign(panel=panel, line=line)


def _part_styles(rows: pd.DataFrame) -> dict[str, tuple[str, Any]]:
    others = iter(_OTHERS * 4)
    modes = {mode: (colour, dash) for mode, (colour, dash, _, _) in MODES.items()}
    return {line: {**_PARTS, **modes}.get(line) or next(others) for line in dict.fromkeys(rows["line"])}


def _panels(
    rows: pd.DataFrame,
    x: str,
    styles: dict[str, tuple[str, Any]],
    title: str,
    end: tuple[float, float] | None = None,
) -> tuple[Figure, np.ndarray]:
    """The figure but for its x axes; a line that does not reach `end` is led there by dots."""
    panels = list(dict.fromkeys(rows["panel"]))
    phases = sorted(dict.fromkeys(rows["phase"]), key=lambda phase: [*_PHASES, phase].index(phase))
    width = min(max(1.2 + _PANEL[0] * len(panels), _WIDTHS[0]), _WIDTHS[1])
    fig = new_figure(1.35 + _PANEL[1] * len(phases), title, width=width)
    axes = fig.subplots(len(phases), len(panels), squeeze=False, sharey="row", sharex=True)
    margins: list[Any] = []
    for at, phase in enumerate(phases):
        of_phase = rows[rows["phase"] == phase]
        limits = gap_limits(of_phase)
        for ax, panel in zip(axes[at], panels, strict=True):
            margins = draw_margin(ax, rows["margin"], vertical=False)
            of_panel = of_phase[of_phase["panel"] == panel]
            if of_panel.empty:
                ax.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color=FAINT, fontsize=8)
            _draw_lines(ax, of_panel, x, styles, limits, end)
            ax.set_ylim(*limits)
            ax.grid(axis="x", color="#EEEEEE")
            if not at:
                ax.set_title(panel, fontsize=8.5)
        percent_axis(axes[at, 0].yaxis)
        axes[at, 0].set_ylabel(_PHASES.get(phase, phase), fontsize=8.5)
    shown = [line for line in styles if (rows["line"] == line).any()]
    handles = [Line2D([], [], color=styles[n][0], linestyle=styles[n][1], lw=1.4, label=_said(n)) for n in shown]
    for verdict in [verdict for verdict in VERDICT_STYLE if (rows["verdict"] == verdict).any()]:
        filled = verdict not in ("inconclusive", "invalid")
        how: dict[str, Any] = {"markerfacecolor": FAINT if filled else "white", "markeredgecolor": FAINT, "ls": ""}
        handles.append(Line2D([], [], marker=verdict_style(verdict)[1], label=verdict, **how))
    handles += margins
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), int(width / 1.55)))
    return fig, axes


def _draw_lines(
    ax: Axes,
    rows: pd.DataFrame,
    x: str,
    styles: dict[str, tuple[str, Any]],
    limits: tuple[float, float],
    end: tuple[float, float] | None,
) -> None:
    lines: Sequence[str] = [line for line in styles if (rows["line"] == line).any()]
    for i, name in enumerate(lines):
        colour, dash = styles[name]
        line = rows[rows["line"] == name].sort_values(x, kind="stable")
        place: Callable[[float], float] = _apart(rows[x], i - (len(lines) - 1) / 2, x)
        known = [(place(v), g) for v, g in zip(line[x], line["gap"], strict=True) if math.isfinite(g)]
        if end and known and not (line[x] == end[0]).any():
            # By definition, not measured: where in between it changes is not known.
            ax.plot(*zip(known[-1], end, strict=True), color=colour, linestyle=":", lw=0.8, zorder=1)
        if known:
            ax.plot(*zip(*known, strict=True), color=colour, linestyle=dash, lw=1.2, zorder=2)
        for _, row in line.iterrows():
            verdict = row["verdict"]
            marker = verdict_style(verdict)[1] if verdict else "."
            filled = verdict not in ("inconclusive", "invalid")
            draw_interval(ax, place(row[x]), row, colour, marker, vertical=True, limits=limits, filled=filled, size=4.5)


def _apart(values: pd.Series, step: float, x: str) -> Callable[[float], float]:
    """Lines stand apart by a hair, so that intervals at one place do not hide each other."""
    if x == "zero_fraction":
        return lambda value: value + 0.012 * step
    doublings = max(1.0, math.log2(values.max() / values.min()))
    return lambda value: float(value * 2 ** (0.012 * doublings * step))


def _said(line: str) -> str:
    return MODES[line][3] if line in MODES else shorten(line)
