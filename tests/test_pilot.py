"""The plan of rounds: what bounds it, and that it grows with the noise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import StudyError
from kvlab.pilot import MAX_ROUNDS, MOST_ROUNDS, PILOT_ROUNDS, given_rounds, plan_rounds, replanned
from kvlab.stats import MIN_ROUNDS, rounds_for

ratios = st.lists(st.floats(-0.2, 0.2), min_size=2, max_size=20)


@given(ratios, st.floats(1e-3, 100), st.sampled_from([0.01, 0.03, 0.1]), st.floats(1e-3, 1e4))
def test_a_plan_keeps_the_pilot_and_the_budget_and_says_what_set_it(aa, seconds, margin, budget):
    plan = plan_rounds(aa, seconds, margin, budget)
    assert plan.rounds >= len(aa)
    assert plan.rounds <= min(plan.wanted, MOST_ROUNDS)
    assert (plan.limit in ("budget", "most")) or plan.rounds == plan.wanted
    assert plan.rounds == plan.wanted or f"of {plan.wanted} wanted" in str(plan)
    assert plan.rounds * seconds <= max(budget, len(aa) * seconds)
    assert plan.wanted >= rounds_for(float(np.std(aa, ddof=1)), margin / 2) >= MIN_ROUNDS
    assert str(plan.rounds) in str(plan)
    over = plan.rounds * seconds / budget
    assert ("beyond the budget" in str(plan)) == (over > 1.2) or over == pytest.approx(1.2)


@given(ratios, st.sampled_from([0.01, 0.03]), st.floats(1e-3, 1e4), st.floats(1e-3, 1e4))
def test_a_larger_budget_gives_the_plan_it_would_have_given_at_first_and_a_smaller_one_takes_nothing(
    aa, margin, first, second
):
    plan, larger = plan_rounds(aa, 0.1, margin, first), max(first, second)
    # A plan that its budget did not cut stands as it is.
    again = replace(replanned(plan, margin, larger), budget=larger)
    assert again == plan_rounds(aa, 0.1, margin, larger)
    assert replanned(plan, margin, min(first, second)).rounds == plan.rounds
    assert replanned(given_rounds(9), margin, second) == given_rounds(9)


@given(ratios, st.floats(1.5, 10))
def test_more_noise_never_takes_fewer_rounds(aa, factor):
    quiet, loud = (plan_rounds(np.array(aa) * f, 0.1, 0.03, 1e9).wanted for f in (1, factor))
    assert loud >= quiet


@pytest.mark.parametrize(
    ("sd", "limit"), [(1e-6, "power"), (0.004, "precision"), (0.012, "most"), (0.05, "power"), (0.2, "most")]
)
def test_what_sets_the_number(sd, limit):
    alternating = sd * np.resize([1.0, -1.0], PILOT_ROUNDS)
    plan = plan_rounds(alternating, 0.1, 0.03, 1e9)
    assert plan.limit == limit
    assert (plan.rounds in (MAX_ROUNDS, MOST_ROUNDS)) == (limit == "most")


def test_a_given_number_needs_no_pilot():
    plan = given_rounds(20)
    assert (plan.rounds, plan.limit, plan.sd) == (20, "given", None)
    assert "as given" in str(plan)


@pytest.mark.parametrize("bad", [[], [float("nan"), 0.0]])
def test_ratios_that_are_none_are_refused(bad):
    with pytest.raises(StudyError):
        plan_rounds(bad, 0.1, 0.03, 60)
