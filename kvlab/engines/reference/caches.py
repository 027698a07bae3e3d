"""Layer 2: one shared buffer, and every layer's cache as a view of it, group overlaid on group.

The geometry is vLLM's (`create_kv_cache_views`, `vllm/v1/kv_cache_interface.py`): layer l of every group has its block
b at `l * layer_stride + b * block_stride`. Block IDs are disjoint across groups, so the groups share the bytes safely.
A uniform-type group instead packs its layers side by side in each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch

from kvlab.engines.reference.presets import INDEX_WIDTH, LATENT_WIDTH, ReferenceConfig
from kvlab.engines.reference.specs import (
    AttentionGroup,
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvlab.errors import CapacityError, GeometryError

# Packed rows: e4m3 codes with their scales, for the latent also its bf16 rope values.
LATENT_BYTES = 656
INDEX_BYTES = INDEX_WIDTH + 4


def cache_name(index: int, kind: str) -> str:
    """Name of a layer's cache, as vLLM names it."""
    return f"model.layers.{index}.{'mixer' if kind == 'mamba' else 'self_attn.attn'}"


def indexer_name(index: int) -> str:
    """Name of the cache of a sparse layer's indexer."""
    return f"model.layers.{index}.self_attn.indexer.k_cache"


def kv_cache_groups(config: ReferenceConfig) -> list[KVCacheGroup]:
    """The model's groups, one a layer kind, in the order in which the kinds first appear."""
    groups = []
    for kind in dict.fromkeys(config.kinds):
        indices = [i for i, k in enumerate(config.kinds) if k == kind]
        names = [cache_name(i, kind) for i in indices]
        spec = _spec(config, kind)
        if kind == "dsa":
            index_spec = replace(spec, head_size=INDEX_BYTES, cache_dtype_str=None, cache_role="indexer")
            members: dict[str, KVCacheSpec] = dict.fromkeys(names, spec)
            members |= {indexer_name(i): index_spec for i in indices}
            spec, names = UniformTypeKVCacheSpecs(spec.block_size, members), list(members)
        groups.append(KVCacheGroup(spec, tuple(names)))
    return groups


def attention_groups(groups: list[KVCacheGroup]) -> list[AttentionGroup]:
    """One attention group a group, or one for each distinct spec of a uniform-type group."""
    found = []
    for group_id, group in enumerate(groups):
        by_spec: dict[KVCacheSpec, list[str]] = {}
        for name in group.layer_names:
            by_spec.setdefault(_member(group, name), []).append(name)
        found += [AttentionGroup(group_id, spec, tuple(names)) for spec, names in by_spec.items()]
    return found


def _member(group: KVCacheGroup, name: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _spec(config: ReferenceConfig, kind: str) -> Any:
    if kind == "mamba":
        shapes = (
            (config.conv_kernel - 1, config.conv_width),
            (config.mamba_heads, config.mamba_head_dim, config.state_size),
        )
        return MambaSpec(config.max_model_len, shapes=shapes, dtypes=(torch.bfloat16, torch.float32))
    if kind == "dsa" or (kind == "mla" and config.latent_format == "fp8_ds_mla"):
        return MLAAttentionSpec(
            config.block_size, head_size=LATENT_BYTES, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"
        )
    if kind == "mla":
        return MLAAttentionSpec(config.block_size, head_size=LATENT_WIDTH, dtype=torch.bfloat16)
    dense = FullAttentionSpec(
        config.block_size,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        dtype=torch.bfloat16,
        kernel_blocks=config.kernel_blocks,
    )
    if "mamba" in config.kinds:
        # As vLLM does: attention blocks grow until a page holds a state, whose page is then padded to match, so that
        # attention pages stay dense and can be split into kernel blocks.
        state = _spec(config, "mamba").state_size_bytes
        quantum = 16 * config.kernel_blocks
        bytes_per_token = dense.page_size_bytes // dense.block_size
        grown = -(-state // (bytes_per_token * quantum)) * quantum
        dense = replace(dense, block_size=max(dense.block_size, grown))
    if kind == "window":
        return SlidingWindowSpec(**vars(dense), sliding_window=config.sliding_window)
    return dense


@dataclass(frozen=True)
class KVCaches:
    """The caches of all layers.

    Attributes:
        buffer: int8, zero at first; all caches are views of it.
        groups: KV cache groups, by ID, with page padding resolved.
        tensors: layer name -> tensor, or tuple of tensors for a recurrent layer.
        block_stride: bytes from one allocator block of a layer to the next.
    """

    buffer: torch.Tensor
    groups: list[KVCacheGroup]
    tensors: Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]]
    block_stride: int


def build_caches(groups: list[KVCacheGroup], num_blocks: int, device: torch.device) -> KVCaches:
    """Allocate the buffer and view it as each layer's cache.

    Args:
        num_blocks: allocator blocks, the null block included.

    Raises:
        CapacityError: when the buffer cannot be allocated.
        GeometryError: when dense pages of two groups differ, or a state would be misaligned.
    """
    block_stride = max(group.kv_cache_spec.page_size_bytes for group in groups)
    groups = [replace(group, kv_cache_spec=_padded(group.kv_cache_spec, block_stride)) for group in groups]
    offsets = {
        name: offset for group in groups for name, offset in _layer_offsets(group, num_blocks * block_stride).items()
    }
    side_by_side = any(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in groups)
    slots = 1 if side_by_side else max(len(group.layer_names) for group in groups)
    num_bytes = slots * num_blocks * block_stride
    try:
        buffer = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    except RuntimeError as error:
        raise CapacityError(
            f"a KV cache of {num_blocks} blocks needs {num_bytes / 2**30:.1f} GiB, which {device} does not have; lower"
            " --num-kv-blocks"
        ) from error
    return KVCaches(buffer, groups, _view_layers(buffer, groups, offsets, num_blocks, block_stride), block_stride)


def _padded(spec: KVCacheSpec, block_stride: int) -> KVCacheSpec:
    if spec.page_size_bytes == block_stride:
        return spec
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=block_stride)
    raise GeometryError(
        f"{type(spec).__name__} pages of {spec.page_size_bytes} bytes share a buffer of {block_stride}-byte blocks;"
        " attention pages are dense, so give all attention groups one page size"
    )


def _layer_offsets(group: KVCacheGroup, layer_stride: int) -> dict[str, int]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        pages = [spec.kv_cache_specs[name].page_size_bytes for name in group.layer_names]
        return dict(zip(group.layer_names, accumulate(pages[:-1], initial=0), strict=True))
    return {name: index * layer_stride for index, name in enumerate(group.layer_names)}


def _view_layers(
    buffer: torch.Tensor,
    groups: list[KVCacheGroup],
    offsets: Mapping[str, int],
    num_blocks: int,
    block_stride: int,
) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """Every layer's cache as a view of `buffer`; block 0 of a layer starts at its offset, bytes."""
    tensors: dict[str, torch.Tensor | tuple[torch.Tensor, ...]] = {}
    for group in groups:
        for name in group.layer_names:
            spec, offset = _member(group, name), offsets[name]
            if isinstance(spec, MambaSpec):
                states = []
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
                    states.append(_strided(buffer, dtype, (num_blocks, *shape), block_stride, offset, name))
                    offset += prod(shape) * dtype.itemsize
                tensors[name] = tuple(states)
                continue
            assert isinstance(spec, AttentionSpec)
            rows = (spec.kernel_block_size, spec.row_width)
            shape = rows if isinstance(spec, MLAAttentionSpec) else (spec.num_kv_heads, *rows)
            shape = (num_blocks * spec.kernel_blocks, *shape)
            stride = block_stride // spec.kernel_blocks
            tensors[name] = _strided(buffer, spec.dtype, shape, stride, offset, name)
    return tensors


def _strided(
    buffer: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], block_stride: int, offset: int, name: str
) -> torch.Tensor:
    size = dtype.itemsize
    if offset % size or block_stride % size:
        raise GeometryError(
            f"layer {name!r}: {dtype} of shape {shape} would start at byte {offset} with blocks {block_stride} bytes"
            f" apart, which is no multiple of {size}; make the convolution's channels even"
        )
    inner = [prod(shape[i + 1 :]) for i in range(1, len(shape))]
    return buffer.view(dtype).as_strided(shape, (block_stride // size, *inner), offset // size)
