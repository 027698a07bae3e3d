"""Layer 4: gaps estimated from a table of timed replays: a log ratio a round, and what they say together.

The unit of evidence is the round, never the replay: replays of one arm follow each other within milliseconds and share
the clock, the temperature and the neighbours of that moment. A round gives one log ratio an arm; the ratio cancels what
drifts slower than a round, and the random order within the round centres the rest at zero when the arms are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from kvlab.clusters import clustered_interval
from kvlab.errors import StudyError
from kvlab.intervals import Floats, bootstrap_interval, checked, hodges_lehmann, student_quantile

BASELINE = "zeros"
# Share of a visit's replays whose clock is known, at least, for its cycles.
_CLOCKED = 0.8
# Of `kvlab.measure.timer.MODES`.
SUSTAINED = "sustained"


@dataclass(frozen=True)
class Estimate:
    """A gap with its uncertainty.

    Attributes:
        log_gap: Hodges-Lehmann estimate of theta.
        gap: exp(theta) - 1.
        ci90: 90 % interval as relative gaps (lo, hi); (-1, inf) for a single round.
        sd: standard deviation of the per-round log ratios; 0 for a single round.
        n: rounds.
        df: degrees of freedom of the interval's Student quantile.
        processes: that timed the rounds.
    """

    log_gap: float
    gap: float
    ci90: tuple[float, float]
    sd: float
    n: int
    df: float
    processes: int = 1

    @property
    def log_ci90(self) -> tuple[float, float]:
        """The interval of theta."""
        lo, hi = self.ci90
        return (math.log1p(lo) if lo > -1 else -math.inf), math.log1p(hi)

    @property
    def listed_ci90(self) -> list[float] | None:
        """The interval for JSON; None for the unbounded one of a single round, which JSON has no word for."""
        return list(self.ci90) if all(map(math.isfinite, self.ci90)) else None

    @property
    def half_width(self) -> float:
        """Of the interval of theta."""
        lo, hi = self.log_ci90
        return (hi - lo) / 2

    @property
    def standard_error(self) -> float:
        """Of theta, with what correlation and outliers do to it; inf for a single round."""
        if self.n == 1:
            return math.inf
        return self.half_width / student_quantile(0.05, self.df)

    @property
    def nonzero(self) -> bool:
        """The 90 % interval excludes 0."""
        return self.ci90[0] > 0 or self.ci90[1] < 0

    def inside(self, margin: float) -> bool:
        """The interval of theta lies inside +-log(1 + margin): two one-sided tests at 5 %."""
        lo, hi = self.log_ci90
        return -math.log1p(margin) < lo and hi < math.log1p(margin)

    def outside(self, margin: float) -> bool:
        """The interval of theta lies wholly outside +-log(1 + margin)."""
        lo, hi = self.log_ci90
        return lo > math.log1p(margin) or hi < -math.log1p(margin)

    def __str__(self) -> str:
        return f"{self.gap:+.2%} (90% interval {self.ci90[0]:+.2%} to {self.ci90[1]:+.2%}, {self.n} rounds)"


def estimate(log_ratios: ArrayLike, processes: ArrayLike | None = None) -> Estimate:
    """The gap that per-round log ratios [rounds] show, in round order.

    Args:
        processes: of each round, which process timed it; one for all where absent.

    Raises:
        StudyError: for no values, or any that is not finite.
    """
    values = checked(log_ratios)
    theta = hodges_lehmann(values)
    each = np.zeros(len(values), int) if processes is None else np.asarray(processes)
    lo, hi, df = clustered_interval(values, each)
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    ci90 = math.expm1(lo), math.expm1(hi)
    return Estimate(theta, math.expm1(theta), ci90, sd, len(values), df, len(np.unique(each)))


def arm_estimate(samples: pd.DataFrame, arm: str, baseline: str = BASELINE) -> Estimate:
    """The gap of an arm, clustered by process where the samples say which timed each round.

    Args:
        samples: as for `round_ratios`.

    Raises:
        StudyError: as `round_ratios`.
    """
    return table_estimate(round_table(samples), arm, baseline, round_processes(samples))


def table_estimate(
    table: pd.DataFrame, arm: str, baseline: str = BASELINE, processes: pd.Series | None = None
) -> Estimate:
    """`arm_estimate` from a `round_table`, or from one of cycles.

    Args:
        processes: of `round_processes`.
    """
    ratios = table_ratios(table, arm, baseline)
    return estimate(ratios, None if processes is None else processes[table[[arm, baseline]].dropna().index])


def round_processes(samples: pd.DataFrame) -> pd.Series | None:
    """By round, which process timed it; None where the samples do not say."""
    return samples.groupby("round")["process"].first() if "process" in samples else None


def round_ratios(samples: pd.DataFrame, arm: str, baseline: str = BASELINE) -> Floats:
    """log(arm / baseline) of each round that holds both, in round order, of the times in `round_table`.

    Flagged replays (throttled, say) count like any other.

    Args:
        samples: one row per replay, with columns `round`, `arm` and `us` (microseconds); one case, one mode.

    Raises:
        StudyError: when a column or an arm is missing, no round holds both arms, a time is not positive and finite,
            or rows of several cases, modes, models, engines or routings are mixed.
    """
    return table_ratios(round_table(samples), arm, baseline)


def round_table(samples: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of each round (row, in order) under each arm (column), NaN where a round lacks the arm.

    The median of the arm's replays. Of sustained ones their mean, under all arms, where a power cap held any of them or
    may have: the clock swings from replay to replay there, their median is where the swing dwells longest, and what a
    busy card takes for a step is the time of many over their number (`kvlab.measure.settling` times whole periods of
    the swing). A mean under one arm against a median under another would be a gap of its own.
    """
    return _round_values(samples).unstack("arm")


def cycle_table(samples: pd.DataFrame) -> pd.DataFrame:
    """As `round_table` has microseconds, cycles: each replay's time x its `sm_mhz`; NaN for visits with too few clocks.

    Of a swing that is half seen, the half is no clock of the visit.
    """
    mhz = samples.get("sm_mhz", pd.Series(math.nan, samples.index)).astype(float)
    known = mhz.notna().groupby([samples["round"], samples["arm"]], observed=True).mean().unstack("arm")
    cycles = _round_values(samples.assign(cycles=samples["us"] * mhz), value="cycles").unstack("arm")
    return cycles.where(known >= _CLOCKED)


def clock_counted(samples: pd.DataFrame) -> bool:
    """Whether the card counted `sm_mhz`, see `kvlab.measure.clock`: a driver's are whole MHz, a median of them half."""
    return "sm_mhz" in samples and bool((samples["sm_mhz"].dropna().astype(float) % 0.5 != 0).any())


def table_ratios(table: pd.DataFrame, arm: str, baseline: str = BASELINE) -> Floats:
    """`round_ratios` from a `round_table`."""
    for name in (arm, baseline):
        if name not in table:
            raise StudyError(f"samples have no arm {name!r}; measured arms are {', '.join(map(repr, table.columns))}")
    ratios = np.log(table[arm].to_numpy(float) / table[baseline].to_numpy(float))
    ratios = ratios[~np.isnan(ratios)]
    if not ratios.size:
        raise StudyError(f"no round holds both arms {arm!r} and {baseline!r}; time all arms in every round")
    return ratios


def position_bias(samples: pd.DataFrame, level: float = 0.90) -> pd.DataFrame:
    """How much slower each position in the round is than its round, the arms' own times taken out.

    A least-squares fit of the log times by round, arm and position gives the arms' levels; they are subtracted, and a
    position's value in a round is what is left against the round's mean.

    Args:
        samples: as for `round_ratios`, with a column `position` (of the arm within its round).
        level: at which all intervals hold together (Bonferroni).

    Returns:
        A row a position, in order: `position`, `bias` (relative), `lo`, `hi`, `rounds`.

    Raises:
        StudyError: as `round_ratios`, when no round holds all arms, or when the orders cannot tell arms from positions.
    """
    if not 0 < level < 1:
        raise StudyError(f"interval level {level} is out of range; give a fraction in (0, 1), 0.90 for 90 %")
    table = np.log(_round_values(samples, "position")).reset_index(name="y")
    arms = table["arm"].nunique()
    table = table[table.groupby("round")["arm"].transform("nunique") == arms]
    if table.empty:
        raise StudyError(f"no round holds all {arms} arms; time all arms in every round")
    positions = sorted(table["position"].unique())
    columns = pd.get_dummies(table[["arm", "position"]].astype(str), dtype=float).assign(y=table["y"])
    within = columns - columns.groupby(table["round"]).transform("mean")
    y = within.pop("y")
    coefficients, _, rank, _ = np.linalg.lstsq(within, y, rcond=None)
    if rank < arms + len(positions) - 2:
        raise StudyError(
            f"the orders of {table['round'].nunique()} rounds cannot tell {arms} arms from {len(positions)} positions;"
            " draw a fresh order for every round, and run several"
        )
    y = y - within.iloc[:, :arms] @ coefficients[:arms]
    each = 1 - (1 - level) / len(positions)
    rows: list[dict[str, Any]] = []
    for position in positions:
        here = table["position"] == position
        values = y[here].groupby(table["round"][here]).mean().to_numpy(float)
        numbers = dict(
            zip(("bias", "lo", "hi"), (hodges_lehmann(values), *bootstrap_interval(values, each)), strict=True)
        )
        rows.append({"position": position, **{k: math.expm1(v) for k, v in numbers.items()}, "rounds": len(values)})
    return pd.DataFrame(rows)


def _round_values(samples: pd.DataFrame, *more: str, value: str = "us") -> pd.Series:
    """Time by (round, arm, *more), sorted, in microseconds; or another column by the same rule."""
    keys = ["round", "arm", *more]
    if missing := [c for c in [*keys, "us"] if c not in samples]:
        raise StudyError(f"samples lack column {missing[0]!r}; they need {', '.join(keys)}, us")
    if samples.empty:
        raise StudyError("samples are empty; run at least one round")
    for column in ("case", "mode", "model", "engine", "routing"):
        if column in samples and samples[column].nunique(dropna=False) > 1:
            found = ", ".join(map(str, samples[column].unique()[:3]))
            raise StudyError(f"samples mix values of {column!r} ({found}, ...); decide on one {column} at a time")
    if (blank := samples[keys].isna().any()).any():
        raise StudyError(f"samples have a row without a {blank.idxmax()}; every row carries {', '.join(keys)}")
    us = samples["us"].to_numpy(float)
    bad = np.flatnonzero(~(np.isfinite(us) & (us > 0)))
    if bad.size:
        row = samples.iloc[int(bad[0])]
        raise StudyError(
            f"round {row['round']}, arm {row['arm']!r}: a replay took {row['us']} us; times are positive and finite,"
            " so the timer is at fault: time the round again"
        )
    by_visit = samples.groupby(keys, observed=True)[value]
    if not {"mode", "throttled"} <= set(samples):
        return by_visit.median()
    held = (samples["mode"] == SUSTAINED) & ~samples["throttled"].eq(False).fillna(False).astype(bool)
    return by_visit.mean() if held.any() else by_visit.median()
