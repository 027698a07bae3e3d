"""Layer 4: a picture of what a step may write: each request's blocks, group by group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from kvlab.errors import RunError
from kvlab.plots.style import (
    BANDS,
    BLACK,
    BLUE,
    FAINT,
    INK,
    ORANGE,
    PURPLE,
    VERMILION,
    label_rows,
    need,
    new_figure,
    place_rows,
    shorten,
    styled,
)

_END = 3  # blocks drawn at either end of a stretch that is too long to draw whole
_WHOLE = 2 * _END + 2
_GAP = 2.4  # width of what is left out, in blocks
_LEAST = 18.0  # width of the axes, in blocks: a few blocks should not become bars
_CELL = {
    "freed": {"facecolor": "white", "edgecolor": FAINT, "linestyle": ":", "hatch": "xxx"},
    "read": {"facecolor": BANDS[0], "edgecolor": BLUE},
    "touched": {"facecolor": ORANGE, "edgecolor": INK},
    "state": {"facecolor": PURPLE, "edgecolor": INK, "hatch": "///"},
}
_PALE = {"touched": "#FBE7BE", "state": "#F3DFEA"}
_SAID = {
    "freed": "freed (null block)",
    "read": "read only",
    "touched": "touched tail",
    "state": "touched whole (state)",
}


class _Stretch(NamedTuple):
    """Neighbouring blocks of one sort; `written` is the share of each that was written, or empty."""

    sort: str
    size: int
    written: tuple[float, ...]

    @property
    def strays(self) -> bool:
        """Something was written that the step may not write."""
        return self.sort in ("freed", "read") and any(self.written)


@styled
def plot_views(blocks: pd.DataFrame, *, most: int = 4, title: str | None = None) -> tuple[Figure, Axes]:
    """What a step may write: a row of blocks a request, under each group. Long stretches are cut, with their count.

    Args:
        blocks: one row per group and request: `group`, `kind` (`attention`, `window`, `state`), `request`, the owned
            blocks [`begin`, `end`) and the touched among them [`touched_begin`, `touched_end`), `block_size` (tokens),
            `layers`. Optional: `tokens` of KV of the request, which tells how many blocks before its window were
            freed; `written`, a list: the share of each owned block's bytes that the step wrote.
        most: rows per group; requests that look alike and follow each other share one.

    Raises:
        RunError: for no blocks, or a touched range that is not within the owned one.
    """
    columns = ("group", "kind", "request", "begin", "end", "touched_begin", "touched_end", "block_size", "layers")
    need(blocks, columns, "blocks")
    rows: list[tuple[str, str, list[_Stretch], str]] = []
    for key, group in blocks.groupby(["group", "kind", "block_size", "layers"], sort=False):
        number, kind, size, layers = key
        head = f"group {number}: {kind}, {layers} layer{'s' if layers != 1 else ''}, {size} tokens a block"
        alike = _alike(group)
        for requests, stretches, note in alike[:most]:
            rows.append((head, _requests(requests), stretches, note))
        if len(alike) > most:
            hidden = sum(len(requests) for requests, _, _ in alike[most:])
            rows.append((head, f"{hidden} more", [], ""))
    places, headings = place_rows([head for head, _, _, _ in rows])
    if not headings:
        headings = {-1.0: rows[0][0]}
    heading = title or "What the step may write: blocks of each request"
    fig = new_figure(0.85 + 0.36 * (places[-1] - min(headings) + 1), heading)
    ax = fig.subplots()
    drawn = [_draw(ax, y, stretches) for y, (_, _, stretches, _) in zip(places, rows, strict=True)]
    right = max(_LEAST, *drawn)
    for y, end, (_, _, _, note) in zip(places, drawn, rows, strict=True):
        ax.annotate(note, (end + 0.4, y), va="center", fontsize=8, annotation_clip=False)
    label_rows(ax, places, [name for _, name, _, _ in rows], {})
    for place, text in headings.items():
        ax.axhline(place + 0.42, color=FAINT, linewidth=0.5)
        ax.annotate(text, (0, place + 0.28), fontsize=8.5, fontweight="bold", annotation_clip=False)
    ax.set_ylim(places[-1] + 0.6, min(headings) - 0.6)
    ax.set_xlim(-0.3, right + 0.3)
    ax.set_xticks([])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.tick_params(left=False)
    fig.legend(
        handles=_legend([part for _, _, parts, _ in rows for part in parts]), loc="outside lower center", ncols=3
    )
    return fig, ax


def _legend(parts: Sequence[_Stretch]) -> list[Patch]:
    known = any(part.written for part in parts)
    handles = [
        Patch(**_look(sort, known), label=_SAID[sort]) for sort in _CELL if any(part.sort == sort for part in parts)
    ]
    if known:
        handles.append(Patch(facecolor=BLACK, label="share of the block written"))
    if any(part.strays for part in parts):
        handles.append(Patch(facecolor=VERMILION, hatch="////", edgecolor=BLACK, label="written, and not touched"))
    return handles


def _alike(group: pd.DataFrame) -> list[tuple[list[Any], list[_Stretch], str]]:
    """Requests, what to draw and what to say of it, for each run of requests that look the same."""
    found: list[tuple[list[Any], list[_Stretch], str]] = []
    for row in group.to_dict("records"):
        stretches = _stretches({str(name): value for name, value in row.items()})
        owned, touched = row["end"] - row["begin"], row["touched_end"] - row["touched_begin"]
        if found and found[-1][1] == stretches:
            requests, _, _ = found[-1]
            found[-1] = ([*requests, row["request"]], stretches, f"{_blocks(owned)} each, {touched:,} touched")
        else:
            ids = f"block {row['begin']}" if owned == 1 else f"blocks {row['begin']} to {row['end'] - 1}"
            note = f"{ids if owned else 'no block'}, {touched:,} touched"
            found.append(([row["request"]], stretches, note))
    return found


def _stretches(row: dict[str, Any]) -> list[_Stretch]:
    begin, end = int(row["begin"]), int(row["end"])
    lo, hi = int(row["touched_begin"]), int(row["touched_end"])
    if not begin <= lo <= hi <= end:
        raise RunError(
            f"group {row['group']}, request {row['request']}: touched blocks {lo} to {hi} are not within those owned,"
            f" {begin} to {end}; take the table from touched_blocks"
        )
    written = row.get("written")
    shares = () if written is None or np.ndim(written) == 0 else tuple(float(share) for share in written)
    if shares and len(shares) != end - begin:
        raise RunError(
            f"group {row['group']}, request {row['request']}: written has {len(shares)} shares; give one for each"
            f" of the {end - begin} owned blocks"
        )
    tokens, state = row.get("tokens"), row["kind"] == "state"
    freed = 0
    if not state and tokens is not None and not math.isnan(tokens):
        freed = max(0, -(-int(tokens) // int(row["block_size"])) - (end - begin))
    parts = [
        _Stretch("freed", freed, ()),
        _Stretch("read", lo - begin, shares[: lo - begin]),
        _Stretch("state" if state else "touched", hi - lo, shares[lo - begin : hi - begin]),
        _Stretch("read", end - hi, shares[hi - begin :]),
    ]
    return [part for part in parts if part.size]


def _draw(ax: Axes, y: float, stretches: Sequence[_Stretch]) -> float:
    """Draw a row of blocks from x = 0; returns where it ends."""
    x = 0.0
    for stretch in stretches:
        cut = stretch.size > _WHOLE
        shown = [*range(_END), *range(stretch.size - _END, stretch.size)] if cut else range(stretch.size)
        for index in shown:
            if cut and index == stretch.size - _END:
                left_out = f"{stretch.size - 2 * _END:,}"
                ax.annotate(left_out, (x + _GAP / 2, y), ha="center", va="center", fontsize=7.5)
                for edge in (x + 0.12, x + _GAP - 0.12):
                    ax.plot([edge], [y], marker=".", color=FAINT, markersize=2.5)
                x += _GAP
            share = stretch.written[index] if stretch.written else None
            _cell(ax, x, y, stretch.sort, share)
            x += 1
        x += 0.25
    return x


def _look(sort: str, known: bool) -> dict[str, Any]:
    """Of a block; pale where what was written is known and drawn over it."""
    pale = {"facecolor": _PALE[sort], "hatch": None} if known and sort in _PALE else {}
    return {**_CELL[sort], **pale, "linewidth": 0.7}


def _cell(ax: Axes, x: float, y: float, sort: str, share: float | None) -> None:
    ax.add_patch(Rectangle((x + 0.06, y - 0.36), 0.88, 0.72, **_look(sort, share is not None)))
    if share:
        # The y axis points down: what was written stands on the cell's floor.
        height = 0.72 * min(share, 1.0)
        how: dict[str, Any] = (
            {"facecolor": BLACK} if sort in _PALE else {"facecolor": VERMILION, "hatch": "////", "edgecolor": BLACK}
        )
        ax.add_patch(Rectangle((x + 0.06, y + 0.36 - height), 0.88, height, linewidth=0, **how))


def _blocks(count: int) -> str:
    return f"{count:,} block{'s' if count != 1 else ''}"


def _requests(requests: Sequence[Any]) -> str:
    if len(requests) == 1:
        return f"request {shorten(requests[0], 16)}"
    return f"{shorten(requests[0], 12)} to {shorten(requests[-1], 12)} ({len(requests)} requests)"
