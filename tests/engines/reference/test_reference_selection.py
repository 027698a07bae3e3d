"""What the sparse layers chose, in the batch's order, however buckets and pieces ordered it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, cases, part_of, scratch, tiny_engine

from kvlab.cases import Case, parse_case
from kvlab.engines.reference import ReferenceStep
from kvlab.errors import EngineError

LAYERS = [f"model.layers.{i}.self_attn.indexer" for i in range(2)]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases(), topk=st.sampled_from((1, 9, 64)), scratch_bytes=st.sampled_from((8 * 2**20, 20_000)))
def test_every_row_holds_distinct_visible_positions_and_none_beyond(case, topk, scratch_bytes):
    engine = tiny_engine("tiny-dsa", topk=topk)
    step = engine.prepare(case)
    step.fill("random")
    with scratch(scratch_bytes):
        found = step.selection()
    step.close()
    assert list(found) == LAYERS
    positions = [p for r in case.requests for p in range(r.prefix_len, r.kv_len)]
    for chosen in found.values():
        assert chosen.shape == (case.num_tokens, topk)
        for row, position in zip(chosen.tolist(), positions, strict=True):
            kept = [p for p in row if p >= 0]
            assert len(kept) == len(set(kept)) == min(topk, position + 1)
            assert max(kept) <= position
            assert set(row) - set(kept) <= {-1}


def test_rows_are_the_requests_own_in_the_batch_s_order():
    engine = tiny_engine("tiny-dsa", topk=9)
    case = parse_case("mix=1@40,5@30:4,1@40,20@50,5@30:4")
    step = engine.prepare(case)
    step.fill("random", 3)
    together = step.selection()[LAYERS[0]].split([r.query_len for r in case.requests])
    for req_id, request, rows in zip(step.batch.req_ids, case.requests, together, strict=True):
        step.restore()
        alone = ReferenceStep(engine, Case("alone", (request,)), part_of(step.batch, [req_id]))
        alone.save()
        assert [set(row) for row in alone.selection()[LAYERS[0]].tolist()] == [set(row) for row in rows.tolist()]


def test_it_starts_from_the_saved_contents_whatever_ran_before():
    step = tiny_engine("tiny-dsa").prepare(parse_case("d=3*1@50"))
    with pytest.raises(EngineError, match="no contents yet"):
        step.selection()
    step.fill("random", 1)
    first = step.selection()
    step.forward()
    again = step.selection()
    step.fill("random", 2)
    other = step.selection()
    assert all(torch.equal(first[name], again[name]) for name in LAYERS)
    assert not torch.equal(first[LAYERS[0]], other[LAYERS[0]])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "tiny-dsa"])
def test_models_that_attend_to_all_choose_none_and_have_no_experts(family):
    step = tiny_engine(family).prepare(parse_case("d=1@40"))
    step.fill("zeros")
    assert step.selection() == {}
    assert step.expert_loads() == {}
