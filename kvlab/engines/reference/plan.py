"""Layer 2: a batch as index tensors on the device, so that a forward creates none from Python data.

Requests that schedule and have computed equally many tokens form one bucket and run as one tensor. Tokens are ordered
bucket by bucket; the last step of a forward puts them back into the batch's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvlab.engines.reference.paging import Index, Pages
from kvlab.engines.reference.specs import AttentionSpec, KVCacheGroup, SlidingWindowSpec
from kvlab.errors import EngineError
from kvlab.kv.batch import Batch
from kvlab.kv.specs import representative_spec

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """What the requests of a bucket read in one attention group.

    Attributes:
        index: where the tokens are, for the group's pages: R requests by T tokens.
        first: position of the first of the T tokens: 0, or the first one in the window of the first query.
        positions: int64 [T].
    """

    index: Index
    first: int
    positions: torch.Tensor


@dataclass(frozen=True)
class Bucket:
    """R requests that each compute the Q tokens at positions `computed`..`computed + Q - 1`.

    Attributes:
        rows: their tokens in the plan's order, R * Q of them, request by request.
        num_requests, num_queries, computed: R, Q and the tokens before them.
        positions: of the queries, int64 [Q].
        contexts: by group ID; None for a recurrent group.
        states: by group ID, the requests' state blocks, int64 [R]; None for an attention group.
    """

    rows: slice
    num_requests: int
    num_queries: int
    computed: int
    positions: torch.Tensor
    contexts: tuple[Context | None, ...]
    states: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Plan:
    """A batch, ready to run.

    Attributes:
        token_ids: int64 [tokens].
        order: row of each of the batch's tokens in the plan's order, int64 [tokens].
        cos, sin: of the tokens' rotary angles, float32 [tokens, rope_width / 2].
        writes: by group ID, where the tokens' own rows go; None for a recurrent group.
        buckets: in the plan's order.
    """

    token_ids: torch.Tensor
    order: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    writes: tuple[Index | None, ...]
    buckets: tuple[Bucket, ...]


def build_plan(
    batch: Batch,
    groups: Sequence[KVCacheGroup],
    pages: Sequence[Pages | None],
    rope_width: int,
    rope_theta: float,
    device: torch.device,
) -> Plan:
    """Lay a batch out.

    Args:
        groups, pages: by group ID; any layer's pages stand for its group's, None for a recurrent group.

    Raises:
        EngineError: when a request would read or write the null block.
    """
    planner = _Planner(batch, groups, pages, device)
    members: dict[tuple[int, int], list[str]] = {}
    for req_id in batch.req_ids:
        scheduled, computed, _ = batch.expected[req_id]
        members.setdefault((scheduled, computed), []).append(req_id)
    buckets, ordered, begin = [], [], 0
    for (scheduled, computed), req_ids in members.items():
        buckets.append(planner.bucket(req_ids, scheduled, computed, begin))
        ordered += req_ids
        begin += scheduled * len(req_ids)
    spans = {r: np.arange(batch.expected[r][0]) + batch.expected[r][1] for r in ordered}
    positions = np.concatenate([spans[r] for r in ordered])
    starts = dict(zip(ordered, np.cumsum([0] + [len(spans[r]) for r in ordered]).tolist(), strict=False))
    order = np.concatenate([np.arange(len(spans[r])) + starts[r] for r in batch.req_ids])
    frequencies = rope_theta ** (-np.arange(0, rope_width, 2) / rope_width)
    angles = positions[:, None] * frequencies
    return Plan(
        token_ids=planner.tensor(np.concatenate([batch.query_token_ids[r] for r in ordered])),
        order=planner.tensor(order),
        cos=torch.from_numpy(np.cos(angles)).float().to(device),
        sin=torch.from_numpy(np.sin(angles)).float().to(device),
        writes=tuple(planner.writes(g, ordered, spans) if planner.attends(g) else None for g in range(len(groups))),
        buckets=tuple(buckets),
    )


class _Planner:
    def __init__(
        self,
        batch: Batch,
        groups: Sequence[KVCacheGroup],
        pages: Sequence[Pages | None],
        device: torch.device,
    ) -> None:
        self.batch = batch
        self.specs = [representative_spec(group.kv_cache_spec) for group in groups]
        self.pages = pages
        self.device = device

    def tensor(self, array: Int64Array) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.int64).to(self.device)

    def attends(self, group_id: int) -> bool:
        return isinstance(self.specs[group_id], AttentionSpec)

    def bucket(self, req_ids: list[str], scheduled: int, computed: int, begin: int) -> Bucket:
        ids = range(len(self.specs))
        return Bucket(
            rows=slice(begin, begin + scheduled * len(req_ids)),
            num_requests=len(req_ids),
            num_queries=scheduled,
            computed=computed,
            positions=self.tensor(np.arange(computed, computed + scheduled)),
            contexts=tuple(self.context(g, req_ids, scheduled, computed) if self.attends(g) else None for g in ids),
            states=tuple(None if self.attends(g) else self.states(g, req_ids) for g in ids),
        )

    def context(self, group_id: int, req_ids: list[str], scheduled: int, computed: int) -> Context:
        spec = self.specs[group_id]
        first = max(0, computed - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        positions = np.arange(first, computed + scheduled)
        blocks = np.stack([self.blocks(group_id, r, positions) for r in req_ids])
        slots = np.broadcast_to(positions % spec.block_size, blocks.shape)
        return Context(self.locate(group_id, blocks, slots), first, self.tensor(positions))

    def writes(self, group_id: int, req_ids: list[str], spans: dict[str, Int64Array]) -> Index:
        blocks = np.concatenate([self.blocks(group_id, r, spans[r]) for r in req_ids])
        slots = np.concatenate([spans[r] for r in req_ids]) % self.specs[group_id].block_size
        return self.locate(group_id, blocks, slots)

    def states(self, group_id: int, req_ids: list[str]) -> torch.Tensor:
        zero = np.zeros(1, np.int64)
        return self.tensor(np.concatenate([self.blocks(group_id, r, zero) for r in req_ids]))

    def blocks(self, group_id: int, req_id: str, positions: Int64Array) -> Int64Array:
        """Allocator block of each position."""
        row = np.asarray(self.batch.block_ids[req_id][group_id], np.int64)
        blocks = row[positions // self.specs[group_id].block_size]
        if not blocks.all():
            raise EngineError(
                f"request {req_id!r}, group {group_id}: position {positions[np.argmin(blocks)]} lies in the null block;"
                " its block table must hold every block from the window's first on"
            )
        return blocks

    def locate(self, group_id: int, blocks: Int64Array, slots: Int64Array) -> Index:
        pages = self.pages[group_id]
        assert pages is not None
        return pages.locate(self.tensor(blocks), self.tensor(slots))
