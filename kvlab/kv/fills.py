"""Layer 1: fills, the rules for KV contents, and their application to the blocks that a case owns."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from kvlab.errors import FillError, FormatError, GeometryError
from kvlab.kv.batch import Batch
from kvlab.kv.detect import format_of
from kvlab.kv.formats import Format, RawFormat
from kvlab.kv.overlaps import check_overlaps
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import BlockDims, BlockRanges, LayerTensor, layer_tensors, owned_block_ranges

# A recurrent state feeds back into itself within the step; unit variance there would swamp the activations.
STATE_SCALE = 0.1
# Values drawn at a time: bounds the float32 scratch at 256 MB whatever the cache's size.
_CHUNK_VALUES = 64 * 2**20


@dataclass(frozen=True)
class Fill(ABC):
    """A rule for KV contents; `str` gives the text that `parse_fill` reads back."""

    kind: ClassVar[str]

    def __str__(self) -> str:
        given = [f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.kind}({', '.join(given)})" if given else self.kind

    @abstractmethod
    def values(
        self, shape: Sequence[int], spec: Any, generator: torch.Generator | None, device: torch.device
    ) -> torch.Tensor | None:
        """float32 values to encode into a view of `shape`; None for all-zero bytes."""

    @property
    def zero_share(self) -> float:
        """Share of the tokens whose bytes are all zero."""
        return 0.0


@dataclass(frozen=True)
class Zeros(Fill):
    """All bytes zero, scales included: what vLLM's forward benchmark times."""

    kind = "zeros"

    def values(
        self, shape: Sequence[int], spec: Any, generator: torch.Generator | None, device: torch.device
    ) -> torch.Tensor | None:
        return None


@dataclass(frozen=True)
class Random(Fill):
    """Independent normal values, encoded in each layer's own format.

    Attributes:
        std: standard deviation; a tenth of it in recurrent states.
        zero_fraction: share of the tokens in each request's blocks whose bytes are all zero, the same tokens in all
            layers of a group (that hold as many a block); in recurrent states, share of the elements.
    """

    kind = "random"
    std: float = 1.0
    zero_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.std) and self.std > 0):
            raise FillError(f"fill {self.kind!r}: std is {self.std}; give a positive number")
        if not 0 <= self.zero_fraction <= 1:
            raise FillError(f"fill {self.kind!r}: zero_fraction is {self.zero_fraction}; give a share in [0, 1]")

    def values(
        self, shape: Sequence[int], spec: Any, generator: torch.Generator | None, device: torch.device
    ) -> torch.Tensor | None:
        scale = self.std * (STATE_SCALE if is_recurrent(spec) else 1.0)
        return torch.randn(tuple(shape), generator=generator, device=device).mul_(scale)

    @property
    def zero_share(self) -> float:
        return self.zero_fraction


@dataclass(frozen=True)
class Constant(Fill):
    """One value everywhere; 0.015 is the one of vLLM's `DecodeBenchConnector`."""

    kind = "constant"
    value: float = 0.015

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise FillError(f"fill {self.kind!r}: value is {self.value}; give a finite number")

    def __str__(self) -> str:
        return f"{self.kind}({_text(self.value)})"

    def values(
        self, shape: Sequence[int], spec: Any, generator: torch.Generator | None, device: torch.device
    ) -> torch.Tensor | None:
        return torch.full(tuple(shape), self.value, device=device)


FILLS: dict[str, type[Fill]] = {fill.kind: fill for fill in (Zeros, Random, Constant)}


def parse_fill(text: str | Fill) -> Fill:
    """`zeros`, `random`, `random(std=0.5, zero_fraction=0.25)`, `constant(0.015)`; a `Fill` passes through.

    Raises:
        FillError: one line that shows what is wrong and what is known.
    """
    if isinstance(text, Fill):
        return text
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None or match[1] not in FILLS:
        raise FillError(f"fill {text!r}: unknown; known are {', '.join(FILLS)}, e.g. random(std=0.5)")
    fill = FILLS[match[1]]
    known = [f.name for f in fields(fill)]
    given: dict[str, float] = {}
    for position, item in enumerate(filter(None, map(str.strip, (match[2] or "").split(",")))):
        name, equals, number = item.partition("=")
        if not equals:
            name, number = known[position] if position < len(known) else item, item
        name = name.strip()
        if name not in known or name in given:
            takes = ", ".join(known) or "nothing"
            raise FillError(f"fill {text!r}: cannot place {item!r}; {match[1]} takes {takes}")
        try:
            given[name] = float(number)
        except ValueError:
            raise FillError(f"fill {text!r}: {number.strip()!r} is not a number") from None
    return fill(**given)


def _text(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


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

    Args:
        kv_caches, attn_groups, batch, num_blocks, block_dims: as for `touched_kv_views`.
        fill: a `Fill` or its text.
        generator: source of random values, on the caches' device; seeded with 0 when absent.
        formats: layer name -> byte format, where the spec does not tell; else `format_of`.

    Raises:
        FillError, FormatError, GeometryError: before any byte is written.
    """
    fill = parse_fill(fill)
    layers = distinct_layers(layer_tensors(kv_caches, attn_groups, num_blocks, block_dims))
    owned = {layer.group_id: owned_block_ranges(layer.group_id, batch) for layer in layers}
    writes = []
    for layer in layers:
        layer.check_ranges(owned[layer.group_id])
        fmt = None
        if not isinstance(fill, Zeros):
            fmt = (formats or {}).get(layer.layer) or format_of(layer.spec, layer.tensor, layer.layer)
            _check_layer(layer, fmt, fill)
        writes.append((layer, fmt))
    check_overlaps(layers, batch)
    if generator is None and layers:
        generator = torch.Generator(device=layers[0].tensor.device).manual_seed(0)
    merged = {group_id: _merged(ranges) for group_id, ranges in owned.items()}
    zero_tokens = _ZeroTokens(fill.zero_share, owned, num_blocks, generator)
    with torch.inference_mode():
        for layer, fmt in writes:
            for begin, end in merged[layer.group_id]:
                if fmt is None:
                    layer.blocks(begin, end).zero_()
                else:
                    _write(layer, fmt, fill, begin, end, generator, zero_tokens)


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


def _check_layer(layer: LayerTensor, fmt: Format, fill: Fill) -> None:
    """Raise what encoding into the layer would raise, by its null block, which is of the same geometry."""
    view = layer.token_major(0, 1)
    try:
        fmt.check(view)
    except FormatError as error:
        raise FormatError(f"layer {layer.layer!r}, shape {tuple(layer.tensor.shape)}: {error}") from None
    if fill.zero_share and not is_recurrent(layer.spec) and not fmt.token_major:
        raise FillError(
            f"layer {layer.layer!r}: its kernel orders a block's values its own way, so {fill} cannot tell which are a"
            " token's; drop zero_fraction, or use another attention backend"
        )
    if fill.zero_share and not is_recurrent(layer.spec) and view.dim() < 3:
        raise GeometryError(
            f"layer {layer.layer!r}: shape {tuple(layer.tensor.shape)} has no axis of tokens, but {fill} zeroes some of"
            " them; drop zero_fraction or pass the cache as [blocks, tokens, values]"
        )


def _write(
    layer: LayerTensor,
    fmt: Format,
    fill: Fill,
    begin: int,
    end: int,
    generator: torch.Generator | None,
    zero_tokens: _ZeroTokens,
) -> None:
    for lo, hi in _chunks(layer, begin, end):
        view = layer.token_major(lo, hi)
        values = fill.values((*view.shape[:-1], fmt.width_of(view.shape[-1])), layer.spec, generator, view.device)
        if values is None:
            view.zero_()
            continue
        if fill.zero_share and is_recurrent(layer.spec):
            # Masked, not multiplied: a negative value times zero is a negative zero, whose bytes are not.
            values.masked_fill_(torch.rand(values.shape, generator=generator, device=view.device) < fill.zero_share, 0)
        fmt.encode(values, view)
        if fill.zero_share and not is_recurrent(layer.spec):
            mask = zero_tokens.mask(layer, view, lo, hi)
            for part in (view,) if isinstance(fmt, RawFormat) else fmt.fields(view).values():
                part.masked_fill_(mask, 0)


def _chunks(layer: LayerTensor, begin: int, end: int) -> Iterator[tuple[int, int]]:
    per_block = max(1, layer.tensor.numel() * layer.factor // layer.tensor.shape[layer.dim])
    step = max(1, _CHUNK_VALUES // per_block)
    for lo in range(begin, end, step):
        yield lo, min(lo + step, end)


class _ZeroTokens:
    """Which tokens are zero: drawn once a request and group, so that all layers of the group agree."""

    def __init__(
        self, share: float, owned: Mapping[int, BlockRanges], num_blocks: int, generator: torch.Generator | None
    ) -> None:
        self.share = share
        self.owned = owned
        self.num_blocks = num_blocks
        self.generator = generator
        self.drawn: dict[tuple[int, int], torch.Tensor] = {}

    def mask(self, layer: LayerTensor, view: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """bool, of the shape of a token-major view of blocks [begin, end) up to broadcasting."""
        tokens = layer.factor * view.shape[-2]
        key = (layer.group_id, tokens)
        if key not in self.drawn:
            self.drawn[key] = self._draw(layer.group_id, tokens, view.device)
        return self.drawn[key][begin:end].view(view.shape[0], *(1,) * (view.dim() - 3), view.shape[-2], 1)

    def _draw(self, group_id: int, tokens: int, device: torch.device) -> torch.Tensor:
        mask = torch.zeros(self.num_blocks, tokens, dtype=torch.bool, device=device)
        for begin, end in self.owned[group_id].tolist():
            count = (end - begin) * tokens
            order = torch.randperm(count, generator=self.generator, device=device)
            mask[begin:end] = (order < round(self.share * count)).view(-1, tokens)
        return mask
