"""Layer 5: a case's verdict as the record that the run stores and `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.cases import Case
from kvlab.engines.base import Engine
from kvlab.measure.telemetry import CLOCK_FLOOR
from kvlab.plan import Plan
from kvlab.stats import Estimate, decide


def verdict_head(engine: Engine, case: Case, plan: Plan, run: Path) -> dict[str, Any]:
    """What a verdict is about."""
    return {
        "case": case.name,
        "text": str(case),
        "model": engine.model,
        "engine": engine.name,
        "routing": engine.routing,
        "phase": case.phase,
        "mode": plan.mode,
        "margin": plan.margin,
        "run": str(run),
    }


def failed_verdict(plan: Plan, reasons: list[str], finite: Mapping[str, bool] | None = None) -> dict[str, Any]:
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
        "reasons": reasons,
    }


def case_verdict(
    samples: pd.DataFrame, plan: Plan, finite: Mapping[str, bool], outside_writes: int | None
) -> dict[str, Any]:
    """The verdict that a case's samples support.

    Args:
        samples: of the case, in the plan's mode.
        finite: whether each arm's outputs were finite.
        outside_writes: bytes written outside the touched views; None where nobody looked.
    """
    decisions = {
        arm.name: decide(samples, arm.name, plan.margin, finite=finite, outside_writes=outside_writes or 0)
        for arm in plan.compared
    }
    decision = decisions[plan.claim.name]
    medians = samples.groupby("arm")["us"].median()
    flagged = float(_flagged(samples).mean())
    reasons = list(decision.reasons)
    if set(samples["routing"]) == {"real"}:
        reasons.append("MoE routing was real: contents can move the experts too, so the gap is not about KV alone")
    if flagged:
        reasons.append(f"{flagged:.0%} of the samples were throttled or below {CLOCK_FLOOR:.0%} of the highest clock")
    return {
        "gap": decision.gap.gap,
        "ci90": _interval(decision.gap),
        "verdict": decision.verdict,
        "aa": {"gap": decision.aa.gap, "ci90": _interval(decision.aa)},
        "median_us": {arm.name: float(medians[arm.name]) for arm in plan.arms},
        "rounds": decision.gap.n,
        "mde": decision.mde if math.isfinite(decision.mde) else None,
        "finite": {arm.name: finite[arm.name] for arm in plan.arms},
        "arm": plan.claim.name,
        "reasons": reasons,
        "nonzero": decision.nonzero,
        "rounds_needed": decision.rounds_needed,
        "also": {f"{margin:g}": verdict for margin, verdict in decision.also.items()},
        "arms": {
            name: {"gap": d.gap.gap, "ci90": _interval(d.gap), "verdict": d.verdict} for name, d in decisions.items()
        },
        "flagged": flagged,
        "outside_writes": outside_writes,
    }


def _interval(estimate: Estimate) -> list[float] | None:
    """None for the unbounded interval of too few rounds, which JSON has no word for."""
    return list(estimate.ci90) if all(map(math.isfinite, estimate.ci90)) else None


def _flagged(samples: pd.DataFrame) -> pd.Series:
    """Samples that were throttled, or whose clock was under `CLOCK_FLOOR` of the case's highest."""
    flagged = samples["flagged"].astype(bool)
    if "sm_mhz" in samples and samples["sm_mhz"].notna().any():
        flagged |= samples["sm_mhz"] < CLOCK_FLOOR * samples["sm_mhz"].max()
    return flagged
