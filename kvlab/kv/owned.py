"""Layer 1: which blocks requests own, as tables on the caches' device: the same for every seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvlab.kv.batch import Batch
from kvlab.kv.views import BlockRanges


class OwnedBlocks:
    """The blocks that requests own, group by group.

    Attributes:
        ranges: by group, the allocator blocks [begin, end) of each request.
        computed: tokens in each request's cache after the step.
        num_blocks: allocator blocks of the pool.
        device: where the tables lie.
    """

    def __init__(self, batch: Batch, ranges: Mapping[int, BlockRanges], num_blocks: int, device: torch.device) -> None:
        self.ranges = ranges
        self.computed = [sum(batch.expected[req_id][:2]) for req_id in batch.req_ids]
        self.num_blocks = num_blocks
        self.device = device
        self._tables: dict[tuple[object, ...], torch.Tensor] = {}

    def kernel_blocks(self, group_id: int, factor: int) -> torch.Tensor:
        """The kernel blocks that requests own, in ascending order within each: int32."""
        key = ("blocks", group_id, factor)
        if key not in self._tables:
            ranges = self.ranges[group_id] * factor
            ids = [np.arange(begin, end, dtype=np.int32) for begin, end in ranges.tolist()]
            self._tables[key] = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *ids])).to(self.device)
        return self._tables[key]

    def shares(self, group_id: int, tokens: int, share: float) -> torch.Tensor:
        """For each allocator block of `kernel_blocks(group_id, 1)`, whose it is and how far a share of that goes.

        Args:
            tokens: token slots of an allocator block.

        Returns:
            int64 [2, blocks]: the request, and, where all requests' slots stand in a row, the end of the first
            `round(share * slots)` of its slots.
        """
        key = ("shares", group_id, tokens, share)
        if key not in self._tables:
            blocks = np.diff(self.ranges[group_id], axis=1)[:, 0]
            slots = blocks * tokens
            ends = np.cumsum(slots) - slots + np.rint(share * slots).astype(np.int64)
            table = np.repeat(np.stack([np.arange(len(blocks)), ends]), blocks, axis=1)
            self._tables[key] = torch.from_numpy(table).to(self.device)
        return self._tables[key]
