"""Layer 1: what a fill writes where, worked out once and then written with any seed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvlab.errors import FillError, FormatError, GeometryError
from kvlab.kv.batch import Batch
from kvlab.kv.codecs import cast_saturating, to_bytes
from kvlab.kv.detect import format_of
from kvlab.kv.draws import Place, draw_method, key_of, normals
from kvlab.kv.formats import Format, IndexerFormat, RawFormat
from kvlab.kv.overlaps import check_overlaps
from kvlab.kv.owned import OwnedBlocks
from kvlab.kv.request_draws import RequestDraws
from kvlab.kv.roles import role_of
from kvlab.kv.rules import Fill, ValueFill, Zeros
from kvlab.kv.scores import Scores
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import BlockRanges, LayerTensor, owned_block_ranges

if TYPE_CHECKING:
    from kvlab.kv.launches import Launch

# Values drawn and encoded at a time: on a GPU what bounds the float32 scratch at 256 MB, else what stays in the cache.
_CHUNK_VALUES = {"cuda": 64 * 2**20, "cpu": 2**17}


@dataclass(frozen=True)
class _Write:
    """What one cache tensor gets.

    Attributes:
        fmt: None for zero bytes.
        alike: equal where two writes differ in the tensor's address alone; spec and format count by identity.
    """

    layer: LayerTensor
    fmt: Format | None
    fill: Fill
    alike: Hashable


class FillPlan:
    """A fill of the blocks that a batch owns: every check made, every table on the device; a seed is all it lacks.

    Attributes:
        layers: the cache tensors that it was made for; it serves no others.
    """

    def __init__(
        self,
        layers: Sequence[LayerTensor],
        batch: Batch,
        num_blocks: int,
        fill: Fill,
        formats: Mapping[str, Format],
    ) -> None:
        """Write nothing yet.

        Args:
            layers: distinct cache tensors.
            num_blocks: allocator blocks of the pool.
            formats: layer name -> byte format, where the spec does not tell.

        Raises:
            FillError, FormatError, GeometryError: what writing would raise.
        """
        self.layers = layers
        owned = {group_id: owned_block_ranges(group_id, batch) for group_id in {layer.group_id for layer in layers}}
        for layer in layers:
            layer.check_ranges(owned[layer.group_id])
        writes = _writes(layers, fill, formats)
        check_overlaps(layers, batch)
        device = layers[0].tensor.device if layers else torch.device("cpu")
        self._blocks = OwnedBlocks(batch, owned, num_blocks, device)
        self._merged = {group_id: _merged(ranges) for group_id, ranges in owned.items()}
        self._launches, self._others = _launches(writes, self._blocks, self._merged)

    def write(self, seed: int) -> None:
        """Write the blocks, their random contents drawn from a seed."""
        requests = RequestDraws(seed, self._blocks)
        with torch.inference_mode():
            # All draws before all launches, so that no kernel waits for the host's next table.
            for launch, keys, zeros in [(launch, *launch.draw(requests)) for launch in self._launches]:
                launch.run(keys, zeros)
            for write in self._others:
                if isinstance(write.fill, Scores):
                    _write_scores(write, write.fill, requests)
                    continue
                for begin, end in self._merged[write.layer.group_id]:
                    _write_values(write, begin, end, requests)


def _merged(ranges: BlockRanges) -> list[tuple[int, int]]:
    """Adjacent ranges joined: fewer, longer writes."""
    merged: list[tuple[int, int]] = []
    for begin, end in ranges.tolist():
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def _writes(layers: Sequence[LayerTensor], fill: Fill, formats: Mapping[str, Format]) -> list[_Write]:
    """What each layer gets; raises what writing it would raise."""
    writes, roles, checked = [], set(), set()
    for layer in layers:
        part, fmt = fill, None
        if fill.by_role:
            if not is_recurrent(layer.spec):
                fmt = _format(layer, formats)
            role = role_of(layer.spec, fmt)
            roles.add(role)
            part = fill.part(role)
        fmt = None if isinstance(part, Zeros) else fmt or _format(layer, formats)
        t = layer.tensor
        lies = (tuple(t.shape), t.stride(), t.dtype, layer.dim, layer.factor, layer.group_id)
        alike = (lies, id(layer.spec), id(fmt), part)
        writes.append(_Write(layer, fmt, part, alike))
        if fmt is not None and alike not in checked:
            _check_layer(layer, fmt, part)
            checked.add(alike)
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


def _launches(
    writes: list[_Write], blocks: OwnedBlocks, merged: Mapping[int, list[tuple[int, int]]]
) -> tuple[list[Launch], list[_Write]]:
    """What kernels can write, all layers at once, and the rest."""
    if draw_method(blocks.device) != "triton":
        return [], writes
    from kvlab.kv.launches import LaunchPlan

    plan, rest = LaunchPlan(), []
    for write in writes:
        # One range is one `zero_`, as fast as memory allows.
        one_zero = write.fmt is None and len(merged[write.layer.group_id]) <= 1
        fill = write.fill
        if one_zero or not (isinstance(fill, ValueFill) and plan.add(write.layer, write.fmt, fill, write.alike)):
            rest.append(write)
    return plan.launches(blocks), rest


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
        values = fill.values(Place(requests.key(layer), lo * layer.factor, shape, view.device, recurrent))
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
    blocks = requests.blocks.kernel_blocks(layer.group_id, layer.factor).long()
    vector = normals(key_of(requests.key(layer), "vector"), 0, (1, fmt.width), layer.tensor.device)
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
