"""Readings beside the replays: often enough, in order, and what they say together."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.measure.sampler import PERIOD_S, READING_S, Sampler, Summary, TimedReading, summarise
from kvlab.measure.telemetry import NoTelemetry, Reading, Telemetry, make_telemetry


class Card(Telemetry):
    """A card whose counter moves every `step_s` at `watts`."""

    source = "fake"

    def __init__(self, watts=500.0, step_s=0.0, fails_at=None):
        self.watts, self.step_s, self.fails_at, self.count = watts, step_s, fails_at, 0
        self.threads = set()

    def read(self):
        self.threads.add(threading.get_ident())
        self.count += 1
        if self.count == self.fails_at:
            raise OSError("card lost")
        now = time.perf_counter()
        counted = now - now % self.step_s if self.step_s else now
        return Reading(1980.0 - self.count, 3201.0, self.watts, 50.0, False, "", joules=self.watts * counted)


def test_readings_span_the_block_and_come_from_another_thread():
    card = Card()
    begin = time.perf_counter()
    with Sampler(card, period_s=0.01) as sampler:
        time.sleep(0.15)
        end = time.perf_counter()
    readings = sampler.readings
    assert 6 <= len(readings) <= 17
    assert all(a.t_s < b.t_s for a, b in pairwise(readings))
    assert begin <= readings[0].t_s < begin + 0.05
    # The last one is taken on leaving.
    assert readings[-1].t_s >= end
    assert threading.get_ident() not in card.threads
    assert sampler.failure is None


def test_the_shortest_block_has_two_readings():
    with Sampler(Card(), period_s=10.0) as sampler:
        pass
    assert len(sampler.readings) == 2


def test_leaving_does_not_wait_for_the_next_reading():
    begin = time.perf_counter()
    with Sampler(Card(), period_s=30.0):
        pass
    assert time.perf_counter() - begin < 5


def test_without_telemetry_no_thread_runs():
    before = threading.active_count()
    with Sampler(make_telemetry(torch.device("cpu"))) as sampler:
        assert threading.active_count() == before
    assert sampler.readings == []
    assert sampler.summary() == Summary()
    assert isinstance(make_telemetry(torch.device("cpu")), NoTelemetry)


def test_a_sensor_that_fails_is_reported_and_ends_no_measurement():
    with Sampler(Card(fails_at=3), period_s=0.005) as sampler:
        time.sleep(0.05)
    assert sampler.failure == "OSError: card lost"
    assert len(sampler.readings) == 2
    assert sampler.summary().sm_mhz == 1978.5


def test_an_error_in_the_block_goes_on_and_the_thread_ends():
    with pytest.raises(ValueError, match="mine"), Sampler(Card(), period_s=0.005):
        raise ValueError("mine")
    assert all(thread.name != "kvlab telemetry" for thread in threading.enumerate())


def reading(t, joules=None, watts=None, **more):
    return TimedReading(t_s=t, joules=joules, watts=watts, **more)


@given(st.floats(50, 800), st.floats(0.01, 0.1), st.floats(0.0, 0.05), st.integers(60, 120), st.integers(0, 1_000_000))
def test_watts_are_energy_over_time_whatever_the_counter_s_step(watts, step_s, offset, count, start):
    times = [offset + PERIOD_S * i for i in range(count)]
    made = [reading(t, joules=start + watts * (t - t % step_s), watts=watts + 400) for t in times]
    found = summarise(made)
    assert found.watts_source == "energy"
    # One period late at either end, at most.
    assert found.watts == pytest.approx(watts, rel=2 * PERIOD_S / (found.seconds - 2 * (PERIOD_S + step_s)))


def test_too_short_a_while_takes_the_mean_of_the_readings():
    made = [reading(0.03 * i, joules=100.0 + i, watts=w) for i, w in enumerate((400.0, 500.0, 600.0))]
    assert summarise(made).watts == 500
    assert summarise(made).watts_source == "readings"
    still = [reading(0.03 * i, joules=100.0, watts=450.0) for i in range(100)]
    assert summarise(still).watts_source == "readings"


def test_a_summary_takes_medians_the_hottest_and_any_throttling():
    made = [
        reading(0.0, sm_mhz=1980.0, celsius=50.0, throttled=False),
        reading(0.1, sm_mhz=None, celsius=60.0, throttled=True),
        reading(0.2, sm_mhz=1400.0, celsius=55.0, throttled=False),
        reading(0.3, sm_mhz=1500.0),
    ]
    found = summarise(made)
    assert found == Summary(1500.0, None, None, None, 60.0, True, 4, pytest.approx(0.3))


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 2)), max_size=5), st.lists(st.floats(0, 12), max_size=40))
def test_where_the_card_rests_only_readings_from_its_work_count(spans, times):
    sampler = Sampler(NoTelemetry("test"))
    busy = [(begin, begin + length) for begin, length in spans]
    sampler.readings = [
        TimedReading(sm_mhz=float(any(b + READING_S <= t <= e for b, e in busy)), joules=t, t_s=t)
        for t in sorted(times)
    ]
    found = sampler.summary(busy)
    if busy:
        assert found.sm_mhz in (None, 1.0)
        assert found.readings == sum(reading.sm_mhz for reading in sampler.readings)
        assert found.watts_source != "energy"
    else:
        assert found.readings == len(times)
