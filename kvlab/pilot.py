"""Layer 4: how many rounds a case needs, from the noise of its first ones; pure.

A fixed number of rounds is decided on before the gap is looked at: the pilot's rounds time all arms, but of their
ratios only the spread about their own mean is read here, never where they lie. They stay part of the evidence, as a
plan that is blind to the gap hardly bends its intervals (internal pilots: Wittes & Brittain 1990,
doi:10.1002/sim.4780090113). The spread of `zeros_again` alone would not do: under a power cap zeros are quiet and
random contents are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvlab.intervals import checked
from kvlab.stats import MIN_ROUNDS, rounds_for

PILOT_ROUNDS = 8
# For precision; and for power too, as an interval's cost grows with the square of the rounds (20 s at 500).
MAX_ROUNDS = 120
MOST_ROUNDS = 500
# The interval's Student quantile and its correction for correlated rounds, against the normal one of the formula.
_SMALL_SAMPLE = 1.15
# Half-width aimed at where time is left, as a share of the margin: 0.3 % at 3 %.
_PRECISION = 0.1
_Z95 = 1.645
# Times the budget: above, a pilot that took longer is told.
_OVER = 1.2


@dataclass(frozen=True)
class RoundPlan:
    """How many rounds, and why.

    Attributes:
        rounds: in all, the pilot's included.
        limit: what set the number: `given`, `power`, `precision`, `most` (`MAX_ROUNDS` for precision, `MOST_ROUNDS`
            for power) or `budget`.
        wanted: rounds without a limit.
        sd: of the pilot's A/A log ratios; None where the number was given.
        seconds_per_round: of the pilot; None where the number was given.
        sd_arms: the largest sd of another arm's log ratios; None where the number was given.
        pilot: rounds that the sds are of.
        budget: seconds that all rounds were to take; None where the number was given.
    """

    rounds: int
    limit: str
    wanted: int
    sd: float | None = None
    seconds_per_round: float | None = None
    sd_arms: float | None = None
    pilot: int = PILOT_ROUNDS
    budget: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def __str__(self) -> str:
        if self.limit == "given":
            return f"{self.rounds} rounds, as given"
        allowed = "the pilot alone, as the budget has no more" if self.rounds <= self.pilot else "all in the budget"
        why = {
            "power": "for 80 % power at the margin",
            "precision": f"for an interval of +-{_PRECISION:.0%} of the margin",
            "most": "the most that are run" + (f", of {self.wanted} wanted" if self.wanted > self.rounds else ""),
            "budget": f"{allowed}, of {self.wanted} wanted",
        }[self.limit]
        other = "" if self.sd_arms is None else f", of the arms {self.sd_arms:.2%}"
        noise = f"A/A noise {self.sd:.2%}{other}, planned for {_likely(self.pilot):.1f} times that"
        pace = f"{self.seconds_per_round:.2f} s a round"
        if self.budget is not None and self.rounds * (self.seconds_per_round or 0.0) > _OVER * self.budget:
            pace += f", beyond the budget of {self.budget:g} s"
        return f"{self.rounds} rounds: {why} ({noise}, {pace})"


def given_rounds(rounds: int) -> RoundPlan:
    """The plan of a number that was asked for."""
    return RoundPlan(rounds, "given", rounds)


def plan_rounds(
    aa_log_ratios: ArrayLike,
    seconds_per_round: float,
    margin: float,
    budget: float,
    arms_log_ratios: Iterable[ArrayLike] = (),
) -> RoundPlan:
    """Rounds for 80 % power at the margin, then for a narrow interval while the budget lasts.

    Args:
        aa_log_ratios: of `zeros_again` against `zeros` in the pilot's rounds, at least two.
        seconds_per_round: that these took.
        margin: of equivalence; the A/A test is made at half of it.
        budget: seconds for all rounds, the pilot's included.
        arms_log_ratios: of each other arm against `zeros`, in as many rounds; their spread alone is read.

    Raises:
        StudyError: for ratios that are not finite, or a margin out of range.
    """
    ratios = checked(aa_log_ratios)
    arms = [float(np.std(checked(arm), ddof=1)) for arm in arms_log_ratios]
    sd = float(np.std(ratios, ddof=1))
    return _planned(sd, max(arms, default=None), len(ratios), seconds_per_round, margin, budget, len(ratios))


def replanned(plan: RoundPlan, margin: float, budget: float) -> RoundPlan:
    """A plan that its budget cut short, under another budget: as blind to the gap as the first, and never shorter."""
    if plan.limit != "budget" or plan.sd is None or plan.seconds_per_round is None:
        return plan
    return _planned(plan.sd, plan.sd_arms, plan.rounds, plan.seconds_per_round, margin, budget, plan.pilot)


def _planned(
    sd: float, sd_arms: float | None, least: int, seconds_per_round: float, margin: float, budget: float, pilot: int
) -> RoundPlan:
    arms, likely = sd_arms or 0.0, _likely(pilot)
    power = max(rounds_for(sd * likely, margin / 2), rounds_for(arms * likely, margin))
    precision = math.ceil((max(sd, arms) * likely * _Z95 / (_PRECISION * math.log1p(margin))) ** 2)
    precise = min(precision, MAX_ROUNDS)
    limit = "power" if power >= precise else "precision" if precise == precision else "most"
    wanted = max(power, precise, least, MIN_ROUNDS)
    most = wanted
    if power > MOST_ROUNDS:
        limit, most = "most", max(least, MOST_ROUNDS)
    affordable = max(least, int(budget / max(seconds_per_round, 1e-9)))
    if affordable < most:
        limit, most = "budget", affordable
    return RoundPlan(most, limit, wanted, sd, seconds_per_round, sd_arms, pilot, budget)


def _likely(pilot: int) -> float:
    """An sd from so few rounds is too low half the time; 4 in 5 true values lie under this many times it.

    The lower fifth of chi-square by Wilson and Hilferty (1931, doi:10.1073/pnas.17.12.684). Without it the power that
    was planned for is reached by half of the studies only.
    """
    k = max(pilot - 1, 1)
    fifth = k * (1 - 2 / (9 * k) - 0.8416 * math.sqrt(2 / (9 * k))) ** 3
    return math.sqrt(k / fifth) * _SMALL_SAMPLE
