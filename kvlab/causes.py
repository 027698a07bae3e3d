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

import pandas as pd

from kvlab.cause_parts import Part, clock_moved, clock_part, gaps_by_role, movers_of, selection_part, wander_us
from kvlab.cause_words import MAIN, cause_sentence, clock_is_likely
from kvlab.estimates import (
    BASELINE,
    Estimate,
    arm_estimate,
    clock_counted,
    cycle_table,
    round_processes,
    round_table,
    table_estimate,
)
from kvlab.kernel_gaps import kernel_gap_table, profiled_samples
from kvlab.kernel_names import MOE
from kvlab.role_effects import role_effects

__all__ = ["Cause", "Part", "arm_medians", "find_cause", "gap_in_cycles", "kernel_gap_table"]

AGAIN = "zeros_again"
# Of the tokens: below, no expert's load changes enough to move a step by `MOVED`.
ROUTING_MOVED = 0.01


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
        clock: change of the rounds' SM clocks, as a gap; None where no round has both.
        counted: the card counted its clock in every replay; else its driver read it now and then.
        selection: top-k and gathers together, with the interval of the profiled replays; without kernels the effect of
            the indexer's contents in cycles, with the interval of the rounds; None without that too.
        clocks: what of the rest of the gap the change of clock can explain: all of it, with the intervals of the gap
            and of the selection together, where the change could make more (the step waits for memory in part); else
            what the change could make, with the interval of the rounds' clocks. None without clocks; 0 for a clock
            that did not move (`kvlab.cause_parts.clock_moved`).
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
    clock: Estimate | None = None
    counted: bool = False
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

    @property
    def clock_moved(self) -> bool:
        """The clock under the arm is another one than the baseline's."""
        return clock_moved(self.mhz, self.clock, self.counted)


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
    roles, again = (gaps_by_role(kernels, name, baseline) for name in (arm, AGAIN))
    us = round_table(samples)
    step = float(us[baseline].median())
    cycles = _round_cycles(us, (arm, baseline), samples, telemetry)
    mhz = arm_medians("sm_mhz", arm, baseline, samples, telemetry)
    counted = clock_counted(samples)
    processes = round_processes(samples)
    indexer, kv, interaction = role_effects(us, arm, baseline, processes)
    indexer_cycles, kv_cycles, _ = (None,) * 3 if cycles is None else role_effects(cycles, arm, baseline, processes)
    clock = None if cycles is None else table_estimate(cycles / us, arm, baseline, processes)
    selection = selection_part(roles, indexer_cycles, step)
    left = step * gap.gap - selection.us
    clocked = Part(0.0, 0.0)
    if mhz is not None and clock_moved(mhz, clock, counted):
        clocked = clock_part(step, gap, selection, mhz, clock)
    cause = Cause(
        kind="unknown",
        sentence="",
        gap=gap,
        aa=arm_estimate(samples, AGAIN, baseline) if AGAIN in set(samples["arm"]) else None,
        cycles=None if cycles is None else table_estimate(cycles, arm, baseline, processes),
        mhz=mhz,
        clock=clock,
        counted=counted,
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
    movers = movers_of(roles, again, step)
    # Kernels that only wander select nothing.
    chosen = roles.empty or abs(selection.us) > wander_us(roles, again)
    kind = _kind(cause, movers, step, chosen)
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


def _of_same_step(table: pd.DataFrame | None, samples: pd.DataFrame) -> pd.DataFrame:
    """The rows of the samples' case and mode."""
    if table is None:
        return pd.DataFrame()
    for column in ("run", "case", "mode"):
        if column in table and column in samples:
            table = table[table[column].isin(samples[column].unique())]
    return table


def _kind(cause: Cause, movers: Mapping[str, float], step: float, chosen: bool) -> str:
    gap_us = step * cause.gap.gap
    seen = cause.gap.nonzero and abs(cause.gap.log_gap) > _floor(cause.aa)
    if seen and (cause.routing or 0.0) >= ROUTING_MOVED:
        # What neither the clock nor the selection explains, and experts that take as much more, where they were seen.
        known = sum(part.us / gap_us for part in (cause.clocks, cause.selection) if part)
        experts = movers.get(MOE, 0.0) / gap_us if cause.roles else 1.0
        if min(1.0 - known, experts) >= MAIN:
            return "routing"
    if movers and min(movers.values()) < 0 < max(movers.values()):
        return "cancelling"
    if not seen:
        return "none"
    shares = {"selection": cause.selection if chosen else None, "clocks": cause.clocks}
    explained = {kind: part.us / gap_us for kind, part in shares.items() if part is not None}
    if explained and max(explained.values()) >= MAIN:
        return max(explained, key=lambda kind: explained[kind])
    return "kernels" if any(us / gap_us >= MAIN for us in movers.values()) else "unknown"


def _floor(aa: Estimate | None) -> float:
    """How far from 0 the interval of the baseline against itself reaches, in log ratios."""
    return max(map(abs, aa.log_ci90)) if aa is not None and aa.n > 1 else 0.0
