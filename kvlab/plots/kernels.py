"""Layer 4: where a step's time goes: by role and by kernel, under one arm and another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvlab.errors import RunError
from kvlab.kernel_gaps import kernel_gap_table
from kvlab.kernel_names import OTHER, REST, ROLES
from kvlab.plots.style import (
    FAINT,
    INK,
    QUIET,
    SERIES_COLOURS,
    arm_styles,
    head_note,
    label_rows,
    microseconds,
    need,
    new_figure,
    note,
    percent,
    pick,
    shorten,
    styled,
    time_unit,
)

# The rest that no kernel explains comes behind the roles.
_PLACES = {role: place for place, role in enumerate((*ROLES, REST))}
_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----")
_SMALL = 0.07  # of the longest bar: a shorter part has no room for its name


@styled
def plot_parts(
    kernels: pd.DataFrame,
    *,
    case: str | None = None,
    mode: str | None = None,
    arms: Sequence[str] | None = None,
    baseline: str = "zeros",
    title: str | None = None,
) -> tuple[Figure, np.ndarray]:
    """A step's time by role under each arm, and what each role adds to the gap; the parts add to the total.

    A part below zero (the rest, where kernels overlap) has no length in the upper picture. Whiskers are the 90 %
    intervals of `kvlab.kernel_gaps.kernel_gap_table`.

    Args:
        kernels: `Run.kernels`: `case`, `mode`, `arm`, `kernel`, `role`, `us` (of one step).
        case, mode: which, where there are several.
        arms: which to compare with the baseline; all by default.

    Returns:
        The figure and its two axes [2]: times by role, gaps by role.

    Raises:
        RunError: when there are several cases or modes and none is chosen, or nothing to compare.
        StudyError: as `kernel_gap_table`.
    """
    rows = _chosen(kernels, case, mode)
    compared = [arm for arm in (arms or arm_styles(rows["arm"])) if arm != baseline]
    if not compared:
        raise RunError(f"only kernels of {baseline!r}: nothing to compare; profile another arm")
    tables = {arm: _table(rows, arm, baseline, "role") for arm in compared}
    times = pd.DataFrame({baseline: tables[compared[0]]["baseline_us"]} | {a: t["arm_us"] for a, t in tables.items()})
    times = times.fillna(0.0)
    # What no kernel explains comes last, however much it is.
    order = times.max(axis=1).where(times.index != REST, -math.inf).sort_values(ascending=False, kind="stable").index
    times = times.loc[order]
    heights = [0.9 + 0.42 * times.shape[1], 0.9 + (0.24 * len(compared) + 0.16) * (len(times) + 1)]
    heading = title or f"{_about(rows)}: time by role, and each role's part of the gap"
    fig = new_figure(sum(heights) + 0.5, heading)
    axes = fig.subplots(2, 1, height_ratios=heights)
    _stack(axes[0], times)
    _differences(axes[1], {arm: table.reindex(order) for arm, table in tables.items()}, times[baseline].sum(), baseline)
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=shorten(role))
        for role, (colour, hatch) in ((role, _look(role)) for role in order)
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return fig, axes


@styled
def plot_kernels(
    kernels: pd.DataFrame,
    *,
    arm: str = "random",
    baseline: str = "zeros",
    top: int = 12,
    case: str | None = None,
    mode: str | None = None,
    title: str | None = None,
) -> tuple[Figure, np.ndarray]:
    """The kernels whose times differ most between two arms: the times of each, and the gap.

    Whiskers are the 90 % intervals of `kvlab.kernel_gaps.kernel_gap_table`; the row of all other kernels has none.

    Args:
        kernels: `Run.kernels`: `case`, `mode`, `arm`, `kernel`, `us` (of one step).
        top: how many; the rest is one row.
        case, mode: which, where there are several.

    Returns:
        The figure and its two axes [2]: times, gaps.

    Raises:
        RunError: when there are several cases or modes and none is chosen.
        StudyError: as `kernel_gap_table`.
    """
    rows = _chosen(kernels, case, mode)
    table = _table(rows, arm, baseline, "kernel")
    if len(table) > top + 1:
        others = table.iloc[top:].sum()
        others[["lo_us", "hi_us"]] = math.nan
        table = pd.concat([table.iloc[:top], others.to_frame(f"the other {len(table) - top} kernels").T])
    heading = title or f"{_about(rows)}: kernels by what they add to the gap"
    fig = new_figure(1.45 + 0.3 * len(table), heading, width=9.6)
    times, gaps = axes = fig.subplots(1, 2, sharey=True, width_ratios=[1.25, 1])
    styles = arm_styles([baseline, arm])
    for y, (before, after) in enumerate(table[["baseline_us", "arm_us"]].to_numpy(float)):
        ends = [us for us in (before, after) if us > 0]
        times.plot(ends, [y] * len(ends), color="#C8C8C8", linewidth=2, zorder=1)
        for us, name, size in ((before, baseline, 6), (after, arm, 4.5)):
            if us > 0:
                colour, marker = styles[name]
                face = "white" if name == baseline else colour
                times.plot([us], [y], marker=marker, color=colour, mfc=face, ms=size, ls="")
        if before >= 0:
            told = percent((after - before) / before, 1) if before else f"not in {baseline}"
            note(gaps, y, told, 66, QUIET)
        note(gaps, y, _signed(after - before), 8)
    shown = table[["baseline_us", "arm_us"]].to_numpy(float)
    shown = shown[shown > 0]
    if shown.size and shown.max() > 5 * shown.min():
        times.set_xscale("log")
    times.xaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:,.0f}" if us >= 10 else f"{us:g}"))
    times.set_xlabel("time in a step (µs)")
    for y, (_, of_kernel) in enumerate(table.iterrows()):
        _bar(gaps, y, of_kernel, 1.0, styles[arm][0], "")
    gaps.xaxis.set_major_locator(MaxNLocator(4))
    head_note(gaps, "gap", 8)
    head_note(gaps, "of the kernel", 66)
    gaps.axvline(0, color=FAINT, linewidth=0.8)
    gaps.set_xlabel(f"gap (µs); all kernels {_signed(float(table['gap_us'].sum()))}")
    gaps.tick_params(left=False)
    label_rows(times, list(range(len(table))), [shorten(name, 44) for name in table.index], {})
    handles = [
        Line2D([], [], ls="", marker=styles[n][1], color=styles[n][0], mfc="white" if n == baseline else None, label=n)
        for n in (baseline, arm)
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig, axes


def _chosen(kernels: pd.DataFrame, case: str | None, mode: str | None) -> pd.DataFrame:
    need(kernels, ("case", "mode", "arm", "kernel", "us"), "kernels")
    rows = pick(pick(kernels, "case", case, "kernels"), "mode", mode, "kernels")
    return pick(rows, "run", None, "kernels")


def _table(rows: pd.DataFrame, arm: str, baseline: str, by: str) -> pd.DataFrame:
    """`kernel_gap_table` without its closing row: microseconds by role or kernel, the largest gap first."""
    table = kernel_gap_table(rows, arm, baseline, by=by).iloc[:-1].set_index(by)
    return table[["baseline_us", "arm_us", "gap_us", "lo_us", "hi_us"]]


def _look(role: object) -> tuple[str, str]:
    """Colour and hatch of a role, the same in every figure; of a name that is no role, that of `other`."""
    place = _PLACES.get(str(role), _PLACES[OTHER])
    return SERIES_COLOURS[place % 7], _HATCHES[place % 6]


def _stack(ax: Axes, table: pd.DataFrame) -> None:
    scale, unit = time_unit(float(table.sum().max()))
    totals = table.sum().to_numpy(float)
    drawn = (table / scale).clip(lower=0)  # a rest below zero has no length; the total tells
    left = np.zeros(drawn.shape[1])
    longest = float(drawn.sum().max())
    for role, of_role in drawn.iterrows():
        width = of_role.to_numpy(float)
        colour, hatch = _look(role)
        look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        ax.barh(range(len(width)), width, left=left, height=0.62, linewidth=0.6, **look)
        for y, (start, part) in enumerate(zip(left, width, strict=True)):
            if part > _SMALL * longest:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9}
                said = microseconds(part * scale)
                ax.text(start + part / 2, y, said, ha="center", va="center", fontsize=7.5, bbox=box)
        left += width
    for y, (end, total) in enumerate(zip(left, totals, strict=True)):
        ax.text(end, y, f"  {microseconds(total)}", va="center", fontsize=8.5, fontweight="bold")
    ax.set_xlim(0, longest * 1.14)
    label_rows(ax, list(range(len(totals))), [shorten(arm, 30) for arm in drawn.columns], {})
    ax.set_xlabel(f"time of a step ({unit}), by role")


def _differences(ax: Axes, tables: Mapping[str, pd.DataFrame], step: float, baseline: str) -> None:
    """Bars of each role's gap, an arm beside the other, and of the total below."""
    roles = list(next(iter(tables.values())).index)
    scale, unit = time_unit(max(float(table["gap_us"].abs().max()) for table in tables.values()))
    height = 0.8 / len(tables)
    for number, (arm, table) in enumerate(tables.items()):
        total = pd.Series({"gap_us": table["gap_us"].sum(), "lo_us": math.nan, "hi_us": math.nan})
        for r, of_role in enumerate([*(row for _, row in table.iterrows()), total]):
            us = float(of_role["gap_us"])
            if math.isnan(us):
                continue  # neither arm of this comparison ran such a kernel
            y = r + (number - (len(tables) - 1) / 2) * height
            colour, hatch = (INK, "") if r == len(roles) else _look(roles[r])
            _bar(ax, y, of_role, scale, colour, hatch, height)
            side = 1 if us >= 0 else -1
            end = of_role["hi_us" if us >= 0 else "lo_us"]
            at: dict[str, Any] = {"xytext": (4 * side, 0), "textcoords": "offset points", "va": "center"}
            told = _signed(us) + (f" ({percent(us / step)})" if step else "")
            told += f"  {shorten(arm, 26)}" if len(tables) > 1 else ""
            end = us if math.isnan(end) else side * max(side * us, side * end)
            ax.annotate(told, (end / scale, y), ha="left" if side > 0 else "right", fontsize=7.5, **at)
    ax.axhline(len(roles) - 0.5, color=FAINT, linewidth=0.6)
    ax.axvline(0, color=FAINT, linewidth=0.8)
    ax.margins(x=0.5 if len(tables) > 1 else 0.42)
    label_rows(ax, list(range(len(roles) + 1)), [*(shorten(role, 30) for role in roles), "total"], {})
    against = f"{shorten(next(iter(tables)), 30)} less {baseline}" if len(tables) == 1 else f"each arm less {baseline}"
    ax.set_xlabel(f"gap ({unit}): {against}; in brackets, of the whole step under {baseline}")


def _bar(ax: Axes, y: float, row: pd.Series, scale: float, colour: str, hatch: str, height: float = 0.6) -> None:
    """A gap as a bar, its interval as a whisker where it is known."""
    us, low, high = (float(row[name]) / scale for name in ("gap_us", "lo_us", "hi_us"))
    ax.barh([y], [us], height=0.85 * height, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6)
    if math.isfinite(low) and math.isfinite(high):
        ax.plot([low, high], [y, y], color=INK, linewidth=1.1, solid_capstyle="butt", zorder=3)


def _signed(us: float) -> str:
    return ("+" if us > 0 else "") + microseconds(us)


def _about(rows: pd.DataFrame) -> str:
    said = [shorten(rows[c].iloc[0]) for c in ("model", "case", "mode") if c in rows]
    return ", ".join(said)
