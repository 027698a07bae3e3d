"""Layer 4: one look for all figures: colours, marks, numbers as text, intervals, the margin.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; shapes, dashes and places repeat what colours
say, so that a page printed in grey loses nothing.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvlab.errors import RunError

MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
INK = "#222222"
QUIET = "#5A5A5A"  # text beside the main thing
FAINT = "#8A8A8A"  # lines
BANDS = ("#DCE9F5", "#BDD5EC", "#9DBFE0")
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

# In place of a verdict, whatever it is, of what was timed at another pace than the mode means (`kvlab.pace`).
OTHER_PACE = "other pace †"
# verdict -> colour, marker; what has no verdict yet is drawn like "unfinished".
VERDICT_STYLE = {
    "equivalent": (GREEN, "o"),
    "different": (VERMILION, "D"),
    "inconclusive": (ORANGE, "s"),
    "invalid": ("#777777", "X"),
    "unfinished": (SKY, "p"),
    OTHER_PACE: ("#B5B5B5", "v"),
}
SERIES_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":")
# mode -> colour and dash of a line, mark, what it means.
MODES: dict[str, tuple[str, Any, str, str]] = {
    "isolated": (BLUE, "-", "o", "isolated: each step alone"),
    "sustained": (VERMILION, "--", "s", "sustained: back to back"),
}
_ARMS = {"zeros": (BLUE, "o"), "zeros_again": (SKY, "s"), "random": (VERMILION, "D")}
_OTHER_ARMS = ((GREEN, "^"), (PURPLE, "v"), (ORANGE, "P"), (BLACK, "X"), (BLUE, "<"), (VERMILION, ">"), (GREEN, "d"))

WIDTH = 7.2  # inches: an A4 or letter page less its margins
_CHARACTERS_AN_INCH = 13.0  # at 10 points

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a `$` in a case's name is a `$`
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.6,
}
_LOOK = ("axes", "figure", "font", "grid", "hatch", "legend", "lines", "mathtext", "patch", "text", "xtick", "ytick")
_RC = {name: value for name, value in matplotlib.rcParamsDefault.items() if name.split(".")[0] in _LOOK} | _RC

P = ParamSpec("P")
T = TypeVar("T")


def styled(plot: Callable[P, T]) -> Callable[P, T]:
    """A plot function under the one look, whatever the caller's rcParams say."""

    look: Any = _RC

    @functools.wraps(plot)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with matplotlib.rc_context(look):
            return plot(*args, **kwargs)

    return wrapper


def new_figure(height: float, title: str, width: float = WIDTH) -> Figure:
    """A figure with its title at the top left, wrapped to its width; sizes in inches."""
    lines = textwrap.wrap(title, int(width * _CHARACTERS_AN_INCH), max_lines=3, placeholder=" ...") or [""]
    fig = Figure(figsize=(width, height + 0.17 * (len(lines) - 1)), layout="constrained")
    fig.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
    return fig


def need(data: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Raise RunError unless the table has rows and the columns."""
    if missing := [name for name in columns if name not in data]:
        raise RunError(f"the {what} have no column {', '.join(missing)}; take the table from a Run")
    if data.empty:
        raise RunError(f"no {what} to plot: the run holds none yet")


def pick(data: pd.DataFrame, column: str, wanted: str | None, what: str) -> pd.DataFrame:
    """The rows of one value of a column: the wanted one, or the only one.

    Raises:
        RunError: when it is absent, or when several are there and none is wanted.
    """
    if column not in data:
        return data
    found = list(dict.fromkeys(data[column]))
    if wanted is None and len(found) > 1:
        raise RunError(f"the {what} are of several {column}s ({_listed(found)}); say which: {column}=...")
    if wanted is not None and wanted not in found:
        raise RunError(f"no {what} of {column} {wanted!r} to plot; there are {_listed(found)}")
    return data if wanted is None else data[data[column] == wanted]


def _listed(names: list[Any], most: int = 6) -> str:
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"


def arm_styles(arms: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Arm -> colour and marker, zeros first; the usual three always have the same."""
    ordered = sorted(dict.fromkeys(arms), key=lambda arm: (list(_ARMS).index(arm) if arm in _ARMS else len(_ARMS), arm))
    others = iter(range(len(ordered)))
    return {arm: _ARMS.get(arm) or _OTHER_ARMS[next(others) % len(_OTHER_ARMS)] for arm in ordered}


def verdict_style(verdict: Any) -> tuple[str, str]:
    """Colour and marker."""
    return VERDICT_STYLE.get(str(verdict), VERDICT_STYLE["unfinished"])


def percent(value: float | None, digits: int = 2, sign: bool = True) -> str:
    """`+0.29 %` with a typographic minus; an en dash for what is absent or not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{100 * value:{'+' if sign else ''}.{digits}f} %".replace("-", MINUS)


def percent_interval(low: float | None, high: float | None, digits: int = 2) -> str:
    """`-0.35 .. +0.12`, in percent without the sign of it; empty where an end is absent."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"{100 * low:+.{digits}f} .. {100 * high:+.{digits}f}".replace("-", MINUS)


def tokens(count: float) -> str:
    """`8k` for 8,192, `100k` for 100,000; as it is below 1,000."""
    n = round(count)
    if n < 1000:
        return str(n)
    for unit in (1024, 1000):
        if n % unit == 0:
            return f"{n // unit}k"
    return f"{n / 1000:.3g}k" if n < 1e6 else f"{n / 1e6:.3g}M"


def time_unit(us: float) -> tuple[float, str]:
    """Microseconds of the unit in which a time has three digits before the point at most, and the unit's name."""
    for scale, name in ((1e6, "s"), (1e3, "ms")):
        if abs(us) >= 0.9995 * scale:
            return scale, name
    return 1.0, "µs"


def microseconds(us: float) -> str:
    """With three digits, in the unit that they fit."""
    scale, unit = time_unit(us)
    digits = f"{us / scale:#.3g}" if abs(us) < 999.5 * scale else f"{us / scale:,.0f}"
    return digits.rstrip(".").replace("-", MINUS) + f" {unit}"


def shorten(name: Any, most: int = 40) -> str:
    """A name that fits: the middle of a long one is left out, as its ends tell more."""
    text = str(name)
    if len(text) > most:
        tail = (most - 1) // 2
        text = f"{text[: most - 1 - tail]}…{text[-tail:]}"
    # Matplotlib leaves labels with a leading underscore out of a legend.
    return f"\u200a{text}" if text.startswith("_") else text


def place_rows(heads: Sequence[str]) -> tuple[list[float], dict[float, str]]:
    """Place of each row from the top; place -> heading above each run of rows under the same one, if they differ."""
    places: list[float] = []
    headings: dict[float, str] = {}
    y = 0.0
    for row, head in enumerate(heads):
        if len(set(heads)) > 1 and (row == 0 or head != heads[row - 1]):
            headings[y] = head
            y += 1
        places.append(y)
        y += 1
    return places, headings


def label_rows(ax: Axes, places: Sequence[float], names: Sequence[str], headings: Mapping[float, str]) -> None:
    """Rows' names on the y axis, headings bold and without a tick; the first row on top."""
    ax.set_yticks([*places, *headings], [*names, *headings.values()])
    for label, tick in list(zip(ax.get_yticklabels(), ax.yaxis.get_major_ticks(), strict=True))[len(places) :]:
        label.set_fontweight("bold")
        tick.tick1line.set_visible(False)
    ax.set_ylim(places[-1] + 0.6, -0.6)


def note(ax: Axes, y: float, text: str, points: float, colour: str = INK) -> None:
    """Text to the right of a row, so many points off the axes."""
    at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    ax.annotate(text, (1, y), (points, 0), fontsize=8.5, color=colour, annotation_clip=False, **at)


def head_note(ax: Axes, text: str, points: float) -> None:
    """What the notes below are, over the axes."""
    at: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    ax.annotate(text, (1, 1), (points, 2), fontsize=8, color=QUIET, annotation_clip=False, **at)


def draw_margin(ax: Axes, margins: pd.Series, *, vertical: bool) -> list[Any]:
    """The band of each margin, the narrower the darker, and the line of no gap; returns handles for a legend."""
    span, line = (ax.axvspan, ax.axvline) if vertical else (ax.axhspan, ax.axhline)
    handles = []
    for i, margin in enumerate(sorted({float(m) for m in margins.dropna()}, reverse=True)):
        look: dict[str, Any] = {
            "facecolor": BANDS[min(i, len(BANDS) - 1)],
            "edgecolor": BLUE,
            "linewidth": 0.3,
            "zorder": 0.0,
        }
        handles.append(span(1 / (1 + margin) - 1, margin, label=f"margin ±{100 * margin:g} %", **look))
    line(0, color=FAINT, linewidth=0.8, zorder=1)
    return handles


def percent_axis(axis: Any) -> None:
    """A few ticks of a fraction, in percent."""
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %".replace("-", MINUS)))


def gap_limits(gaps: pd.DataFrame, low: str = "ci90_lo", high: str = "ci90_hi") -> tuple[float, float]:
    """Limits of an axis of gaps: all points and the margin; an interval may double that, what is longer is cut."""
    margin = float(gaps["margin"].max()) if gaps["margin"].notna().any() else 0.0
    points = [g for g in gaps["gap"] if math.isfinite(g)]
    near_lo, near_hi = min([-margin, *points]), max([margin, *points])
    room = near_hi - near_lo or 0.01
    ends_lo = [g for g in gaps[low] if math.isfinite(g)]
    ends_hi = [g for g in gaps[high] if math.isfinite(g)]
    lo = max(min([near_lo, *ends_lo]), near_lo - room)
    hi = min(max([near_hi, *ends_hi]), near_hi + room)
    pad = 0.06 * (hi - lo)
    return lo - pad, hi + pad


def draw_interval(
    ax: Axes,
    at: float,
    row: Any,
    colour: str,
    marker: str,
    *,
    vertical: bool = False,
    size: float = 6.0,
    columns: tuple[str, str, str] = ("gap", "ci90_lo", "ci90_hi"),
    limits: tuple[float, float] | None = None,
    filled: bool = True,
) -> None:
    """A gap with its interval at a place of the other axis: nothing without a gap, a lone mark without an interval.

    An interval that leaves the limits ends in an arrow there.
    """
    gap, lo, hi = (float(row[name]) if pd.notna(row[name]) else math.nan for name in columns)
    if not math.isfinite(gap):
        return
    face = colour if filled else "white"

    def draw(along: list[float], **how: Any) -> None:
        here = [at] * len(along)
        ax.plot(*((here, along) if vertical else (along, here)), color=colour, **how)

    if math.isfinite(lo) and math.isfinite(hi):
        low, high = (max(lo, limits[0]), min(hi, limits[1])) if limits else (lo, hi)
        draw([low, high], linewidth=1.8, solid_capstyle="butt", zorder=2)
        ends = (("v", "^") if vertical else ("<", ">")) if limits else ()
        for end, drawn, arrow in zip((lo, hi), (low, high), ends, strict=False):
            if end != drawn:
                draw([drawn], marker=arrow, markersize=5, zorder=3, clip_on=False)
    draw([gap], marker=marker, markersize=size, linestyle="none", markerfacecolor=face, markeredgewidth=1.1, zorder=3)
