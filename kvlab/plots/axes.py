"""Layer 4: axes that several figures share."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator


def log_axis(ax: Axes, values: pd.Series, text: Callable[[float], str], apart: float = 0.075) -> None:
    """A logarithmic x axis with a tick at each value, but for those nearer to another than a share of the axis.

    The last value keeps its tick before the one that it would touch.
    """
    ax.set_xscale("log", base=2)
    found = sorted({float(v) for v in values})
    low, high = found[0], found[-1]
    pad = max((high / low) ** 0.05, 1.15 if high > low else 2.0)
    ax.set_xlim(low / pad, high * pad)
    least = (high / low * pad**2) ** apart
    ticks = [low]
    for value in found[1:]:
        if value >= ticks[-1] * least:
            ticks.append(value)
        elif value == high and len(ticks) > 1:
            ticks[-1] = value
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
