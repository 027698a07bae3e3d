"""The reference models' own KV: a step over it gives what the whole sequence gives without a cache."""

import numpy as np
import pytest
import torch
from dense_oracle import DenseOracle
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import TOLERANCE
from tiny import FAMILIES, cases, poison, readable_bytes, relative_rms, tiny_engine

from kvlab.cases import parse_case
from kvlab.errors import EngineError

families = pytest.mark.parametrize("family", FAMILIES)
# Decodes, verifies and hits behind a window of 13 tokens and blocks of 8, of unequal lengths, one request fresh.
MIX = "mix=1@60,2*1@41,5@44:4,9@50,12@40c,17"


@pytest.fixture
def in_chunks_of(monkeypatch):
    """An engine whose prefill computes so many tokens a step."""

    def make(family, tokens, topk=64):
        engine = tiny_engine(family, num_kv_blocks=300, topk=topk)
        monkeypatch.setattr(engine, "prefill_tokens", tokens)
        poison(engine)
        return engine

    return make


def prefilled_step(engine, case, seed=0):
    prefilled = engine.prefill(case, seed)
    step = engine.prepare(case, seed)
    step.prefilled = prefilled
    # What the step reads must come from the snapshot.
    poison(engine)
    step.fill("prefill")
    return step


@families
@pytest.mark.parametrize("tokens", [7, 64, 4096])
@pytest.mark.parametrize("text", [MIX, "d=1@300", "h=20@200"])
def test_a_step_over_prefilled_kv_equals_the_dense_run(family, tokens, text, in_chunks_of):
    engine, case = in_chunks_of(family, tokens), parse_case(text)
    if family == "tiny-dsa" and max(r.kv_len for r in case.requests) > 64:
        # All tokens are chosen: which of two tied ones is may turn on the last bit.
        engine = in_chunks_of(family, tokens, topk=512)
    step = prefilled_step(engine, case)
    hidden = step.forward().split([r.query_len for r in case.requests])
    for req_id, found in zip(step.batch.req_ids, hidden, strict=True):
        _, computed, _ = step.batch.expected[req_id]
        whole = np.concatenate([step.batch.prompt_token_ids[req_id][:computed], step.batch.query_token_ids[req_id]])
        chosen = [[set(range(i + 1)) for i in range(len(whole))] for _ in engine.config.kinds]
        expected = DenseOracle(engine, chosen).hidden(whole.tolist())[computed:]
        assert relative_rms(found, expected) < TOLERANCE[family], req_id


@families
@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=cases(), tokens=st.integers(1, 80))
def test_chunks_write_what_one_whole_prefill_writes(family, case, tokens):
    engine = tiny_engine(family, num_kv_blocks=300, topk=64)
    found = []
    try:
        for size in (tokens, 4096):
            engine.prefill_tokens = size
            step = prefilled_step(engine, case)
            assert step.first_nonfinite() is None
            step.restore()
            keep = readable_bytes(engine, step.batch)
            # Untouched poison decodes to NaN, untouched zeros to nothing: no readable row may be left so.
            found.append((step.forward().clone(), engine.caches.buffer[keep]))
            step.close()
    finally:
        del engine.prefill_tokens
    assert relative_rms(found[0][0], found[1][0]) < 2 * TOLERANCE[family]
    if len(found[0][1]):
        assert (found[0][1] == found[1][1]).float().mean() > 0.9


@families
def test_the_snapshot_brings_back_the_same_bytes_after_any_other_fill(family, in_chunks_of):
    engine = in_chunks_of(family, 16)
    step = prefilled_step(engine, parse_case(MIX))
    first, start = step.forward().clone(), None
    for other in ("zeros", "random", "constant(0.015)"):
        step.fill(other, 3)
        step.forward()
        step.fill("prefill")
        start = engine.caches.buffer.clone() if start is None else start
        assert torch.equal(engine.caches.buffer, start)
        assert torch.equal(step.forward(), first)


def test_the_kv_of_another_case_or_seed_is_refused(in_chunks_of):
    engine = in_chunks_of("tiny-swa", 16)
    prefilled = engine.prefill(parse_case("d=1@60"), seed=1)
    for text, seed in (("d=1@60", 2), ("d=1@61", 1), ("d=2*1@60", 1)):
        step = engine.prepare(parse_case(text), seed)
        with pytest.raises(EngineError, match="call prefill and prepare with the same case and seed"):
            step.prefilled = prefilled
        step.close()
    step = engine.prepare(parse_case("d=1@60"), seed=1)
    step.prefilled = prefilled
    step.fill(" prefill ")
    step.prefilled = None
    with pytest.raises(EngineError, match="nothing was prefilled"):
        step.fill("prefill")
