"""Layer 2: the KV that a model writes itself: a batch's prefixes in chunks, and the snapshot that keeps the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvlab.cases import Case
from kvlab.errors import CapacityError, EngineError
from kvlab.kv.batch import Batch
from kvlab.kv.snapshot import Snapshot
from kvlab.kv.specs import is_sliding_window, representative_spec, tokens_per_block

# Where too few blocks are spare for a longer one, a chunk may shrink to this; below it a long prefix would take hours.
_LEAST_CHUNK = 256


class Prefilled(Snapshot):
    """All blocks that a batch owns, as the model left them after the batch's prefixes.

    Attributes:
        case, batch: whose they are.
    """

    def __init__(self, views: Sequence[torch.Tensor], case: Case, batch: Batch) -> None:
        super().__init__(views)
        self.case, self.batch = case, batch

    def check(self, case: Case, batch: Batch) -> None:
        """Raise EngineError unless this is the KV of that batch: the same blocks and tokens."""
        if self.batch.block_ids != batch.block_ids or any(
            not np.array_equal(tokens, batch.prompt_token_ids[req_id])
            for req_id, tokens in self.batch.prompt_token_ids.items()
        ):
            raise EngineError(
                f"case {case.name!r}: its step cannot take the KV that was prefilled for {self.case.name!r}: other"
                " blocks or tokens; call prefill and prepare with the same case and seed"
            )


def prefix_lens(batch: Batch) -> dict[str, int]:
    """Tokens of each request whose KV is in the cache before the step, those that a hit replays included.

    A replay rebuilds the window alone: what the other groups hold of the replayed tokens is read as it is
    (`DeepseekV41ModelState.prepare_attn`, `vllm/models/deepseek_v41/nvidia/model_state.py`).
    """
    return {req_id: computed + batch.replayed[req_id] for req_id, (_, computed, _) in batch.expected.items()}


def prefix_batches(
    name: str,
    batch: Batch,
    kv_cache_groups: Sequence[Any],
    num_blocks: int,
    max_tokens: int,
    dcp_size: int = 1,
) -> Iterator[Batch]:
    """The steps that compute a batch's prefixes, at most `max_tokens` tokens each, over the batch's own blocks.

    Blocks that a window has left behind by the time of the batch's step are the null block in its table. The prefill
    still passes through them: it borrows blocks that the batch does not use, and returns each as the window moves on.

    Args:
        name: of the case.
        kv_cache_groups: as for `build_batch`.
        num_blocks: of the pool.

    Raises:
        CapacityError: where too few blocks are spare.
    """
    ends = prefix_lens(batch)
    windows = _Windows(batch, kv_cache_groups, num_blocks, dcp_size)
    done = {req_id: 0 for req_id in batch.req_ids if ends[req_id]}
    while done:
        pieces: dict[str, tuple[int, int]] = {}
        room = max_tokens
        for req_id, begin in done.items():
            left = ends[req_id] - begin
            size = windows.borrow(req_id, begin, min(left, room))
            if size:
                pieces[req_id] = (begin, begin + size)
            room -= size
            if size < left or not room:
                break
        if not pieces:
            req_id, begin = next(iter(done.items()))
            raise CapacityError(
                f"case {name!r}: a prefill borrows blocks for windows that the step has left behind, and needs"
                f" {windows.missing(req_id, begin, min(ends[req_id], begin + _LEAST_CHUNK))} more for"
                f" {_LEAST_CHUNK} tokens, but {len(windows.spare)} of {num_blocks} are spare; enlarge the KV cache"
                " (--num-kv-blocks) or take fewer requests"
            )
        yield _piece(batch, pieces, windows, num_blocks)
        for req_id, (_, end) in pieces.items():
            windows.give_back(req_id, end)
            done[req_id] = end
            if end == ends[req_id]:
                del done[req_id]


class _Windows:
    """The block tables of a prefill: a batch's own, with borrowed blocks before its windows."""

    def __init__(self, batch: Batch, groups: Sequence[Any], num_blocks: int, dcp_size: int) -> None:
        self.batch = batch
        self.spare = list(range(num_blocks - 1, batch.num_blocks - 1, -1))
        self.borrowed: dict[tuple[str, int], dict[int, int]] = {}
        specs = {g: group.kv_cache_spec for g, group in enumerate(groups)}
        self.windows = {
            g: (representative_spec(spec).sliding_window, tokens_per_block(spec, dcp_size))
            for g, spec in specs.items()
            if is_sliding_window(representative_spec(spec))
        }

    def borrow(self, req_id: str, begin: int, wanted: int) -> int:
        """Take what the tokens from `begin` need; how many of the wanted tokens have room."""
        size, least = wanted, min(_LEAST_CHUNK, wanted)
        while self.missing(req_id, begin, begin + size) > len(self.spare):
            if size == least:
                return 0
            size = max(size // 2, least)
        for g in self.windows:
            for i in self._absent(req_id, g, begin, begin + size):
                self.borrowed.setdefault((req_id, g), {})[i] = self.spare.pop()
        return size

    def missing(self, req_id: str, begin: int, end: int) -> int:
        """Blocks that tokens [begin, end) need beyond those that the request has."""
        return sum(len(self._absent(req_id, g, begin, end)) for g in self.windows)

    def give_back(self, req_id: str, end: int) -> None:
        """Return blocks that no token from `end` on sees."""
        for g in self.windows:
            mine = self.borrowed.get((req_id, g), {})
            for i in [i for i in mine if i < self._first(g, end)]:
                self.spare.append(mine.pop(i))

    def row(self, req_id: str, g: int, begin: int) -> list[int]:
        """The request's block table in a group, for tokens from `begin` on."""
        row = list(self.batch.block_ids[req_id][g])
        for i, block in self.borrowed.get((req_id, g), {}).items():
            row[i] = block
        first = self._first(g, begin) if g in self.windows else 0
        return [0] * first + row[first:]

    def _first(self, g: int, position: int) -> int:
        window, block_size = self.windows[g]
        return int(max(0, position - window + 1) // block_size)

    def _absent(self, req_id: str, g: int, begin: int, end: int) -> list[int]:
        row, mine = self.batch.block_ids[req_id][g], self.borrowed.get((req_id, g), {})
        last = min(len(row), -(-end // self.windows[g][1]))
        return [i for i in range(self._first(g, begin), last) if not row[i] and i not in mine]


def _piece(batch: Batch, pieces: dict[str, tuple[int, int]], windows: _Windows, num_blocks: int) -> Batch:
    places = [batch.req_ids.index(req_id) for req_id in pieces]
    tokens = {req_id: batch.prompt_token_ids[req_id] for req_id in pieces}
    groups = range(len(batch.group_block_ranges))
    return Batch(
        req_ids=list(pieces),
        expected={r: (end - begin, begin, False) for r, (begin, end) in pieces.items()},
        query_token_ids={r: tokens[r][begin:end] for r, (begin, end) in pieces.items()},
        prompt_token_ids={r: tokens[r][:end] for r, (_, end) in pieces.items()},
        draft_token_ids={},
        replayed=dict.fromkeys(pieces, 0),
        group_block_ranges=[[ranges[i] for i in places] for ranges in batch.group_block_ranges],
        block_ids={r: tuple(windows.row(r, g, begin) for g in groups) for r, (begin, _) in pieces.items()},
        num_blocks=num_blocks,
    )
