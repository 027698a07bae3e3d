"""Layer 2: KV cache specs of the reference engine, named as vLLM's (`vllm/v1/kv_cache_interface.py`).

`kvlab.kv` reads a spec's kind from its class name, so the names are part of the interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class KVCacheSpec:
    """What every spec has: `block_size`, tokens in an allocator block."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's part of an allocator block, padding included."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A cache of one row per token and head.

    Attributes:
        num_kv_heads: rows per token.
        head_size: values of K in a row, as of V.
        dtype: of the cache tensor.
        kernel_blocks: kernel blocks in an allocator block.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kernel_blocks: int = 1

    @property
    def num_states(self) -> int:
        """Rows (of each head) in an allocator block: one a token."""
        return self.block_size

    @property
    def kernel_block_size(self) -> int:
        """Tokens in a kernel block."""
        return self.block_size // self.kernel_blocks

    @property
    def row_width(self) -> int:
        """Elements of `dtype` in a row: K, then V."""
        return 2 * self.head_size

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.row_width * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Attention over the whole context: `[B * kernel_blocks, H, N, 2 * head_size]`."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention over the last `sliding_window` tokens, the query's own included; earlier blocks are the null block."""

    sliding_window: int


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One row per token, without a separate V: `[B, N, head_size]`.

    Attributes:
        head_size: elements of `dtype` in a row; bytes where the row is packed (dtype uint8).
        cache_dtype_str: `fp8_ds_mla` for the packed latent.
        cache_role: `indexer` for the keys of a sparse indexer.
    """

    num_kv_heads: int = 1
    cache_dtype_str: str | None = None
    cache_role: str = "sparse"

    @property
    def row_width(self) -> int:
        return self.head_size


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """One block of recurrent state a request: strided slices of one page.

    Attributes:
        shapes: shape of each state, without the block dimension.
        dtypes: dtype of each.
        page_size_padded: bytes from one page to the next, where larger than the states.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None

    @property
    def state_size_bytes(self) -> int:
        """Bytes of all states."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.state_size_bytes


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers whose pages differ but that need the same number of token slots, under one block table."""

    kv_cache_specs: Mapping[str, KVCacheSpec]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of an allocator block over all members, which lie side by side in it."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a spec and a block table; its ID is its place in `engine.kv_cache_groups`."""

    kv_cache_spec: KVCacheSpec
    layer_names: tuple[str, ...]


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one group that one attention kernel serves; several may share a group's ID."""

    kv_cache_group_id: int
    kv_cache_spec: KVCacheSpec
    layer_names: tuple[str, ...]
