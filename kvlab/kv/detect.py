"""Layer 1: which byte format a cache tensor has."""

from __future__ import annotations

from typing import Any

import torch

from kvlab.errors import FormatError
from kvlab.kv.formats import (
    DeepseekV4Format,
    Format,
    Fp8DsMlaFormat,
    Fp8Format,
    IndexerFormat,
    PerTokenHeadFormat,
    RawFormat,
)
from kvlab.kv.specs import declared_name, is_recurrent

RAW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def format_of(spec: Any, tensor: torch.Tensor, layer: str = "?", kv_cache_dtype: str | None = None) -> Format:
    """The byte format of a cache tensor, from its spec, its dtype and vLLM's `kv_cache_dtype` string.

    Never from the shape alone; the shape must then agree.

    Args:
        spec: the layer's spec; `kv_quant_mode`, `cache_dtype_str`, `cache_role` and `model_version` are read.
        tensor: the whole cache tensor or a view of some blocks.
        kv_cache_dtype: where the spec does not carry it.

    Raises:
        FormatError: naming layer, spec, dtype and shape.
    """
    found: Format | None = None
    if tensor.dtype in RAW_DTYPES:
        found = RawFormat(tensor.dtype)
    elif not is_recurrent(spec):
        found = _quantised_format(spec, tensor.dtype, kv_cache_dtype or getattr(spec, "cache_dtype_str", None) or "")
    if found is not None:
        try:
            found.width_of(tensor.shape[-1])
        except FormatError as error:
            raise FormatError(f"layer {layer!r}, shape {tuple(tensor.shape)}: {error}") from None
        return found
    raise FormatError(
        f"layer {layer!r}: unknown cache format: {type(spec).__name__} {_describe(spec)}, dtype {tensor.dtype}, shape"
        f" {tuple(tensor.shape)}; name it with formats={{{layer!r}: Format}}"
    )


def _quantised_format(spec: Any, dtype: torch.dtype, cache_dtype: str) -> Format | None:
    mode = declared_name(getattr(spec, "kv_quant_mode", None)).lower()
    if mode in ("", "none", "0"):
        mode = cache_dtype
    if dtype in FP8_DTYPES:
        return PerTokenHeadFormat(dtype) if "per_token_head" in mode else Fp8Format(dtype)
    if dtype not in (torch.uint8, torch.int8):
        return None
    if declared_name(getattr(spec, "cache_role", None)).lower() == "indexer":
        return IndexerFormat()
    if cache_dtype == "fp8_ds_mla":
        return DeepseekV4Format() if getattr(spec, "model_version", None) == "deepseek_v4" else Fp8DsMlaFormat()
    if mode == "int8_per_token_head":
        return PerTokenHeadFormat(torch.int8)
    if mode == "fp8_per_token_head":
        return PerTokenHeadFormat(torch.float8_e4m3fn)
    if mode in ("fp8_per_tensor", "fp8", "fp8_e4m3", "fp8_e5m2"):
        return Fp8Format(torch.float8_e5m2 if "e5m2" in cache_dtype else torch.float8_e4m3fn)
    return None


def _describe(spec: Any) -> str:
    names = ("kv_quant_mode", "cache_dtype_str", "cache_role", "model_version")
    said = [f"{n}={declared_name(getattr(spec, n, None))}" for n in names if getattr(spec, n, None) is not None]
    return f"({', '.join(said)})"
