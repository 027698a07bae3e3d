"""The rest of isolated replays: as short as serves, the same for all arms, and kept with the case."""

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

    @property
    def over(self):
        return self.watts[self.contents] / (1 + self.timer.rest) / self.limit

    def read(self):
        return Reading(sm_mhz=1980.0, watts=self.over * self.limit, throttled=self.over > 1)


class StepOf:
    """Tells the card what it was filled with."""

    def __init__(self, card):
        self.card, self.case = card, type("Case", (), {"name": "hit"})

    def fill(self, fill, seed=0):
        self.card.contents = str(fill)


class Clock(Timer):
    """A step of 20 ms that takes as much longer as the card is over its limit."""

    kind = "cuda_graph_events"

    def __init__(self, card, mode="isolated"):
        self.card, self.mode = card, mode

    def time(self, count):
        return [20_000.0 * max(1.0, self.card.over)] * count

    def settle(self, seconds):
        time.sleep(0.05)

    def output(self):
        raise NotImplementedError


def found(watts, mode="isolated"):
    card = Card({"zeros": 0.0, "random": 0.0, "constant(2)": 0.0} | watts)
    card.timer = Clock(card, mode)
    return find_rest(StepOf(card), card.timer, PLAN, card)


@pytest.mark.parametrize(
    ("watts", "share", "arm"),
    [
        ({"zeros": 690, "random": 690}, 0.0, ""),
        ({"zeros": 400, "random": 701}, 0.0, "random"),  # held, by less than is worth a rest
        ({"zeros": 400, "random": 800}, 1.0, "random"),
        ({"zeros": 1500, "random": 600}, 3.0, "zeros"),
        ({"zeros": 400, "random": 5000}, 3.0, "random"),
    ],
)
def test_the_shortest_rest_that_serves_the_arm_that_is_held_most(watts, share, arm):
    rest = found(watts)
    assert (rest.share, rest.arm) == (share, arm)
    assert share in RESTS
    assert set(rest.capped) == {"zeros", "random", "constant(2)"}
    assert bool(rest.us) == bool(arm)
    assert bool(str(rest)) == bool(share)
    assert not share or f"{arm} took" in str(rest)
    assert "constant" not in str(rest)


def test_a_busy_card_and_a_blind_one_do_not_rest():
    assert found({"random": 5000}, "sustained") == Rest()
    card = Card({})
    card.timer = Clock(card)
    assert find_rest(StepOf(card), card.timer, PLAN, NoTelemetry("test")) == Rest()


def test_a_case_gone_on_with_rests_as_it_did(tmp_path):
    card = Card({"zeros": 400.0, "random": 1000.0, "constant(2)": 0.0})
    with Run.create(tmp_path / "run", {"model": "m", "engine": "e", "routing": "none", "seed": 0}, machine()) as run:
        run.add_case("hit", "hit=1@40", "decode", [])
        for watts in (1000.0, 0.0):
            card.watts["random"], card.timer = watts, Clock(card)
            rest = rest_of(run, StepOf(card), card.timer, PLAN, card)
            assert rest.share == card.timer.rest == 1.0
