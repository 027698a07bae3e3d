"""What the CPU timer times, and that nothing else is inside the interval."""

import time

import pytest
import torch

from kvlab.cases import parse_case
from kvlab.engines.base import Step
from kvlab.errors import EngineError
from kvlab.measure.timer import GraphTimer, make_timer, relative_rms


def test_every_replay_starts_from_the_saved_contents(hand_engine):
    step = hand_engine.prepare(parse_case("d=2*1@40"))
    step.fill("random", 3)
    timer = make_timer(step, "isolated")
    outputs = []
    for _ in range(3):
        assert len(timer.time(2)) == 2
        outputs.append(timer.output())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_no_restore_or_fill_is_inside_the_timed_interval(hand_engine, monkeypatch):
    """Public case: a fill that ran inside the measured interval (vllm PR 56473)."""
    step = hand_engine.prepare(parse_case("d=1@40"))
    step.fill("zeros")
    inside, spans, clock = [], [], time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: spans.append(clock()) or spans[-1])
    slow = Step.restore

    def restore(self):
        inside.append(len(spans) % 2)
        time.sleep(0.02)
        slow(self)

    monkeypatch.setattr(Step, "restore", restore)
    times = make_timer(step, "isolated").time(3)
    assert inside == [0, 0, 0]
    assert max(times) < 20_000


def test_an_unfilled_cache_is_never_run(hand_engine):
    """Public case: an uninitialised cache (vllm PR 31928)."""
    step = hand_engine.prepare(parse_case("d=1@40"))
    with pytest.raises(EngineError, match="no contents yet"):
        make_timer(step, "isolated").time(1)
    assert hand_engine.forwards == 0


def test_unknown_modes_and_devices_are_refused(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    with pytest.raises(EngineError, match="isolated or sustained"):
        make_timer(step, "warm")
    hand_engine.device = torch.device("meta")
    with pytest.raises(EngineError, match="cpu and cuda"):
        make_timer(step, "isolated")


def test_relative_rms_is_zero_for_equals_and_scales():
    x = torch.randn(7, 5)
    assert relative_rms(x, x) == 0
    assert relative_rms(1.01 * x, x) == pytest.approx(0.01, rel=1e-3)
    assert relative_rms(torch.zeros(3), torch.zeros(3)) == 0


def test_a_graph_settles_for_the_time_that_replays_take_with_their_restores(monkeypatch):
    """A step far shorter than its own restore must not settle for minutes."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Graph(GraphTimer):
        def __init__(self):
            self.counts = []

        def time(self, count):
            self.counts.append(count)
            now[0] += 0.004 * count
            return [10.0] * count

    timer = Graph()
    timer.settle(0.2)
    assert timer.paced_s == pytest.approx(0.004)
    assert now[0] == pytest.approx(0.2, abs=0.02)
    # One call for all, so that a sustained load has no pause.
    assert len(timer.counts) == 2
