"""Layer 1: which layers one kernel fills, and the tables it reads: one launch for all layers that lie alike.

A launch covers every layer and every block of its kind, so that 61 layers and 256 requests cost one, not 15,616.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from kvlab.kv import random_kernel
from kvlab.kv.extents import view_intervals
from kvlab.kv.formats import DeepseekV4Format, Format, Fp8DsMlaFormat, Fp8Format, IndexerFormat, RawFormat
from kvlab.kv.random_kernel import fill_packed, fill_runs
from kvlab.kv.request_draws import RequestDraws
from kvlab.kv.rules import Random, ValueFill, Zeros
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import LayerTensor

# Groups of 8 values that a program of `fill_runs` writes, and values that one of `fill_packed` holds at a time: 32 a
# thread.
_GROUPS = 512
_PACKED_VALUES = 4096
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_LAYOUT = ("TILES", "TILE", "ROPE", "ROW", "ROPE_AT", "SCALE_ROW", "SCALE_AT", "PLANAR", "UE8M0")
_PACKED: dict[type[Format], dict[str, Any]] = {
    Fp8DsMlaFormat: dict(zip(_LAYOUT, (4, 128, 64, 656, 528, 656, 512, False, False), strict=True)),
    DeepseekV4Format: dict(zip(_LAYOUT, (7, 64, 64, 576, 448, 8, 0, True, True), strict=True)),
    IndexerFormat: dict(zip(_LAYOUT, (1, 128, 0, 128, 0, 4, 0, True, False), strict=True)),
}
# Standard deviations whose square float32 holds, and whose largest value, 5.4 times that, the type of a plain value.
_LEAST_SCALE, _MOST_SCALE = 1e-15, {torch.float16: 1e4, torch.float8_e4m3fn: 80.0}


@dataclass(frozen=True)
class Lie:
    """What the layers of one launch have in common; starts, strides and lengths count `unit` bytes.

    Attributes:
        group_id, factor: which kernel blocks.
        storage: address.
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
    storage: int
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


class LaunchPlan:
    """Layers to be filled, gathered by how they lie."""

    def __init__(self) -> None:
        self._members: dict[Lie, list[tuple[LayerTensor, int, int]]] = {}

    def add(self, layer: LayerTensor, fmt: Format | None, fill: ValueFill, key: int) -> bool:
        """Take a layer, unless no kernel can fill it.

        Args:
            fmt: None for zeros.
            key: of its draws.
        """
        found = _lie_of(layer, fmt, fill)
        if found is not None:
            lie, start = found
            self._members.setdefault(lie, []).append((layer, start, key))
        return found is not None

    def launch(self, requests: RequestDraws) -> None:
        """Fill the layers' owned blocks."""
        for lie, members in self._members.items():
            layer, device = members[0][0], members[0][0].tensor.device
            blocks = requests.kernel_blocks(lie.group_id, lie.factor)
            if not len(blocks):
                continue
            # Keys are unsigned, PyTorch's integers not.
            keys = np.array([key for _, _, key in members], np.uint64).view(np.int64)
            tables = [
                torch.from_numpy(keys).to(device),
                torch.tensor([start for _, start, _ in members], device=device),
                blocks,
            ]
            zeros = requests.zero_tokens(layer, lie.share).view(torch.uint8) if lie.share else blocks.view(torch.uint8)
            with torch.cuda.device_of(layer.tensor):
                (_launch_packed if lie.kind == "packed" else _launch_runs)(lie, layer.tensor, tables, zeros)


def launch_normals(key: int, begin: int, blocks: int, count: int, device: torch.device) -> torch.Tensor:
    """Normal values for kernel blocks from `begin` on, under a layer's key: float32 [blocks, count]."""
    length = -(-count // 8)
    values = torch.empty(blocks, length * 8, device=device)
    # Blocks are counted from `begin`, but lie from the tensor's first value on.
    lie = Lie(0, 1, 0, "float", values.dtype, None, 1.0, 0.0, 32, length, length, (0,), 1, 1)
    tables = [
        torch.from_numpy(np.array([key], np.uint64).view(np.int64)).to(device),
        torch.tensor([-begin * length], device=device),
        torch.arange(begin, begin + blocks, dtype=torch.int32, device=device),
    ]
    with torch.cuda.device_of(values):
        _launch_runs(lie, values, tables, tables[2].view(torch.uint8))
    return values[:, :count]


def _launch_runs(lie: Lie, tensor: torch.Tensor, tables: list[torch.Tensor], zeros: torch.Tensor) -> None:
    keys, starts, blocks = tables
    groups = min(_GROUPS, triton.next_power_of_2(lie.length))
    runs = torch.tensor(lie.runs, device=tensor.device)
    fill_runs[(len(blocks) * len(runs) * triton.cdiv(lie.length, groups), len(keys))](
        _storage(tensor, lie.dtype),
        keys,
        starts,
        blocks,
        runs,
        zeros,
        lie.block_stride,
        lie.length,
        len(runs),
        lie.tokens,
        lie.token_length,
        _spread(lie.scale),
        KIND=lie.kind,
        HAS_ZERO=bool(lie.share),
        GROUPS=groups,
        FAST=random_kernel.compiled(),
        num_warps=max(1, groups // 128),
    )


def _launch_packed(lie: Lie, tensor: torch.Tensor, tables: list[torch.Tensor], zeros: torch.Tensor) -> None:
    assert lie.fmt is not None
    layout = _PACKED[lie.fmt]
    keys, starts, blocks = tables
    tokens = min(_PACKED_VALUES // layout["TILE"], triton.next_power_of_2(lie.tokens))
    fill_packed[(len(blocks) * triton.cdiv(lie.tokens, tokens), len(keys))](
        *(_storage(tensor, dtype) for dtype in (lie.dtype, torch.float32, torch.bfloat16)),
        keys,
        starts,
        blocks,
        zeros,
        lie.block_stride,
        lie.tokens,
        _spread(lie.scale),
        **layout,
        HAS_ZERO=bool(lie.share),
        TOKENS=tokens,
        FAST=random_kernel.compiled(),
        num_warps=max(1, min(4, tokens * layout["TILE"] // 1024)),
    )


def _storage(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


def _spread(scale: float) -> float:
    return -2 * math.log(2) * scale * scale


def _lie_of(layer: LayerTensor, fmt: Format | None, fill: ValueFill) -> tuple[Lie, int] | None:
    """How a layer lies and where its block 0 begins, in units; None where no kernel can fill it."""
    written = _written(layer, fmt, fill)
    if written is None:
        return None
    kind, dtype, scale = written
    tensor, size, share = layer.tensor, layer.tensor.element_size(), fill.zero_share
    unit = 8 * size if kind in ("float", "e4m3") else 16
    intervals = view_intervals(tensor.narrow(layer.dim, 0, 1))
    begin, length = int(intervals[:, 0].min()), int(intervals[0, 1] - intervals[0, 0])
    runs = np.sort(intervals[:, 0]) - begin
    stride = tensor.stride(layer.dim) * size
    aligned = not any(n % unit for n in (begin, length, stride, *runs.tolist()))
    if not aligned or tensor.untyped_storage().data_ptr() % 16 or np.any(np.diff(runs) < length):
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
    lie = Lie(
        group_id=layer.group_id,
        factor=layer.factor,
        storage=tensor.untyped_storage().data_ptr(),
        kind=kind,
        dtype=dtype,
        fmt=type(fmt) if fmt is not None and kind == "packed" else None,
        scale=scale,
        share=share,
        unit=unit,
        block_stride=stride // unit,
        length=length // unit,
        runs=tuple((runs // unit).tolist()),
        tokens=tokens,
        token_length=token_length,
    )
    return lie, begin // unit


def _written(layer: LayerTensor, fmt: Format | None, fill: ValueFill) -> tuple[str, torch.dtype, float] | None:
    """(kind, dtype, scale) of a `Lie`, or None."""
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
