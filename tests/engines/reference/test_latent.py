"""The sparse indexer: what it chooses among tied, crowded and flat scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_engine

from kvlab.cases import parse_case
from kvlab.engines.reference.latent import index_scores, select_tokens
from kvlab.kv.formats import IndexerFormat

CASES = ("decode=3*1@50", "verify=5@50:4", "hit=20@50", "mixed=1@50,30,3*2@9:1,12@40c")


def chosen_tokens(step):
    """By indexer and bucket: chosen tokens [R, Q, k] and what they were chosen by."""
    seen: dict[str, list[torch.Tensor]] = {}
    hidden = step.observe(lambda name, tensor: seen.setdefault(name, []).append(tensor.clone()))
    assert hidden.isfinite().all()
    return {name: chosen for name, chosen in seen.items() if name.endswith(".chosen")}, seen


def fill_indexer(step, kind: str) -> None:
    """Contents whose scores crowd: one vector in every token, its scale by the kind."""
    engine, fmt = step.engine, IndexerFormat()
    step.fill("zeros" if kind == "zeros" else "random")
    generator = torch.Generator().manual_seed(0)
    for name, cache in engine.kv_caches.items():
        if not name.endswith("k_cache") or kind in ("zeros", "random"):
            continue
        (blocks,) = (slice(ranges[0][0], ranges[-1][1]) for ranges in step.batch.group_block_ranges)
        view = cache[blocks]
        shape = (*view.shape[:-1], 1)
        direction = torch.randn(128, generator=generator)
        scale = {
            "tied": torch.ones(shape),
            # Within 1 %, so that all scores fall into one bin of a coarse histogram.
            "one bin": 3 + 0.01 * torch.randn(shape, generator=generator),
            # Half of the tokens score exactly 0, the others less and more.
            "plateau": torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.5).float(),
        }[kind]
        fmt.encode(direction * scale, view)
        if kind == "plateau":
            view_fields = fmt.fields(view)
            for field in view_fields.values():
                field.masked_fill_(scale == 0, 0)
    step.save()


@pytest.mark.parametrize("kind", ["zeros", "random", "tied", "one bin", "plateau"])
@pytest.mark.parametrize("text", CASES)
def test_chosen_tokens_are_distinct_and_in_range_whatever_the_scores(kind, text):
    engine = tiny_engine("tiny-dsa")
    step = engine.prepare(parse_case(text))
    fill_indexer(step, kind)
    assert step.first_nonfinite() is None
    step.restore()
    chosen, _ = chosen_tokens(step)
    assert len(chosen) == engine.config.num_layers
    lengths = dict.fromkeys((r.query_len, r.kv_len) for r in parse_case(text).requests)
    for buckets in chosen.values():
        assert len(buckets) == len(lengths)
        for picked, (queries, kv_len) in zip(buckets, lengths, strict=True):
            k = min(engine.config.topk, kv_len)
            assert picked.shape[1:] == (queries, k)
            assert 0 <= picked.min() <= picked.max() < kv_len
            assert all(len(set(row)) == k for row in picked.flatten(0, 1).tolist())


def test_contents_that_crowd_do_so_in_the_scores():
    engine = tiny_engine("tiny-dsa")
    step = engine.prepare(parse_case("decode=1@50"))
    distinct = {}
    for kind in ("zeros", "tied", "one bin", "plateau", "random"):
        fill_indexer(step, kind)
        _, seen = chosen_tokens(step)
        scores = seen["model.layers.0.self_attn.indexer"][0][0, 0, :49]
        distinct[kind] = len(scores.unique())
        if kind == "plateau":
            assert (scores == 0).sum() > 10
    assert distinct["zeros"] == distinct["tied"] == 1
    assert 1 < distinct["one bin"] <= 49
    assert distinct["random"] > 40


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_selection_is_a_top_k_of_the_visible_scores(data):
    queries, length = data.draw(st.integers(1, 6)), data.draw(st.integers(6, 30))
    topk = data.draw(st.integers(1, 12))
    levels = data.draw(st.sampled_from((1, 3, 1000)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.randint(-levels, levels + 1, (2, queries, length), generator=generator).float()
    positions, keys = torch.arange(length - queries, length), torch.arange(length)
    chosen = select_tokens(scores.clone(), positions, keys, topk)
    assert chosen.shape == (2, queries, min(topk, length))
    for request in range(2):
        for i, position in enumerate(positions.tolist()):
            row = scores[request, i].tolist()
            picked = set(chosen[request, i].tolist())
            assert len(picked) == chosen.shape[2]
            seen = {j for j in picked if j <= position}
            assert len(seen) == min(topk, position + 1)
            rest = set(range(position + 1)) - seen
            assert not rest or min(row[j] for j in seen) >= max(row[j] for j in rest)


def test_index_scores_are_the_weighted_sum_of_rectified_products():
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(2, 3, 4, 128, generator=generator), torch.randn(2, 7, 128, generator=generator)
    weight = torch.randn(2, 3, 4, generator=generator)
    scores = index_scores(q, weight, keys)
    for r, i, j in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(7)).tolist():
        expected = sum(float(weight[r, i, h]) * max(0.0, float(q[r, i, h] @ keys[r, j])) for h in range(4))
        assert float(scores[r, i, j]) == pytest.approx(expected, abs=1e-3)
