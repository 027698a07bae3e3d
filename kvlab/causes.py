"""Layer 4: why contents move a step's time, pure: parts in microseconds, and one sentence that follows from them.

Three causes are told apart. Selection: sparse attention chooses tokens (top-k) and finds them (gather) by what the
indexer's cache holds; computing the scores is the same work whatever they are. Clocks: contents that toggle more bits
draw more power, and at the limit the clock falls; the gap in cycles (time x clock) is then smaller than the gap in
time. Routing: attention's output feeds the gates of the experts.

Kernels say how much is selection: their gaps carry Welch intervals over the profiled replays, which are few and share
their moment. Rounds say the rest: the gap less the selection, and what the change of clock could make at most. The 2x2
of the cache's roles checks both without a profile: in cycles the KV's contents have no effect where it is the clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from kvlab.cause_words import CLOCK_MOVED, MAIN, cause_sentence, clock_is_likely
from kvlab.estimates import (
    BASELINE,
    Estimate,
    arm_estimate,
    cycle_table,
    estimate,
    round_processes,
    round_table,
    table_estimate,
    table_ratios,
)
from kvlab.intervals import Floats
from kvlab.kernel_gaps import TOTAL, kernel_gap_table, profiled_samples
from kvlab.kernel_names import MOE, REST, SELECTION
from kvlab.role_effects import role_effects

__all__ = ["Cause", "Part", "arm_medians", "find_cause", "gap_in_cycles", "kernel_gap_table"]

AGAIN = "zeros_again"
# Of the step: half of the smallest margin that a verdict is given for (1 %). Kernels that moved less explain nothing.
MOVED = 0.005
# Times what the same kernels moved between the baseline and its repetition: within that, they only wander.
WANDER = 2.0
# Of the tokens: below, no expert's load changes enough to move a step by `MOVED`.
ROUTING_MOVED = 0.01


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


@dataclass(frozen=True)
class Cause:
    """What moves an arm's time against the baseline's.

    Attributes:
        kind: `none` (there is no gap), `selection`, `clocks`, `routing`, `cancelling` (kernels moved in opposite
            directions), `kernels` (others than those of selection, in cycles too) or `unknown`.
        sentence: for people.
        likely: of `clocks`: the gap in cycles leaves room for more.
        gap: in time.
        aa: the baseline again against the baseline; None without that arm.
        cycles: the gap in cycles; None without clocks.
        mhz, watts: of the baseline and of the arm; None where they were not read.
        selection: top-k and gathers together, with the interval of the profiled replays; without kernels the effect of
            the indexer's contents in cycles, with the interval of the rounds; None without that too.
        clocks: what of the rest of the gap the change of clock can explain: all of it, with the intervals of the gap
            and of the selection together, where the change could make more (the step waits for memory in part); else
            what the change could make, with the interval of the rounds' clocks. None without clocks.
        routing: share of the tokens that went to other experts; None where nobody looked.
        other: what neither selection nor clocks explain.
        roles: role -> microseconds by which its kernels moved; empty without kernels.
        role_ci90: role -> interval of that, of the roles that have one (`kvlab.kernel_gaps.kernel_gap_table`).
        profiled: what those intervals are over, `3 profiled replays`, say.
        indexer, kv: main effects of the contents of the two roles of the cache, from the 2x2 of arms; None without it.
        indexer_cycles, kv_cycles: the same of time x clock; None without clocks too.
        interaction: by how much both together do more than each alone, in log ratios.
    """

    kind: str
    sentence: str
    gap: Estimate
    likely: bool = False
    aa: Estimate | None = None
    cycles: Estimate | None = None
    mhz: tuple[float, float] | None = None
    watts: tuple[float, float] | None = None
    selection: Part | None = None
    clocks: Part | None = None
    routing: float | None = None
    other: Part | None = None
    roles: Mapping[str, float] = field(default_factory=dict)
    role_ci90: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    profiled: str = ""
    indexer: Estimate | None = None
    kv: Estimate | None = None
    indexer_cycles: Estimate | None = None
    kv_cycles: Estimate | None = None
    interaction: Estimate | None = None


def find_cause(
    samples: pd.DataFrame,
    kernels: pd.DataFrame | None = None,
    arm: str = "random",
    baseline: str = BASELINE,
    *,
    telemetry: pd.DataFrame | None = None,
    routing_moved: float | None = None,
) -> Cause:
    """The cause of the gap between two arms of one case in one mode.

    Args:
        samples: as for `kvlab.estimates.round_ratios`; `sm_mhz` and `watts` are read where they are. With `zeros_again`
            there is a floor, with the arms `mix(kv=ARM, indexer=BASELINE)` and the reverse the 2x2 of roles.
        kernels: as for `kernel_gap_table`; None, or a table without both arms, where nothing was profiled.
        telemetry: readings beside the replays: `arm`, `sm_mhz`, `watts`, and `round`; for samples that have none. Of
            this and of `kernels` the samples' case and mode are taken.
        routing_moved: share of the tokens that went to other experts under the arm.

    Raises:
        StudyError: as `round_ratios`.
    """
    gap = arm_estimate(samples, arm, baseline)
    kernels, telemetry = _of_same_step(kernels, samples), _of_same_step(telemetry, samples)
    roles = _by_role(kernels, arm, baseline)
    us = round_table(samples)
    step = float(us[baseline].median())
    cycles = _round_cycles(us, (arm, baseline), samples, telemetry)
    mhz = arm_medians("sm_mhz", arm, baseline, samples, telemetry)
    processes = round_processes(samples)
    indexer, kv, interaction = role_effects(us, arm, baseline, processes)
    indexer_cycles, kv_cycles, _ = (None,) * 3 if cycles is None else role_effects(cycles, arm, baseline, processes)
    selection = _selection(roles, indexer_cycles, step)
    left = step * gap.gap - selection.us
    clocked = Part(0.0, 0.0)
    if mhz is not None and abs(mhz[1] / mhz[0] - 1) >= CLOCK_MOVED:
        ratios = None if cycles is None else table_ratios(cycles / us, arm, baseline)
        clocked = _clocked(step, gap, selection, mhz, ratios)
    cause = Cause(
        kind="unknown",
        sentence="",
        gap=gap,
        aa=arm_estimate(samples, AGAIN, baseline) if AGAIN in set(samples["arm"]) else None,
        cycles=None if cycles is None else table_estimate(cycles, arm, baseline, processes),
        mhz=mhz,
        watts=arm_medians("watts", arm, baseline, samples, telemetry),
        selection=selection if len(roles) or selection.us else None,
        clocks=None if mhz is None else clocked,
        routing=routing_moved,
        other=Part(left - clocked.us, (left - clocked.us) / step),
        roles={str(role): float(us) for role, us in roles["gap_us"].items()},
        role_ci90={
            str(role): (float(us - half), float(us + half))
            for role, us, half in roles.itertuples()
            if math.isfinite(half)
        },
        profiled="" if roles.empty else profiled_samples(kernels, arm, baseline),
        indexer=indexer,
        kv=kv,
        indexer_cycles=indexer_cycles,
        kv_cycles=kv_cycles,
        interaction=interaction,
    )
    movers = _movers(roles, _by_role(kernels, AGAIN, baseline), step)
    kind = _kind(cause, movers, step)
    routing = ", ".join(sorted(set(samples["routing"].dropna()))) if "routing" in samples else ""
    about = {"arm": arm, "baseline": baseline, "routing": routing}
    words = cause_sentence(cause, kind, movers, step=step, floor=_floor(cause.aa), **about)
    return replace(cause, kind=kind, sentence=words, likely=kind == "clocks" and clock_is_likely(cause))


def gap_in_cycles(
    samples: pd.DataFrame, arm: str = "random", baseline: str = BASELINE, telemetry: pd.DataFrame | None = None
) -> Estimate | None:
    """The gap in cycles, of rounds whose clock was read under both arms: each replay's time x SM clock; None where no
    round was.

    A step that waits for memory takes fewer cycles at a lower clock: its gap in cycles is then negative.

    Args:
        samples: as for `kvlab.estimates.round_ratios`, with `sm_mhz`.
        telemetry: readings with `round`, `arm`, `sm_mhz`, for samples that have none.

    Raises:
        StudyError: as `round_ratios`.
    """
    cycles = _round_cycles(round_table(samples), (arm, baseline), samples, telemetry)
    return None if cycles is None else table_estimate(cycles, arm, baseline, round_processes(samples))


def arm_medians(column: str, arm: str, baseline: str, *sources: pd.DataFrame) -> tuple[float, float] | None:
    """Medians over visits of the baseline and of the arm, from the first table that has both; None where none has.

    Args:
        column: of a sensor: `sm_mhz`, `watts`.
        sources: of one case and mode: the samples, then what was read beside them.
    """
    for source in sources:
        if {"arm", column} <= set(source):
            visits = source
            if "round" in source:
                visits = source.groupby(["round", "arm"], observed=True)[column].median().reset_index()
            medians = visits.groupby("arm", observed=True)[column].median().reindex([baseline, arm])
            if medians.notna().all() and (medians > 0).all():
                return float(medians.iloc[0]), float(medians.iloc[1])
    return None


def _round_cycles(
    us: pd.DataFrame, arms: tuple[str, str], samples: pd.DataFrame, telemetry: pd.DataFrame | None
) -> pd.DataFrame | None:
    """Cycles as `us` has microseconds (round x arm), from the first table with a round that has both arms."""
    tables = [cycle_table(samples)]
    if telemetry is not None and {"round", "arm", "sm_mhz"} <= set(telemetry):
        tables.append(us * telemetry.groupby(["round", "arm"], observed=True)["sm_mhz"].median().unstack("arm"))
    for table in tables:
        table = table.reindex(index=us.index, columns=us.columns)
        if table.get([*arms], pd.DataFrame()).notna().all(axis=1).any():
            return table
    return None


def _selection(roles: pd.DataFrame, indexer_cycles: Estimate | None, step: float) -> Part:
    """By the kernels, else by the 2x2: what the indexer's contents make once the clock is taken out."""
    if roles.empty and indexer_cycles is not None and indexer_cycles.nonzero:
        gap, (lo, hi) = indexer_cycles.gap, indexer_cycles.ci90
        return Part(step * gap, gap, (step * lo, step * hi))
    chosen = roles[roles.index.isin(SELECTION)]
    us, half = float(chosen["gap_us"].sum()), float(np.sqrt((chosen["half_us"] ** 2).sum(skipna=False)))
    return Part(us, us / step, (us - half, us + half) if len(chosen) and math.isfinite(half) else None)


def _clocked(step: float, gap: Estimate, selection: Part, mhz: tuple[float, float], ratios: Floats | None) -> Part:
    """What of the gap beyond selection a change of clock explains; `ratios` are the rounds' log(MHz / baseline's)."""
    us, ends = step * gap.gap, [step * end for end in gap.ci90]
    left = us - selection.us
    # At the baseline's clock a step that waits for the clock alone would have taken this much less.
    could = step * (1 + gap.gap) * (1 - mhz[1] / mhz[0])
    if could * left <= 0:
        return Part(0.0, 0.0)
    if abs(left) <= abs(could):
        half = 0.0 if selection.ci90 is None else (selection.ci90[1] - selection.ci90[0]) / 2
        found, interval = left, (left - math.hypot(us - ends[0], half), left + math.hypot(ends[1] - us, half))
    else:
        ratio = (-math.inf, math.inf) if ratios is None else estimate(ratios).ci90
        found, interval = could, (step * (1 + gap.gap) * -ratio[1], step * (1 + gap.gap) * -ratio[0])
    return Part(found, found / step, interval if all(map(math.isfinite, interval)) else None)


def _of_same_step(table: pd.DataFrame | None, samples: pd.DataFrame) -> pd.DataFrame:
    """The rows of the samples' case and mode."""
    if table is None:
        return pd.DataFrame()
    for column in ("run", "case", "mode"):
        if column in table and column in samples:
            table = table[table[column].isin(samples[column].unique())]
    return table


def _by_role(kernels: pd.DataFrame, arm: str, baseline: str) -> pd.DataFrame:
    """`kernel_gap_table` by role (the index), without rest and total; empty where either arm was not profiled."""
    if kernels.empty or not {arm, baseline} <= set(kernels["arm"]):
        return pd.DataFrame({"gap_us": [], "half_us": []}, index=pd.Index([], name="role"), dtype=float)
    table = (
        kernel_gap_table(kernels, arm, baseline, by="role").set_index("role").drop(index=[TOTAL, REST], errors="ignore")
    )
    return table.assign(half_us=(table["hi_us"] - table["lo_us"]) / 2)[["gap_us", "half_us"]]


def _movers(roles: pd.DataFrame, wander: pd.DataFrame, step: float) -> dict[str, float]:
    """Microseconds by which selection, and each other role, moved; without those that moved by little or chance."""
    movers = {}
    for name, members in {
        "selection": SELECTION,
        **{role: (role,) for role in roles.index if role not in SELECTION},
    }.items():
        moved = roles[roles.index.isin(members)]
        us = float(moved["gap_us"].sum())
        noise = float(np.sqrt((moved["half_us"].fillna(0) ** 2).sum()))
        noise = max(noise, WANDER * abs(float(wander.loc[wander.index.isin(members), "gap_us"].sum())))
        if abs(us) > max(MOVED * step, noise):
            movers[name] = us
    return movers


def _kind(cause: Cause, movers: Mapping[str, float], step: float) -> str:
    gap_us = step * cause.gap.gap
    seen = cause.gap.nonzero and abs(cause.gap.log_gap) > _floor(cause.aa)
    if seen and (cause.routing or 0.0) >= ROUTING_MOVED:
        # Without a profile: what neither the clock nor the selection explains.
        known = sum(part.us / gap_us for part in (cause.clocks, cause.selection) if part)
        if (movers.get(MOE, 0.0) / gap_us if cause.roles else 1.0 - known) >= MAIN:
            return "routing"
    if movers and min(movers.values()) < 0 < max(movers.values()):
        return "cancelling"
    if not seen:
        return "none"
    shares = {"selection": cause.selection, "clocks": cause.clocks}
    explained = {kind: part.us / gap_us for kind, part in shares.items() if part is not None}
    if explained and max(explained.values()) >= MAIN:
        return max(explained, key=lambda kind: explained[kind])
    return "kernels" if any(us / gap_us >= MAIN for us in movers.values()) else "unknown"


def _floor(aa: Estimate | None) -> float:
    """How far from 0 the interval of the baseline against itself reaches, in log ratios."""
    return max(map(abs, aa.log_ci90)) if aa is not None and aa.n > 1 else 0.0
