"""Layer 4: figures. Functions of DataFrames that return (fig, ax); nothing here shows or saves.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; shapes and places repeat what colours say, so
that a page printed in grey loses nothing.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvlab.errors import RunError

VERDICT_STYLE = {
    "equivalent": ("#009E73", "o"),
    "different": ("#D55E00", "D"),
    "inconclusive": ("#E69F00", "s"),
    "invalid": ("#777777", "X"),
}
BAND = "#DCE9F5"
INK = "#222222"
FAINT = "#8A8A8A"
ARM_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#CC79A7", "#009E73", "#E69F00", "#000000")


def plot_gaps(verdicts: pd.DataFrame, *, title: str | None = None) -> tuple[Figure, Axes]:
    """Each case's gap with its 90 % interval against the margin, the A/A floor below it.

    Args:
        verdicts: `Run.verdicts`, or several put together; one row a case, top to bottom.

    Raises:
        RunError: for an empty table.
    """
    if verdicts.empty:
        raise RunError("no verdict to plot: the run has no finished case yet")
    rows = verdicts.reset_index(drop=True)
    fig = Figure(figsize=(7.2, 1.6 + 0.55 * len(rows)), layout="constrained")
    ax = fig.subplots()
    margin = float(rows["margin"].max())
    ax.axvspan(1 / (1 + margin) - 1, margin, color=BAND, zorder=0, label=f"margin {margin:.0%}")
    ax.axvline(0, color=FAINT, linewidth=0.8, zorder=1)
    several = rows["model"].nunique() > 1
    names: list[str] = []
    for y, row in rows.iterrows():
        colour, marker = VERDICT_STYLE[row["verdict"]]
        names.append(f"{row['model']}\n{row['case']}" if several else str(row["case"]))
        note = str(row["verdict"])
        if pd.notna(row["gap"]):
            _interval(ax, y - 0.1, row["gap"], row["ci90_lo"], row["ci90_hi"], colour, marker)
            _interval(ax, y + 0.22, row["aa_gap"], row["aa_ci90_lo"], row["aa_ci90_hi"], FAINT, "|")
            note = f"{row['gap']:+.2%}  {note}"
        ax.annotate(
            note,
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            fontsize=9,
            annotation_clip=False,
        )
    ax.plot([], [], color=FAINT, marker="|", label="zeros against zeros (A/A)")
    ax.set_yticks(range(len(rows)), names)
    ax.set_ylim(len(rows) - 0.5, -0.6)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlabel("time under random KV against zero KV (gap, 90 % interval)")
    ax.set_title(title or _title(rows), loc="left", fontsize=10, color=INK)
    fig.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    _plain(ax)
    return fig, ax


def plot_samples(samples: pd.DataFrame, case: str) -> tuple[Figure, Axes]:
    """One case's replays, round by round, a colour an arm; flagged replays are hollow.

    Args:
        samples: `Run.samples`.
        case: a case's name.

    Raises:
        RunError: when the run holds no replay of the case.
    """
    rows = samples[samples["case"] == case]
    if rows.empty:
        raise RunError(
            f"no replay of case {case!r} to plot; the run has {', '.join(sorted(set(samples['case']))) or 'none'}"
        )
    fig = Figure(figsize=(7.2, 3.6), layout="constrained")
    ax = fig.subplots()
    arms = list(dict.fromkeys(rows.sort_values(["round", "position"])["arm"]))
    arms.sort(key=lambda arm: (not arm.startswith("zeros"), arm))
    width = 0.7 / len(arms)
    for i, arm in enumerate(arms):
        colour = ARM_COLOURS[i % len(ARM_COLOURS)]
        of_arm = rows[rows["arm"] == arm]
        x = of_arm["round"] + (i - (len(arms) - 1) / 2) * width
        flagged = of_arm["flagged"].to_numpy(bool)
        ax.scatter(x[~flagged], of_arm["us"][~flagged], s=9, color=colour, label=arm, linewidths=0)
        ax.scatter(x[flagged], of_arm["us"][flagged], s=12, facecolors="none", edgecolors=colour, linewidths=0.8)
        median = float(of_arm["us"].median())
        ax.axhline(median, color=colour, linewidth=0.8, alpha=0.6)
    ax.set_xlabel("round")
    ax.set_ylabel("time of one replay (µs)")
    ax.set_title(f"{case}: every replay; lines are medians", loc="left", fontsize=10, color=INK)
    ax.legend(loc="upper right", ncols=len(arms), frameon=False, fontsize=8)
    _plain(ax)
    return fig, ax


def _interval(ax: Axes, y: float, middle: float, low: float, high: float, colour: str, marker: str) -> None:
    ax.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="butt", zorder=2)
    ax.plot([middle], [y], color=colour, marker=marker, markersize=6, zorder=3)


def _title(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    device = str(first["gpu"]).removeprefix("none (").removesuffix(")")
    models = ", ".join(dict.fromkeys(rows["model"]))
    return f"{models} on {device}, {first['engine']} engine, {first['mode']}"


def _plain(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FAINT)
    ax.tick_params(colors=INK, labelsize=9)
    ax.margins(x=0.06)
    ax.autoscale_view(scaley=False)
