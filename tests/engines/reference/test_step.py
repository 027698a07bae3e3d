"""What a step reads, what it writes, and that it does so alike every time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, cases, part_of, poison, readable_bytes, relative_rms, scratch, tiny_engine

from kvlab.cases import Case, parse_case
from kvlab.engines.reference import ReferenceEngine, ReferenceStep
from kvlab.errors import EngineError
from kvlab.kv.extents import storage_extents

families = pytest.mark.parametrize("family", FAMILIES)
scratches = st.sampled_from((8 * 2**20, 20_000))
few = settings(max_examples=12, deadline=None, derandomize=True)


def filled_step(family: str, case: Case, seed: int = 0, **given) -> tuple[ReferenceEngine, ReferenceStep]:
    engine = tiny_engine(family, **given)
    poison(engine)
    step = engine.prepare(case, seed)
    step.fill("random", seed)
    return engine, step


def touched_bytes(step: ReferenceStep) -> torch.Tensor:
    (extent,) = storage_extents(step.touched).values()
    return extent.mask()


@families
@few
@given(cases(), st.integers(0, 3), scratches)
def test_a_step_writes_inside_the_touched_views_only(family, case, seed, scratch_bytes):
    engine, step = filled_step(family, case, seed)
    before = engine.caches.buffer.clone()
    with scratch(scratch_bytes):
        hidden = step.forward()
    assert hidden.shape == (case.num_tokens, engine.config.hidden_size)
    assert hidden.isfinite().all()
    changed = engine.caches.buffer != before
    assert changed.any()
    assert not (changed & ~touched_bytes(step)).any()


@families
@few
@given(cases(), st.integers(0, 3), scratches)
def test_nothing_but_the_tokens_before_the_step_is_read(family, case, seed, scratch_bytes):
    engine, step = filled_step(family, case, seed)
    with scratch(scratch_bytes):
        expected = step.forward().clone()
        step.restore()
        # NaN in the null block, foreign blocks, tails of pages, padding, tokens that left the window, the slots that
        # the step itself fills, and the states of requests that start here.
        keep = readable_bytes(engine, step.batch)
        poison(engine, keep)
        hidden = step.forward()
    assert torch.equal(hidden, expected)
    untouched = ~keep & ~touched_bytes(step)
    assert (engine.caches.buffer[untouched] == -1).all()


@families
@few
@given(cases(), st.integers(0, 3))
def test_restored_steps_repeat_bit_by_bit(family, case, seed):
    engine, step = filled_step(family, case, seed)
    start = engine.caches.buffer.clone()
    first = step.forward().clone()
    written = engine.caches.buffer.clone()
    step.restore()
    assert torch.equal(engine.caches.buffer, start)
    assert torch.equal(step.forward(), first)
    assert torch.equal(engine.caches.buffer, written)


@families
@few
@given(cases(max_requests=5), st.integers(0, 3))
@example(parse_case("a=3*20@50"), 0)
def test_a_request_gives_the_same_in_a_mixed_batch_as_alone(family, case, seed):
    # All tokens are chosen: which of two tied ones is may turn on the last bit of a product, so on the batch's shape.
    engine, step = filled_step(family, case, seed, topk=64)
    together = step.forward().split([r.query_len for r in case.requests])
    for req_id, request, hidden in zip(step.batch.req_ids, case.requests, together, strict=True):
        step.restore()
        alone = ReferenceStep(engine, Case("alone", (request,)), part_of(step.batch, [req_id])).forward()
        # As in test_model.py: a value may round to the next e4m3 code, a wrong token shows above 2e-2.
        assert relative_rms(alone, hidden) < 1e-2


@families
@pytest.mark.parametrize("fill", ["zeros", "random", "constant(0.015)"])
def test_every_fill_gives_finite_hidden_states(family, fill):
    step = tiny_engine(family).prepare(parse_case("any=1@40,5@30:4,9@50,12@40c,17"))
    step.fill(fill)
    assert step.first_nonfinite() is None
    step.restore()
    assert step.forward().isfinite().all()


@families
def test_contents_reach_the_hidden_states(family):
    engine = tiny_engine(family)
    step = engine.prepare(parse_case("a=2*1@40"))
    outputs = []
    for seed in (0, 1):
        step.fill("random", seed)
        outputs.append(step.forward().clone())
    assert not torch.allclose(*outputs, atol=1e-2)


@families
def test_the_first_nonfinite_layer_is_named(family):
    engine = tiny_engine(family)
    step = engine.prepare(parse_case("a=2*1@40"))
    assert step.batch.group_block_ranges
    for index, kind in enumerate(engine.config.kinds):
        step.fill("random")
        name = f"model.layers.{index}.{'mixer' if kind == 'mamba' else 'self_attn'}"
        cache = engine.kv_caches[name if kind == "mamba" else f"{name}.attn"]
        group = next(g for g, group in enumerate(engine.kv_cache_groups) if any(name in n for n in group.layer_names))
        block = step.batch.group_block_ranges[group][1][1] - 1
        if kind == "mamba":
            cache[1][block, 0, 0, 0] = torch.inf
        elif cache.dtype == torch.uint8:
            # Sparse layers may not choose a given token; they choose some of them all.
            cache[step.batch.group_block_ranges[group][1][0] : block + 1, :, :512] = 0xFF
        else:
            cache[block * engine.caches.groups[group].kv_cache_spec.kernel_blocks] = torch.nan
        step.save()
        assert step.first_nonfinite() == name


def test_a_nan_in_an_indexer_is_found_though_the_hidden_states_stay_finite():
    engine = tiny_engine("tiny-dsa")
    step = engine.prepare(parse_case("a=1@40"))
    step.fill("random")
    engine.kv_caches["model.layers.1.self_attn.indexer.k_cache"][2].view(-1)[:128] = 0xFF
    step.save()
    assert step.first_nonfinite() == "model.layers.1.self_attn.indexer"
    step.restore()
    assert step.forward().isfinite().all()


def test_a_closed_or_unfilled_step_says_so():
    step = tiny_engine("tiny-dense").prepare(parse_case("a=1@40"))
    with pytest.raises(EngineError, match="no contents yet"):
        step.first_nonfinite()
    step.close()
    with pytest.raises(EngineError, match="step is closed"):
        step.forward()


@families
@pytest.mark.parametrize("text", ["a=4*1@40", "a=3*5@40:4", "a=64@90", "a=1@300,5@100:4,64@200c,70"])
def test_a_forward_needs_no_values_on_the_host(family, text):
    # On the meta device there are no values to copy, to branch on or to index by, and a stray CPU tensor is an error:
    # what runs there can be captured.
    engine = ReferenceEngine(tiny_engine(family).config, torch.device("meta"), 200, torch.bfloat16)
    case = parse_case(text)
    hidden = engine.prepare(case).forward()
    assert (hidden.shape, hidden.device.type) == ((case.num_tokens, 32), "meta")


@pytest.mark.gpu
@families
def test_a_captured_forward_equals_the_eager_one(family):
    engine = ReferenceEngine(tiny_engine(family).config, torch.device("cuda"), 200, torch.bfloat16)
    step = engine.prepare(parse_case("any=1@40,5@30:4,9@50,12@40c,17"))
    step.fill("random")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.forward()
        step.restore()
        eager = step.forward().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step.restore()
        captured = step.forward()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(captured, eager, rtol=0.02, atol=0.02)
