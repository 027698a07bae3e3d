"""Layer 4: what was timed and sensed: replays round by round, clocks and power by arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvlab.errors import RunError
from kvlab.estimates import round_table
from kvlab.plots.style import (
    FAINT,
    INK,
    arm_styles,
    label_rows,
    need,
    new_figure,
    pick,
    place_rows,
    shorten,
    styled,
    time_unit,
)

_SENSED = {"watts": "board power (W)", "sm_mhz": "SM clock (MHz)"}


@styled
def plot_samples(
    samples: pd.DataFrame, case: str, *, mode: str | None = None, clock: bool = True, title: str | None = None
) -> tuple[Figure, Axes]:
    """One case's replays, round by round, one colour and mark per arm; flagged replays are hollow.

    One line per arm: the median of its rounds, each as `kvlab.estimates.round_table` has it, which is what a verdict
    compares. One column per mode; below, where the samples have `sm_mhz`, the SM clock.

    Args:
        samples: `Run.samples`.
        case: a case's name.
        mode: the one to draw; all that the case was measured in when absent.
        clock: draw the clock where it is known.

    Returns:
        The figure and the first mode's times; all axes are in `fig.axes`.

    Raises:
        RunError: when the run holds no replay of the case in the mode, or the samples are of several runs.
    """
    need(samples, ("case", "mode", "round", "position", "arm", "us", "flagged"), "samples")
    rows = pick(pick(samples, "case", case, "replays"), "run", None, "replays")
    if mode is not None:
        rows = pick(rows, "mode", mode, f"replays of case {case!r}")
    modes = list(dict.fromkeys(rows["mode"]))
    styles = arm_styles(rows["arm"])
    strip = clock and "sm_mhz" in rows and bool(rows["sm_mhz"].notna().any())
    heading = title or f"{shorten(case)}, {' and '.join(modes)}: every replay; lines are the times compared"
    scale, unit = time_unit(rows["us"].median())
    fig = new_figure(4.1 + (1.1 if strip else 0), heading)
    heights = [3.2, 1.0] if strip else [1.0]
    axes = fig.subplots(len(heights), len(modes), squeeze=False, sharex="col", height_ratios=heights)
    for column, name in zip(axes.T, modes, strict=True):
        _rounds(column, rows[rows["mode"] == name], styles, scale)
        if len(modes) > 1:
            column[0].set_title(name)
    axes[0, 0].set_ylabel(f"time of one replay ({unit})")
    if strip:
        axes[1, 0].set_ylabel("SM clock (MHz)")
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, ms=4, label=shorten(arm))
        for arm, (colour, marker) in styles.items()
    ]
    if rows["flagged"].any():
        hollow: dict[str, Any] = {"mfc": "white", "mec": INK, "ms": 4}
        handles.append(Line2D([], [], linestyle="none", marker="o", label="throttled or slow clock", **hollow))
    fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return fig, axes[0, 0]


def _rounds(axes: Sequence[Axes], rows: pd.DataFrame, styles: Mapping[str, tuple[str, str]], scale: float) -> None:
    """One mode's times in the first axes, its clock in the second where there is one."""
    width = 0.72 / len(styles)
    compared = round_table(rows).median() / scale
    for i, (arm, (colour, marker)) in enumerate(styles.items()):
        of_arm = rows[rows["arm"] == arm]
        if of_arm.empty:
            continue
        x = of_arm["round"].to_numpy(float) + (i - (len(styles) - 1) / 2) * width
        us = of_arm["us"].to_numpy(float) / scale
        flagged = of_arm["flagged"].to_numpy(bool)
        _dots(axes[0], x, us, flagged, colour, marker)
        axes[0].axhline(float(compared[arm]), color=colour, linewidth=0.8, alpha=0.7, zorder=1)
        if len(axes) > 1:
            _dots(axes[1], x, of_arm["sm_mhz"].to_numpy(float), flagged, colour, marker)
    for ax in axes:
        ax.margins(y=0.1)
    axes[-1].set_xlabel("round")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes[-1].set_xlim(rows["round"].min() - 0.6, rows["round"].max() + 0.6)


@styled
def plot_clocks(
    readings: pd.DataFrame, *, power_limit_watts: float | None = None, title: str | None = None
) -> tuple[Figure, np.ndarray]:
    """Board power and SM clock under each arm: every reading, and the median as a bar.

    Args:
        readings: `Run.samples` or `Run.telemetry`, of one case or of several; `watts`, `sm_mhz`.
        power_limit_watts: of the card; drawn as a line.

    Returns:
        The figure and its two axes [2]: watts, MHz.

    Raises:
        RunError: when nothing was sensed.
    """
    need(readings, ("case", "mode", "arm"), "readings")
    if not any(name in readings and readings[name].notna().any() for name in _SENSED):
        raise RunError("no clock or power to plot: the run was measured without NVML")
    readings = readings.dropna(subset=[name for name in _SENSED if name in readings], how="all")
    if "round" in readings:
        # One reading serves all replays of an arm in a round.
        once = [c for c in ("run", "model", "case", "mode", "round", "arm", "position") if c in readings]
        readings = readings.drop_duplicates(once)
    styles = arm_styles(readings["arm"])
    by = [c for c in ("run", "model", "case", "mode") if c in readings and readings[c].nunique() > 1]
    heads = pd.Series("", index=readings.index)
    for column in by:
        heads += ", " + readings[column].map(lambda name: shorten(name, 28))
    heads = heads.str.removeprefix(", ")
    groups = [
        (head, arm, of_head[of_head["arm"] == arm])
        for head, of_head in readings.groupby(heads, sort=False)
        for arm in styles
        if (of_head["arm"] == arm).any()
    ]
    places, headings = place_rows([str(head) for head, _, _ in groups])
    fig = new_figure(1.15 + 0.27 * (places[-1] + 1), title or _clocks_title(readings))
    axes = fig.subplots(1, 2, sharey=True)
    for ax, (name, label) in zip(axes, _SENSED.items(), strict=True):
        ax.set_xlabel(label)
        ax.grid(axis="x", color="#EEEEEE")
        if name not in readings or readings[name].isna().all():
            ax.annotate("not sensed", (0.5, 0.5), xycoords="axes fraction", ha="center", color=FAINT)
            ax.set_xticks([])
            continue
        for y, (_, arm, group) in zip(places, groups, strict=True):
            if group[name].notna().any():
                _spread(ax, y, group[name].dropna().to_numpy(float), *styles[arm])
        ax.margins(x=0.08)
    if power_limit_watts is not None:
        axes[0].axvline(power_limit_watts, color=INK, linestyle=":", linewidth=1)
        axes[0].set_title(f"dotted: power limit, {power_limit_watts:.0f} W", fontsize=8)
    label_rows(axes[0], places, [shorten(arm, 30) for _, arm, _ in groups], headings)
    axes[1].tick_params(left=False)
    return fig, axes


def _dots(ax: Axes, x: np.ndarray, y: np.ndarray, flagged: np.ndarray, colour: str, marker: str) -> None:
    ax.scatter(x[~flagged], y[~flagged], s=11, color=colour, marker=marker, linewidths=0)
    ax.scatter(x[flagged], y[flagged], s=11, facecolors="none", edgecolors=colour, marker=marker, linewidths=0.7)


def _spread(ax: Axes, y: float, values: np.ndarray, colour: str, marker: str) -> None:
    """Each value as a dot, a fixed wobble apart, the middle half as a bar and the median as a stroke."""
    wobble = 0.22 * np.sin(2.4 * np.arange(len(values)))
    ax.scatter(values, y + wobble, s=9, color=colour, marker=marker, alpha=0.55, linewidths=0)
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    ax.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
    ax.plot([middle, middle], [y - 0.34, y + 0.34], color=INK, linewidth=1.6, zorder=4)


def _clocks_title(readings: pd.DataFrame) -> str:
    one = [c for c in ("model", "case", "mode") if c in readings and readings[c].nunique() == 1]
    said = ", ".join(shorten(readings[c].iloc[0]) for c in one)
    return f"{said or 'Readings'}: each reading, the middle half as a bar, the median as a stroke"
