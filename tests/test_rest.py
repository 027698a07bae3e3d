"""The rest of isolated replays: the shortest with which no arm is capped, the same for all, and kept with the case."""

import time

import pytest

from kvlab.measure.telemetry import NoTelemetry, Reading, Telemetry
from kvlab.measure.timer import Timer
from kvlab.plan import Plan
from kvlab.provenance import machine
from kvlab.rest import RESTS, Rest, find_rest, rest_of
from kvlab.run import Run

PLAN = Plan.of(["random", "constant(2)"])


class Card(Telemetry):
    """Capped where the work's share of the time, times the watts of the contents, is over the limit."""

    source = "fake"
    limit = 700.0

    def __init__(self, watts):
        self.watts, self.contents, self.timer = watts, "zeros", None

    def read(self):
        power = self.watts[self.contents] / (1 + self.timer.rest)
        return Reading(sm_mhz=1980.0, watts=power, throttled=power > self.limit)


class StepOf:
    """Tells the card what it was filled with."""

    def __init__(self, card):
        self.card, self.case = card, type("Case", (), {"name": "hit"})

    def fill(self, fill, seed=0):
        self.card.contents = str(fill)


class Clock(Timer):
    kind = "cuda_graph_events"

    def __init__(self, mode="isolated"):
        self.mode = mode

    def time(self, count):
        return [1.0] * count

    def settle(self, seconds):
        time.sleep(0.08)

    def output(self):
        raise NotImplementedError


def found(watts, mode="isolated"):
    card = Card({"zeros": 0.0, "random": 0.0, "constant(2)": 0.0} | watts)
    card.timer = Clock(mode)
    return find_rest(StepOf(card), card.timer, PLAN, card), card.timer


@pytest.mark.parametrize(
    ("watts", "share", "still"),
    [
        ({"zeros": 690, "random": 690}, 0.0, 0),
        ({"zeros": 400, "random": 701}, 1.0, 0),
        ({"zeros": 1500, "random": 1600}, 3.0, 0),
        ({"zeros": 400, "random": 5000}, 3.0, 1),
    ],
)
def test_one_rest_serves_all_arms(watts, share, still):
    rest, timer = found(watts)
    assert rest.share == timer.rest == share
    assert share in RESTS
    assert set(rest.capped) == {"zeros", "random", "constant(2)"}
    assert (max(rest.capped.values()) > 0) == bool(share)
    assert sum(part > 0 for part in rest.still.values()) == still
    assert bool(str(rest)) == bool(share)
    assert ("even so under random" in str(rest)) == bool(still)
    assert "constant" not in str(rest)


def test_a_busy_card_and_a_blind_one_do_not_rest():
    rest, timer = found({"random": 5000}, "sustained")
    assert (rest.share, timer.rest, dict(rest.capped)) == (0.0, 0.0, {})
    clock = Clock()
    card = Card({})
    assert find_rest(StepOf(card), clock, PLAN, NoTelemetry("test")) == Rest()


def test_a_case_gone_on_with_rests_as_it_did(tmp_path):
    card = Card({"zeros": 400.0, "random": 701.0, "constant(2)": 0.0})
    with Run.create(tmp_path / "run", {"model": "m", "engine": "e", "routing": "none", "seed": 0}, machine()) as run:
        run.add_case("hit", "hit=1@40", "decode", [])
        for watts in (701.0, 0.0):
            card.watts["random"], card.timer = watts, Clock()
            rest = rest_of(run, StepOf(card), card.timer, PLAN, card)
            assert rest.share == card.timer.rest == 1.0
