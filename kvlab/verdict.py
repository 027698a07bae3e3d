"""Layer 5: a case's verdict as the record that the run stores and `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.cases import Case
from kvlab.causes import gap_in_cycles
from kvlab.engines.base import Engine
from kvlab.estimates import round_table
from kvlab.examination import Examination
from kvlab.measure.telemetry import CLOCK_FLOOR
from kvlab.plan import Plan
from kvlab.run import Run
from kvlab.stats import decide, p_different


def verdict_head(engine: Engine, case: Case, plan: Plan, mode: str, run: Path) -> dict[str, Any]:
    """What a verdict is about."""
    return {
        "case": case.name,
        "text": str(case),
        "model": engine.model,
        "engine": engine.name,
        "routing": engine.routing,
        "phase": case.phase,
        "mode": mode,
        "margin": plan.margin,
        "run": str(run),
    }


def failed_verdict(plan: Plan, reasons: Sequence[str], finite: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """A verdict without times: what was wrong was seen before any was taken."""
    return {
        "gap": None,
        "ci90": None,
        "verdict": "invalid",
        "aa": {"gap": None, "ci90": None},
        "median_us": {},
        "rounds": 0,
        "mde": None,
        "finite": dict(finite or {}),
        "arm": plan.claim.name,
        "reasons": list(reasons),
    }


def kept_verdict(run: Run, plan: Plan, case: str, mode: str, found: Examination | None, failure: str) -> dict[str, Any]:
    """The verdict on a case that failed on the way: what its rounds say where it has any, or said before.

    Args:
        found: of the step; None where there was none to look at.
    """
    told, samples, stored = f"It went no further: {failure}", run.samples_of(case, mode), run.verdict_of(case, mode)
    rounds = samples["round"].nunique()
    if found is not None and rounds > (stored["rounds"] if stored else 0):
        found = replace(found, finite=finite_so_far(run, case, mode, found))
        return with_reason(case_verdict(samples, plan, found), told)
    if stored and stored["rounds"]:  # with its cause, its plan and its rest
        return stored if told in stored["reasons"] else with_reason(stored, told)
    return failed_verdict(plan, [failure], found.finite if found else None)


def finite_so_far(run: Run, case: str, mode: str, found: Examination) -> dict[str, bool]:
    """Arm -> its outputs were finite, in the rounds of earlier processes too."""
    seen = run.facts_of(case).get(f"nonfinite_{mode}", ())
    return {arm: fine and arm not in seen for arm, fine in found.finite.items()}


def with_reason(verdict: Mapping[str, Any], sentence: str) -> dict[str, Any]:
    """The verdict with more to say than its samples do; `added` tells such sentences from the samples'."""
    return {
        **verdict,
        "reasons": [*verdict["reasons"], sentence],
        "added": [*verdict.get("added", ()), sentence],
    }


def case_verdict(samples: pd.DataFrame, plan: Plan, found: Examination) -> dict[str, Any]:
    """The verdict that a case's samples in one mode support.

    Args:
        found: of the step; `finite` by the outputs of its replays too.
    """
    real = set(samples["routing"]) == {"real"}
    decisions = {
        arm.name: decide(
            samples,
            arm.name,
            plan.margin,
            finite=found.finite,
            outside_writes=found.outside_writes or 0,
            # Where the routing is real, that it moves is part of what is timed, and said; elsewhere it is a fault.
            routing_moved=not real and found.routing_moved.get(arm.name, 0.0) > 0,
        )
        for arm in plan.compared
    }
    decision = decisions[plan.claim.name]
    medians = round_table(samples).median()
    flagged = float(_flagged(samples).mean())
    reasons = list(decision.reasons)
    if real:
        reasons.append(_told_routing(plan.claim.name, found.routing_moved.get(plan.claim.name)))
    if flagged:
        reasons.append(f"{flagged:.0%} of the samples were throttled or below {CLOCK_FLOOR:.0%} of the highest clock.")
    return {
        "gap": decision.gap.gap,
        "ci90": decision.gap.listed_ci90,
        "verdict": decision.verdict,
        "aa": {"gap": decision.aa.gap, "ci90": decision.aa.listed_ci90},
        "median_us": {arm.name: float(medians[arm.name]) for arm in plan.arms},
        "rounds": decision.gap.n,
        "mde": decision.mde if math.isfinite(decision.mde) else None,
        "finite": {arm.name: found.finite[arm.name] for arm in plan.arms},
        "arm": plan.claim.name,
        "reasons": reasons,
        "nonzero": decision.nonzero,
        "p": p_different(decision.gap, plan.margin),
        "rounds_needed": decision.rounds_needed,
        "also": {f"{margin:g}": verdict for margin, verdict in decision.also.items()},
        "arms": {
            name: {"gap": d.gap.gap, "ci90": d.gap.listed_ci90, "verdict": d.verdict} for name, d in decisions.items()
        },
        "flagged": flagged,
        "outside_writes": found.outside_writes,
        **({"routing_moved": found.routing_moved} if found.routing_moved else {}),
        **_clocks(samples, plan.claim.name),
    }


def _clocks(samples: pd.DataFrame, arm: str) -> dict[str, Any]:
    """Medians of what the sensors said under each arm, and the gap in cycles; nothing where there are no sensors."""
    if "sm_mhz" not in samples or samples["sm_mhz"].isna().all():
        return {}
    watts = samples["watts"] if "watts" in samples else samples["sm_mhz"] * math.nan
    # Of visits, as causes and reports have them: a replay has its visit's readings, and a capped visit more replays.
    visits = samples.assign(watts=watts).groupby(["round", "arm"], observed=True)[["sm_mhz", "watts"]].median()
    medians = visits.groupby("arm").median().dropna(subset="sm_mhz")
    clocks = {
        str(name): {"MHz": float(row["sm_mhz"]), "W": None if math.isnan(row["watts"]) else float(row["watts"])}
        for name, row in medians.iterrows()
    }
    cycles = gap_in_cycles(samples, arm)
    told = {"gap": cycles.gap, "ci90": cycles.listed_ci90, "rounds": cycles.n} if cycles else None
    return {"clocks": clocks, **({"cycles": told} if told else {})}


def _told_routing(arm: str, moved: float | None) -> str:
    if moved is None:
        return "MoE routing was real: contents can move the experts too, so the gap is not about KV alone."
    return (
        f"MoE routing was real, and at least {moved:.0%} of the tokens went to other experts under {arm}: the gap is"
        " not about KV alone."
    )


def _flagged(samples: pd.DataFrame) -> pd.Series:
    """Samples that were throttled, or whose clock was under `CLOCK_FLOOR` of the case's highest."""
    flagged = samples["flagged"].astype(bool)
    if "sm_mhz" in samples and samples["sm_mhz"].notna().any():
        flagged |= samples["sm_mhz"] < CLOCK_FLOOR * samples["sm_mhz"].max()
    return flagged
