"""Layer 4: parts of a gap in microseconds of a step, pure: what its kernels and its clock made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlab.estimates import Estimate
from kvlab.kernel_gaps import TOTAL, kernel_gap_table
from kvlab.kernel_names import REST, SELECTION

# Of the step: half of the smallest margin that a verdict is given for (1 %). Kernels that moved less explain nothing.
MOVED = 0.005
# Times what the same kernels moved between the baseline and its repetition: within that, they only wander.
WANDER = 2.0
# Of the clock that a driver reads: more than one step of NVIDIA's clocks (15 of 1,980 MHz). Of one that was counted, as
# its interval is narrow: a tenth of the smallest margin.
READ_MOVED, COUNTED_MOVED = 0.01, 0.001


@dataclass(frozen=True)
class Part:
    """A part of a gap.

    Attributes:
        us: microseconds of one step, signed like the gap.
        of_step: of the baseline's time.
        ci90: interval of `us`; None where it is not known.
    """

    us: float
    of_step: float
    ci90: tuple[float, float] | None = None


def selection_part(roles: pd.DataFrame, indexer_cycles: Estimate | None, step: float) -> Part:
    """By the kernels, else by the 2x2: what the indexer's contents make once the clock is taken out.

    Args:
        roles: of `gaps_by_role`.
        step: the baseline's microseconds.
    """
    if roles.empty and indexer_cycles is not None and indexer_cycles.nonzero:
        gap, (lo, hi) = indexer_cycles.gap, indexer_cycles.ci90
        return Part(step * gap, gap, (step * lo, step * hi))
    chosen = roles[roles.index.isin(SELECTION)]
    us, half = float(chosen["gap_us"].sum()), float(np.sqrt((chosen["half_us"] ** 2).sum(skipna=False)))
    return Part(us, us / step, (us - half, us + half) if len(chosen) and math.isfinite(half) else None)


def clock_moved(mhz: tuple[float, float] | None, clock: Estimate | None, counted: bool) -> bool:
    """Whether the clock under the arm is another one than the baseline's.

    Args:
        mhz: medians of the baseline and of the arm.
        clock: change of the rounds' clocks; None where no round has both.
        counted: by the card, not read by its driver.
    """
    if counted and clock is not None and clock.n > 1:
        return clock.nonzero and abs(clock.log_gap) >= COUNTED_MOVED
    return mhz is not None and abs(mhz[1] / mhz[0] - 1) >= READ_MOVED


def clock_part(step: float, gap: Estimate, selection: Part, mhz: tuple[float, float], clock: Estimate | None) -> Part:
    """What of the gap beyond selection a change of clock explains; arguments as of `clock_moved`."""
    us, ends = step * gap.gap, [step * end for end in gap.ci90]
    left = us - selection.us
    change = mhz[1] / mhz[0] - 1 if clock is None else clock.gap
    # At the baseline's clock a step that waits for the clock alone would have taken this much less.
    could = -step * (1 + gap.gap) * change
    if could * left <= 0:
        return Part(0.0, 0.0)
    if abs(left) <= abs(could):
        half = 0.0 if selection.ci90 is None else (selection.ci90[1] - selection.ci90[0]) / 2
        found, interval = left, (left - math.hypot(us - ends[0], half), left + math.hypot(ends[1] - us, half))
    else:
        lo, hi = (-math.inf, math.inf) if clock is None else clock.ci90
        found, interval = could, (step * (1 + gap.gap) * -hi, step * (1 + gap.gap) * -lo)
    return Part(found, found / step, interval if all(map(math.isfinite, interval)) else None)


def gaps_by_role(kernels: pd.DataFrame, arm: str, baseline: str) -> pd.DataFrame:
    """`kernel_gap_table` by role (the index), without rest and total; empty where either arm was not profiled."""
    if kernels.empty or not {arm, baseline} <= set(kernels["arm"]):
        return pd.DataFrame({"gap_us": [], "half_us": []}, index=pd.Index([], name="role"), dtype=float)
    table = (
        kernel_gap_table(kernels, arm, baseline, by="role").set_index("role").drop(index=[TOTAL, REST], errors="ignore")
    )
    return table.assign(half_us=(table["hi_us"] - table["lo_us"]) / 2)[["gap_us", "half_us"]]


def movers_of(roles: pd.DataFrame, again: pd.DataFrame, step: float) -> dict[str, float]:
    """Microseconds by which selection, and each other role, moved; without those that moved by little or by chance.

    Args:
        roles, again: of `gaps_by_role`, of the arm and of the baseline's repetition.
        step: the baseline's microseconds.
    """
    groups = {"selection": SELECTION, **{role: (role,) for role in roles.index if role not in SELECTION}}
    moved = {name: (_moved_us(roles, members), members) for name, members in groups.items()}
    return {
        name: us
        for name, (us, members) in moved.items()
        if abs(us) > max(MOVED * step, wander_us(roles, again, members))
    }


def wander_us(roles: pd.DataFrame, again: pd.DataFrame, members: tuple[str, ...] = SELECTION) -> float:
    """By how much kernels of some roles move by chance: their interval, or twice what the repetition moved them."""
    half = roles.loc[roles.index.isin(members), "half_us"].fillna(0)
    return max(float(np.sqrt((half**2).sum())), WANDER * abs(_moved_us(again, members)))


def _moved_us(roles: pd.DataFrame, members: tuple[str, ...]) -> float:
    return float(roles.loc[roles.index.isin(members), "gap_us"].sum())
