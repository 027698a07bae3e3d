"""A batch as index tensors: order, places and windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, cases, tiny_engine

from kvlab.cases import parse_case
from kvlab.errors import EngineError


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(cases(max_requests=6), st.integers(0, 3))
def test_buckets_hold_all_tokens_and_the_order_puts_them_back(family, case, seed):
    engine = tiny_engine(family)
    batch = engine.prepare(case, seed).batch
    plan = engine.plan(batch)
    assert plan.token_ids[plan.order].tolist() == np.concatenate(list(batch.query_token_ids.values())).tolist()
    shapes = {(scheduled, computed) for scheduled, computed, _ in batch.expected.values()}
    assert {(b.num_queries, b.computed) for b in plan.buckets} == shapes
    assert len(plan.buckets) == len(shapes)
    begin = 0
    for bucket in plan.buckets:
        assert bucket.rows == slice(begin, begin + bucket.num_requests * bucket.num_queries)
        begin = bucket.rows.stop
        for g, group in enumerate(engine.kv_cache_groups):
            assert (bucket.contexts[g] is None) != (bucket.states[g] is None)
            if bucket.states[g] is not None:
                assert len(bucket.states[g]) == bucket.num_requests
                continue
            context = bucket.contexts[g]
            window = getattr(group.kv_cache_spec, "sliding_window", None) or 10**6
            end = bucket.computed + bucket.num_queries
            assert context.positions.tolist() == list(range(max(0, bucket.computed + 1 - window), end))
            assert context.first == context.positions[0]
            assert {part.shape[-1] for part in context.index} == {len(context.positions)}
    assert begin == batch.num_tokens


def test_a_place_in_the_null_block_is_refused():
    engine = tiny_engine("tiny-swa")
    batch = engine.prepare(parse_case("a=1@60")).batch
    (window, full) = batch.block_ids["bench-0"]
    assert not window[0]
    assert window[-1]
    holed = replace(batch, block_ids={"bench-0": (window, [full[0], 0, *full[2:]])})
    with pytest.raises(EngineError, match="request 'bench-0', group 1: position 8 lies in the null block"):
        engine.plan(holed)


def test_rotary_angles_are_exact_at_the_end_of_a_long_context():
    engine = tiny_engine("tiny-dense", 600)
    plan = engine.plan(engine.prepare(parse_case("a=1@4096")).batch)
    assert plan.cos.dtype == torch.float32
    assert plan.cos[0, 0] == pytest.approx(np.cos(4095.0), abs=1e-6)
