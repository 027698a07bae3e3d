"""Layer 4: why contents move a step's time, pure: parts in microseconds, and one sentence that follows from them.

Three causes are told apart. Selection: sparse attention scores and chooses tokens by what the indexer's cache holds.
Clocks: contents that toggle more bits draw more power, and at the limit the clock falls; the gap in cycles (time x
clock) is then smaller than the gap in time. Routing: attention's output feeds the gates of the experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from kvlab.cause_words import CLOCK_MOVED, MAIN, cause_sentence
from kvlab.estimates import BASELINE, Estimate, estimate, round_ratios, round_table, table_ratios
from kvlab.kernel_gaps import TOTAL, kernel_gap_table
from kvlab.kernel_names import MOE, REST, SELECTION

__all__ = ["Cause", "Part", "find_cause", "gap_in_cycles", "kernel_gap_table"]

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
    """

    us: float
    of_step: float


@dataclass(frozen=True)
class Cause:
    """What moves an arm's time against the baseline's.

    Attributes:
        kind: `none` (there is no gap), `selection`, `clocks`, `routing`, `cancelling` (kernels moved in opposite
            directions), `kernels` (others than those of selection, in cycles too) or `unknown`.
        sentence: for people.
        gap: in time.
        aa: the baseline again against the baseline; None without that arm.
        cycles: the gap in cycles; None without clocks.
        mhz, watts: of the baseline and of the arm; None where they were not read.
        selection: top-k, indexer scores and gathers together; None without kernels.
        clocks: what of the rest of the gap the change of clock can explain: at most all of it, and all of it where
            the step waits for memory and the clock fell by more; None without clocks.
        routing: share of the tokens that went to other experts; None where nobody looked.
        other: what neither selection nor clocks explain.
        roles: role -> microseconds by which its kernels moved; empty without kernels.
        indexer, kv: main effects of the contents of the two roles of the cache, from the 2x2 of arms; None without it.
        interaction: by how much both together do more than each alone, in log ratios.
    """

    kind: str
    sentence: str
    gap: Estimate
    aa: Estimate | None = None
    cycles: Estimate | None = None
    mhz: tuple[float, float] | None = None
    watts: tuple[float, float] | None = None
    selection: Part | None = None
    clocks: Part | None = None
    routing: float | None = None
    other: Part | None = None
    roles: Mapping[str, float] = field(default_factory=dict)
    indexer: Estimate | None = None
    kv: Estimate | None = None
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
        telemetry: readings beside the replays: `arm`, `sm_mhz`, `watts`, and `round`; they go before the samples' own.
            Of this and of `kernels` the samples' case and mode are taken.
        routing_moved: share of the tokens that went to other experts under the arm.

    Raises:
        StudyError: as `round_ratios`.
    """
    gap = estimate(round_ratios(samples, arm, baseline))
    step = float(samples.loc[samples["arm"] == baseline, "us"].median())
    kernels, telemetry = _of_same_step(kernels, samples), _of_same_step(telemetry, samples)
    roles = _by_role(kernels, arm, baseline)
    mhz = _by_arm("sm_mhz", arm, baseline, telemetry, samples)
    selected = float(roles.loc[roles.index.isin(SELECTION), "gap_us"].sum())
    left = step * gap.gap - selected
    clocked = 0.0
    if mhz is not None and abs(mhz[1] / mhz[0] - 1) >= CLOCK_MOVED:
        # At the baseline's clock a step that waits for the clock alone would have taken this much less.
        could = step * (1 + gap.gap) * (1 - mhz[1] / mhz[0])
        clocked = math.copysign(min(abs(could), abs(left)), left) if could * left > 0 else 0.0
    indexer, kv, interaction = _effects(samples, arm, baseline)
    cause = Cause(
        kind="unknown",
        sentence="",
        gap=gap,
        aa=estimate(round_ratios(samples, AGAIN, baseline)) if AGAIN in set(samples["arm"]) else None,
        cycles=gap_in_cycles(samples, arm, baseline, telemetry),
        mhz=mhz,
        watts=_by_arm("watts", arm, baseline, telemetry, samples),
        selection=None if roles.empty else Part(selected, selected / step),
        clocks=None if mhz is None else Part(clocked, clocked / step),
        routing=routing_moved,
        other=Part(left - clocked, (left - clocked) / step),
        roles={str(role): float(us) for role, us in roles["gap_us"].items()},
        indexer=indexer,
        kv=kv,
        interaction=interaction,
    )
    movers = _movers(roles, _by_role(kernels, AGAIN, baseline), step)
    kind = _kind(cause, movers, step)
    routing = ", ".join(sorted(set(samples["routing"].dropna()))) if "routing" in samples else ""
    about = {"arm": arm, "baseline": baseline, "routing": routing}
    words = cause_sentence(cause, kind, movers, step=step, floor=_floor(cause.aa), **about)
    return replace(cause, kind=kind, sentence=words)


def gap_in_cycles(
    samples: pd.DataFrame, arm: str = "random", baseline: str = BASELINE, telemetry: pd.DataFrame | None = None
) -> Estimate | None:
    """The gap in time x SM clock: per round the median time times the median MHz; None where no clocks were read.

    A step that waits for memory takes fewer cycles at a lower clock: its gap in cycles is then negative.

    Args:
        samples: as for `kvlab.estimates.round_ratios`, with `sm_mhz`.
        telemetry: readings with `round`, `arm`, `sm_mhz`, which go before the samples' own.

    Raises:
        StudyError: as `round_ratios`.
    """
    us = round_table(samples)
    for source in (telemetry, samples):
        if source is None or not {"round", "arm", "sm_mhz"} <= set(source) or source["sm_mhz"].isna().all():
            continue
        mhz = source.groupby(["round", "arm"], observed=True)["sm_mhz"].median().unstack("arm")
        cycles = us * mhz.reindex(index=us.index, columns=us.columns)
        if cycles.get([baseline, arm], pd.DataFrame()).notna().all(axis=1).any():
            return estimate(table_ratios(cycles, arm, baseline))
    return None


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


def _by_arm(
    column: str, arm: str, baseline: str, telemetry: pd.DataFrame, samples: pd.DataFrame
) -> tuple[float, float] | None:
    """Medians of the baseline and of the arm, from the first table that has both."""
    for source in (telemetry, samples):
        if {"arm", column} <= set(source):
            medians = source.groupby("arm", observed=True)[column].median().reindex([baseline, arm])
            if medians.notna().all() and (medians > 0).all():
                return float(medians.iloc[0]), float(medians.iloc[1])
    return None


def _effects(
    samples: pd.DataFrame, arm: str, baseline: str
) -> tuple[Estimate, Estimate, Estimate] | tuple[None, None, None]:
    """Main effects of the indexer's and of the KV's contents, and their interaction, per round in log ratios."""
    table = round_table(samples)
    kv_alone, indexer_alone = (_mix(table.columns, *pair) for pair in ((arm, baseline), (baseline, arm)))
    if kv_alone is None or indexer_alone is None or kv_alone == indexer_alone:
        return None, None, None
    logs = np.log(table[[baseline, arm, kv_alone, indexer_alone]].dropna().to_numpy(float).T)
    if not logs.size:
        return None, None, None
    both, kv, indexer = logs[1:] - logs[0]
    return estimate((indexer + both - kv) / 2), estimate((kv + both - indexer) / 2), estimate(both - kv - indexer)


def _mix(arms: Iterable[str], kv: str, indexer: str) -> str | None:
    """The arm `mix(kv=..., indexer=...)` among others."""
    wanted = {f"kv={kv}", f"indexer={indexer}"}
    for arm in arms:
        # A comma within brackets belongs to a part, as in random(std=0.5, zero_fraction=0.1).
        if match := re.fullmatch(r"mix\((.*)\)", arm.replace(" ", "")):
            parts = re.split(r",(?![^(]*\))", match[1])
            if set(parts) == {part.replace(" ", "") for part in wanted}:
                return arm
    return None


def _kind(cause: Cause, movers: Mapping[str, float], step: float) -> str:
    gap_us = step * cause.gap.gap
    if movers and min(movers.values()) < 0 < max(movers.values()):
        return "cancelling"
    if not cause.gap.nonzero or abs(cause.gap.log_gap) <= _floor(cause.aa):
        return "none"
    moe = movers.get(MOE, 0.0) / gap_us if cause.roles else 1.0
    if (cause.routing or 0.0) >= ROUTING_MOVED and moe >= MAIN:
        return "routing"
    shares = {"selection": cause.selection, "clocks": cause.clocks}
    explained = {kind: part.us / gap_us for kind, part in shares.items() if part is not None}
    if explained and max(explained.values()) >= MAIN:
        return max(explained, key=lambda kind: explained[kind])
    return "kernels" if any(us / gap_us >= MAIN for us in movers.values()) else "unknown"


def _floor(aa: Estimate | None) -> float:
    """How far from 0 the interval of the baseline against itself reaches, in log ratios."""
    return max(map(abs, aa.log_ci90)) if aa is not None and aa.n > 1 else 0.0
