"""Layer 1: the application of a fill to the blocks that a case owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvlab.errors import FillError
from kvlab.kv.batch import Batch
from kvlab.kv.draws import seed_of
from kvlab.kv.fill_plan import FillPlan
from kvlab.kv.formats import Format
from kvlab.kv.parsing import parse_fill
from kvlab.kv.rules import Fill, Prefill, Zeros
from kvlab.kv.views import BlockDims, LayerTensor, layer_tensors

# Plans kept at a time: more than a study has arms. Each holds a few tables on the device.
_MOST_PLANS = 16


class FillPlans:
    """The latest plans of a case's fills; each serves only what it was made for, down to the tensors' addresses."""

    def __init__(self) -> None:
        self._known: list[tuple[tuple[Any, ...], FillPlan]] = []

    def find(
        self, layers: Sequence[LayerTensor], batch: Batch, num_blocks: int, fill: Fill, formats: Mapping[str, Format]
    ) -> FillPlan:
        """The plan of a fill, made where there is none yet; arguments and errors are those of `FillPlan`."""
        case = _case(layers, batch, num_blocks, fill, formats)
        for known, plan in self._known:
            if known == case:
                return plan
        plan = FillPlan(layers, batch, num_blocks, fill, formats)
        self._known = [(case, plan), *self._known][:_MOST_PLANS]
        return plan


def _case(
    layers: Sequence[LayerTensor], batch: Batch, num_blocks: int, fill: Fill, formats: Mapping[str, Format]
) -> tuple[Any, ...]:
    """All that a plan depends on, as values: tensors, lists and formats may change in place.

    A plan holds its tensors, so that no other has their IDs.
    """
    return (
        # The text too, because the values 0.0 and -0.0 are equal and their bytes are not.
        fill,
        str(fill),
        num_blocks,
        [list(map(tuple, ranges)) for ranges in batch.group_block_ranges],
        [batch.expected[req_id] for req_id in batch.req_ids],
        [_place(layer) for layer in layers],
        [(type(fmt), dict(vars(fmt))) if (fmt := formats.get(layer.layer)) else None for layer in layers],
    )


def _place(layer: LayerTensor) -> tuple[Any, ...]:
    t = layer.tensor
    lies = (id(t), t.device, t.untyped_storage().data_ptr(), t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)
    return (layer.group_id, layer.layer, layer.index, layer.spec, layer.dim, layer.factor, *lies)


def fill_kv_blocks(
    kv_caches: Mapping[str, Any],
    attn_groups: Iterable[Any],
    batch: Batch,
    num_blocks: int,
    fill: Fill | str,
    generator: torch.Generator | None = None,
    *,
    formats: Mapping[str, Format] | None = None,
    block_dims: BlockDims = None,
    plans: FillPlans | None = None,
) -> None:
    """Give all blocks that a batch owns new contents, group by group; no other byte changes.

    Random contents depend on the seed, the layer's name, the block and the place in it (zero tokens and indexer scales
    on the request's blocks): a layer or a request has the same ones whatever else is filled. They differ between CPU
    and CUDA, and on CUDA with and without Triton.

    Args:
        kv_caches, attn_groups, batch, num_blocks, block_dims: as for `touched_kv_views`.
        fill: a `Fill` or its text.
        generator: its seed is that of the random contents, 0 when absent; nothing is drawn from it, so that a second
            fill repeats the first.
        formats: layer name -> byte format, where the spec does not tell; else `format_of`.
        plans: kept by who fills the same case again and again; without it every call works the fill out anew.

    Raises:
        FillError, FormatError, GeometryError: before any byte is written.
    """
    fill = parse_fill(fill)
    if isinstance(fill, Prefill):
        raise FillError(f"fill {str(fill)!r}: only an engine can write it, by running its model; use step.fill")
    layers = distinct_layers(layer_tensors(kv_caches, attn_groups, num_blocks, block_dims))
    plans = FillPlans() if plans is None else plans
    plans.find(layers, batch, num_blocks, fill, formats or {}).write(seed_of(generator))


def zero_kv_blocks(
    kv_caches: Mapping[str, Any],
    attn_groups: Iterable[Any],
    batch: Batch,
    num_blocks: int,
    *,
    block_dims: BlockDims = None,
) -> None:
    """Zero all blocks that a batch owns: `fill_kv_blocks(..., "zeros")`."""
    fill_kv_blocks(kv_caches, attn_groups, batch, num_blocks, Zeros(), block_dims=block_dims)


def distinct_layers(layers: Iterable[LayerTensor]) -> list[LayerTensor]:
    """The layers without those that share an earlier one's cache byte for byte (KV sharing)."""
    seen: dict[tuple[Any, ...], LayerTensor] = {}
    for layer in layers:
        t = layer.tensor
        seen.setdefault((layer.group_id, t.data_ptr(), tuple(t.shape), t.stride(), t.dtype), layer)
    return list(seen.values())
