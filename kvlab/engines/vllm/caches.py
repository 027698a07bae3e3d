"""Layer 2: the caches, groups and byte formats of a loaded vLLM model.

Relies on `static_forward_context` (`vllm/config/compilation.py`), `KVCacheConfig` (`vllm/v1/kv_cache_interface.py`),
`AttentionGroup` (`vllm/v1/worker/utils.py`) and the names of the indexer backends
(`vllm/v1/attention/backends/mla/indexer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvlab.errors import GeometryError
from kvlab.kv.detect import format_of
from kvlab.kv.formats import DeepseekV4Format, Format, IndexerFormat
from kvlab.kv.specs import kind_names, layer_spec
from kvlab.kv.views import iter_tensors

# Specs whose blocks a decoder's tokens own; others are sized by an encoder, or have rules of their own.
_SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec", "CircularBufferSpec")
# Backends that order a block's values their own way: the CPU's keeps all K of a block, transposed, before all V.
_OWN_ORDER = ("CPUAttentionBackend",)


def layer_caches(runner: Any) -> dict[str, Any]:
    """Layer name -> tensor or nest of tensors; layers without a cache are left out."""
    context = runner.vllm_config.compilation_config.static_forward_context
    caches = {name: getattr(layer, "kv_cache", None) for name, layer in context.items()}
    return {name: cache for name, cache in caches.items() if any(True for _ in iter_tensors(cache))}


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
    if kind_names(spec).isdisjoint(_SPECS):
        tensor = next(iter_tensors(cache))
        raise GeometryError(
            f"layer {name!r}: {type(spec).__name__} (dtype {tensor.dtype}, shape {tuple(tensor.shape)}) is no spec that"
            f" kvlab knows; it knows {', '.join(_SPECS)} and what derives from them; take another model"
        )


class _Group:
    """An attention group reduced to what kvlab reads."""

    def __init__(self, group: Any, caches: Mapping[str, Any]) -> None:
        self.kv_cache_group_id: int = group.kv_cache_group_id
        self.kv_cache_spec = group.kv_cache_spec
        self.layer_names = [name for name in group.layer_names if name in caches]
        self.backend: str = group.backend.__name__


def layer_formats(groups: Iterable[Any], caches: Mapping[str, Any], cache_dtype: str) -> dict[str, Format]:
    """Each layer's byte format, from its spec, vLLM's `cache_dtype` string and its attention backend.

    Raises:
        FormatError: for a layer whose format kvlab does not know; names layer, spec, dtype and shape.
    """
    formats = {}
    for group in groups:
        for name in group.layer_names:
            # A recurrent layer's tensors differ in dtype; each is resolved from its own.
            tensors = list(iter_tensors(caches[name]))
            if len({tensor.dtype for tensor in tensors}) == 1:
                formats[name] = _format(group, tensors[0], name, cache_dtype)
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
