"""Very small reference engines, steps made by hand, and the bytes that a step may read."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from hypothesis import strategies as st

from kvlab.cases import Case, Request
from kvlab.engines.reference import ReferenceEngine, ReferenceStep, attention, load_reference
from kvlab.kv.batch import Batch, build_batch, count_blocks
from kvlab.kv.detect import format_of
from kvlab.kv.extents import storage_extents
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import layer_tensors

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 97,
    "num_heads": 4,
    "head_dim": 8,
    "block_size": 8,
    "sliding_window": 13,
    "index_heads": 3,
    "mamba_heads": 4,
    "mamba_head_dim": 4,
    "state_size": 6,
    "max_model_len": 4096,
}
FAMILIES = ("tiny-dense", "tiny-swa", "tiny-mla", "tiny-mla-packed", "tiny-dsa", "tiny-hybrid")


@lru_cache
def tiny_engine(family: str, num_kv_blocks: int = 160, topk: int = 9) -> ReferenceEngine:
    """One engine a family, shared by the tests: every step brings its own contents."""
    sizes = SIZES | ({"topk": topk} if family == "tiny-dsa" else {})
    if family == "tiny-mla-packed":
        family, sizes["latent_format"] = "tiny-mla", "fp8_ds_mla"
    return load_reference(family, device="cpu", num_kv_blocks=num_kv_blocks, seed=3, **sizes)


@st.composite
def requests(draw, max_kv: int = 60) -> Request:
    """Any request, all phases about equally often."""
    phase = draw(st.sampled_from(("decode", "verify", "prefill", "chunk", "hit")))
    if phase == "decode":
        return Request(1, draw(st.integers(2, max_kv)))
    if phase == "verify":
        drafts = draw(st.integers(1, 4))
        return Request(1 + drafts, draw(st.integers(2 + drafts, max_kv)), drafts)
    if phase == "prefill":
        query = draw(st.integers(1, max_kv))
        return Request(query, query)
    query = draw(st.integers(2, max_kv - 1))
    return Request(query, draw(st.integers(query + 1, max_kv)), chunked=phase == "chunk")


@st.composite
def cases(draw, max_requests: int = 4, max_kv: int = 60) -> Case:
    """Any case; equal requests, which run as one bucket, are common and need not stand together."""
    kinds = draw(st.lists(requests(max_kv), min_size=1, max_size=3))
    return Case("any", tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=max_requests))))


@contextmanager
def scratch(num_bytes: int):
    """Cut intermediate results into pieces of `num_bytes`, so that small cases exercise the cutting too."""
    usual = attention._SCRATCH_BYTES["cpu"]
    attention._SCRATCH_BYTES["cpu"] = num_bytes
    try:
        yield
    finally:
        attention._SCRATCH_BYTES["cpu"] = usual


def part_of(batch: Batch, req_ids: list[str]) -> Batch:
    """Some requests of a batch, on the same blocks."""
    places = [batch.req_ids.index(r) for r in req_ids]
    return replace(
        batch,
        req_ids=req_ids,
        expected={r: batch.expected[r] for r in req_ids},
        group_block_ranges=[[ranges[i] for i in places] for ranges in batch.group_block_ranges],
    )


def steps_of(engine: ReferenceEngine, tokens: list[np.ndarray], pieces: list[list[int]], observer=None):
    """Run whole sequences through the cache, piece by piece; every request keeps its blocks from step to step.

    Yields (request index, first position, hidden states) of each request in each step. The blocks that a sliding
    window has left behind are the null block in the step's table.
    """
    case = Case("whole", tuple(Request(len(t), len(t)) for t in tokens))
    whole = build_batch(case, engine.kv_cache_groups, engine.num_blocks, 2, np.random.default_rng(0))
    computed = [0] * len(tokens)
    for turn in range(max(map(len, pieces))):
        taking = [i for i, mine in enumerate(pieces) if turn < len(mine)]
        batch = Batch([], {}, {}, {}, {}, {}, [[] for _ in engine.kv_cache_groups], {}, whole.num_blocks)
        for i in taking:
            req_id, size, before = whole.req_ids[i], pieces[i][turn], computed[i]
            batch.req_ids.append(req_id)
            batch.expected[req_id] = (size, before, size == 1)
            batch.query_token_ids[req_id] = tokens[i][before : before + size]
            rows = []
            for g, group in enumerate(engine.kv_cache_groups):
                freed, live = count_blocks(group.kv_cache_spec, before, before + size)
                begin = whole.group_block_ranges[g][i][0]
                rows.append([0] * freed + list(range(begin + freed, begin + freed + live)))
                batch.group_block_ranges[g].append((begin + freed, begin + freed + live))
            batch.block_ids[req_id] = tuple(rows)
        hidden = ReferenceStep(engine, case, batch).observe(observer)
        sizes = [pieces[i][turn] for i in taking]
        for i, part in zip(taking, hidden.split(sizes), strict=True):
            yield i, computed[i], part
            computed[i] += pieces[i][turn]


def poison(engine: ReferenceEngine, keep: torch.Tensor | None = None) -> None:
    """Set every byte of the buffer, but those of `keep`, to 0xFF: NaN in bf16, float32 and e4m3."""
    buffer = engine.caches.buffer
    if keep is None:
        buffer.fill_(-1)
    else:
        buffer.masked_fill_(~keep, -1)


def readable_bytes(engine: ReferenceEngine, batch: Batch) -> torch.Tensor:
    """bool [buffer bytes]: what the step may read before it has written it, and not a byte more."""
    marks = torch.zeros_like(engine.caches.buffer, dtype=torch.uint8)
    for layer in layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims):
        for req_id in batch.req_ids:
            _, computed, _ = batch.expected[req_id]
            row = torch.tensor(batch.block_ids[req_id][layer.group_id])
            if is_recurrent(layer.spec):
                if computed:
                    for extent in storage_extents([layer.blocks(int(row[0]), int(row[0]) + 1)]).values():
                        marks |= extent.mask()
                continue
            window = getattr(layer.spec, "sliding_window", None)
            first = max(0, computed - window + 1) if window else 0
            positions = torch.arange(first, computed)
            blocks, slots = row[positions // layer.spec.block_size], positions % layer.spec.block_size
            tokens = layer.spec.block_size // layer.factor
            blocks, slots = blocks * layer.factor + slots // tokens, slots % tokens
            view = layer.token_major(0, engine.num_blocks)
            for field in format_of(layer.spec, view, layer.layer).fields(view).values():
                marked = marks.as_strided(field.shape, field.stride(), field.storage_offset())
                marked[blocks, ..., slots, :] = 1
    return marks.bool()


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).double().square().mean().sqrt() / expected.double().square().mean().sqrt())
