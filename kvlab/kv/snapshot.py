"""Layer 1: save views and bring them back, each byte once, in as few kernels as the device allows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch

from kvlab.kv.extents import Intervals, StorageExtent, storage_extents

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Bytes that one program copies: enough to keep a block of threads busy, few enough to fill the GPU.
_RUN_BYTES = 8192


class Snapshot:
    """A copy of some views, taken by `save` and written back by `restore`.

    Bytes that several views share (layers sharing a cache, overlaid groups) are copied once. Both calls are plain work
    on the current stream, so that `restore` may be captured in a CUDA graph. On CUDA with Triton all runs of a storage
    are one kernel; elsewhere PyTorch's `_foreach_copy_` copies view by view.

    Attributes:
        method: `triton` or `foreach`, stored with the run.
        num_bytes: bytes that `restore` writes.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.method = _method(views)
        self._copies: list[_RunCopy] | list[_ViewCopy]
        if self.method == "triton":
            self._copies = [_RunCopy(extent) for extent in storage_extents(views).values() if extent.num_bytes]
        else:
            self._copies = [_ViewCopy(views)]
        self.num_bytes = sum(copy.num_bytes for copy in self._copies)

    @torch.inference_mode()
    def save(self) -> None:
        """Copy the views' present contents; the copies keep their addresses from one save to the next."""
        for copy in self._copies:
            copy.save()

    @torch.inference_mode()
    def restore(self) -> None:
        """Write the saved contents back."""
        for copy in self._copies:
            copy.restore()

    def drop(self) -> None:
        """Let go of the views and of what was saved of them; a restore then does nothing."""
        self._copies = []


class _ViewCopy:
    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views = distinct_views(views)
        self.saved: list[torch.Tensor] = []
        self.num_bytes = sum(view.numel() * view.element_size() for view in self.views)

    def save(self) -> None:
        if not self.saved:
            self.saved = [torch.empty_like(view, memory_format=torch.contiguous_format) for view in self.views]
        if self.views:
            torch._foreach_copy_(self.saved, self.views)

    def restore(self) -> None:
        if self.views:
            torch._foreach_copy_(self.views, self.saved)


class _RunCopy:
    """The runs of one storage, cut into pieces of at most `_RUN_BYTES` and counted in the widest words that fit."""

    def __init__(self, extent: StorageExtent) -> None:
        self.num_bytes = extent.num_bytes
        lengths = extent.intervals[:, 1] - extent.intervals[:, 0]
        common = int(np.gcd.reduce(np.concatenate([extent.intervals.ravel(), [extent.storage.numel(), 8]])))
        word = max(size for size in _WORDS if common % size == 0)
        pieces = cut_runs(extent.intervals, _RUN_BYTES)
        device = extent.storage.device
        dtype = _WORDS[word]
        self._block = _RUN_BYTES // word
        self._cache = torch.empty(0, dtype=dtype, device=device).set_(extent.storage.untyped_storage())
        self._saved = torch.empty(int(lengths.sum()) // word, dtype=dtype, device=device)
        count = (pieces[:, 1] - pieces[:, 0]) // word
        # The saved copy is dense: each piece begins where the last one ended.
        self._in_cache = torch.from_numpy(pieces[:, 0] // word).to(device)
        self._in_saved = torch.from_numpy(np.cumsum(count) - count).to(device)
        self._count = torch.from_numpy(count.astype(np.int32)).to(device)

    def save(self) -> None:
        self._copy(self._saved, self._cache, self._in_saved, self._in_cache)

    def restore(self) -> None:
        self._copy(self._cache, self._saved, self._in_cache, self._in_saved)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, to: torch.Tensor, start: torch.Tensor) -> None:
        from kvlab.kv.copy_kernel import copy_runs

        copy_runs[(len(self._count),)](target, source, to, start, self._count, BLOCK=self._block)


def _method(views: Sequence[torch.Tensor]) -> str:
    return "triton" if views and views[0].is_cuda and find_spec("triton") else "foreach"


def cut_runs(intervals: Intervals, longest: int) -> Intervals:
    """The same bytes in order, as intervals of at most `longest`: int64 [n, 2]."""
    counts = -(-(intervals[:, 1] - intervals[:, 0]) // longest)
    owner = np.repeat(np.arange(len(intervals)), counts)
    nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = intervals[owner, 0] + nth * longest
    return np.stack([begin, np.minimum(begin + longest, intervals[owner, 1])], axis=1)


def distinct_views(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The views, in order, without those that repeat an earlier one byte for byte."""
    distinct: dict[tuple[object, ...], torch.Tensor] = {}
    for view in views:
        if view.numel():
            distinct.setdefault((view.data_ptr(), tuple(view.shape), view.stride(), view.dtype), view)
    return list(distinct.values())
