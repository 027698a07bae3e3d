"""Layer 1: which layers one kernel fills, and the tables it reads: one launch for all layers of one layout.

A launch covers every layer and every block of its kind, so that 61 layers and 256 requests cost one, not 15,616.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton

from kvlab.kv import random_kernel
from kvlab.kv.extents import strided_runs
from kvlab.kv.formats import DeepseekV4Format, Format, Fp8DsMlaFormat, Fp8Format, IndexerFormat, RawFormat
from kvlab.kv.owned import OwnedBlocks
from kvlab.kv.random_kernel import fill_packed, fill_runs
from kvlab.kv.request_draws import RequestDraws
from kvlab.kv.rules import Random, ValueFill, Zeros
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import LayerTensor

# Groups of 8 values that a program of `fill_runs` writes, and values that one of `fill_packed` does: 32 a thread.
_GROUPS = 512
_PACKED_VALUES = 8 * _GROUPS
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PACKED_FIELDS = ("TILES", "TILE", "ROPE", "ROW", "ROPE_AT", "SCALE_ROW", "SCALE_AT", "PLANAR", "UE8M0")
_PACKED: dict[type[Format], dict[str, Any]] = {
    Fp8DsMlaFormat: dict(zip(_PACKED_FIELDS, (4, 128, 64, 656, 528, 656, 512, False, False), strict=True)),
    DeepseekV4Format: dict(zip(_PACKED_FIELDS, (7, 64, 64, 576, 448, 8, 0, True, True), strict=True)),
    IndexerFormat: dict(zip(_PACKED_FIELDS, (1, 128, 0, 128, 0, 4, 0, True, False), strict=True)),
}
# Standard deviations whose square float32 holds, and whose largest value, 5.4 times that, the type of a plain value.
_LEAST_SCALE, _MOST_SCALE = 1e-15, {torch.float16: 1e4, torch.float8_e4m3fn: 80.0}


@dataclass(frozen=True)
class Layout:
    """What the layers of one launch have in common; starts, strides and lengths count `unit` bytes.

    Attributes:
        group_id, factor: which kernel blocks.
        kind: `float`, `e4m3` or `zeros` of `fill_runs`, or `packed`.
        dtype: as which the storage is written.
        fmt: of packed values.
        scale: standard deviation of what is stored.
        share: of zero tokens.
        unit: bytes of 8 plain values; 16 for packed ones and zeros.
        block_stride: from one kernel block to the next.
        length, runs: of the runs of adjacent bytes that make up a block, and where they begin.
        tokens, token_length: tokens of a kernel block, and from one to the next within a run.
    """

    group_id: int
    factor: int
    kind: str
    dtype: torch.dtype
    fmt: type[Format] | None
    scale: float
    share: float
    unit: int
    block_stride: int
    length: int
    runs: tuple[int, ...]
    tokens: int
    token_length: int


@dataclass(frozen=True)
class Launch:
    """One kernel call: layers of one layout, all their blocks, and the tables that it reads.

    Attributes:
        starts: of each layer's block 0, int64 [layers].
        runs: `Layout.runs`, int64 [runs].
        blocks: kernel blocks, int32.
    """

    layout: Layout
    layers: list[LayerTensor]
    starts: torch.Tensor
    runs: torch.Tensor
    blocks: torch.Tensor

    def draw(self, requests: RequestDraws) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, zero tokens) of `fill_runs`, for one seed."""
        if self.layout.kind == "zeros":
            # Read by no kernel.
            return self.starts, self.blocks.view(torch.uint8)
        keys = _on_device([requests.key(layer) for layer in self.layers], self.blocks.device)
        if not self.layout.share:
            return keys, self.blocks.view(torch.uint8)
        return keys, requests.zero_tokens(self.layers[0], self.layout.share).view(torch.uint8)

    def run(self, keys: torch.Tensor, zeros: torch.Tensor) -> None:
        """Fill the layers' blocks."""
        tensor = self.layers[0].tensor
        with torch.cuda.device_of(tensor):
            if self.layout.kind == "packed":
                _launch_packed(self.layout, tensor, keys, self.starts, self.blocks, zeros)
            else:
                _launch_runs(self.layout, tensor, keys, self.starts, self.blocks, self.runs, zeros)


class LaunchPlan:
    """Layers to be filled, gathered by their layout."""

    def __init__(self) -> None:
        # By layout, and the storage's address.
        self._members: dict[tuple[Layout, int], list[tuple[LayerTensor, int]]] = {}
        self._layouts: dict[Hashable, Layout | None] = {}

    def add(self, layer: LayerTensor, fmt: Format | None, fill: ValueFill, alike: Hashable) -> bool:
        """Take a layer, unless no kernel can fill it; no format for zeros.

        Args:
            alike: equal for layers that differ in their address alone, with format and fill.
        """
        if alike not in self._layouts:
            self._layouts[alike] = _layout_of(layer, fmt, fill)
        layout = self._layouts[alike]
        if layout is None:
            return False
        begin = layer.tensor.storage_offset() * layer.tensor.element_size()
        address = layer.tensor.untyped_storage().data_ptr()
        if begin % layout.unit or address % 16:
            return False
        self._members.setdefault((layout, address), []).append((layer, begin // layout.unit))
        return True

    def launches(self, owned: OwnedBlocks) -> list[Launch]:
        """What fills the owned blocks of the layers, its tables on the device."""
        launches = []
        for (layout, _), members in self._members.items():
            blocks = owned.kernel_blocks(layout.group_id, layout.factor)
            if len(blocks):
                starts = torch.tensor([start for _, start in members], device=blocks.device)
                runs = torch.tensor(layout.runs, device=blocks.device)
                launches.append(Launch(layout, [layer for layer, _ in members], starts, runs, blocks))
        return launches


def launch_normals(key: int, begin: int, blocks: int, count: int, device: torch.device) -> torch.Tensor:
    """Normal values for kernel blocks from `begin` on, under a layer's key: float32 [blocks, count]."""
    length = -(-count // 8)
    values = torch.empty(blocks, length * 8, device=device)
    layout = Layout(
        group_id=0,
        factor=1,
        kind="float",
        dtype=values.dtype,
        fmt=None,
        scale=1.0,
        share=0.0,
        unit=32,
        block_stride=length,
        length=length,
        runs=(0,),
        tokens=1,
        token_length=1,
    )
    keys = _on_device([key], device)
    # Blocks are counted from `begin`, but lie from the tensor's first value on.
    starts = torch.full((1,), -begin * length, device=device)
    ids = torch.arange(begin, begin + blocks, dtype=torch.int32, device=device)
    with torch.cuda.device_of(values):
        _launch_runs(layout, values, keys, starts, ids, torch.zeros_like(starts), ids.view(torch.uint8))
    return values[:, :count]


def _on_device(keys: list[int], device: torch.device) -> torch.Tensor:
    """Keys as int64, for PyTorch lacks unsigned ones; from pinned memory, for else the host waits for the device."""
    table = torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _launch_runs(
    layout: Layout,
    tensor: torch.Tensor,
    keys: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    runs: torch.Tensor,
    zeros: torch.Tensor,
) -> None:
    groups = min(_GROUPS, triton.next_power_of_2(layout.length))
    fill_runs[(len(blocks) * len(runs) * triton.cdiv(layout.length, groups), len(starts))](
        _storage(tensor, layout.dtype),
        keys,
        starts,
        blocks,
        runs,
        zeros,
        layout.block_stride,
        layout.length,
        len(runs),
        layout.tokens,
        layout.token_length,
        _spread(layout.scale),
        KIND=layout.kind,
        HAS_ZERO=bool(layout.share),
        GROUPS=groups,
        FAST=random_kernel.compiled(),
        num_warps=max(1, groups // 128),
    )


def _launch_packed(
    layout: Layout,
    tensor: torch.Tensor,
    keys: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    zeros: torch.Tensor,
) -> None:
    assert layout.fmt is not None
    packed = _PACKED[layout.fmt]
    parts = packed_parts(packed, layout.tokens)
    programs = triton.cdiv(layout.tokens * packed["TILES"], parts["TILE_PART"])
    if packed["ROPE"]:
        programs += triton.cdiv(layout.tokens, parts["ROPE_PART"])
    values = max(parts["TILE_PART"] * packed["TILE"], parts["ROPE_PART"] * packed["ROPE"])
    fill_packed[(len(blocks) * programs, len(starts))](
        *(_storage(tensor, dtype) for dtype in (layout.dtype, torch.float32, torch.bfloat16)),
        keys,
        starts,
        blocks,
        zeros,
        layout.block_stride,
        layout.tokens,
        _spread(layout.scale),
        **packed,
        **parts,
        HAS_ZERO=bool(layout.share),
        FAST=random_kernel.compiled(),
        num_warps=max(1, values // 1024),
    )


def packed_parts(layout: Mapping[str, int], tokens: int) -> dict[str, int]:
    """What one program of `fill_packed` writes of a kernel block: tiles, or the uncoded values of so many tokens."""
    tiles = min(_PACKED_VALUES // layout["TILE"], triton.next_power_of_2(tokens * layout["TILES"]))
    rope = min(_PACKED_VALUES // layout["ROPE"], triton.next_power_of_2(tokens)) if layout["ROPE"] else 1
    return {"TILE_PART": tiles, "ROPE_PART": rope}


def _storage(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


def _spread(scale: float) -> float:
    return -2 * math.log(2) * scale * scale


def _layout_of(layer: LayerTensor, fmt: Format | None, fill: ValueFill) -> Layout | None:
    """A layer's layout; None where no kernel can fill it."""
    written = _written(layer, fmt, fill)
    if written is None:
        return None
    kind, dtype, scale = written
    tensor, size, share = layer.tensor, layer.tensor.element_size(), fill.zero_share
    unit = 8 * size if kind in ("float", "e4m3") else 16
    runs, length = _block_runs(tuple(tensor.shape), tensor.stride(), layer.dim, size)
    stride = tensor.stride(layer.dim) * size
    if any(n % unit for n in (length, stride, *runs)) or any(b - a < length for a, b in pairwise(runs)):
        return None
    tokens = token_length = 1
    if kind == "packed" or share:
        view = layer.token_major(0, 1)
        tokens, token_bytes = view.shape[-2], view.stride(-2) * size
        if kind == "packed" and (token_bytes != tensor.shape[-1] or length != tokens * token_bytes or len(runs) > 1):
            return None
        if kind != "packed" and (token_bytes % unit or token_bytes * tokens > length):
            return None
        token_length = token_bytes // unit
    return Layout(
        group_id=layer.group_id,
        factor=layer.factor,
        kind=kind,
        dtype=dtype,
        fmt=type(fmt) if fmt is not None and kind == "packed" else None,
        scale=scale,
        share=share,
        unit=unit,
        block_stride=stride // unit,
        length=length // unit,
        runs=tuple(run // unit for run in runs),
        tokens=tokens,
        token_length=token_length,
    )


@lru_cache
def _block_runs(shape: tuple[int, ...], stride: tuple[int, ...], dim: int, size: int) -> tuple[tuple[int, ...], int]:
    """Where the runs of adjacent bytes of a kernel block begin, in ascending order, and their length."""
    offsets, run = strided_runs((*shape[:dim], 1, *shape[dim + 1 :]), stride)
    return tuple((np.sort(offsets) * size).tolist()), run * size


def _written(layer: LayerTensor, fmt: Format | None, fill: ValueFill) -> tuple[str, torch.dtype, float] | None:
    """(kind, dtype, scale) of a `Layout`, or None."""
    if fmt is None or isinstance(fill, Zeros):
        return "zeros", torch.bfloat16, 1.0
    # In a state elements are zero, not tokens.
    if not isinstance(fill, Random) or (fill.zero_share and is_recurrent(layer.spec)):
        return None
    scale = fill.scale(is_recurrent(layer.spec)) / (fmt.scale if isinstance(fmt, Fp8Format) else 1.0)
    if not _LEAST_SCALE < scale < _MOST_SCALE.get(getattr(fmt, "dtype", torch.float32), 1e15):
        return None
    if isinstance(fmt, RawFormat):
        return ("float", fmt.dtype, scale) if fmt.dtype in _FLOATS else None
    if not _has_e4m3(layer.tensor.device):
        return None
    if isinstance(fmt, Fp8Format):
        return ("e4m3", torch.uint8, scale) if fmt.dtype == torch.float8_e4m3fn else None
    return ("packed", torch.uint8, scale) if type(fmt) in _PACKED else None


def _has_e4m3(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
