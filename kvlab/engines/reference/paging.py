"""Layer 2: reading and writing the tokens of a paged cache.

A token's place is (allocator block, slot in it). `locate` turns places into whatever indexes the cache fastest, once
for all layers of a group, when a step is prepared; `write` and `read` then only copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from kvlab.engines.reference.specs import AttentionSpec
from kvlab.kv.detect import format_of
from kvlab.kv.formats import RawFormat

Index = tuple[torch.Tensor, ...]


class Pages(ABC):
    """One layer's cache, token by token."""

    @abstractmethod
    def locate(self, blocks: torch.Tensor, slots: torch.Tensor) -> Index:
        """Index of places given as two int64 tensors [..., T]; where a token has several heads, [..., H, T]."""

    @abstractmethod
    def write(self, index: Index, values: torch.Tensor) -> None:
        """Store float values [..., (H,) T, width], rounded as the format rounds."""

    @abstractmethod
    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """Values at an index: [..., (H,) T, width]."""


class RawPages(Pages):
    """Plain floats in dense pages: the cache is one matrix of rows.

    Args:
        tensor: [B * kernel_blocks, (H,) N, width], contiguous.
    """

    def __init__(self, tensor: torch.Tensor, spec: AttentionSpec) -> None:
        self.rows = tensor.view(-1, tensor.shape[-1])
        self.spec = spec
        self.heads = torch.arange(spec.num_kv_heads, device=tensor.device) if tensor.dim() == 4 else None

    def locate(self, blocks: torch.Tensor, slots: torch.Tensor) -> Index:
        tokens = self.spec.kernel_block_size
        kernel_blocks, slots = blocks * self.spec.kernel_blocks + slots // tokens, slots % tokens
        if self.heads is None:
            return (kernel_blocks * tokens + slots,)
        kernel_blocks, slots = kernel_blocks.unsqueeze(-2), slots.unsqueeze(-2)
        return ((kernel_blocks * len(self.heads) + self.heads.unsqueeze(-1)) * tokens + slots,)

    def write(self, index: Index, values: torch.Tensor) -> None:
        self.rows.index_copy_(0, index[0].flatten(), values.to(self.rows.dtype).reshape(-1, self.rows.shape[1]))

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        # An embedding lookup copies whole rows; advanced indexing copies element by element.
        return F.embedding(index[0], self.rows).to(dtype)


class PackedPages(Pages):
    """Rows of several fields: codes, scales, rope values.

    Args:
        tensor: uint8 [B, N, bytes].
    """

    def __init__(self, tensor: torch.Tensor, spec: AttentionSpec, layer: str) -> None:
        self.format = format_of(spec, tensor, layer)
        self.fields = {name: as_words(field) for name, field in self.format.fields(tensor).items()}

    def locate(self, blocks: torch.Tensor, slots: torch.Tensor) -> Index:
        return blocks, slots

    def write(self, index: Index, values: torch.Tensor) -> None:
        for name, encoded in self.format.encode_fields(values).items():
            field = self.fields[name]
            field.index_put_(index, encoded.view(field.dtype))

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        found = {name: field[index].view(torch.uint8) for name, field in self.fields.items()}
        return self.format.decode_fields(found).to(dtype)


def as_words(field: torch.Tensor) -> torch.Tensor:
    """A byte view seen in the widest words that its strides and its length allow: fewer elements to move."""
    places = (field.shape[-1], field.storage_offset(), *field.stride()[:-1])
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(place % dtype.itemsize == 0 for place in places):
            return field.view(dtype)
    return field


def open_pages(tensor: torch.Tensor, spec: AttentionSpec, layer: str) -> Pages:
    """The pages of a layer's cache.

    Raises:
        FormatError: for an unknown byte format.
    """
    if isinstance(format_of(spec, tensor, layer), RawFormat):
        return RawPages(tensor, spec)
    return PackedPages(tensor, spec, layer)
