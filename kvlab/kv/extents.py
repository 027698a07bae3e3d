"""Layer 1: tensor views as byte intervals of their storage, the common ground on which overlaid groups are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Intervals = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StorageExtent:
    """Bytes of one storage.

    Attributes:
        storage: all bytes of the storage as a uint8 tensor; writing it writes the cache.
        intervals: sorted, disjoint, not adjacent [begin, end) byte offsets: int64 [n, 2].
    """

    storage: torch.Tensor
    intervals: Intervals

    @property
    def num_bytes(self) -> int:
        """Bytes covered, each counted once."""
        return int((self.intervals[:, 1] - self.intervals[:, 0]).sum())

    def mask(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """bool [end - begin], true inside the intervals, for the storage's bytes [begin, end), on its device."""
        end = self.storage.numel() if end is None else end
        first, last = np.searchsorted(self.intervals[:, 1], begin, "right"), np.searchsorted(self.intervals[:, 0], end)
        inside = np.clip(self.intervals[first:last], begin, end) - begin
        marks = torch.zeros(end - begin + 1, dtype=torch.int8, device=self.storage.device)
        starts, stops = torch.from_numpy(inside.T.copy()).to(self.storage.device)
        marks[starts], marks[stops] = 1, -1
        return marks[:-1].cumsum(0, dtype=torch.int8).bool()


def view_intervals(view: torch.Tensor) -> Intervals:
    """The byte runs that a view covers, in any order: int64 [runs, 2]."""
    if not view.numel():
        return np.empty((0, 2), np.int64)
    offsets, run = strided_runs(tuple(view.shape), view.stride())
    return (offsets[:, None] + int(view.storage_offset()) + np.array([0, run])) * view.element_size()


def strided_runs(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], int]:
    """Where the runs of adjacent elements of a view begin, after its first element, in any order; and their length."""
    run = 1
    dims = sorted(((s, n) for s, n in zip(stride, shape, strict=True) if n > 1), reverse=True)
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    offsets = np.zeros(1, np.int64)
    for step, count in dims:
        offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    return offsets, run


def merge_intervals(intervals: Intervals) -> Intervals:
    """The same bytes as sorted, disjoint, non-adjacent intervals."""
    if not len(intervals):
        return intervals.reshape(0, 2)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([intervals[first, 0], reach[last]], axis=1)


def storage_extents(views: Iterable[torch.Tensor]) -> dict[int, StorageExtent]:
    """What a set of views covers, by the address of each storage."""
    runs: dict[int, list[Intervals]] = {}
    storages: dict[int, torch.Tensor] = {}
    for view in views:
        untyped = view.untyped_storage()
        address = untyped.data_ptr()
        if address not in storages:
            storages[address] = torch.empty(0, dtype=torch.uint8, device=view.device).set_(untyped)
        runs.setdefault(address, []).append(view_intervals(view))
    return {
        address: StorageExtent(storage, merge_intervals(np.concatenate(runs[address])))
        for address, storage in storages.items()
    }
