"""The record of a verdict: clocks and cycles of the arms that have them."""

import pandas as pd
import pytest

from kvlab.examination import Examination
from kvlab.plan import Plan
from kvlab.verdict import case_verdict

PLAN = Plan.of(["random", "levels"])


def samples(mhz, rounds=8):
    """Rounds of 3 replays of 1 ms; `mhz`: arm -> clock, None for one that was not read, or a function of the round."""
    rows = []
    for index in range(rounds):
        for position, arm in enumerate(("zeros", "zeros_again", "random", "levels")):
            clock = mhz.get(arm, 1980.0)
            row = {"round": index, "position": position, "arm": arm, "case": "c", "mode": "isolated", "routing": "none"}
            told = {"sm_mhz": clock(index) if callable(clock) else clock, "watts": None, "flagged": False}
            rows += [
                {**row, **told, "replay": replay, "us": 1000.0 + 0.1 * (index % 3) + 0.01 * replay}
                for replay in range(3)
            ]
    return pd.DataFrame(rows)


def verdict(mhz):
    arms = [arm.name for arm in PLAN.arms]
    return case_verdict(samples(mhz), PLAN, Examination(finite=dict.fromkeys(arms, True), outside_writes=0))


def test_an_arm_without_a_clock_costs_the_others_nothing():
    whole, partly = verdict({}), verdict({"levels": None})
    assert set(whole["clocks"]) == {"zeros", "zeros_again", "random", "levels"}
    assert partly["clocks"] == {arm: of for arm, of in whole["clocks"].items() if arm != "levels"}
    assert partly["cycles"] == whole["cycles"]
    assert "cycles" not in verdict({"zeros": None})
    nothing = verdict(dict.fromkeys(whole["clocks"]))
    assert "clocks" not in nothing


@pytest.mark.parametrize("read", [1, 5, 8])
def test_cycles_say_of_how_many_rounds_they_are(read):
    told = verdict({"random": lambda index: 1755.0 if index < read else None})
    assert told["cycles"]["rounds"] == read
    assert told["cycles"]["gap"] == pytest.approx(1755 / 1980 - 1, abs=1e-3)


def test_p_goes_with_the_verdict():
    told = verdict({})
    assert told["verdict"] == "equivalent"
    assert told["p"] > 0.5
