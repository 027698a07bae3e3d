"""Layer 4: which tokens an indexer picks under each arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvlab.errors import RunError
from kvlab.plots.style import DASHES, arm_styles, need, new_figure, percent_axis, shorten, styled, tokens

_BINS = 128
_MOST_ROWS = 96


@styled
def plot_selection(
    selection: pd.DataFrame | Mapping[str, Any], *, context: int | None = None, title: str | None = None
) -> tuple[Figure, np.ndarray]:
    """Where in the context the picked tokens lie: a raster of query rows an arm, and the share of picks by place.

    Args:
        selection: arm -> int [rows, k], what each query row picked (`Step.selection` of one layer); or a table with a
            row a pick: `arm`, `row` (from 0), `position` (token, from 0). Negative positions are an indexer's padding.
        context: tokens to choose from; the last position picked plus one when absent.

    Returns:
        The figure and its axes [arms + 1]: a raster each arm, then the shares.

    Raises:
        RunError: for no picks.
    """
    picks = _by_arm(selection)
    styles = arm_styles(picks)
    length = context or max(int(position.max()) for _, position in picks.values()) + 1
    bins = np.linspace(0, length, min(_BINS, length) + 1)
    numbers = np.unique(np.concatenate([row for row, _ in picks.values()]))
    # Rows that no screen could tell apart are counted together.
    lines = np.array_split(numbers, min(len(numbers), _MOST_ROWS))
    edges = np.array([*(part[0] for part in lines), numbers[-1] + 1], dtype=float)
    # What was there to pick: bins at the end, and lines of several rows, hold more tokens or fewer.
    room = np.diff(bins)[None, :] * np.array([len(part) for part in lines])[:, None]
    heights = [1.25] * len(styles) + [1.7]
    heading = title or "Which tokens the indexer picks: a raster of query rows by arm, darker where more are picked"
    fig = new_figure(0.75 + sum(heights), heading)
    axes = fig.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    handles, mesh = [], None
    for i, (ax, arm) in enumerate(zip(axes, styles, strict=False)):
        row, position = picks[arm]
        counts, _, _ = np.histogram2d(row, position, bins=[edges, bins])
        share = np.minimum(counts / room, 1)
        mesh = ax.pcolormesh(bins, edges, share, cmap="Greys", norm=PowerNorm(0.5, 0, 1), rasterized=True)
        ax.set_title(f"{shorten(arm)}: {len(position) / len(np.unique(row)):,.0f} picks a row", fontsize=8.5)
        ax.set_ylabel("query row")
        ax.invert_yaxis()
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        colour, dash = styles[arm][0], DASHES[i % len(DASHES)]
        of_all = counts.sum(0) / len(position)
        axes[-1].stairs(of_all, bins, baseline=None, color=colour, linestyle=dash, linewidth=1.4)
        handles.append(Line2D([], [], color=colour, linestyle=dash, lw=1.4, label=shorten(arm)))
    assert mesh is not None  # `picks` is not empty
    bar = fig.colorbar(mesh, ax=list(axes[:-1]), aspect=30 * len(styles), pad=0.015)
    bar.set_label("share picked", fontsize=8)
    percent_axis(bar.ax.yaxis)
    axes[-1].set_ylabel("share of\nall picks")
    percent_axis(axes[-1].yaxis)
    axes[-1].set_ylim(bottom=0)
    axes[-1].set_xlim(0, length)
    axes[-1].set_xlabel("position in the context (tokens)")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}" if length < 5000 else tokens(n)))
    fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return fig, axes


def _by_arm(selection: pd.DataFrame | Mapping[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arm -> row and position of each pick, without padding; arms without picks are left out."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if isinstance(selection, pd.DataFrame):
        need(selection, ("arm", "row", "position"), "picks")
        for arm, of_arm in selection.groupby("arm", sort=False):
            found[str(arm)] = (of_arm["row"].to_numpy(), of_arm["position"].to_numpy())
    else:
        for arm, values in selection.items():
            table = np.atleast_2d(np.asarray(values))
            found[arm] = (np.repeat(np.arange(len(table)), table.shape[1]), table.ravel())
    found = {arm: (row[position >= 0], position[position >= 0]) for arm, (row, position) in found.items()}
    found = {arm: pair for arm, pair in found.items() if len(pair[0])}
    if not found:
        raise RunError("no picks to plot: no arm has a token picked")
    return found
