"""Layer 1: save views and bring them back, each byte once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Snapshot:
    """A copy of some views, taken by `save` and written back by `restore`.

    Views that alias one another exactly (layers sharing a cache) are copied once. Both calls are plain copies on the
    current stream, so that `restore` may be captured in a CUDA graph.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views = distinct_views(views)
        self.saved: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that `restore` writes."""
        return sum(view.numel() * view.element_size() for view in self.views)

    @torch.inference_mode()
    def save(self) -> None:
        """Copy the views' present contents; the copies keep their addresses from one save to the next."""
        if not self.saved:
            self.saved = [torch.empty_like(view, memory_format=torch.contiguous_format) for view in self.views]
        _copy_all(self.saved, self.views)

    @torch.inference_mode()
    def restore(self) -> None:
        """Write the saved contents back."""
        _copy_all(self.views, self.saved)


def distinct_views(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The views, in order, without those that repeat an earlier one byte for byte."""
    distinct: dict[tuple[Any, ...], torch.Tensor] = {}
    for view in views:
        if view.numel():
            distinct.setdefault((view.data_ptr(), tuple(view.shape), view.stride(), view.dtype), view)
    return list(distinct.values())


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
