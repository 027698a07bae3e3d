"""The steps of a prefill: every prefix token once and in order, over the batch's own blocks and borrowed ones."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlab.cases import Case, Request, parse_case
from kvlab.engines import base
from kvlab.engines.prefill import prefix_batches, prefix_lens
from kvlab.errors import CapacityError, EngineError
from kvlab.kv.batch import build_batch


class FullAttentionSpec:
    block_size = 8


class SlidingWindowSpec(FullAttentionSpec):
    sliding_window = 13


class LongWindowSpec(SlidingWindowSpec):
    block_size = 4
    sliding_window = 30
    prefix_replay_tokens = 30


class MambaSpec(FullAttentionSpec):
    pass


def groups_of(*specs):
    return [SimpleNamespace(kv_cache_spec=spec(), layer_names=[spec.__name__]) for spec in specs]


GROUPS = groups_of(FullAttentionSpec, SlidingWindowSpec, MambaSpec)
REPLAYING = groups_of(FullAttentionSpec, LongWindowSpec, SlidingWindowSpec)
requests = st.tuples(st.integers(1, 40), st.integers(0, 500), st.booleans()).map(
    lambda r: Request(r[0], r[0] + r[1], chunked=r[2] and r[0] > 1 and r[1] > 0)
)


def batch_of(case, groups, num_blocks=2000):
    return build_batch(case, groups, num_blocks, 100, np.random.default_rng(0))


@pytest.mark.parametrize("groups", [GROUPS, REPLAYING], ids=["hybrid", "replaying"])
@settings(max_examples=60, deadline=None)
@given(reqs=st.lists(requests, min_size=1, max_size=5), max_tokens=st.integers(1, 700), spare=st.integers(0, 200))
def test_every_prefix_token_is_computed_once_in_order_over_blocks_of_its_own(groups, reqs, max_tokens, spare):
    batch = batch_of(Case("c", tuple(reqs)), groups)
    num_blocks = batch.num_blocks + spare
    done = dict.fromkeys(batch.req_ids, 0)
    held = {}
    try:
        for step in prefix_batches("c", batch, groups, num_blocks, max_tokens):
            assert step.num_tokens <= max_tokens
            in_use = [block for rows in step.block_ids.values() for row in rows for block in row if block]
            assert len(in_use) == len(set(in_use))
            assert max(in_use) < num_blocks
            for req_id, (scheduled, begin, is_decode) in step.expected.items():
                end = begin + scheduled
                assert (begin, is_decode) == (done[req_id], False)
                prompt = batch.prompt_token_ids[req_id]
                assert step.query_token_ids[req_id].tolist() == prompt[begin:end].tolist()
                assert step.prompt_token_ids[req_id].tolist() == prompt[:end].tolist()
                done[req_id] = end
                for g, group in enumerate(groups):
                    own, row = batch.block_ids[req_id][g], step.block_ids[req_id][g]
                    spec = group.kv_cache_spec
                    window = getattr(spec, "sliding_window", None)
                    for i, (mine, block) in enumerate(zip(own, row, strict=True)):
                        seen = window is None or (i + 1) * spec.block_size > begin - window + 1
                        if seen and i * spec.block_size < end:
                            assert block
                        assert block in (0, mine) if mine else block == 0 or block >= batch.num_blocks
                        if block and (req_id, g, i) in held:
                            assert held[req_id, g, i] == block
                        if block and window is not None:
                            held[req_id, g, i] = block
    except CapacityError as error:
        # Windows of 13 and 30 tokens and a chunk of 256 span at most 36 and 74 blocks.
        if spare >= 110 or f"of {num_blocks} are spare; enlarge the KV cache" not in str(error):
            raise
        assume(False)
    assert done == prefix_lens(batch)
    assert all(end == request.prefix_len for end, request in zip(done.values(), reqs, strict=True))


def test_requests_share_a_step_and_only_its_last_is_cut():
    batch = batch_of(parse_case("d=3*1@301"), GROUPS)
    sizes = [[n for n, _, _ in step.expected.values()] for step in prefix_batches("d", batch, GROUPS, 2000, 500)]
    assert sizes == [[300, 200], [100, 300]]


def test_without_windows_no_block_is_borrowed():
    groups = groups_of(FullAttentionSpec, MambaSpec)
    batch = batch_of(parse_case("d=2*1@900"), groups)
    steps = list(prefix_batches("d", batch, groups, batch.num_blocks, 256))
    assert all(step.block_ids[r] == batch.block_ids[r] for step in steps for r in step.req_ids)


def test_a_chunk_shrinks_to_the_spare_blocks():
    batch = batch_of(parse_case("d=1@4097"), GROUPS)
    sizes = [step.num_tokens for step in prefix_batches("d", batch, GROUPS, batch.num_blocks + 70, 4096)]
    assert sum(sizes) == 4096
    assert 256 <= min(sizes) <= max(sizes) <= 70 * 8


def test_an_engine_that_cannot_prefill_says_so(hand_engine):
    with pytest.raises(EngineError, match="engine 'hand' cannot prefill; drop the arm prefill"):
        hand_engine.prefill(parse_case("d=1@40"))


def test_what_cannot_be_kept_is_refused_before_anything_runs(hand_engine, monkeypatch):
    monkeypatch.setattr(base, "free_bytes", lambda device: 2000)
    monkeypatch.setattr(type(hand_engine), "compute", lambda *_: pytest.fail("ran"))
    with pytest.raises(CapacityError) as error:
        hand_engine.prefill(parse_case("d=20*1@20"))
    assert "needs 0.0 GiB, but 0.0 GiB are free; take fewer requests (20 now), shorten K" in str(error.value)


def test_a_step_without_a_prefill_names_the_mend(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    with pytest.raises(EngineError, match=r"nothing was prefilled for this step; call engine\.prefill\(case, seed\)"):
        step.fill("prefill")
