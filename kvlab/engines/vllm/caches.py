"""Layer 2: the caches, groups and byte formats of a loaded vLLM model.

Relies on `static_forward_context` (`vllm/config/compilation.py`), `KVCacheConfig` (`vllm/v1/kv_cache_interface.py`),
`AttentionGroup` (`vllm/v1/worker/utils.py`) and the names of the indexer backends
(`vllm/v1/attention/backends/mla/indexer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from kvlab.errors import FormatError, GeometryError
from kvlab.kv.detect import format_of
from kvlab.kv.formats import DeepseekV4Format, Format, Fp8Format, IndexerFormat
from kvlab.kv.specs import layer_spec
from kvlab.kv.views import iter_tensors

# Specs whose blocks a decoder's tokens own. By exact name: one that derives from them may have rules of its own
# (`SinkFullAttentionSpec` keeps blocks that all requests share).
_SPECS = (
    *("FullAttentionSpec", "MLAAttentionSpec", "RSWASpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    *("ChunkedLocalAttentionSpec", "MambaSpec", "CircularBufferSpec"),
)
# Backends that order a block's values their own way: the CPU's keeps all K of a block, transposed, before all V.
_OWN_ORDER = ("CPUAttentionBackend",)


def layer_caches(runner: Any) -> dict[str, Any]:
    """Layer name -> tensor or nest of tensors; layers without a cache are left out.

    Raises:
        FormatError: for a layer that keeps more than values in its cache.
    """
    caches = {}
    for name, layer in _layers(runner).items():
        cache = getattr(layer, "kv_cache", None)
        if not any(True for _ in iter_tensors(cache)):
            continue
        if getattr(layer, "rope_position_cache", None) is not None:
            raise FormatError(
                f"layer {name!r}: {type(layer).__name__} keeps the tokens' positions (int64) beside its keys, which no"
                " random contents may overwrite; kvlab has no format for it, so take a configuration without M-RoPE"
            )
        caches[name] = cache
    return caches


def layer_scales(runner: Any) -> dict[str, tuple[float, float]]:
    """Layer name -> scales of an fp8 cache's K and V codes (`vllm/model_executor/layers/quantization/kv_cache.py`)."""
    scales = {}
    for name, layer in _layers(runner).items():
        k, v = (getattr(layer, f"_{part}_scale_float", None) for part in "kv")
        if isinstance(k, int | float) and isinstance(v, int | float) and min(k, v) > 0:
            scales[name] = (float(k), float(v))
    return scales


def is_scaled(fmt: Format) -> TypeGuard[Fp8Format]:
    """Whether a cache's codes have scales outside it, one for K and one for V."""
    return type(fmt) is Fp8Format


def scale_notes(scales: Mapping[str, tuple[float, float]]) -> list[str]:
    """A sentence where some fp8 caches have two scales, of which `layer_formats` takes one.

    Args:
        scales: of the fp8 caches.
    """
    two = [name for name, (k, v) in scales.items() if k != v]
    if not two:
        return []
    return [f"fp8 contents are drawn for K's scale in V too, but V has another in {len(two)} layers ({two[0]!r}, ...)"]


def _layers(runner: Any) -> Mapping[str, Any]:
    layers: Mapping[str, Any] = runner.vllm_config.compilation_config.static_forward_context
    return layers


def attention_groups(runner: Any, caches: Mapping[str, Any]) -> list[Any]:
    """The runner's attention groups, one list for all KV cache groups; only layers that have a cache.

    Raises:
        GeometryError: for a layer with a cache of its own that no attention group speaks for, or of a spec that kvlab
            does not know.
    """
    groups = [_Group(group, caches) for groups in runner.attn_groups for group in groups]
    for group in groups:
        for name in group.layer_names:
            _refuse_unknown_spec(layer_spec(group.kv_cache_spec, name), name, caches[name])
    spoken_for = {name for group in groups for name in group.layer_names}
    for group_id, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if silent := [name for name in group.layer_names if name in caches and name not in spoken_for]:
            raise GeometryError(
                f"layer {silent[0]!r} of KV cache group {group_id} ({type(group.kv_cache_spec).__name__}) has a cache"
                " but no attention group: kvlab cannot tell which of its blocks a step writes"
            )
    return groups


def _refuse_unknown_spec(spec: Any, name: str, cache: Any) -> None:
    if type(spec).__name__ not in _SPECS:
        tensor = next(iter_tensors(cache))
        raise GeometryError(
            f"layer {name!r}: {type(spec).__name__} (dtype {tensor.dtype}, shape {tuple(tensor.shape)}) is no spec that"
            f" kvlab knows; it knows {', '.join(_SPECS)}; take another model"
        )
    if (mode := getattr(spec, "mamba_cache_mode", "none")) != "none":
        raise GeometryError(
            f"layer {name!r}: its states are kept per block of tokens (mamba_cache_mode {mode!r}), of which kvlab fills"
            " none; load the model without prefix caching, with mamba_cache_mode 'none'"
        )


class _Group:
    """An attention group reduced to what kvlab reads."""

    def __init__(self, group: Any, caches: Mapping[str, Any]) -> None:
        self.kv_cache_group_id: int = group.kv_cache_group_id
        self.kv_cache_spec = group.kv_cache_spec
        self.layer_names = [name for name in group.layer_names if name in caches]
        self.backend: str = group.backend.__name__


def layer_formats(
    groups: Iterable[Any],
    caches: Mapping[str, Any],
    cache_dtype: str,
    scales: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, Format]:
    """Each layer's byte format, from its spec, vLLM's `cache_dtype` string and its attention backend.

    Args:
        scales: of `layer_scales`; of an fp8 cache K's counts, for both halves.

    Raises:
        FormatError: for a layer whose format kvlab does not know; names layer, spec, dtype and shape.
    """
    formats = {}
    for group in groups:
        for name in group.layer_names:
            # A recurrent layer's tensors differ in dtype; each is resolved from its own.
            tensors = list(iter_tensors(caches[name]))
            if len({tensor.dtype for tensor in tensors}) == 1:
                found = formats[name] = _format(group, tensors[0], name, cache_dtype)
                if is_scaled(found) and scales and name in scales:
                    found.scale = scales[name][0]
    return formats


def _format(group: Any, tensor: torch.Tensor, name: str, cache_dtype: str) -> Format:
    spec = group.kv_cache_spec
    if tensor.dtype == torch.uint8:
        # DeepSeek-V4's specs do not say the indexer's role, nor that their fp8 is the packed one.
        if "Indexer" in group.backend and tensor.shape[-1] == IndexerFormat.num_bytes:
            return IndexerFormat()
        packed = getattr(spec, "state_content_bytes", None) or tensor.shape[-1]
        if getattr(spec, "model_version", None) == "deepseek_v4" and packed == DeepseekV4Format.num_bytes:
            return DeepseekV4Format()
    found = format_of(spec, tensor, name, cache_dtype)
    if group.backend in _OWN_ORDER:
        found.token_major = False
    return found
