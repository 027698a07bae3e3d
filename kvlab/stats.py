"""Layer 4: verdicts, pure: a table of timed replays in, numbers and plain sentences out.

Everything is decided on theta = log T_arm - log T_baseline (`kvlab.estimates`, `kvlab.intervals`). A margin of 3 % is
therefore the interval +-log(1.03), symmetric in log space: a gap from -2.91 % to +3 %, so that exchanging the two arms
cannot change a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from kvlab.errors import StudyError
from kvlab.estimates import BASELINE, Estimate, arm_estimate, estimate, position_bias, round_ratios
from kvlab.intervals import (
    Floats,
    bootstrap_interval,
    checked,
    hodges_lehmann,
    student_quantile,
    student_tail,
)

__all__ = [
    "AGAIN",
    "BASELINE",
    "MIN_ROUNDS",
    "Decision",
    "Estimate",
    "all_within",
    "arm_estimate",
    "bootstrap_interval",
    "decide",
    "estimate",
    "hodges_lehmann",
    "holm",
    "judge",
    "p_different",
    "position_bias",
    "round_ratios",
    "rounds_for",
]

AGAIN = "zeros_again"
# Four ratios all on one side still happen by chance more than 5 % of the time (2^-4); the sixth may be an outlier.
MIN_ROUNDS = 6
# Family-wise error at which a list of what differs is told.
ALPHA = 0.05
MAX_ROUNDS = 1_000_000  # what "no number of rounds would decide" is reported as
ALSO_MARGINS = (0.01, 0.05)

_Z80, _Z90, _Z95 = (NormalDist().inv_cdf(p) for p in (0.80, 0.90, 0.95))


@dataclass(frozen=True)
class Decision:
    """A verdict with what it rests on.

    Attributes:
        verdict: `equivalent`, `different`, `inconclusive` or `invalid`.
        reasons: plain sentences with numbers.
        gap: the arm against the baseline.
        aa: the second zeros arm against the baseline: the noise floor.
        nonzero: the gap's 90 % interval excludes 0; an equivalent gap can be non-zero.
        mde: minimum detectable effect: the smallest |gap| that this many rounds of this noise would flag as non-zero
            four times in five. In log space the interval's half-width plus z.80 standard errors; inf for one round.
        rounds_needed: rounds in all (not in addition) that would decide with 80 % power, see `rounds_for`;
            None where more rounds would not help.
        also: the verdict at 1 % and at 5 %.
    """

    verdict: str
    reasons: tuple[str, ...]
    gap: Estimate
    aa: Estimate
    nonzero: bool
    mde: float
    rounds_needed: int | None
    also: dict[float, str]


def rounds_for(sd: float, margin: float) -> int:
    """Rounds to find equivalence at `margin` with 80 % power when the true gap is 0: sd^2 (z.95 + z.90)^2 / delta^2.

    delta is log(1 + margin); at least `MIN_ROUNDS`. For a pilot give the sd of its A/A log ratios and half the margin:
    the A/A test is the stricter one and takes four times the rounds. Autocorrelated rounds and few of them take more.

    Raises:
        StudyError: for a negative or non-finite sd, or a margin out of range.
    """
    if not 0 <= sd < math.inf:
        raise StudyError(
            f"sd {sd} of the log ratios is not a finite number of 0 or more; take it from a pilot's rounds"
        )
    _check_margin(margin)
    return _rounds(sd, math.log1p(margin), _Z95 + _Z90)


def decide(
    samples: pd.DataFrame,
    arm: str = "random",
    margin: float = 0.03,
    finite: Mapping[str, bool] | None = None,
    outside_writes: int = 0,
    routing_moved: bool = False,
) -> Decision:
    """Whether `arm` times like `zeros` within `margin`.

    | verdict | when |
    |---|---|
    | `invalid` | a compared arm's output was not finite, a step wrote outside its touched views, or the routing moved |
    | `invalid` | the A/A interval (`zeros_again` against `zeros`) is not inside +-log(1 + margin / 2) |
    | `equivalent` | the 90 % interval of theta is inside +-log(1 + margin) |
    | `different` | it is wholly outside |
    | `inconclusive` | neither, or fewer than `MIN_ROUNDS` rounds |

    The first row that applies wins, except that too few rounds come before the A/A test. An A/A that fails for width
    alone is told from one that moved in the reasons, and by `rounds_needed`.

    Args:
        samples: as for `round_ratios`, with arms `zeros`, `zeros_again` and `arm`.
        finite: arm -> its output had no NaN and no infinity; arms not named count as finite.
        outside_writes: bytes that the step changed outside its touched views.
        routing_moved: experts got other tokens under one arm than under another, in a claim about KV alone.

    Raises:
        StudyError: as `round_ratios`, or for a margin out of range.
    """
    _check_margin(margin)
    gap, aa = (arm_estimate(samples, name) for name in (arm, AGAIN))
    faults = []
    for name in dict.fromkeys((arm, BASELINE, AGAIN)):
        if finite is not None and not finite.get(name, True):
            faults.append(f"The output of arm {name!r} holds a NaN or an infinity.")
    if outside_writes:
        faults.append(f"The step changed {outside_writes} bytes outside its touched views.")
    if routing_moved:
        faults.append("The routing moved between the arms, so the gap is not the KV cache's alone.")
    also = {m: "invalid" if faults else judge(gap, aa, m)[0] for m in ALSO_MARGINS}
    if faults:
        verdict, reasons, rounds = "invalid", tuple(faults), None
    else:
        verdict, reasons, rounds = judge(gap, aa, margin, arm)
    mde = math.expm1(gap.half_width + _Z80 * gap.standard_error)
    return Decision(verdict, reasons, gap, aa, gap.nonzero, mde, rounds, also)


def judge(gap: Estimate, aa: Estimate, margin: float, arm: str = "arm") -> tuple[str, tuple[str, ...], int | None]:
    """`decide` on finished estimates of a step without faults: verdict, reasons, rounds needed."""
    n, half = min(gap.n, aa.n), margin / 2
    if n < MIN_ROUNDS:
        rounds = max(_rounds_to_decide(gap, margin), _rounds_to_decide(aa, half)) if n > 1 else MIN_ROUNDS
        return "inconclusive", (f"{n} rounds are too few for a verdict; run {rounds} or more.",), rounds
    if not aa.inside(half):
        if aa.nonzero and abs(aa.log_gap) > math.log1p(half):
            return "invalid", (f"The floor moved: {AGAIN} is {aa} off {BASELINE}, more than half the margin.",), None
        rounds = _rounds_to_decide(aa, half)
        told = f"The noise floor is too wide: {AGAIN} is {aa} off {BASELINE}, not within half the margin, {half:.2%};"
        return "invalid", (f"{told} {_told_rounds(rounds)}.",), rounds
    told = f"{arm} is {gap} off {BASELINE}"
    if gap.inside(margin):
        also = "; the gap is small but not zero" if gap.nonzero else ""
        return "equivalent", (f"{told}, inside the margin of {margin:.2%}{also}.",), None
    if gap.outside(margin):
        return "different", (f"{told}, wholly outside the margin of {margin:.2%}.",), None
    rounds = _rounds_to_decide(gap, margin)
    return "inconclusive", (f"{told}, across the margin of {margin:.2%}; {_told_rounds(rounds)}.",), rounds


def all_within(verdicts: Iterable[str]) -> bool:
    """All cases are equivalent. An intersection-union test: each at 5 %, so is the whole (Berger 1982).

    Args:
        verdicts: of the cases, `Decision.verdict`.

    Raises:
        StudyError: for none: nothing was shown.
    """
    said = list(verdicts)
    if not said:
        raise StudyError("no decisions to combine; run at least one case")
    return all(verdict == "equivalent" for verdict in said)


def p_different(measured: Estimate | ArrayLike, margin: float) -> float:
    """p-value of "|theta| is at most log(1 + margin)", for `holm`; at most 0.05 only where the interval says different.

    Student's tail with the interval's own standard error and degrees of freedom; 1 for a single round.

    Args:
        measured: an estimate, or log ratios [rounds] of one process.

    Raises:
        StudyError: as `estimate`, or for a margin out of range (0 asks whether the gap is zero).
    """
    if margin != 0:
        _check_margin(margin)
    e = measured if isinstance(measured, Estimate) else estimate(measured)
    if e.n == 1:
        return 1.0
    size, delta = abs(e.log_gap), math.log1p(margin)
    lo, hi = e.log_ci90
    # The side that faces zero: with it p = 0.05 falls where the interval leaves the margin.
    error = (e.log_gap - lo if e.log_gap > 0 else hi - e.log_gap) / student_quantile(0.05, e.df)
    if error == 0:
        return 0.0 if size > delta else 1.0
    return min(1.0, student_tail((size - delta) / error, e.df) + student_tail((size + delta) / error, e.df))


def holm(p_values: ArrayLike) -> Floats:
    """Holm's adjusted p-values (1979) in the given order: those at most 0.05 differ, family-wise error 5 %.

    Raises:
        StudyError: for no values, or any outside [0, 1].
    """
    p = checked(p_values, "p-values")
    if p.min() < 0 or p.max() > 1:
        raise StudyError(f"p-values from {p.min()} to {p.max()}; give probabilities in [0, 1]")
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted


def _check_margin(margin: float) -> None:
    if not 0 < margin < 1:
        raise StudyError(f"margin {margin} is out of range; give a fraction in (0, 1), 0.03 for 3 %")


def _rounds(sd: float, distance: float, z: float) -> int:
    wanted = (sd * z / distance) ** 2 if distance else math.inf
    return max(MIN_ROUNDS, math.ceil(min(wanted, MAX_ROUNDS)))


def _rounds_to_decide(e: Estimate, margin: float) -> int:
    """Planned for a gap of 0 while the interval holds it, else for the gap as estimated; `e.n` >= 2."""
    sd, delta = e.standard_error * math.sqrt(e.n), math.log1p(margin)
    distance, z = (abs(delta - abs(e.log_gap)), _Z95 + _Z80) if e.nonzero else (delta, _Z95 + _Z90)
    return min(MAX_ROUNDS, max(_rounds(sd, distance, z), e.n + 1))


def _told_rounds(rounds: int) -> str:
    if rounds >= MAX_ROUNDS:
        return "it sits on the edge, so no number of rounds would decide: judge it at another margin"
    return f"about {rounds} rounds in all would decide four times in five"
