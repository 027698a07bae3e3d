"""The byte oracle: it finds any byte outside, names its owner, and says how tight the views are."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cases import Case, Request, parse_case
from kvlab.errors import EngineError
from kvlab.kv.formats import RawFormat
from kvlab.verification import reads_unwritten, verify, verify_step

requests = st.tuples(st.integers(1, 30), st.integers(0, 90), st.booleans()).map(
    lambda r: Request(r[0], r[0] + r[1], chunked=r[2] and r[0] > 1 and r[1] > 0)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=4))
def test_an_honest_step_passes_and_every_written_byte_is_counted(make_hand_engine, reqs):
    engine = make_hand_engine()
    (result,) = verify(engine, [Case("c", tuple(reqs))])
    assert result.ok
    assert result.bytes_outside == 0
    assert result.outside is None
    slots = sum(r.query_len for r in reqs)
    # 2 heads of 4 bf16 values a slot, 32 fp32 a state; a byte may keep its value by chance in both draws.
    assert 0.5 * slots * 16 < result.bytes_written <= slots * 16 + len(reqs) * 128
    assert 0 < result.tightness <= 1
    assert result.reads_unwritten == "no"


def test_a_stray_write_is_found_and_its_owner_named(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@200"))
    hand_engine.stray_block = step.batch.block_ids["bench-0"][0][1]
    result = verify_step(step)
    assert not result.ok
    assert result.bytes_outside > 0
    assert f"layer 'attn', block {hand_engine.stray_block} of request bench-0" in result.outside


def test_a_write_to_a_block_of_nobody_is_found(hand_engine):
    hand_engine.stray_block = 60
    (result,) = verify(hand_engine, ["d=1@200"])
    assert not result.ok
    assert "in no block of the case" in result.outside


@pytest.mark.parametrize("name", ["attn", "state"])
def test_views_that_lack_one_written_block_fail(hand_engine, name):
    step = hand_engine.prepare(parse_case("d=1@200"))
    shrunk = []
    for view in step.touched:
        if (view.dim() == 4) == (name == "attn"):
            view = view.narrow(0, 0, view.shape[0] - 1)
        shrunk.append(view)
    step.touched = shrunk
    result = verify_step(step)
    assert not result.ok
    assert f"layer {name!r}" in result.outside


def test_a_step_that_reads_whole_pages_is_told(hand_engine):
    """Public case: the tail of the last page, past the written tokens, poisoned (vllm PR 43990)."""
    step = hand_engine.prepare(parse_case("d=1@40"))
    assert reads_unwritten(step) == "no"
    honest = step.forward

    def whole_pages():
        out = honest()
        last = step.batch.block_ids["bench-0"][0][-1]
        return out + hand_engine.kv_caches["attn"][last].float().sum()

    step.forward = whole_pages
    assert reads_unwritten(step) == "yes"


def test_reads_that_are_given_no_weight_are_told_apart(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    honest = step.forward

    def masked():
        out = honest()
        last = step.batch.block_ids["bench-0"][0][-1]
        return out + 0.0 * hand_engine.kv_caches["attn"][last].float().sum()

    step.forward = masked
    assert reads_unwritten(step) == "masked"


def test_in_a_block_of_a_kernel_s_own_order_any_byte_may_be_a_token_s(hand_engine):
    """vLLM's CPU attention keeps K transposed: the tail of the last block is no tail of its tokens."""
    hand_engine.formats = {"attn": RawFormat(torch.bfloat16, token_major=False)}
    step = hand_engine.prepare(parse_case("d=1@40"))
    honest = step.forward
    _, end = step.batch.group_block_ranges[0][0]

    def reading(block):
        return lambda: honest() + hand_engine.kv_caches["attn"][block].float().sum()

    step.forward = reading(end - 1)
    assert reads_unwritten(step) == "no"
    step.forward = reading(end + 1)
    assert reads_unwritten(step) == "yes"
    assert verify_step(step).ok


def test_the_probe_puts_back_what_it_poisoned(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    step.fill("random", 5)
    before = hand_engine.kv_caches["attn"].clone()
    hand_engine.kv_caches["attn"][50] = 7
    before[50] = 7
    reads_unwritten(step, seed=5)
    step.restore()
    assert torch.equal(hand_engine.kv_caches["attn"], before)


def test_a_step_that_does_not_repeat_itself_is_held_to_its_own_distance(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    honest, noise = step.forward, torch.Generator().manual_seed(0)
    step.forward = lambda: honest() * (1 + 1e-3 * torch.rand(1, 1, generator=noise).sub(0.5).sign())
    assert reads_unwritten(step) == "no"


def test_an_output_that_moves_whatever_stands_there_cannot_be_told(hand_engine):
    """A top-k whose order turns on what a GPU's caches hold: other last bits, the same for every poison."""
    step = hand_engine.prepare(parse_case("d=1@40"))
    honest, cache = step.forward, hand_engine.kv_caches["attn"]
    step.forward = lambda: honest() * (1 + 1e-6 * float(cache[60].any()))
    assert reads_unwritten(step) is None


def test_what_nans_leave_behind_is_no_read(hand_engine):
    """A workspace that keeps a NaN: every later forward shows it, with or without poison."""
    step = hand_engine.prepare(parse_case("d=1@40"))
    honest, cache, workspace = step.forward, hand_engine.kv_caches["attn"], [1.0]

    def forward():
        workspace[0] *= 1.0 + 0.0 * float(cache[60].sum())
        return honest() * workspace[0]

    step.forward = forward
    assert reads_unwritten(step) is None


def test_the_regions_tell_a_page_s_tail_from_foreign_blocks(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    honest, cache = step.forward, hand_engine.kv_caches["attn"]
    for block, expected in ((step.batch.block_ids["bench-0"][0][-1], ("yes", "no")), (60, ("no", "yes"))):
        step.forward = lambda block=block: honest() + cache[block].float().sum()
        assert tuple(reads_unwritten(step, region=region) for region in ("own", "foreign")) == expected
    with pytest.raises(EngineError, match="region 'tail' is unknown; give all, own, foreign"):
        reads_unwritten(step, region="tail")


class MLAAttentionSpec:
    block_size = 16

    def __init__(self, num_states):
        self.num_states = num_states


class SlidingWindowSpec(MLAAttentionSpec):
    sliding_window = 20


@pytest.mark.parametrize("spec", [MLAAttentionSpec, SlidingWindowSpec])
@pytest.mark.parametrize("states", [4, 8, 16, 32])
@pytest.mark.parametrize("kv_len", [40, 41, 48, 100])
def test_a_layer_that_stores_fewer_or_more_states_than_tokens(make_hand_engine, spec, states, kv_len):
    """DeepSeek-V4.1 stores one state for two tokens: what counts as unwritten is counted in states."""
    engine = make_hand_engine()
    engine.kv_caches = {"latent": torch.zeros(64, states, 4)}
    engine.attn_groups = [SimpleNamespace(kv_cache_group_id=0, kv_cache_spec=spec(states), layer_names=["latent"])]
    engine.kv_cache_groups = engine.attn_groups
    step = engine.prepare(parse_case(f"d=1@{kv_len}"))
    (table,) = step.batch.block_ids["bench-0"]

    def reading(last):
        rows = engine.kv_caches["latent"][table].flatten(0, 1)
        return rows[table.count(0) * states : last].sum().reshape(1, 1)

    written = -(-kv_len * states // 16)
    step.forward = lambda: reading(written)
    assert reads_unwritten(step) == "no"
    if written < len(table) * states:
        step.forward = lambda: reading(written + 1)
        assert reads_unwritten(step) == "yes"
