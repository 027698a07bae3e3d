"""Score fills: what an indexer computes from the cache has the promised shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cases import parse_case
from kvlab.errors import FillError
from kvlab.kv.batch import build_batch
from kvlab.kv.filling import fill_kv_blocks
from kvlab.kv.formats import IndexerFormat
from kvlab.kv.scores import HOT_TOKENS, LEVEL_COPIES, SCORES, Levels
from kvlab.kv.views import layer_tensors

from standins import FullAttentionSpec, Group, MambaSpec, MLAAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

KINDS = [shape.kind for shape in SCORES]
# 2,048 tokens a level at most, hot ones by the thousand, and contexts that end within a block or hold one token.
CASE = "d=1@20000,1@20000,1@700,64@130,40@40,1@2"
NUM_BLOCKS = 680
GUARD = 0xA5


def sparse_world():
    """Indexers of one and of four kernel blocks a block, one in padded pages; keys and values, a window and a state."""
    members = {
        "kv": MLAAttentionSpec(block_size=64),
        "indexer": MLAAttentionSpec(block_size=64, cache_role="indexer"),
        "padded": MLAAttentionSpec(block_size=64, cache_role="indexer"),
        "split": MLAAttentionSpec(block_size=64, cache_role="indexer"),
    }
    padded = torch.full((NUM_BLOCKS * (64 * 132 + 576),), GUARD, dtype=torch.uint8)
    caches = {
        "kv": torch.zeros(NUM_BLOCKS, 64, 8, dtype=torch.bfloat16),
        "indexer": torch.zeros(NUM_BLOCKS, 64, 132, dtype=torch.uint8),
        "padded": padded.as_strided((NUM_BLOCKS, 1, 64, 132), (64 * 132 + 576, 64 * 132, 132, 1)),
        "split": torch.zeros(NUM_BLOCKS * 4, 16, 132, dtype=torch.uint8),
        "window": torch.zeros(NUM_BLOCKS, 2, 64, 8, dtype=torch.bfloat16),
        "state": torch.zeros(NUM_BLOCKS, 4, 8),
    }
    groups = [
        Group(UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=members), list(members), 0),
        Group(SlidingWindowSpec(block_size=64, sliding_window=128), ["window"], 1),
        Group(MambaSpec(block_size=64), ["state"], 2),
    ]
    batch = build_batch(parse_case(CASE), groups, NUM_BLOCKS, 100, np.random.default_rng(0))
    return caches, groups, batch


def filled(fill, seed=0):
    caches, groups, batch = sparse_world()
    fill_kv_blocks(caches, groups, batch, NUM_BLOCKS, fill, torch.Generator().manual_seed(seed))
    layers = {layer.layer: layer for layer in layer_tensors(caches, groups, NUM_BLOCKS)}
    return caches, layers, batch


def decode(layer, batch, request):
    """(codes [tokens, 128] as values, scales [tokens]) of a request's tokens in order; slots beyond them checked."""
    begin, end = batch.group_block_ranges[0][request]
    fields = IndexerFormat().fields(layer.token_major(begin, end))
    codes = fields["codes"].contiguous().view(torch.float8_e4m3fn).float().reshape(-1, 128)
    scales = fields["scales"].contiguous().view(torch.float32).flatten()
    assert codes.isfinite().all()
    assert scales.isfinite().all()
    count = sum(batch.expected[batch.req_ids[request]][:2])
    assert (scales[count:] == scales[count - 1]).all()
    return codes[:count], scales[:count]


def score(codes, scales, seed=0, heads=64):
    """Scores of the tokens for four queries, as the indexer's kernels compute them: float64 [4, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(4, heads, 128, generator=generator, dtype=torch.float64)
    w = torch.randn(4, heads, generator=generator, dtype=torch.float64)
    w *= w.sum(1, keepdim=True).sign() * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]) * (heads * 128) ** -0.5
    keys = codes[:1] if (codes == codes[0]).all() else codes
    return (torch.relu(q @ keys.double().T) * w.unsqueeze(-1)).sum(1) * scales.double()


def each_request(layers, batch):
    for name in ("indexer", "padded", "split"):
        for request in range(len(batch.req_ids)):
            codes, scales = decode(layers[name], batch, request)
            yield codes, scales, score(codes, scales)


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_of_a_layer_have_one_key_but_for_its_scale(kind):
    _, layers, batch = filled(kind)
    vectors = []
    for name in ("indexer", "padded", "split"):
        codes = torch.cat([decode(layers[name], batch, request)[0] for request in range(len(batch.req_ids))])
        vector = codes[0]
        assert (codes == vector).all()
        assert 0.5 < vector.std() < 1.5
        vectors.append(vector)
        # A key is its codes times its scale, as any reader decodes it.
        begin, end = batch.group_block_ranges[0][2]
        keys = IndexerFormat().decode(layers[name].token_major(begin, end)).reshape(-1, 128)
        _, scales = decode(layers[name], batch, 2)
        torch.testing.assert_close(keys[:700], vector * scales.unsqueeze(1))
    assert torch.stack(vectors).unique(dim=0).shape[0] == 3
    # Scales are shared by the layers, not by the requests.
    scales = [[decode(layers[name], batch, r)[1] for r in (0, 1)] for name in ("indexer", "padded", "split")]
    assert all(torch.equal(scales[0][r], scales[i][r]) for i in (1, 2) for r in (0, 1))
    assert torch.equal(scales[0][0], scales[0][1]) == (kind == "ramp")


@pytest.mark.parametrize("kind", ["levels", "hot_scattered"])
def test_the_other_layers_are_those_of_random_and_the_rest_of_the_pool_is_left_alone(kind):
    caches, layers, batch = filled(kind, 3)
    plain, *_ = filled("random", 3)
    mixed, *_ = filled(f"mix(kv=random, indexer={kind})", 3)
    for name in caches:
        if layers[name].spec.__dict__.get("cache_role") is None:
            assert torch.equal(caches[name].view(torch.uint8), plain[name].view(torch.uint8)), name
        assert torch.equal(caches[name].view(torch.uint8), mixed[name].view(torch.uint8)), name
    owned = {block for begin, end in batch.group_block_ranges[0] for block in range(begin, end)}
    others = [block for block in range(NUM_BLOCKS) if block not in owned]
    assert not caches["indexer"][others].any()
    assert (caches["padded"][others] == GUARD).all()
    storage = torch.empty(0, dtype=torch.uint8).set_(caches["padded"].untyped_storage()).view(NUM_BLOCKS, -1)
    assert (storage[:, 64 * 132 :] == GUARD).all()


def levels_of(scores):
    """Counts of the distinct scores of each query; what float64 rounds apart counts as one."""
    for row in scores:
        ordered = row.sort().values
        steps = (ordered[1:] - ordered[:-1]) > 1e-9 * ordered.abs().max()
        yield np.diff([0, *(np.flatnonzero(steps.numpy()) + 1), len(row)])


def test_levels_are_few_and_each_of_just_under_2048_tokens():
    _, layers, batch = filled("levels")
    for _, scales, scores in each_request(layers, batch):
        count = len(scales)
        levels = min(count, max(4, math.ceil(count / LEVEL_COPIES)))
        for copies in levels_of(scores):
            assert len(copies) == levels
            assert copies.max() - copies.min() <= 1
            assert copies.max() <= LEVEL_COPIES
        if count == 20000:
            assert levels == 10
            assert copies.min() == 2000
            # Permuted: a run of one level is as short as chance makes it.
            assert (scales[1:] == scales[:-1]).float().mean() < 0.15
            torch.testing.assert_close(scales.unique()[1:] / scales.unique()[:-1], torch.full((9,), 1.1))


@pytest.mark.parametrize("count", [1, 3, 2047, 2048, 100_000, 3_000_000])
def test_levels_of_any_context_are_finite_and_as_many_as_it_takes(count):
    scales = Levels().scales(count, torch.Generator().manual_seed(0))
    distinct, copies = scales.unique(return_counts=True)
    assert scales.isfinite().all()
    assert scales.min() == 1
    assert len(distinct) == min(count, max(4, math.ceil(count / 2047)))
    assert copies.max() <= 2047
    if count == 100_000:
        assert copies.min() >= 2040


def test_pow2_scores_are_powers_of_two_apart():
    _, layers, batch = filled("pow2")
    for _, scales, scores in each_request(layers, batch):
        mantissa, exponent = torch.frexp(scales)
        assert (mantissa == 0.5).all()
        assert set(exponent.tolist()) <= set(range(-3, 5))
        if len(scales) > 1000:
            for copies in levels_of(scores):
                assert len(copies) == 8
                assert abs(copies / len(scales) - 1 / 8).max() < 0.02


def test_cluster_scores_lie_within_one_per_cent_of_one_another_s_centre():
    _, layers, batch = filled("cluster")
    for _, scales, scores in each_request(layers, batch):
        centre = scores / scales * 3
        assert ((scores - centre).abs() <= 0.01001 * centre.abs()).all()
        assert ((scores[:2] > 0).all(1) ^ (scores[:2] < 0).all(1)).all()
        if len(scales) > 1000:
            # Not ties: nearly all distinct in fp32, normally spread.
            assert scales.unique().numel() > len(scales) / 4
            assert abs(scales.std() / 0.00987 - 1) < 0.05


def picks(scores, k):
    return [row.topk(k).indices.sort().values for row in scores]


def test_hot_contiguous_picks_are_one_run_of_neighbours_for_either_sign():
    _, layers, batch = filled("hot_contiguous")
    for _, scales, scores in each_request(layers, batch):
        count = len(scales)
        hot = min(HOT_TOKENS, count // 2)
        for k in {1, hot // 8, hot // 4, hot // 2 - hot // 32}:
            for chosen in picks(scores, k) if 0 < k <= hot // 2 else ():
                assert int(chosen[-1] - chosen[0]) == k - 1
                assert (count - hot) // 2 <= int(chosen[0])
                assert int(chosen[-1]) < (count + hot) // 2


def test_hot_scattered_has_the_same_scores_and_scattered_picks():
    _, contiguous, batch = filled("hot_contiguous")
    _, scattered, _ = filled("hot_scattered")
    pairs = zip(each_request(contiguous, batch), each_request(scattered, batch), strict=True)
    for (codes, scales, scores), (other_codes, other_scales, other_scores) in pairs:
        assert torch.equal(codes, other_codes)
        assert torch.equal(scales.sort().values, other_scales.sort().values)
        assert torch.equal(scores.sort().values, other_scores.sort().values)
        if len(scales) > 1000:
            for chosen in picks(other_scores, 2048):
                assert (chosen.diff() == 1).float().mean() < 0.2
                assert chosen[0] < 200
                assert chosen[-1] > len(scales) - 200


def test_iid_tiny_and_huge_are_one_shape_at_three_sizes():
    shapes = {}
    for kind in ("iid", "tiny", "huge"):
        _, layers, batch = filled(kind)
        shapes[kind] = list(each_request(layers, batch))
    for (_, iid, scores), (_, tiny, small), (_, huge, large) in zip(*shapes.values(), strict=True):
        torch.testing.assert_close(tiny, iid * 1e-8)
        torch.testing.assert_close(huge, iid * 1e6)
        assert torch.equal(scores.argsort(), large.argsort())
        if len(iid) > 1000:
            assert abs(iid.std() - 1) < 0.05
            assert (small.half() == 0).double().mean() > 0.9
            assert large.half().isinf().double().mean() > 0.5


def test_ramp_picks_the_last_tokens_or_the_first():
    _, layers, batch = filled("ramp")
    for _, scales, scores in each_request(layers, batch):
        count = len(scales)
        assert scales[0] == 0.5
        assert count == 1 or scales[-1] == 1
        k = max(1, count // 8)
        for row, chosen in zip(scores, picks(scores, k), strict=True):
            first = 0 if row[0] < 0 else count - k
            assert chosen.tolist() == list(range(first, first + k))


@pytest.mark.parametrize("shape", SCORES, ids=KINDS)
@given(count=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_scales_of_any_count_are_finite_and_repeat_with_the_seed(shape, count, seed):
    first, again = (shape().scales(count, torch.Generator().manual_seed(seed)) for _ in range(2))
    assert first.shape == (count,)
    assert first.dtype == torch.float32
    assert first.isfinite().all()
    assert torch.equal(first, again)


def test_a_request_s_scales_do_not_depend_on_the_others():
    _, layers, batch = filled("hot_scattered")
    caches, groups, _ = sparse_world()
    ranges = [[group[1]] for group in batch.group_block_ranges]
    only = build_batch(parse_case("d=1@20000"), groups, NUM_BLOCKS, 100, np.random.default_rng(0))
    only.group_block_ranges[:] = ranges
    fill_kv_blocks(caches, groups, only, NUM_BLOCKS, "hot_scattered")
    begin, end = ranges[0][0]
    assert torch.equal(caches["indexer"][begin:end], layers["indexer"].tensor[begin:end])
    assert not caches["indexer"][:begin].any()


def test_slots_of_several_tokens_or_of_one_rank_are_counted_as_slots():
    # Four tokens to a slot, as DeepSeek-V4's compressed keys; and blocks of two ranks' tokens, of which half are here.
    for block_size, dcp_size, slots in ((256, 1, 250), (64, 2, 512), (64, 1, 1000)):
        spec = MLAAttentionSpec(block_size=block_size, num_states=64, cache_role="indexer", dcp_sharded=True)
        groups = [Group(spec, ["indexer"])]
        cache = torch.zeros(40, 64, 132, dtype=torch.uint8)
        batch = build_batch(parse_case("d=1@1000"), groups, 40, 100, np.random.default_rng(0), dcp_size)
        fill_kv_blocks({"indexer": cache}, groups, batch, 40, "ramp")
        begin, end = batch.group_block_ranges[0][0]
        (layer,) = layer_tensors({"indexer": cache}, groups, 40)
        scales = IndexerFormat().fields(layer.token_major(begin, end))["scales"].contiguous().view(torch.float32)
        torch.testing.assert_close(scales.flatten()[:slots], torch.linspace(0.5, 1, slots))
        assert (scales.flatten()[slots:] == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_an_indexer_is_refused_before_any_byte(kind):
    group = Group(FullAttentionSpec(block_size=16), ["attn"])
    cache = torch.full((9, 2, 16, 4), 7.0)
    batch = build_batch(parse_case("d=1@64"), [group], 9, 100, np.random.default_rng(0))
    with pytest.raises(FillError, match=f"{kind}.* no layer of this model is one; its roles are kv"):
        fill_kv_blocks({"attn": cache}, [group], batch, 9, kind)
    assert (cache == 7).all()


def test_an_indexer_of_another_format_is_refused_with_its_layer():
    group = Group(MLAAttentionSpec(block_size=16, cache_role="indexer"), ["keys"])
    cache = torch.full((9, 16, 128), 7.0, dtype=torch.bfloat16)
    batch = build_batch(parse_case("d=1@64"), [group], 9, 100, np.random.default_rng(0))
    with pytest.raises(FillError, match=r"'keys', shape \(9, 16, 128\).*one scale a token, not bfloat16"):
        fill_kv_blocks({"keys": cache}, [group], batch, 9, "levels")
    assert (cache == 7).all()
