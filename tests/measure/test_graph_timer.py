"""The captured step on a real GPU: it computes what the eager one does, and repeats it bit for bit."""

from itertools import pairwise

import pytest
import torch

from kvlab.cases import parse_case
from kvlab.measure.timer import GraphTimer, make_timer
from kvlab.verification import verify

FAMILIES = ("tiny-dense", "tiny-swa", "tiny-mla", "tiny-dsa", "tiny-hybrid")
CASES = ("decode=4*1@4096", "verify=4*4@4096:3", "prefill=512", "chunk=256@2048c", "hit=64@2048")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    from kvlab.engines.load import load_engine

    return load_engine(request.param, device="cuda")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["isolated", "sustained"])
def test_a_replay_computes_the_eager_step_again_and_again(engine, case, mode):
    step = engine.prepare(parse_case(case))
    for fill in ("zeros", "random"):
        step.fill(fill, 1)
        timer = make_timer(step, mode)
        assert isinstance(timer, GraphTimer)
        assert timer.graph_vs_eager <= max(2e-2, 4 * timer.eager_repeat)
        times = timer.time(5)
        first = timer.output().clone()
        assert len(times) == 5
        assert min(times) > 0
        assert first.isfinite().all()
        timer.time(4)
        assert torch.equal(timer.output(), first)
        timer.close()
    step.close()


@pytest.mark.parametrize("case", CASES)
def test_a_graph_serves_every_fill(engine, case):
    step = engine.prepare(parse_case(case))
    step.fill("zeros")
    timer = make_timer(step, "isolated")
    timer.time(2)
    zeros = timer.output().clone()
    step.fill("random", 3)
    timer.time(2)
    captured = timer.output().clone()
    step.restore()
    eager = step.forward()
    # A prefill without a prefix reads nothing of what was filled.
    assert torch.equal(zeros, captured) == case.startswith("prefill")
    assert (captured.float() - eager.float()).norm() <= 2e-2 * eager.float().norm()
    step.close()


def test_nothing_is_written_outside_the_touched_views(engine):
    for result in verify(engine, CASES):
        assert result.ok, result
        assert result.bytes_written > 0
        assert result.reads_unwritten == "no"


def test_rests_lie_between_the_replays_and_in_no_time(engine):
    step = engine.prepare(parse_case("decode=4*1@4096"))
    step.fill("random", 1)
    timer = make_timer(step, "isolated")
    timer.time(5)
    assert timer.busy == []
    timer.rest = 20.0
    times = timer.time(6)
    gaps = [begin - end for (_, end), (begin, _) in pairwise(timer.busy)]
    assert all(gap >= 20 * us / 1e6 for gap, us in zip(gaps, times, strict=False))
    assert all(end - begin >= us / 1e6 for (begin, end), us in zip(timer.busy, times, strict=True))
    timer.rest = 0.0
    assert sorted(times)[3] < 2 * sorted(timer.time(6))[3]
    step.close()
