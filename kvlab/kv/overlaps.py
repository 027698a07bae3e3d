"""Layer 1: overlaid groups share bytes; this proves that the blocks of one request and group are nobody else's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvlab.errors import GeometryError
from kvlab.kv.batch import Batch
from kvlab.kv.extents import Intervals, merge_intervals, view_intervals
from kvlab.kv.views import LayerTensor, owned_block_ranges


def check_overlaps(layers: Iterable[LayerTensor], batch: Batch) -> None:
    """Raise GeometryError where blocks that a batch owns in one group lie over blocks that it owns in another.

    vLLM overlays groups from offset 0, which is sound because a block ID belongs to one group at a time: block b of
    one group may lie over block b of another only. That holds where both keep block b within the same bytes, which
    strides and offsets tell; only other layouts are compared byte by byte.
    """
    by_storage: dict[int, list[LayerTensor]] = {}
    for layer in layers:
        by_storage.setdefault(layer.tensor.untyped_storage().data_ptr(), []).append(layer)
    for members in by_storage.values():
        places: dict[tuple[int, ...], LayerTensor] = {}
        for layer in members:
            places.setdefault((layer.group_id, *_place(layer)), layer)
        distinct = list(places.values())
        for a, b in _doubtful_pairs(np.array(list(places), np.int64)):
            one, other = distinct[a], distinct[b]
            if _share_bytes(one, other, batch):
                raise GeometryError(
                    f"layers {one.layer!r} (group {one.group_id}) and {other.layer!r} (group {other.group_id}) keep"
                    " different blocks in the same bytes: filling one would change the other; their blocks stand"
                    f" {_place(one)[1]} and {_place(other)[1]} bytes apart"
                )


def _place(layer: LayerTensor) -> tuple[int, int, int, int]:
    """(first byte, bytes from block to block, end of block 0, end of the last block) of a layer's tensor."""
    tensor, size = layer.tensor, layer.tensor.element_size()
    stride, last = (
        tensor.stride(layer.dim) * count for count in (layer.factor, tensor.shape[layer.dim] - layer.factor)
    )
    begin = int(tensor.storage_offset())
    extent = 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, stride * size, (begin + extent - last) * size, (begin + extent) * size


def _doubtful_pairs(places: Intervals) -> list[list[int]]:
    """Pairs of rows (group, *place) of two groups that neither lie apart nor keep block b within the same bytes."""
    group, begin, stride, end, last = (column[:, None] for column in places.T)
    meet = (begin < last.T) & (last > begin.T)
    block_by_block = (stride == stride.T) & (np.maximum(end, end.T) - np.minimum(begin, begin.T) <= stride)
    return np.argwhere(np.triu(meet & (group != group.T) & ~block_by_block)).tolist()


def _share_bytes(one: LayerTensor, other: LayerTensor, batch: Batch) -> bool:
    mine, theirs = _owned(one, batch), _owned(other, batch)
    if not len(mine) or not len(theirs):
        return False
    after = np.searchsorted(theirs[:, 1], mine[:, 0], side="right")
    inside = after < len(theirs)
    return bool((theirs[after[inside], 0] < mine[inside, 1]).any())


def _owned(layer: LayerTensor, batch: Batch) -> Intervals:
    ranges = owned_block_ranges(layer.group_id, batch).tolist()
    runs = [view_intervals(layer.blocks(begin, end)) for begin, end in ranges]
    return merge_intervals(np.concatenate(runs)) if runs else np.empty((0, 2), np.int64)
