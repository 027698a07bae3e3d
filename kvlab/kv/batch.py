"""Layer 1: which KV blocks a case owns, group by group, without a scheduler.

The allocation, the prefix replay and the random tokens follow `vllm/benchmarks/forward/batch.py` (vLLM 0.33), so that
the same case, seed and caches give the same blocks and tokens there and here. But for the states that drafts write:
there a recurrent request has one block whatever the drafts, and the others of its row are whatever was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.cases import Case
from kvlab.errors import CapacityError
from kvlab.kv.specs import (
    is_recurrent,
    is_sliding_window,
    prefix_replay_tokens,
    representative_spec,
    tokens_per_block,
)

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """A case laid out over the KV blocks of an engine.

    Attributes:
        req_ids: request IDs in the order of the case.
        expected: request ID -> (scheduled tokens, computed tokens before the step, is decode or verify); what a
            runner must have built. Scheduled tokens include a prefix hit's replayed window.
        query_token_ids: request ID -> IDs of the scheduled tokens, int64 [scheduled].
        prompt_token_ids: request ID -> prompt that a runner is told of, int64: the prefix of a decode, else all K.
        draft_token_ids: request ID -> drafts to verify, int64 [D]; requests without drafts are absent.
        replayed: request ID -> tokens of a prefix hit that are computed again.
        group_block_ranges: per KV cache group, per request, the owned allocator blocks [begin, end).
        block_ids: request ID -> per group, the block table row; freed blocks before a window are 0, the null block.
        num_blocks: blocks in use, the null block included; valid block IDs are below it.
    """

    req_ids: list[str]
    expected: dict[str, tuple[int, int, bool]]
    query_token_ids: dict[str, TokenIds]
    prompt_token_ids: dict[str, TokenIds]
    draft_token_ids: dict[str, TokenIds]
    replayed: dict[str, int]
    group_block_ranges: list[list[tuple[int, int]]]
    block_ids: dict[str, tuple[list[int], ...]]
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, over all requests."""
        return sum(scheduled for scheduled, _, _ in self.expected.values())


def count_blocks(spec: Any, computed: int, kv_len: int, dcp_size: int = 1) -> tuple[int, int]:
    """(freed, live) blocks of one request: freed ones lie wholly before a sliding window and are the null block.

    Args:
        computed: tokens in the cache before the step.
        kv_len: tokens in the cache after it, lookahead included.
    """
    kind = representative_spec(spec)
    if is_recurrent(kind):
        # One more state per draft that is verified (`MambaSpec`, `vllm/v1/kv_cache_interface.py`); rings have none.
        return 0, 1 + getattr(kind, "num_speculative_blocks", 0)
    block_size = tokens_per_block(spec, dcp_size)
    total = -(-kv_len // block_size)
    freed = max(0, computed - kind.sliding_window + 1) // block_size if is_sliding_window(kind) else 0
    return freed, total - freed


def build_batch(
    case: Case,
    kv_cache_groups: Sequence[Any],
    num_kv_blocks: int,
    vocab_size: int,
    rng: np.random.Generator,
    dcp_size: int = 1,
    lookahead: int = 0,
) -> Batch:
    """Give every request of a case its own blocks in every group, and random tokens.

    All groups draw from one pool, so a block ID belongs to one request of one group; block 0 is the null block. A
    prefix hit on a model with bounded replay recomputes its last `min(window, prefix)` tokens. `lookahead` reserves
    room for a drafter's writes.

    Args:
        kv_cache_groups: objects with `.kv_cache_spec`, in the order of their group IDs.
        num_kv_blocks: blocks of the pool, the null block included.
        rng: drawn from once a request: `integers(0, vocab_size, kv_len)`.
        dcp_size: decode context parallel ranks.

    Raises:
        CapacityError: with the number of blocks needed.
    """
    replay_window = max((prefix_replay_tokens(group.kv_cache_spec) for group in kv_cache_groups), default=0)
    replays = [min(replay_window, r.prefix_len) if r.prefix_hit else 0 for r in case.requests]
    counts = [
        [
            count_blocks(group.kv_cache_spec, r.prefix_len - replay, r.kv_len + lookahead, dcp_size)
            for group in kv_cache_groups
        ]
        for r, replay in zip(case.requests, replays, strict=True)
    ]
    needed = 1 + sum(live for row in counts for _, live in row)
    if needed > num_kv_blocks:
        raise CapacityError(
            f"case {case.name!r} needs {needed} KV blocks (the null block included), but only {num_kv_blocks} exist;"
            " enlarge the KV cache (--num-kv-blocks) or shorten the case"
        )
    batch = Batch([], {}, {}, {}, {}, {}, [[] for _ in kv_cache_groups], {}, needed)
    cursor = 1
    for i, (request, replay, row) in enumerate(zip(case.requests, replays, counts, strict=True)):
        req_id = f"bench-{i}"
        computed = request.prefix_len - replay
        table = []
        for (freed, live), ranges in zip(row, batch.group_block_ranges, strict=True):
            table.append([0] * freed + list(range(cursor, cursor + live)))
            ranges.append((cursor, cursor + live))
            cursor += live
        tokens = rng.integers(0, vocab_size, request.kv_len, dtype=np.int64)
        batch.req_ids.append(req_id)
        batch.expected[req_id] = (request.query_len + replay, computed, request.is_decode)
        batch.query_token_ids[req_id] = tokens[computed:]
        batch.prompt_token_ids[req_id] = tokens[: request.prefix_len] if request.is_decode else tokens
        if request.num_draft_tokens:
            batch.draft_token_ids[req_id] = tokens[request.prefix_len + 1 :]
        batch.replayed[req_id] = replay
        batch.block_ids[req_id] = tuple(table)
    return batch
