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


class Lanes:
    """Graphs of 4 ms of one stream, each with one pair of events: a lane that is launched again before its last replay
    was read would lose it."""

    def __init__(self, number, now):
        self.now, self.order, self.launched, self.most = now, [], 0, 0
        self.lanes = [Lane(self) for _ in range(number)]


class Lane:
    def __init__(self, card):
        self.card, self.graph, self.replays = card, self, []

    def replay(self):
        assert not self.replays, "launched again before its last replay was read"
        self.card.launched += 1
        self.replays.append(self.card.launched)
        self.card.order.append(self)
        self.card.most = max(self.card.most, len(self.card.order))

    def elapsed_us(self):
        assert self.card.order[0] is self, "another replay runs before this one"
        self.card.order.pop(0)
        self.card.now[0] += 0.004
        return 1000.0 * self.replays.pop()


@pytest.fixture
def graph_timer(monkeypatch):
    def make(lanes):
        now = [0.0]
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        timer = GraphTimer.__new__(GraphTimer)
        card = Lanes(lanes, now)
        timer._lanes = card.lanes
        return timer, card

    return make


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_graph_settles_for_the_time_that_replays_take_with_their_restores(graph_timer, lanes):
    """A step far shorter than its own restore must not settle for minutes."""
    timer, card = graph_timer(lanes)
    timer.settle(0.2)
    assert timer.paced_s == pytest.approx(0.004)
    assert card.now[0] == pytest.approx(0.2, abs=0.02)
    timer.settle(1.0)
    assert card.now[0] == pytest.approx(1.2, abs=0.04)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("stop", [None, 1, 2, 4])
def test_every_replay_that_is_launched_is_waited_for_in_order(graph_timer, lanes, count, stop):
    timer, card = graph_timer(lanes)
    asked = []
    times = timer._time(count, lambda: asked.append(1) or (stop is not None and len(asked) >= stop))
    assert times == [1000.0 * n for n in range(1, card.launched + 1)]
    assert not card.order
    # Two graphs: one is queued while the other runs; so one more is through before a stop takes hold.
    assert card.most == min(lanes, count)
    assert len(times) == (count if stop is None else min(count, stop + lanes - 1))
    if lanes == 2:
        assert timer._last is timer._lanes[(len(times) - 1) % 2]
