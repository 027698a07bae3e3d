"""A round: what comes before the replays that count, in either mode."""

import time
from collections import Counter

import pytest
import torch

from kvlab.cases import parse_case
from kvlab.measure.telemetry import NoTelemetry, Reading, Telemetry
from kvlab.measure.timer import Timer
from kvlab.plan import Plan
from kvlab.rounds import SETTLE_CAPPED_S, SETTLE_S, measure_round

PLAN = Plan.of(["random"], replays=3, discard=1)


class Clock(Timer):
    """Replays of a millisecond, the first of a call slow: the queue was empty."""

    def __init__(self, mode, kind):
        self.mode, self.kind, self.calls, self.settled = mode, kind, [], []

    def time(self, count):
        self.calls.append((count, time.perf_counter()))
        time.sleep(1e-3 * count)
        return [2000.0, *[1000.0] * (count - 1)]

    def settle(self, seconds):
        self.settled.append(seconds)

    def output(self):
        return torch.zeros(1)


class Card(Telemetry):
    source = "fake"

    def __init__(self, throttled):
        self.throttled = throttled

    def read(self):
        return Reading(throttled=self.throttled)


def run(engine, clock, telemetry):
    step = engine.prepare(parse_case("d=1@40"))
    rows, _ = measure_round(step, clock, PLAN, clock.mode, 0, telemetry, {arm.name: True for arm in PLAN.arms})
    return rows


@pytest.mark.parametrize("throttled", [False, True])
def test_a_sustained_replay_that_counts_finds_another_before_it(hand_engine, throttled):
    clock = Clock("sustained", "cuda_graph_events")
    rows = run(hand_engine, clock, Card(throttled))
    assert {row["us"] for row in rows} == {1000.0}
    assert len(rows) == 3 * PLAN.replays
    assert clock.settled == [SETTLE_S, *[SETTLE_CAPPED_S] * throttled] * 3


@pytest.mark.parametrize(("paced_s", "replays"), [(0.0, 3), (1e-4, 10), (0.1, 6), (0.5, 3)])
def test_a_sustained_visit_times_as_many_replays_as_its_settling_is_worth(hand_engine, paced_s, replays):
    clock = Clock("sustained", "cuda_graph_events")
    clock.paced_s = paced_s
    arms = Counter(row["arm"] for row in run(hand_engine, clock, Card(False)))
    assert set(arms.values()) == {replays}
    clock = Clock("isolated", "cuda_graph_events")
    clock.paced_s = paced_s
    assert len(run(hand_engine, clock, Card(False))) == 3 * PLAN.replays


@pytest.mark.parametrize(("kind", "least"), [("cuda_graph_events", 0.1), ("cpu_clock", 0.0)])
def test_an_isolated_arm_has_come_to_its_pace_on_a_gpu(hand_engine, kind, least):
    clock = Clock("isolated", kind)
    rows = run(hand_engine, clock, NoTelemetry("test"))
    assert len(rows) == 3 * PLAN.replays
    begin, counted = None, 0
    for count, at in clock.calls:
        begin = at if begin is None else begin
        if count == PLAN.replays:
            assert at - begin >= least
            begin, counted = None, counted + 1
    assert counted == 3
    assert kind != "cpu_clock" or [count for count, _ in clock.calls] == [1, 3] * 3
