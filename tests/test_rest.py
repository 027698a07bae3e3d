"""The rest of isolated replays: as short as serves, the same for all arms, and kept with the case."""

import time

import numpy as np
import pytest

from kvlab.measure.telemetry import NoTelemetry, Reading, Telemetry
from kvlab.measure.timer import Timer
from kvlab.plan import Plan
from kvlab.provenance import machine
from kvlab.rest import RESTS, Rest, apply_rest, find_rest
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
        return Reading(1980.0 / max(1.0, self.over), watts=self.over * self.limit, throttled=self.over > 1)


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

    def settle(self, seconds, until=lambda: False):
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
        ({"zeros": 720, "random": 2600}, 3.0, "random"),  # both held all the time: the slower one decides
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


def test_a_rest_is_not_taken_for_noise():
    """Where rests change nothing, replays that wander by a percent do not ask for one."""
    taken = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        card = Card({"zeros": 710.0, "random": 705.0, "constant(2)": 0.0})
        card.timer = Clock(card)
        card.timer.time = lambda count, rng=rng: list(20_000 * np.exp(0.01 * rng.standard_normal(count)))
        card.timer.settle = lambda seconds: None
        taken += find_rest(StepOf(card), card.timer, PLAN, card).share > 0
    assert taken <= 6


def test_rounds_from_before_rests_go_on_without_and_fields_of_another_day_are_passed_over(tmp_path):
    card = Card({"zeros": 400.0, "random": 1000.0, "constant(2)": 0.0})
    card.timer = Clock(card)
    with Run.create(tmp_path / "run", {"model": "m", "engine": "e", "routing": "none", "seed": 0}, machine()) as run:
        run.add_case("hit", "hit=1@40", "decode", [], rest_isolated={"share": 3.0, "still": {"zeros": 1.0}})
        rest = apply_rest(run, StepOf(card), card.timer, PLAN, card)
        assert rest.share == card.timer.rest == 3.0
        assert str(rest).startswith("Each replay was followed by a rest of 3 times its length")


def test_a_case_gone_on_with_rests_as_it_did(tmp_path):
    card = Card({"zeros": 400.0, "random": 1000.0, "constant(2)": 0.0})
    with Run.create(tmp_path / "run", {"model": "m", "engine": "e", "routing": "none", "seed": 0}, machine()) as run:
        run.add_case("hit", "hit=1@40", "decode", [])
        for watts in (1000.0, 0.0):
            card.watts["random"], card.timer = watts, Clock(card)
            rest = apply_rest(run, StepOf(card), card.timer, PLAN, card)
            assert rest.share == card.timer.rest == 1.0


@pytest.mark.parametrize("mode", ["isolated", "sustained"])
@pytest.mark.parametrize("earlier", [False, True])
def test_nothing_is_said_of_the_pace_of_rounds_that_an_older_kvlab_timed(tmp_path, mode, earlier):
    """Else a run gone on with would pass for one that rested and settled from its first round on."""
    card = Card({"zeros": 400.0, "random": 1000.0, "constant(2)": 0.0})
    with Run.create(tmp_path / "run", {"model": "m", "engine": "e", "routing": "none", "seed": 0}, machine()) as run:
        run.add_case("hit", "hit=1@40", "decode", [])
        if earlier:
            arms = [{"position": 0, "arm": "zeros", "fill": "zeros", "seed": 0, "replay": 0, "us": 1.0}]
            run.add_round("hit", mode, 0, arms)
        card.timer = Clock(card, mode)
        apply_rest(run, StepOf(card), card.timer, PLAN, card)
        said = {"isolated": f"rest_{mode}", "sustained": "settle_capped_s"}[mode]
        assert (said in run.facts_of("hit")) == (not earlier)
        assert card.timer.rest == (1.0 if mode == "isolated" and not earlier else 0.0)
