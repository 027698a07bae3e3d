"""Settling under a power cap, against an H200's own replays played back: data/benchmarks/cap_settling."""

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.estimates import round_ratios
from kvlab.measure import settling
from kvlab.measure.settling import KEPT, MORE_S, SETTLE_CAPPED_S, SETTLE_S, settle, spread, visit
from kvlab.measure.timer import Timer

RECORDED = Path(__file__).parents[2] / "data" / "benchmarks" / "cap_settling"
LATE_S = 5.0


class Simulated(Timer):
    """Settles as every timer does, by a clock that tests put in place of the real one."""

    mode, now = "sustained", 0.0

    def output(self):
        return torch.zeros(1)


class Playback(Simulated):
    """The replays of one recorded visit, in simulated time; its `readings` are those that were taken so far."""

    kind = "playback"

    def __init__(self, number):
        of = {name: pd.read_parquet(RECORDED / f"{name}.parquet") for name in ("replays", "readings")}
        replays, readings = (table[table["visit"] == number] for table in of.values())
        self.fill = replays["fill"].iloc[0]
        self.us = replays["us"].tolist()
        self.recorded = [SimpleNamespace(t_s=row.t_s, throttled=row.throttled) for row in readings.itertuples()]
        self.late = replays.loc[replays["t_s"] > LATE_S, "us"] if self.fill == "random" else replays["us"][5:]
        self.next, self.paced_s = 0, self.us[0] / 1e6

    @property
    def readings(self):
        return [reading for reading in self.recorded if reading.t_s <= self.now]

    def time(self, count):
        times = self.us[self.next : self.next + count]
        assert len(times) == count, "the recorded visit is over"
        self.next += count
        self.now += sum(times) / 1e6
        return times


@pytest.fixture
def play(monkeypatch):
    def start(number):
        card = Playback(number)
        monkeypatch.setattr(settling.time, "perf_counter", lambda: card.now)
        return card

    yield start
    assert settling.time is time


@pytest.mark.parametrize("number", [1, 3])
def test_a_visit_under_a_cap_waits_for_the_swing_to_die_away(play, number):
    card = play(number)
    truth = card.late.mean()
    early = sorted(card.us[19:22])[1]
    assert settle(card, card)
    assert card.now == pytest.approx(SETTLE_CAPPED_S, abs=0.1)
    times = [replay.us for replay in visit(card, 3, 1, capped=True)]
    assert 28 <= len(times) <= KEPT
    assert np.mean(times) == pytest.approx(truth, rel=1e-3)
    assert abs(early / truth - 1) > 0.01, "three replays a second after the change would do as well"


@pytest.mark.parametrize("number", [1, 3])
def test_the_mean_of_a_visit_is_steadier_than_the_median_of_a_shorter_one(number):
    """Over two periods of the swing, wherever the visit begins after the settling; see `estimates.round_table`."""
    card = Playback(number)
    late = card.us[round(SETTLE_CAPPED_S / card.paced_s) :]
    second = round(1 / card.paced_s)
    off = {
        how.__name__: [
            how(late[k : k + seconds * second]) / card.late.mean() - 1 for k in range(len(late) - 2 * second)
        ]
        for how, seconds in ((np.mean, 2), (np.median, 1))
    }
    rms = {name: np.sqrt(np.mean(np.square(values))) for name, values in off.items()}
    assert rms["mean"] < 0.6 * rms["median"]
    assert rms["mean"] < 1.5e-3


@pytest.mark.parametrize("number", [0, 2])
def test_contents_that_draw_less_are_timed_as_soon_as_they_are_free_of_the_cap(play, number):
    card = play(number)
    assert not settle(card, card)
    assert SETTLE_S <= card.now < SETTLE_S + 0.6
    times = [replay.us for replay in visit(card, 3, 1, capped=False)]
    assert len(times) == 3
    assert sorted(times)[1] == pytest.approx(card.late.mean(), rel=2e-3)


@pytest.mark.parametrize("readings", [[], [SimpleNamespace(t_s=4.9, throttled=None)]])
def test_a_card_that_tells_nothing_may_be_held(play, readings):
    """No NVML, a sampler that failed, a sensor without a word: an arm that is not held loses seconds, no more."""
    card = play(3)
    assert settle(card, SimpleNamespace(readings=readings))
    assert card.now == pytest.approx(SETTLE_CAPPED_S, abs=0.1)


def test_a_visit_may_begin_later(play):
    card = play(3)
    assert settle(card, card, more=MORE_S)
    assert card.now == pytest.approx(SETTLE_CAPPED_S + MORE_S, abs=0.1)


@given(st.lists(st.floats(1, 9), max_size=400), st.integers(1, 30))
def test_what_is_kept_is_in_order_and_evenly_spread(times, most):
    numbered = list(enumerate(times))
    kept = spread(numbered, most)
    assert len(kept) == min(len(times), most)
    assert kept == sorted(kept, key=lambda each: each[0])
    places = [index for index, _ in kept]
    steps = {after - before for before, after in pairwise(places)}
    assert not steps or max(steps) - min(steps) <= 1


class Capped(Simulated):
    """A step of 28 ms on a card whose cap bites after `bites` seconds under random contents and swings from then on."""

    kind, paced_s = "simulated", 0.028

    def __init__(self, slower, swing, decay_s, period_s, bites_s=0.18, sensors=True):
        self.readings, self.sensors, self.rng = [], sensors, np.random.default_rng(0)
        self.slower, self.swing, self.decay_s, self.period_s, self.bites_s = slower, swing, decay_s, period_s, bites_s

    def fill(self, arm):
        self.arm, self.changed, self.readings = arm, self.now, []

    def time(self, count):
        times = []
        for _ in range(count):
            since = self.now - self.changed
            capped = self.arm == "random" and since > self.bites_s
            wave = self.swing * np.exp(-since / self.decay_s) * np.cos(2 * np.pi * since / self.period_s)
            slow = (1 + self.slower) * (1 + wave) if capped else 1.0
            times.append(28_000.0 * slow * (1 + 1e-3 * self.rng.standard_normal()))
            self.now += times[-1] / 1e6
            if self.sensors:
                self.readings.append(SimpleNamespace(t_s=self.now, throttled=capped))
        return times


@pytest.mark.parametrize(
    ("what", "card"),
    [
        ("dies away", {"swing": 0.04, "decay_s": 1.5, "period_s": 1.0}),
        ("dies away slowly, in another period than a visit's", {"swing": 0.04, "decay_s": 3.0, "period_s": 1.6}),
        ("never dies away", {"swing": 0.01, "decay_s": 1e9, "period_s": 1.6}),
        ("bites late", {"swing": 0.0, "decay_s": 1.0, "period_s": 1.0, "bites_s": 0.7}),
        ("no sensor tells", {"swing": 0.04, "decay_s": 1.5, "period_s": 1.0, "sensors": False}),
    ],
)
def test_a_gap_under_a_cap_is_found_whatever_the_swing(monkeypatch, what, card):
    """Rounds as a study times them: each visit settles anew. The mean of some studies tells of what they have alike."""
    found, slower = [], -0.01
    for study in range(6):
        timer, rng = Capped(slower, **card), np.random.default_rng(study)
        monkeypatch.setattr(settling.time, "perf_counter", lambda timer=timer: timer.now)
        rows = []
        for number in range(8):
            for arm in rng.permutation(["zeros", "random"]):
                timer.fill(arm)
                capped = settle(timer, timer, more=rng.uniform(0, MORE_S))
                head = {"round": number, "arm": arm, "mode": timer.mode}
                head["throttled"] = capped if timer.sensors else None
                rows += [{**head, "us": replay.us} for replay in visit(timer, 5, 1, capped)]
        found.append(np.expm1(round_ratios(pd.DataFrame(rows), "random")).mean())
    assert np.mean(found) == pytest.approx(slower, abs=2.5e-3), what
