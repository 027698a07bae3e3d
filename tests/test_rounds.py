"""A round: what comes before the replays that count, in either mode."""

import time
from collections import Counter

import pytest
import torch

from kvlab import rounds
from kvlab.cases import parse_case
from kvlab.measure.settling import MORE_S, SETTLE_CAPPED_S
from kvlab.measure.telemetry import NoTelemetry, Reading, Telemetry
from kvlab.measure.timer import COUNTED, Replay, Timer, make_timer
from kvlab.plan import Plan
from kvlab.rounds import measure_round

from handmade_marks import marks

PLAN = Plan.of(["random"], replays=3, discard=1)


class Clock(Timer):
    """Replays of a millisecond, the first of a call slow: the queue was empty."""

    def __init__(self, mode, kind):
        self.mode, self.kind, self.calls, self.settled = mode, kind, [], []

    def time(self, count):
        self.calls.append((count, time.perf_counter()))
        time.sleep(1e-3 * count)
        return [2000.0, *[1000.0] * (count - 1)]

    def settle(self, seconds, until=lambda: False):
        time.sleep(0.1)
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
    rows, _ = measure_round(step, clock, PLAN, 0, telemetry, {arm.name: True for arm in PLAN.arms})
    return rows


@pytest.mark.parametrize("throttled", [False, True])
def test_a_sustained_replay_that_counts_finds_another_before_it(hand_engine, throttled):
    clock = Clock("sustained", "cuda_graph_events")
    clock.paced_s = 0.1
    rows = run(hand_engine, clock, Card(throttled))
    assert {row["us"] for row in rows} == {1000.0}
    assert {row["throttled"] for row in rows} == {throttled}
    # Under a cap as many as fill two seconds, under every arm.
    assert set(Counter(row["arm"] for row in rows).values()) == {20 if throttled else PLAN.replays}
    assert all(SETTLE_CAPPED_S <= seconds <= SETTLE_CAPPED_S + MORE_S for seconds in clock.settled)
    assert len(set(clock.settled)) == 3  # no two visits in one phase of what is left of the swing


class Warming(Telemetry):
    """A card that draws little until some time after the contents changed."""

    source = "fake"

    def __init__(self, cold_s):
        self.since, self.cold_s = time.perf_counter(), cold_s

    def read(self):
        return Reading(watts=100.0 if time.perf_counter() - self.since < self.cold_s else 600.0, throttled=False)


def test_what_the_card_drew_while_it_woke_is_not_the_arms(hand_engine):
    card = Warming(0.3)

    class Settling(Clock):
        def settle(self, seconds, until=lambda: False):
            card.since = time.perf_counter()
            time.sleep(1.0)

    rows = run(hand_engine, Settling("sustained", "cuda_graph_events"), card)
    assert {row["watts"] for row in rows} == {600.0}


def test_a_power_sensor_that_averages_over_rests_is_not_asked(hand_engine):
    clock = Clock("isolated", "cuda_graph_events")
    rows = run(hand_engine, clock, Warming(0.0))
    assert {row["watts"] for row in rows} == {600.0}
    clock.rest = 3.0
    clock.busy = [(0.0, time.perf_counter() + 60)]
    assert {row["watts"] for row in run(hand_engine, clock, Warming(0.0))} == {None}


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


class Counting(Clock):
    """Counts its clock in all but the last replay of a call."""

    clock = COUNTED

    def replay(self, count):
        sheets = [marks(1755.0, us) for us in self.time(count)]
        sheets[-1][1] = 0
        return [Replay(us, sheet) for us, sheet in zip([1000.0] * count, sheets, strict=True)]


@pytest.mark.parametrize("mode", ["isolated", "sustained"])
@pytest.mark.parametrize("counts", [True, False])
def test_clocks_are_of_one_source(hand_engine, mode, counts):
    """What the card counts lies some MHz off what its driver reads: where one lacks, the other does not fill in."""
    clock = (Counting if counts else Clock)(mode, "cuda_graph_events")
    rows = run(hand_engine, clock, Reads(1740.0))
    told = {row["sm_mhz"] for row in rows}
    if counts:
        assert {None, *(mhz for mhz in told if mhz)} == told
        assert [mhz for mhz in told if mhz] == pytest.approx([1755.0] * (len(told) - 1), rel=1e-3)
    else:
        assert told == {1740.0}


class Reads(Telemetry):
    source = "fake"

    def __init__(self, mhz):
        self.mhz = mhz

    def read(self):
        return Reading(sm_mhz=self.mhz, throttled=False)


@pytest.mark.parametrize("mode", ["isolated", "sustained"])
def test_a_cpu_never_waits_for_a_power_cap(hand_engine, mode, monkeypatch):
    """Its timer knows one mode, whatever was asked for."""
    monkeypatch.setattr(rounds, "settle", lambda *args, **how: pytest.fail("settled"))
    step = hand_engine.prepare(parse_case("d=1@40"))
    step.fill("zeros")
    timer = make_timer(step, mode)
    rows, _ = measure_round(step, timer, PLAN, 0, NoTelemetry("test"), {arm.name: True for arm in PLAN.arms})
    assert len(rows) == 3 * PLAN.replays


class Failing(Card):
    def read(self):
        raise OSError("card lost")


@pytest.mark.parametrize("mode", ["isolated", "sustained"])
def test_a_sensor_that_fails_does_not_end_the_round_and_is_told(hand_engine, mode):
    clock = Clock(mode, "cuda_graph_events")
    step = hand_engine.prepare(parse_case("d=1@40"))
    finite = {arm.name: True for arm in PLAN.arms}
    rows, readings = measure_round(step, clock, PLAN, 0, Failing(False), finite)
    assert {row["sm_mhz"] for row in rows} == {None}
    assert [each["arm"] for each in readings] == list(dict.fromkeys(row["arm"] for row in rows))
    assert {each["failure"] for each in readings} == {"OSError: card lost"}
