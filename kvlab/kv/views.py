"""Layer 1: views of the KV blocks that a case owns, and of those that its step may write.

The rule for touched views is the one vLLM's forward benchmark moved to: a step writes the tail of each attention
request, and may rewrite the whole state of each recurrent one (`vllm/benchmarks/forward/kv_init.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvlab.errors import GeometryError
from kvlab.kv.batch import Batch
from kvlab.kv.specs import is_recurrent, layer_spec, states_per_block, tokens_per_block

BlockRanges = npt.NDArray[np.int64]
BlockDims = Mapping[str, int] | int | None


@dataclass(frozen=True)
class LayerTensor:
    """One cache tensor of one layer, its block dimension resolved.

    Attributes:
        group_id: KV cache group that owns the layer's blocks.
        layer: layer name.
        index: position in the layer's nest of tensors (a recurrent layer has several).
        spec: the layer's own spec.
        tensor: the whole cache tensor, all blocks.
        dim: its block dimension.
        factor: kernel blocks per allocator block along `dim`.
    """

    group_id: int
    layer: str
    index: int
    spec: Any
    tensor: torch.Tensor
    dim: int
    factor: int

    def blocks(self, begin: int, end: int) -> torch.Tensor:
        """View of the allocator blocks [begin, end)."""
        return self.tensor.narrow(self.dim, begin * self.factor, (end - begin) * self.factor)

    def check_ranges(self, ranges: BlockRanges) -> None:
        """Refuse block ranges that a batch of this pool cannot own.

        Raises:
            GeometryError: for blocks before 1 or past the pool; empty ranges may lie anywhere.
        """
        num_blocks = self.tensor.shape[self.dim] // self.factor
        begin, end = ranges[:, 0], ranges[:, 1]
        foreign = (begin > end) | ((begin < end) & ((begin < 1) | (end > num_blocks)))
        if foreign.any():
            first = int(np.argmax(foreign))
            raise GeometryError(
                f"layer {self.layer!r}: request {first} has blocks [{begin[first]}, {end[first]}), but shape"
                f" {tuple(self.tensor.shape)} holds blocks 1 to {num_blocks - 1} (0 is the null block); build the batch"
                " for this pool"
            )

    def token_major(self, begin: int, end: int) -> torch.Tensor:
        """The same blocks as [kernel blocks, ..., tokens, values or bytes]; a recurrent state has no token axis.

        Raises:
            GeometryError: where the shape does not tell which axis holds the tokens.
        """
        view = self.blocks(begin, end).movedim(self.dim, 0)
        if is_recurrent(self.spec) or view.dim() < 3:
            return view
        return view.movedim(self._token_axis(tuple(view.shape)), -2)

    def _token_axis(self, shape: tuple[int, ...]) -> int:
        tokens = states_per_block(self.spec) // self.factor
        axes = [axis for axis in range(1, len(shape) - 1) if shape[axis] == tokens]
        # [B, N, C] and vLLM's logical [B, H, N, C] keep the tokens next to last; only K/V-first shapes need a search.
        if len(shape) <= 4 and len(shape) - 2 in axes:
            return len(shape) - 2
        if len(axes) == 1:
            return axes[0]
        raise GeometryError(
            f"layer {self.layer!r}: no one axis of shape {tuple(self.tensor.shape)} holds the {tokens} tokens of a"
            f" kernel block (block dimension {self.dim}); give the spec the num_states that the cache was built with"
        )


def iter_tensors(kv_cache: Any) -> Iterator[torch.Tensor]:
    """The non-empty tensors in a layer's cache: a tensor, a nest of lists and tuples, or None."""
    return (tensor for tensor in _nested_tensors(kv_cache) if tensor.numel())


def _nested_tensors(kv_cache: Any) -> Iterator[torch.Tensor]:
    if isinstance(kv_cache, torch.Tensor):
        yield kv_cache
    elif isinstance(kv_cache, list | tuple):
        for item in kv_cache:
            yield from _nested_tensors(item)
    elif kv_cache is not None:
        raise GeometryError(f"a cache is a tensor or a nest of tensors, not {type(kv_cache).__name__}")


def block_dim(
    tensor: torch.Tensor, num_blocks: int, spec: Any = None, *, layer: str = "?", index: int = 0
) -> tuple[int, int]:
    """(block dimension, kernel blocks per allocator block) of a cache tensor.

    Dimension 0 or 1 qualifies when its size is a multiple of `num_blocks`. Where both do, the spec decides: the
    remaining dimensions must be a state's shape, or hold the tokens of one kernel block.

    Args:
        index: which of the layer's tensors this is; selects the shape in a recurrent spec's `shapes`.

    Raises:
        GeometryError: naming layer and shape, where no dimension qualifies or nothing decides between two.
    """
    shape = tuple(tensor.shape)
    fits = [(d, shape[d] // num_blocks) for d in range(min(2, len(shape))) if shape[d] and shape[d] % num_blocks == 0]
    if len(fits) > 1 and spec is not None:
        fits = [(d, f) for d, f in fits if _holds_one_block(shape, d, f, spec, index)] or fits
    if len(fits) == 1:
        return fits[0]
    if not fits:
        raise GeometryError(
            f"layer {layer!r}: no block dimension in shape {shape}: neither dim 0 nor dim 1 is a multiple of"
            f" {num_blocks} blocks; pass the allocator's view of the cache, or block_dims={{{layer!r}: dim}}"
        )
    raise GeometryError(
        f"layer {layer!r}: ambiguous block dimension in shape {shape}: dim 0 and dim 1 are both multiples of"
        f" {num_blocks} blocks; say which with block_dims={{{layer!r}: dim}}"
    )


def _holds_one_block(shape: tuple[int, ...], dim: int, factor: int, spec: Any, index: int) -> bool:
    rest = shape[:dim] + shape[dim + 1 :]
    if is_recurrent(spec):
        shapes = getattr(spec, "shapes", None)
        return factor == 1 and (shapes is None or index >= len(shapes) or rest == tuple(shapes[index]))
    states = states_per_block(spec)
    return states % factor == 0 and states // factor in rest


def layer_tensors(
    kv_caches: Mapping[str, Any], attn_groups: Iterable[Any], num_blocks: int, block_dims: BlockDims = None
) -> list[LayerTensor]:
    """Every cache tensor of every layer, in the order group, layer, tensor.

    Args:
        kv_caches: layer name -> tensor or nest of tensors; None for a layer without a cache.
        attn_groups: objects with `.kv_cache_spec`, `.layer_names` and, unless they stand in group order,
            `.kv_cache_group_id`.
        num_blocks: allocator blocks of the pool.
        block_dims: the block dimension, for all layers or by layer name, where an engine knows it.

    Raises:
        GeometryError: a layer without an entry, or a tensor whose block dimension is absent or ambiguous.
    """
    found = []
    for position, group in enumerate(attn_groups):
        group_id = getattr(group, "kv_cache_group_id", position)
        for name in group.layer_names:
            if name not in kv_caches:
                raise GeometryError(
                    f"layer {name!r} of group {group_id} has no entry in kv_caches; pass None if it has no cache"
                )
            spec = layer_spec(group.kv_cache_spec, name)
            known = block_dims.get(name) if isinstance(block_dims, Mapping) else block_dims
            for index, tensor in enumerate(_nested_tensors(kv_caches[name])):
                if not tensor.numel():
                    continue
                if known is None:
                    dim, factor = block_dim(tensor, num_blocks, spec, layer=name, index=index)
                else:
                    dim, factor = known, _known_factor(tensor, known, num_blocks, name)
                found.append(LayerTensor(group_id, name, index, spec, tensor, dim, factor))
    return found


def _known_factor(tensor: torch.Tensor, dim: int, num_blocks: int, layer: str) -> int:
    shape = tuple(tensor.shape)
    if not 0 <= dim < len(shape) or not shape[dim] or shape[dim] % num_blocks:
        raise GeometryError(f"layer {layer!r}: dim {dim} of shape {shape} is no multiple of {num_blocks} blocks")
    return shape[dim] // num_blocks


def owned_block_ranges(group_id: int, batch: Batch) -> BlockRanges:
    """Allocator blocks [begin, end) that each request owns in a group: int64 [requests, 2]."""
    if not 0 <= group_id < len(batch.group_block_ranges):
        raise GeometryError(f"group {group_id} is not in the batch, which has {len(batch.group_block_ranges)} groups")
    return np.asarray(batch.group_block_ranges[group_id], dtype=np.int64).reshape(-1, 2)


def _tails(owned: BlockRanges, scheduled: npt.NDArray[np.int64], block_size: int) -> BlockRanges:
    tail = -(-scheduled // block_size) + 2
    begin, end = owned[:, 0], owned[:, 1]
    return np.stack([np.maximum(begin, end - tail), end], axis=1)


def touched_block_ranges(
    attn_groups: Iterable[Any], batch: Batch, dcp_size: int = 1, lookahead: int = 0
) -> dict[str, BlockRanges]:
    """Allocator blocks [begin, end) that a step may write, by layer: int64 [requests, 2] in batch order.

    Attention: from `max(begin, end - (ceil(scheduled / block_size) + 2))`. Recurrent layers and rings: all blocks.
    Layers whose specs agree share one array.

    Raises:
        GeometryError: a group that the batch does not have, or a layer in two groups.
    """
    scheduled = np.fromiter((batch.expected[r][0] for r in batch.req_ids), np.int64, len(batch.req_ids)) + lookahead
    ranges: dict[str, BlockRanges] = {}
    owned: dict[int, BlockRanges] = {}
    group_of: dict[str, int] = {}
    for position, group in enumerate(attn_groups):
        group_id = getattr(group, "kv_cache_group_id", position)
        if group_id not in owned:
            owned[group_id] = owned_block_ranges(group_id, batch)
        shared: dict[int, BlockRanges] = {}
        for name in group.layer_names:
            if group_of.setdefault(name, group_id) != group_id:
                raise GeometryError(
                    f"layer {name!r} is in group {group_of[name]} and in group {group_id}; its blocks are of one group"
                )
            spec = layer_spec(group.kv_cache_spec, name)
            if is_recurrent(spec):
                ranges[name] = owned[group_id]
                continue
            # Blocks are handed out by the group's size; a member of another size must not shorten the tail.
            block_size = min(tokens_per_block(spec, dcp_size), tokens_per_block(group.kv_cache_spec, dcp_size))
            if block_size not in shared:
                shared[block_size] = _tails(owned[group_id], scheduled, block_size)
            ranges[name] = shared[block_size]
    return ranges


def touched_kv_views(
    kv_caches: Mapping[str, Any],
    attn_groups: Sequence[Any],
    batch: Batch,
    num_blocks: int,
    dcp_size: int = 1,
    lookahead: int = 0,
    *,
    block_dims: BlockDims = None,
) -> list[torch.Tensor]:
    """Views of the KV blocks that a step may write, in the order group, layer, tensor, request.

    Args:
        kv_caches: layer name -> tensor or nest of tensors.
        attn_groups: objects with `.kv_cache_group_id`, `.kv_cache_spec`, `.layer_names`.
        batch: from `build_batch`.
        num_blocks: allocator blocks of the pool (the caches' block dimension, in allocator blocks).
        dcp_size: decode context parallel ranks.
        lookahead: tokens that a drafter may write after the scheduled ones.
        block_dims: see `layer_tensors`.

    Raises:
        GeometryError: see `layer_tensors`, `touched_block_ranges` and `LayerTensor.check_ranges`.
    """
    ranges = touched_block_ranges(attn_groups, batch, dcp_size, lookahead)
    views: list[torch.Tensor] = []
    for layer in layer_tensors(kv_caches, attn_groups, num_blocks, block_dims):
        views += block_views(layer, ranges[layer.layer])
    return views


def owned_kv_views(layer: LayerTensor, batch: Batch) -> list[torch.Tensor]:
    """Views of all blocks that the batch owns in a layer's tensor, one a request."""
    return block_views(layer, owned_block_ranges(layer.group_id, batch))


def block_views(layer: LayerTensor, ranges: BlockRanges) -> list[torch.Tensor]:
    """One view a row of `ranges` (allocator blocks, [begin, end)).

    Raises:
        GeometryError: see `LayerTensor.check_ranges`.
    """
    layer.check_ranges(ranges)
    size = layer.tensor.shape[layer.dim]
    bounds = (ranges * layer.factor).ravel()
    if not len(bounds):
        return []
    if np.any(np.diff(bounds) < 0) or bounds[-1] > size:
        # Out of order, as no allocator of ours leaves them.
        return [layer.blocks(begin, end) for begin, end in ranges.tolist()]
    # One call that cuts [gap, view, gap, view, ...] costs a third of as many calls to narrow.
    pieces = np.diff(bounds, prepend=0, append=size)
    return list(layer.tensor.split_with_sizes(pieces.tolist(), layer.dim)[1::2])
