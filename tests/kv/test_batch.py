"""Block allocation: against what vLLM 0.33's own builder returned, and its invariants."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cases import Case, Request, jitter_kv_lens, parse_case
from kvlab.errors import CapacityError
from kvlab.kv.batch import build_batch, count_blocks
from kvlab.kv.views import touched_block_ranges

from standins import (
    KINDS,
    CircularBufferSpec,
    FullAttentionSpec,
    Group,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cases,
    is_state,
    specs,
)

TOOLS = Path(__file__).parents[2] / "tools"
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "vllm_0_33_batches.json").read_text(encoding="utf-8"))
ENTRIES = GOLDEN["entries"]


@cache
def golden_tool():
    """tools/golden_vllm.py, for the way it writes block tables and hashes."""
    sys.path.insert(0, str(TOOLS))
    spec = importlib.util.spec_from_file_location("golden_vllm", TOOLS / "golden_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_spec(question):
    return KINDS[question["kind"]](**{key: value for key, value in question.items() if key != "kind"})


def make_group(index, question):
    if "members" not in question:
        return Group(make_spec(question), [f"group{index}"], index)
    members = {f"group{index}.layer{k}": make_spec(member) for k, member in enumerate(question["members"])}
    return Group(
        UniformTypeKVCacheSpecs(block_size=question["block_size"], kv_cache_specs=members), list(members), index
    )


def entry_id(entry):
    return f"{entry['layout']}-{entry['case'].split('=')[0]}"


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_batches_equal_those_of_vllm_0_33(entry):
    fold, digest = golden_tool().fold, golden_tool().digest
    groups = [make_group(i, question) for i, question in enumerate(entry["groups"])]
    case = jitter_kv_lens(parse_case(entry["case"]), entry["jitter"], GOLDEN["max_kv_len"], entry["seed"])
    assert [[r.query_len, r.kv_len, r.num_draft_tokens, r.chunked] for r in case.requests] == entry["requests"]
    layout = {"dcp_size": entry["dcp_size"], "lookahead": entry["lookahead"]}
    rng = np.random.default_rng(entry["seed"])
    batch = build_batch(case, groups, GOLDEN["num_kv_blocks"], GOLDEN["vocab_size"], rng, **layout)

    assert [list(batch.expected[r]) for r in batch.req_ids] == entry["expected"]
    assert [[list(r) for r in ranges] for ranges in batch.group_block_ranges] == entry["group_block_ranges"]
    assert [[fold(row) for row in batch.block_ids[r]] for r in batch.req_ids] == entry["block_ids"]
    assert [batch.expected[r][1] for r in batch.req_ids] == entry["num_computed_tokens"]
    replay_starts = [batch.expected[r][1] if batch.replayed[r] else 0 for r in batch.req_ids]
    assert replay_starts == entry["replay_start"]
    assert (batch.num_tokens, batch.num_blocks) == (entry["num_tokens"], entry["num_blocks"])
    assert digest(batch.query_token_ids[r] for r in batch.req_ids) == entry["query_token_ids"]
    assert digest(batch.prompt_token_ids[r] for r in batch.req_ids) == entry["prompt_token_ids"]
    assert digest(batch.draft_token_ids.get(r, []) for r in batch.req_ids) == entry["draft_token_ids"]

    ranges = touched_block_ranges(groups, batch, **layout)
    assert [ranges[group.layer_names[0]].tolist() for group in groups] == entry["touched"]
    with pytest.raises(CapacityError, match=rf"needs {entry['blocks_needed']} KV blocks"):
        build_batch(case, groups, entry["blocks_needed"] - 1, GOLDEN["vocab_size"], rng, **layout)


def test_the_golden_file_covers_every_kind_of_request_and_group():
    assert GOLDEN["vllm"].startswith("0.33.")
    requests = [Request(*numbers[:3], bool(numbers[3])) for entry in ENTRIES for numbers in entry["requests"]]
    assert {r.phase for r in requests} == {"decode", "verify", "prefill", "chunk", "hit"}
    kinds = {group["kind"] for entry in ENTRIES for group in entry["groups"]}
    assert kinds == {*KINDS, "UniformTypeKVCacheSpecs"}
    assert (
        {entry["dcp_size"] > 1 for entry in ENTRIES} == {entry["lookahead"] > 0 for entry in ENTRIES} == {True, False}
    )
    assert any(start for entry in ENTRIES for start in entry["replay_start"])
    assert any("0x" in row for entry in ENTRIES for rows in entry["block_ids"] for row in rows)


def test_a_live_vllm_agrees_with_the_golden_file():
    pytest.importorskip("vllm.benchmarks.forward", reason="no vLLM 0.33 here")
    tool = golden_tool()
    vllm = tool.load_vllm()
    for entry in ENTRIES:
        question = {key: entry[key] for key in ("groups", "case", "jitter", "dcp_size", "lookahead", "seed")}
        answer = tool.answer(vllm, question)
        assert answer == {key: entry[key] for key in answer}, entry["case"]


@st.composite
def layouts(draw):
    """A case, groups, and the keywords of `build_batch`."""
    groups = []
    for g in range(draw(st.integers(0, 4))):
        spec = draw(specs((1, 2, 3, 16, 100)))
        groups.append(Group(spec, list(getattr(spec, "kv_cache_specs", None) or ["layer"]), g))
    return draw(cases()), groups, draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((0, 0, 1, 7)))


def first_spec(group):
    members = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return next(iter(members.values())) if members else group.kv_cache_spec


def sharded_size(group, dcp_size):
    sharded = getattr(group.kv_cache_spec, "dcp_sharded", getattr(first_spec(group), "dcp_sharded", False))
    return group.kv_cache_spec.block_size * (dcp_size if sharded else 1)


@settings(max_examples=250, deadline=None)
@given(layouts())
def test_blocks_are_disjoint_cover_the_kv_and_free_exactly_what_lies_before_the_window(layout):
    case, groups, dcp_size, lookahead = layout
    batch = build_batch(case, groups, 1 << 20, 100, np.random.default_rng(0), dcp_size, lookahead)
    owned = [b for ranges in batch.group_block_ranges for begin, end in ranges for b in range(begin, end)]
    # Disjoint over requests and groups, without holes, and never the null block.
    assert sorted(owned) == list(range(1, batch.num_blocks))
    assert all(len(ranges) == len(case.requests) for ranges in batch.group_block_ranges)
    assert batch.req_ids == list(batch.expected) == list(batch.block_ids)
    for i, (req_id, request) in enumerate(zip(batch.req_ids, case.requests, strict=True)):
        _, computed, _ = batch.expected[req_id]
        for group, row in zip(groups, batch.block_ids[req_id], strict=True):
            begin, end = batch.group_block_ranges[group.kv_cache_group_id][i]
            assert [b for b in row if b] == list(range(begin, end))
            spec, size = first_spec(group), sharded_size(group, dcp_size)
            if is_state(spec):
                assert row == [begin]
                continue
            assert len(row) == (request.kv_len + lookahead + size - 1) // size
            for position, block in enumerate(row):
                tokens = range(position * size, position * size + size)
                # The first scheduled token still sees the `sliding_window - 1` tokens before it.
                oldest = computed - spec.sliding_window + 1 if isinstance(spec, SlidingWindowSpec) else 0
                assert (block == 0) == (tokens[-1] < oldest)


@settings(max_examples=120, deadline=None)
@given(layouts(), st.integers(2, 1000), st.integers(0, 99))
def test_tokens_are_those_of_one_random_sequence_a_request(layout, vocab_size, seed):
    case, groups, dcp_size, lookahead = layout
    batch = build_batch(case, groups, 1 << 20, vocab_size, np.random.default_rng(seed), dcp_size, lookahead)
    rng = np.random.default_rng(seed)
    windows = [getattr(first_spec(g), "prefix_replay_tokens", 0) for g in groups] or [0]
    for req_id, request in zip(batch.req_ids, case.requests, strict=True):
        tokens = rng.integers(0, vocab_size, request.kv_len, dtype=np.int64)
        replayed = min(max(windows), request.prefix_len) if request.phase == "hit" else 0
        scheduled, computed, is_decode = batch.expected[req_id]
        assert batch.replayed[req_id] == replayed
        assert (scheduled, computed) == (request.query_len + replayed, request.prefix_len - replayed)
        assert is_decode == (request.phase in ("decode", "verify"))
        assert computed + scheduled == request.kv_len
        assert np.array_equal(batch.query_token_ids[req_id], tokens[-scheduled:])
        assert np.array_equal(batch.prompt_token_ids[req_id], tokens[: request.prefix_len] if is_decode else tokens)
        drafts = batch.draft_token_ids.get(req_id, np.empty(0, np.int64))
        assert len(drafts) == request.num_draft_tokens
        assert np.array_equal(drafts, tokens[len(tokens) - len(drafts) :])
    assert batch.num_tokens == sum(len(ids) for ids in batch.query_token_ids.values())


@settings(max_examples=100, deadline=None)
@given(layouts(), st.data())
def test_the_capacity_error_says_how_many_blocks_are_needed(layout, data):
    case, groups, dcp_size, lookahead = layout
    needed = build_batch(case, groups, 1 << 20, 100, np.random.default_rng(0), dcp_size, lookahead).num_blocks
    assert build_batch(case, groups, needed, 100, np.random.default_rng(0), dcp_size, lookahead).num_blocks == needed
    too_few = data.draw(st.integers(0, needed - 1))
    with pytest.raises(CapacityError) as error:
        build_batch(case, groups, too_few, 100, np.random.default_rng(0), dcp_size, lookahead)
    message = str(error.value)
    assert f"needs {needed} KV blocks" in message
    assert f"only {too_few} exist" in message
    assert repr(case.name) in message
    assert "\n" not in message


def test_a_refused_case_draws_no_tokens():
    groups = [Group(FullAttentionSpec(block_size=16), ["layer"])]
    rng = np.random.default_rng(0)
    with pytest.raises(CapacityError):
        build_batch(parse_case(f"long=1@{10**15}"), groups, 100, 100, rng)
    assert rng.integers(1 << 30) == np.random.default_rng(0).integers(1 << 30)


def test_public_case_1_one_sharded_block_holds_the_tokens_of_two_ranks():
    sharded = FullAttentionSpec(block_size=16, dcp_sharded=True)
    assert count_blocks(sharded, 31, 32, dcp_size=2) == (0, 1)
    assert count_blocks(sharded, 32, 33, dcp_size=2) == (0, 2)
    assert count_blocks(sharded, 31, 32, dcp_size=1) == (0, 2)
    assert count_blocks(FullAttentionSpec(block_size=16), 31, 32, dcp_size=2) == (0, 2)
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": sharded, "b": sharded})
    assert count_blocks(uniform, 31, 32, dcp_size=2) == (0, 1)


@pytest.mark.parametrize(("computed", "freed"), [(0, 0), (7, 0), (8, 0), (10, 0), (11, 1), (14, 1), (15, 2)])
def test_a_window_of_8_frees_a_block_of_4_with_its_last_token(computed, freed):
    # The token at `computed` sees positions above `computed - 8`.
    spec = SlidingWindowSpec(block_size=4, sliding_window=8)
    assert count_blocks(spec, computed, computed + 1) == (freed, -(-(computed + 1) // 4) - freed)
    # A full-attention spec that only remembers its window keeps all blocks.
    assert count_blocks(FullAttentionSpec(block_size=4, sliding_window=8), computed, computed + 1)[0] == 0


@pytest.mark.parametrize("spec", [MambaSpec(block_size=4), CircularBufferSpec(block_size=4, dcp_sharded=True)])
def test_a_state_or_ring_is_one_block_however_long_the_request(spec):
    assert count_blocks(spec, 1000, 4096, dcp_size=2) == (0, 1)
    assert count_blocks(UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": spec}), 0, 4096) == (0, 1)


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("uniform", [False, True])
def test_each_draft_has_a_state_of_its_own_and_a_step_may_write_them_all(drafts, uniform):
    """vLLM's kernels store one state per draft, through the row's next entries: another request's in a short row."""
    spec = MambaSpec(block_size=4, num_speculative_blocks=drafts)
    if uniform:
        spec = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": spec})
    groups = [Group(FullAttentionSpec(block_size=4), ["b"], 0), Group(spec, ["a"], 1)]
    case = parse_case(f"verify=3*{drafts + 1}@40:{drafts}")
    batch = build_batch(case, groups, 64, 100, np.random.default_rng(0))
    for req_id, (begin, end) in zip(batch.req_ids, batch.group_block_ranges[1], strict=True):
        assert end - begin == 1 + drafts
        assert batch.block_ids[req_id][1] == list(range(begin, end))
    touched = touched_block_ranges(groups, batch)["a"]
    assert touched.tolist() == [list(blocks) for blocks in batch.group_block_ranges[1]]


def test_only_a_prefix_hit_replays_the_widest_window():
    window = {"block_size": 4, "bounded_replay": True}
    groups = [
        Group(SlidingWindowMLASpec(sliding_window=8, **window), ["a"], 0),
        Group(SlidingWindowMLASpec(sliding_window=32, **window), ["b"], 1),
        Group(SlidingWindowMLASpec(block_size=4, sliding_window=99), ["c"], 2),
    ]
    case = Case("all", tuple(parse_case("x=4@100,4@100c,1@100,4@100:3,100,4@24").requests))
    batch = build_batch(case, groups, 1 << 10, 100, np.random.default_rng(0))
    assert list(batch.replayed.values()) == [32, 0, 0, 0, 0, 20]
    assert batch.expected["bench-0"] == (36, 64, False)
    assert batch.expected["bench-5"] == (24, 0, False)
    # The window is freed up to where the replay starts, not up to where the prefix ends.
    assert [row.count(0) for row in batch.block_ids["bench-0"]] == [(64 - 7) // 4, (64 - 31) // 4, 0]
