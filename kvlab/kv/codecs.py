"""Layer 1: the codecs that byte formats are made of: casts that saturate, scaled tiles, byte views and planes."""

from __future__ import annotations

import torch

from kvlab.errors import FormatError

# vLLM's quantisers never let a tile's largest magnitude fall below this, so no scale is zero or subnormal.
_SMALLEST_AMAX = 1e-4


def as_bytes(view: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 view of the same memory, the last dimension in bytes."""
    if view.shape[-1] > 1 and view.stride(-1) != 1:
        raise FormatError(
            f"{name}: the bytes of a token must be adjacent; shape {tuple(view.shape)}, strides {view.stride()}"
        )
    if view.shape[-1] == 1 and view.element_size() > 1 and view.stride(-1) != 1:
        view = view.as_strided(view.shape, (*view.stride()[:-1], 1))
    return view.view(torch.uint8)


def to_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def from_bytes(field: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A copy even of a contiguous field, as a packed one need not start at a multiple of its element size.
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def split_planes(view: torch.Tensor, first: int, second: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Split blocks [blocks, N, first + second] that are stored as N rows of `first` bytes, then N rows of `second`."""
    rows = as_bytes(view, name)
    if rows.dim() == 4 and rows.shape[1] == 1:
        rows = rows.squeeze(1)
    num_bytes = first + second
    if rows.dim() != 3 or rows.stride(-2) != num_bytes:
        raise FormatError(
            f"{name}: a planar block is [N, {num_bytes}] adjacent bytes; got shape {tuple(view.shape)},"
            f" strides {view.stride()}"
        )
    blocks, tokens, _ = rows.shape
    stride, start = rows.stride(0), rows.storage_offset()
    planes = (
        rows.as_strided((blocks, tokens, first), (stride, first, 1), start),
        rows.as_strided((blocks, tokens, second), (stride, second, 1), start + tokens * first),
    )
    return (planes[0].unsqueeze(1), planes[1].unsqueeze(1)) if view.dim() == 4 else planes


def as_finite(values: torch.Tensor) -> torch.Tensor:
    # 2^126, not the largest float: a code that rounds up must not carry the product over it.
    return torch.nan_to_num(values.float(), nan=0.0).clamp(-(2.0**126), 2.0**126)


def cast_saturating(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast with clamping to the largest finite value, float32's at most; NaN becomes 0."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    values = values if dtype == torch.float64 else values.float()
    return torch.nan_to_num(values, nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit).to(dtype)


def encode_tiles(values: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [..., n] as bytes and the exponents [..., n / tile] of their power-of-two scales, int32.

    The scale is the least power of two that brings a tile's largest magnitude within e4m3's 448.
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    tiles = as_finite(values).unflatten(-1, (-1, tile))
    mantissa, exponent = torch.frexp(tiles.abs().amax(-1).clamp(min=_SMALLEST_AMAX) / limit)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).to(torch.int32)
    # Exact: the exponent lies between -22 and 118. One power a tile, where `ldexp` of the tiles takes one a value.
    inverse = torch.ldexp(torch.ones_like(mantissa), -exponent)
    codes = cast_saturating(tiles * inverse.unsqueeze(-1), torch.float8_e4m3fn)
    return to_bytes(codes.flatten(-2)), exponent


def decode_tiles(codes: torch.Tensor, scales: torch.Tensor, tile: int) -> torch.Tensor:
    values = from_bytes(codes, torch.float8_e4m3fn).float().unflatten(-1, (-1, tile))
    return (values * scales.unsqueeze(-1)).flatten(-2)


def decode_ue8m0(field: torch.Tensor) -> torch.Tensor:
    scales = torch.ldexp(torch.ones_like(field, dtype=torch.float32), field.to(torch.int32) - 127)
    return scales.masked_fill(field == 255, torch.nan)
