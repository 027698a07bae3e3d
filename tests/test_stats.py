"""Verdicts: what may not change them, what must, and how often they are wrong when the truth is known."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import stats
from kvlab.errors import StudyError
from kvlab.estimates import round_table
from kvlab.stats import decide, estimate, holm, p_different, position_bias, round_ratios, rounds_for

ARMS = ("zeros", "zeros_again", "random")


def load_simulation():
    path = Path(__file__).parents[1] / "benchmarks" / "aa_simulation.py"
    spec = importlib.util.spec_from_file_location("aa_simulation", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


simulation = load_simulation()


def study(
    rounds: int = 20, gap: float = 0.0, sd: float = 0.004, seed: int = 0, aa: float = 0.0, replays: int = 3
) -> pd.DataFrame:
    """Samples with iid noise `sd` in each round's value: random is `gap` slower than zeros, zeros_again `aa`."""
    rng = np.random.default_rng(seed)
    effects = dict(zip(ARMS, (0.0, math.log1p(aa), math.log1p(gap)), strict=True))
    rows = []
    for number in range(rounds):
        for position, arm in enumerate(rng.permutation(ARMS)):
            level = math.log(1000) + effects[arm] + sd * rng.standard_normal()
            us = np.exp(level + np.linspace(-1, 1, replays) * sd)
            rows += [
                {"round": number, "position": position, "arm": str(arm), "replay": k, "us": t} for k, t in enumerate(us)
            ]
    return pd.DataFrame(rows)


STUDIES = st.builds(
    study,
    rounds=st.integers(1, 15),
    gap=st.floats(-0.08, 0.08),
    sd=st.sampled_from([0.0, 1e-4, 0.003, 0.02]),
    seed=st.integers(0, 10**6),
    aa=st.sampled_from([0.0, 0.0, 0.02]),
)
few = settings(max_examples=25, deadline=None)


def numbers(decision) -> list[float]:
    both = (decision.gap, decision.aa)
    return [v for e in both for v in (e.log_gap, e.gap, *e.ci90, e.sd)] + [decision.mde]


# What may not matter


@few
@given(STUDIES, st.floats(1e-3, 1e3))
def test_the_unit_of_time_changes_nothing(samples, factor):
    a, b = decide(samples), decide(samples.assign(us=samples["us"] * factor))
    assert a.verdict == b.verdict
    np.testing.assert_allclose(numbers(a), numbers(b), rtol=1e-6, atol=1e-12)


@few
@given(STUDIES)
def test_exchanging_two_arms_negates_the_log_gap(samples):
    there = estimate(round_ratios(samples, "random", "zeros"))
    back = estimate(round_ratios(samples, "zeros", "random"))
    assert back.log_gap == pytest.approx(-there.log_gap, abs=1e-12)
    np.testing.assert_allclose(back.log_ci90, [-v for v in there.log_ci90[::-1]], atol=1e-9)
    for margin in (0.01, 0.03, 0.05):
        assert there.inside(margin) == back.inside(margin)
        assert there.outside(margin) == back.outside(margin)


@few
@given(STUDIES, st.integers(0, 99))
def test_the_order_of_rows_and_replays_changes_nothing(samples, seed):
    shuffled = samples.sample(frac=1, random_state=seed)
    shuffled["replay"] = np.random.default_rng(seed).permutation(len(shuffled))
    assert decide(shuffled) == decide(samples)


@few
@given(STUDIES)
def test_equivalent_at_a_margin_is_equivalent_at_every_wider_one(samples):
    verdicts = [decide(samples, margin=m).verdict for m in (0.01, 0.03, 0.05)]
    assert verdicts == sorted(verdicts, key=lambda v: v == "equivalent")
    decision = decide(samples)
    assert decision.also == {0.01: verdicts[0], 0.05: verdicts[2]}


@few
@given(STUDIES, st.booleans())
def test_a_decision_has_reasons_and_no_nan_even_with_every_sample_throttled(samples, throttled):
    decision = decide(samples.assign(throttled=throttled, flagged=throttled))
    assert not np.isnan(numbers(decision)).any()
    assert decision.reasons
    assert all(reason.endswith(".") for reason in decision.reasons)
    lo, hi = decision.gap.ci90
    assert lo <= decision.gap.gap <= hi
    assert decision == decide(samples)


# What must matter


def test_a_small_gap_is_equivalent_and_non_zero():
    decision = decide(study(gap=0.01, sd=0.001))
    assert decision.verdict == "equivalent"
    assert decision.nonzero
    assert decision.rounds_needed is None
    assert decision.gap.gap == pytest.approx(0.01, abs=0.001)
    assert "not zero" in decision.reasons[0]
    assert decision.mde < 0.003


@pytest.mark.parametrize("gap", [-0.06, 0.06])
def test_a_gap_beyond_the_margin_is_different(gap):
    decision = decide(study(gap=gap))
    assert decision.verdict == "different"
    assert decision.rounds_needed is None
    assert p_different(round_ratios(study(gap=gap), "random"), 0.03) < 0.05
    assert f"{decision.gap.gap:+.2%}" in decision.reasons[0]


def test_a_gap_on_the_margin_is_inconclusive_and_says_how_many_rounds_would_do():
    decisions = [decide(study(gap=0.03, sd=0.005, seed=s)) for s in range(10)]
    open_ones = [d for d in decisions if d.verdict == "inconclusive"]
    assert len(open_ones) >= 7
    for d in open_ones:
        assert d.rounds_needed > 20
        assert str(d.rounds_needed) in d.reasons[0] or "no number of rounds" in d.reasons[0]


def test_the_rounds_asked_for_do_decide():
    pilot = decide(study(sd=0.02, rounds=8, seed=3))
    assert pilot.verdict == "invalid"
    assert "too wide" in pilot.reasons[0]
    decided = [decide(study(sd=0.02, rounds=pilot.rounds_needed, seed=s)).verdict for s in range(8)]
    assert decided.count("equivalent") >= 6


def test_a_second_zeros_arm_that_moved_is_told_from_a_noisy_one():
    moved, noisy = decide(study(aa=0.04)), decide(study(sd=0.03))
    assert moved.verdict == noisy.verdict == "invalid"
    assert "moved" in moved.reasons[0]
    assert moved.rounds_needed is None
    assert "too wide" in noisy.reasons[0]
    assert noisy.rounds_needed > 20


@given(st.floats(-0.03, 0.03))
@few
def test_valid_exactly_when_the_second_zeros_arm_is_within_half_the_margin(aa):
    decision = decide(study(aa=aa, gap=0.01))
    lo, hi = decision.aa.log_ci90
    assert (decision.verdict == "invalid") == (not (-math.log1p(0.015) < lo and hi < math.log1p(0.015)))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"finite": {"zeros": True, "random": False}}, "'random' holds a NaN"),
        ({"finite": {"zeros_again": False}}, "'zeros_again' holds a NaN"),
        ({"outside_writes": 64}, "64 bytes outside"),
        ({"routing_moved": True}, "routing moved"),
    ],
)
@pytest.mark.parametrize("rounds", [1, 20])
def test_a_fault_makes_any_timing_invalid(fault, told, rounds):
    decision = decide(study(rounds), **fault)
    assert decision.verdict == "invalid"
    assert set(decision.also.values()) == {"invalid"}
    assert told in " ".join(decision.reasons)
    assert decision.rounds_needed is None


def test_all_faults_are_told_and_another_arms_is_not_held_against_this_one():
    assert len(decide(study(), finite={"random": False}, outside_writes=1, routing_moved=True).reasons) == 3
    assert decide(study(), finite={"constant(1)": False, "random": True}).verdict == "equivalent"


@pytest.mark.parametrize("rounds", range(1, stats.MIN_ROUNDS))
def test_too_few_rounds_decide_nothing(rounds):
    decision = decide(study(rounds, gap=0.5, sd=1e-4))
    assert decision.verdict == "inconclusive"
    assert decision.rounds_needed >= stats.MIN_ROUNDS
    assert "too few" in decision.reasons[0]


def test_one_round_has_an_unbounded_interval_and_detects_nothing():
    decision = decide(study(1))
    assert decision.gap.ci90 == (-1, math.inf)
    assert decision.mde == math.inf
    assert not decision.nonzero


def test_a_margin_is_symmetric_in_log_space():
    assert estimate([math.log(1.0299)] * 8).inside(0.03)
    assert estimate([-math.log(1.0299)] * 8).inside(0.03)
    assert not estimate([math.log(0.9705)] * 8).inside(0.03)  # -2.95 %
    assert estimate([math.log(0.9705)] * 8).outside(0.03)


# Rounds


def test_a_round_counts_once_by_the_median_of_its_replays():
    samples = pd.DataFrame(
        [(2, "zeros", 10.0), (2, "random", 20.0), (0, "random", 30.0), (0, "random", 11.0), (0, "random", 9.0)]
        + [(0, "zeros", 10.0), (1, "zeros", 10.0), (3, "random", 5.0)],
        columns=["round", "arm", "us"],
    )
    np.testing.assert_allclose(round_ratios(samples, "random"), np.log([1.1, 2.0]))
    np.testing.assert_allclose(round_ratios(samples, "zeros", "zeros"), 0)


@pytest.mark.parametrize(
    ("mode", "throttled", "value"),
    [
        ("isolated", True, 10.0),
        ("sustained", False, 10.0),
        ("sustained", True, 13.0),
        ("sustained", None, 13.0),  # no sensor tells
    ],
)
@pytest.mark.parametrize("dtype", ["object", "boolean"])
def test_what_a_busy_card_takes_under_a_cap_is_the_mean_of_its_replays(mode, throttled, value, dtype):
    samples = pd.DataFrame({"round": 0, "arm": "random", "us": [10.0, 10.0, 19.0], "mode": mode})
    samples["throttled"] = pd.array([throttled] * 3, dtype=dtype)
    zeros = pd.DataFrame({"round": 0, "arm": "zeros", "us": [8.0, 9.0, 900.0], "mode": mode, "throttled": False})
    table = round_table(pd.concat([samples, zeros.astype({"throttled": dtype})]))
    assert table["random"].tolist() == [value]
    # Of both arms alike: a mean against a median would be a gap of its own.
    assert table["zeros"].tolist() == [9.0 if value == 10 else pytest.approx(917 / 3)]


@pytest.mark.parametrize("throttled", [("random",), ("zeros", "random"), ()])
def test_which_arm_a_cap_holds_makes_no_gap(throttled):
    """The same swinging step under every arm; the cap is told of under some."""
    rng = np.random.default_rng(0)
    rows = []
    for number, arm in itertools.product(range(20), ("zeros", "zeros_again", "random")):
        swing = np.where(np.arange(25) % 5 == 0, 1.05, 1.0) * (1 + 1e-4 * rng.standard_normal(25))
        rows += [
            {"round": number, "arm": arm, "us": 1000 * s, "mode": "sustained", "throttled": arm in throttled}
            for s in swing
        ]
    decision = decide(pd.DataFrame(rows), margin=0.001)
    assert decision.verdict == "equivalent"
    assert abs(decision.gap.gap) < 1e-4


BAD = {
    "no column": (lambda s: s.drop(columns="us"), "lack column 'us'"),
    "empty": (lambda s: s.iloc[:0], "empty"),
    "a NaN": (lambda s: s.assign(us=s["us"].where(s.index != 7)), "nan us"),
    "a zero": (lambda s: s.assign(us=s["us"].where(s.index != 7, 0.0)), "positive"),
    "no second zeros": (lambda s: s[s["arm"] != "zeros_again"], "no arm 'zeros_again'"),
    "never together": (lambda s: s.assign(round=range(len(s))), "no round holds both"),
    "two cases": (lambda s: s.assign(case=np.where(s["round"] < 3, "a", "b")), "mix values of 'case'"),
    "two modes": (lambda s: s.assign(mode=np.where(s["round"] < 3, "isolated", "sustained")), "mix values of 'mode'"),
    "no round": (lambda s: s.assign(round=s["round"].where(s.index != 7)), "without a round"),
}


@pytest.mark.parametrize(("spoil", "told"), BAD.values(), ids=BAD)
def test_tables_that_cannot_be_judged_are_refused(spoil, told):
    with pytest.raises(StudyError, match=told):
        decide(spoil(study()))


@pytest.mark.parametrize("margin", [0, -0.03, 3, math.nan])
def test_a_margin_is_a_fraction(margin):
    for ask in (lambda: decide(study(), margin=margin), lambda: rounds_for(0.01, margin)):
        with pytest.raises(StudyError, match="give a fraction"):
            ask()


def test_rounds_for_follows_its_formula():
    assert rounds_for(0.03, 0.03) == math.ceil((0.03 * (1.6449 + 1.2816) / math.log(1.03)) ** 2) == 9
    assert rounds_for(0.0, 0.03) == stats.MIN_ROUNDS
    assert rounds_for(0.02, 0.015) > 3.9 * rounds_for(0.02, 0.03) or rounds_for(0.02, 0.03) == stats.MIN_ROUNDS
    with pytest.raises(StudyError, match="pilot"):
        rounds_for(math.nan, 0.03)


# Many cases


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_as_the_step_down_procedure_does(p):
    adjusted = holm(p)
    assert (adjusted >= p).all()
    assert (adjusted <= 1).all()
    order = np.argsort(p, kind="stable")
    rejected = set()
    for rank, k in enumerate(order):
        if p[k] * (len(p) - rank) > 0.05:
            break
        rejected.add(int(k))
    assert set(np.flatnonzero(adjusted <= 0.05)) == rejected


def test_holm_by_hand_and_bad_input():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    for bad in ([], [0.1, math.nan], [1.1]):
        with pytest.raises(StudyError, match="p-values"):
            holm(bad)


@few
@given(STUDIES)
def test_p_is_small_where_the_interval_leaves_the_margin(samples):
    ratios = round_ratios(samples, "random")
    p = p_different(ratios, 0.03)
    assert 0 <= p <= 1
    if p <= 0.049:
        assert estimate(ratios).outside(0.03)
    assert p_different(ratios, 0.01) <= p + 1e-12  # a narrower margin is easier to leave


def test_p_orders_cases_by_evidence_and_is_uniform_at_no_gap():
    small, large = (p_different(round_ratios(study(gap=g), "random"), 0.03) for g in (0.01, 0.06))
    assert small > 0.5
    assert large < 0.001
    rng = np.random.default_rng(5)
    p = np.array([p_different(x, 0) for x in 0.01 * rng.standard_normal((200, 12))])
    assert 0.02 <= np.mean(p <= 0.1) <= 0.15
    assert p_different([0.1], 0.03) == 1


def test_all_within_needs_every_case():
    good, bad = (decide(study(gap=gap)).verdict for gap in (0.0, 0.06))
    assert stats.all_within([good, good])
    assert not stats.all_within([good, bad])
    with pytest.raises(StudyError, match="no decisions"):
        stats.all_within([])


# Positions


def test_no_position_is_faster_than_another_in_a_fair_round():
    free = [position_bias(study(gap=0.2, seed=s)) for s in range(25)]
    held = [bool(((t["lo"] <= 0) & (t["hi"] >= 0)).all()) for t in free]
    assert np.mean(held) >= 0.85
    assert list(free[0]["position"]) == [0, 1, 2]
    assert np.isfinite(free[0].to_numpy(float)).all()


def test_a_slow_first_position_is_found_behind_a_large_gap():
    samples = study(gap=0.2, sd=0.002)
    samples.loc[samples["position"] == 0, "us"] *= 1.03
    table = position_bias(samples).set_index("position")
    assert table.loc[0, "lo"] > 0
    assert (table.loc[[1, 2], "hi"] < 0).all()
    assert table.loc[0, "bias"] == pytest.approx(0.02, abs=0.003)


def test_positions_that_cannot_be_told_from_arms_are_refused():
    samples = study()
    fixed = samples.assign(position=samples["arm"].map({arm: k for k, arm in enumerate(ARMS)}))
    with pytest.raises(StudyError, match="cannot tell 3 arms from 3 positions"):
        position_bias(fixed)
    with pytest.raises(StudyError, match="lack column 'position'"):
        position_bias(samples.drop(columns="position"))
    with pytest.raises(StudyError, match="no round holds all 3 arms"):
        position_bias(samples.assign(round=range(len(samples))))


# The truth known


@pytest.fixture(scope="module")
def checks() -> list[pd.DataFrame]:
    """200 studies of a step against itself under drift, AR(1), bursts and heavy tails."""
    return simulation.simulate(simulation.CLOCKS["all of these"], rounds=20, checks=200, seed=1)


def test_a_step_against_itself_is_never_called_different(checks):
    decisions = [decide(samples) for samples in checks]
    assert not [d for d in decisions if d.verdict == "different"]
    assert 0.06 <= np.mean([d.nonzero for d in decisions]) <= 0.14
    assert np.mean([d.verdict == "equivalent" for d in decisions]) >= 0.9


def test_no_position_is_faster_than_another_on_a_disturbed_clock(checks):
    biased = [((t["lo"] > 0) | (t["hi"] < 0)).any() for t in map(position_bias, checks[:40])]
    assert np.mean(biased) <= 0.2


def test_a_gap_of_two_margins_is_called_different(checks):
    planted = [s.assign(us=s["us"] * np.where(s["arm"] == "random", 1.03**2, 1.0)) for s in checks[:60]]
    assert np.mean([decide(samples).verdict == "different" for samples in planted]) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("clock", simulation.CLOCKS)
def test_no_clock_makes_a_step_differ_from_itself(clock):
    decisions = [decide(s) for s in simulation.simulate(simulation.CLOCKS[clock], rounds=16, checks=200, seed=3)]
    assert sum(d.verdict == "different" for d in decisions) <= 2
    assert 0.02 <= np.mean([d.nonzero for d in decisions]) <= 0.15


def test_the_minimum_detectable_effect_is_detected_four_times_in_five():
    decisions = [decide(study(rounds=12, seed=s)) for s in range(150)]
    # A gap moves the interval by its logarithm, so the same noise shows what the effect would have given.
    assert 0.7 <= np.mean([d.gap.log_ci90[0] + math.log1p(d.mde) > 0 for d in decisions]) <= 0.9
