"""Layer 1: the application of a fill to the blocks that a case owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.errors import FillError, FormatError, GeometryError
from kvlab.kv.batch import Batch
from kvlab.kv.codecs import cast_saturating, to_bytes
from kvlab.kv.detect import format_of
from kvlab.kv.draws import Place, draw_method, key_of, normals, seed_of
from kvlab.kv.formats import Format, IndexerFormat, RawFormat
from kvlab.kv.overlaps import check_overlaps
from kvlab.kv.parsing import parse_fill
from kvlab.kv.request_draws import RequestDraws
from kvlab.kv.roles import role_of
from kvlab.kv.rules import Fill, Prefill, ValueFill, Zeros
from kvlab.kv.scores import Scores
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import BlockDims, BlockRanges, LayerTensor, layer_tensors, owned_block_ranges

# Values drawn and encoded at a time: on a GPU what bounds the float32 scratch at 256 MB, else what stays in the cache.
_CHUNK_VALUES = {"cuda": 64 * 2**20, "cpu": 2**17}


@dataclass(frozen=True)
class _Write:
    """What one cache tensor gets; no format for zero bytes."""

    layer: LayerTensor
    fmt: Format | None
    fill: Fill
    key: int


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

    Raises:
        FillError, FormatError, GeometryError: before any byte is written.
    """
    fill = parse_fill(fill)
    if isinstance(fill, Prefill):
        raise FillError(f"fill {str(fill)!r}: only an engine can write it, by running its model; use step.fill")
    layers = distinct_layers(layer_tensors(kv_caches, attn_groups, num_blocks, block_dims))
    owned = {group_id: owned_block_ranges(group_id, batch) for group_id in {layer.group_id for layer in layers}}
    for layer in layers:
        layer.check_ranges(owned[layer.group_id])
    seed = seed_of(generator)
    writes = _writes(layers, fill, formats or {}, seed)
    check_overlaps(layers, batch)
    if not writes:
        return
    requests = RequestDraws(seed, batch, owned, num_blocks, layers[0].tensor.device)
    merged = {group_id: _merged(ranges) for group_id, ranges in owned.items()}
    with torch.inference_mode():
        for write in _without_launched(writes, requests, merged):
            if isinstance(write.fill, Scores):
                _write_scores(write, write.fill, requests)
                continue
            for begin, end in merged[write.layer.group_id]:
                _write_values(write, begin, end, requests)


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


def _merged(ranges: BlockRanges) -> list[tuple[int, int]]:
    """Adjacent ranges joined: fewer, longer writes."""
    merged: list[tuple[int, int]] = []
    for begin, end in ranges.tolist():
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def _writes(layers: list[LayerTensor], fill: Fill, formats: Mapping[str, Format], seed: int) -> list[_Write]:
    """What each layer gets; raises what writing it would raise."""
    writes, roles = [], set()
    for layer in layers:
        part, fmt = fill, None
        if fill.by_role:
            if not is_recurrent(layer.spec):
                fmt = _format(layer, formats)
            role = role_of(layer.spec, fmt)
            roles.add(role)
            part = fill.part(role)
        if isinstance(part, Zeros):
            fmt = None
        else:
            fmt = fmt or _format(layer, formats)
            _check_layer(layer, fmt, part)
        writes.append(_Write(layer, fmt, part, key_of(seed, layer.layer, layer.index)))
    if fill.by_role:
        fill.check_roles(roles)
    return writes


def _format(layer: LayerTensor, formats: Mapping[str, Format]) -> Format:
    return formats.get(layer.layer) or format_of(layer.spec, layer.tensor, layer.layer)


def _check_layer(layer: LayerTensor, fmt: Format, fill: Fill) -> None:
    """Raise what encoding into the layer would raise, by its null block, which is of the same geometry."""
    view = layer.token_major(0, 1)
    where = f"layer {layer.layer!r}, shape {tuple(layer.tensor.shape)}"
    try:
        fmt.check(view)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    if isinstance(fill, Scores) and not isinstance(fmt, IndexerFormat):
        raise FillError(f"{where}: fill {str(fill)!r} needs an indexer of one scale a token, not {fmt.name}")
    if not (isinstance(fill, ValueFill) and fill.zero_share) or is_recurrent(layer.spec):
        return
    if not fmt.token_major:
        raise FillError(
            f"layer {layer.layer!r}: its kernel orders a block's values its own way, so {fill} cannot tell which are a"
            " token's; drop zero_fraction, or use another attention backend"
        )
    if view.dim() < 3:
        raise GeometryError(
            f"{where}: no axis of tokens, but {fill} zeroes some of them; drop zero_fraction or pass the cache as"
            " [blocks, tokens, values]"
        )


def _without_launched(
    writes: list[_Write], requests: RequestDraws, merged: Mapping[int, list[tuple[int, int]]]
) -> list[_Write]:
    """Fill what kernels can, all layers at once; the rest comes back."""
    if draw_method(requests.device) != "triton":
        return writes
    from kvlab.kv.launches import LaunchPlan

    plan, rest = LaunchPlan(), []
    for write in writes:
        # One range is one `zero_`, as fast as memory allows.
        one_zero = write.fmt is None and len(merged[write.layer.group_id]) <= 1
        fill = write.fill
        if one_zero or not (isinstance(fill, ValueFill) and plan.add(write.layer, write.fmt, fill, write.key)):
            rest.append(write)
    plan.launch(requests)
    return rest


def _write_values(write: _Write, begin: int, end: int, requests: RequestDraws) -> None:
    layer, fmt, fill = write.layer, write.fmt, write.fill
    if fmt is None:
        layer.blocks(begin, end).zero_()
        return
    assert isinstance(fill, ValueFill)
    recurrent = is_recurrent(layer.spec)
    for lo, hi in _chunks(layer, begin, end):
        view = layer.token_major(lo, hi)
        shape = (*view.shape[:-1], fmt.width_of(view.shape[-1]))
        values = fill.values(Place(write.key, lo * layer.factor, shape, view.device, recurrent))
        if values is None:
            view.zero_()
            continue
        fmt.encode(values, view)
        if fill.zero_share and not recurrent:
            zero = requests.zero_tokens(layer, fill.zero_share)[lo * layer.factor : hi * layer.factor]
            mask = zero.view(len(zero), *(1,) * (view.dim() - 3), -1, 1)
            for part in (view,) if isinstance(fmt, RawFormat) else fmt.fields(view).values():
                part.masked_fill_(mask, 0)


def _write_scores(write: _Write, fill: Scores, requests: RequestDraws) -> None:
    """One vector of codes for all tokens, and each token's scale, in one copy each for all requests."""
    layer, fmt = write.layer, write.fmt
    assert isinstance(fmt, IndexerFormat)
    fields = fmt.fields(layer.token_major(0, layer.tensor.shape[layer.dim] // layer.factor))
    blocks = requests.kernel_blocks(layer.group_id, layer.factor).long()
    vector = normals(key_of(write.key, "vector"), 0, (1, fmt.width), requests.device)
    codes = to_bytes(cast_saturating(vector, torch.float8_e4m3fn))
    scales = to_bytes(requests.scales(layer, fill)[blocks].unsqueeze(-1))
    for name, source in (("codes", codes), ("scales", scales.view(len(blocks), *fields["scales"].shape[1:]))):
        target = fields[name]
        target.index_copy_(0, blocks, source.expand(len(blocks), *target.shape[1:]))


def _chunks(layer: LayerTensor, begin: int, end: int) -> Iterator[tuple[int, int]]:
    per_block = max(1, layer.tensor.numel() * layer.factor // layer.tensor.shape[layer.dim])
    step = max(1, _CHUNK_VALUES.get(layer.tensor.device.type, 2**17) // per_block)
    for lo in range(begin, end, step):
        yield lo, min(lo + step, end)
