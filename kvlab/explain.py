"""Layer 5: why a gap is there: kernels and selected tokens under each arm, after the rounds, and what they show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvlab.causes import Cause, Part, find_cause
from kvlab.engines.base import Step
from kvlab.estimates import Estimate
from kvlab.measure.kernels import profile_kernels
from kvlab.measure.timer import Timer
from kvlab.plan import BASELINE, Plan
from kvlab.run import Run
from kvlab.selection import describe_selection, selection_overlap


def explain(
    step: Step, timer: Timer, plan: Plan, mode: str, run: Run, routing_moved: Mapping[str, float]
) -> dict[str, Any]:
    """Profile every arm, store its kernels in the run, and find the cause of the claimed arm's gap.

    Args:
        timer: of the step, in the mode.
        run: with the rounds of the case and mode.
        routing_moved: arm -> share of the tokens that went to other experts than under zeros.

    Returns:
        Keys of the verdict: `cause` (its parts and a sentence), `profiles` (arm -> how the kernels add up), and
        `selection` (arm -> what sparse attention chose) where there is any.
    """
    case = step.case.name
    capped = may_be_capped(run.samples_of(case, mode))
    profiles: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for arm in plan.arms:
        step.fill(arm.fill, plan.seed)
        # First: its forward is eager, and a profile begins with a replay that undoes it.
        if picked := step.selection():
            chosen[arm.name] = list(picked.values())[-1].cpu()
        profile = profile_kernels(step, timer, capped=capped)
        profiles[arm.name] = profile.facts()
        run.add_kernels({"case": case, "mode": mode, "arm": arm.name, **row} for row in profile.rows)
    cause = find_cause(
        run.samples_of(case, mode),
        run.kernels,
        plan.claim.name,
        telemetry=run.telemetry,
        routing_moved=routing_moved.get(plan.claim.name),
    )
    told: dict[str, Any] = {"cause": cause_record(cause), "profiles": profiles}
    if chosen:
        told["selection"] = {name: _selected(step, picks, chosen[BASELINE]) for name, picks in chosen.items()}
    return told


def may_be_capped(samples: pd.DataFrame) -> bool:
    """Whether a power cap held any of the replays, as it may have on a card without sensors."""
    throttled = samples.get("throttled")
    return throttled is None or bool(throttled.eq(True).any())


def cause_record(cause: Cause) -> dict[str, Any]:
    """A cause as JSON: parts as `us` and `of_step`, estimates as `gap` and `ci90`."""
    fields = {name: getattr(cause, name) for name in cause.__dataclass_fields__ if name not in ("gap", "aa")}
    return {
        name: _plain(value)
        for name, value in fields.items()
        if not (value is None or value is False or value in ({}, ""))
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return {"gap": value.gap, "ci90": value.listed_ci90}
    if isinstance(value, Part):
        return {name: _plain(of) for name, of in asdict(value).items() if of is not None}
    return (
        {k: _plain(v) for k, v in value.items()}
        if isinstance(value, Mapping)
        else list(value)
        if isinstance(value, tuple)
        else value
    )


def context_lengths(step: Step) -> NDArray[np.int64]:
    """Tokens that each of the step's tokens sees, itself included: [num_tokens], requests in the batch's order."""
    spans = step.batch.expected.values()
    return np.concatenate([computed + 1 + np.arange(scheduled) for scheduled, computed, _ in spans])


def _selected(step: Step, picks: Any, baseline: Any) -> dict[str, Any]:
    lengths = context_lengths(step)
    # A captured step may be padded; rows beyond its tokens are nobody's.
    found = describe_selection(picks[: len(lengths)], lengths)
    shared = selection_overlap(picks[: len(lengths)], baseline[: len(lengths)])
    numbers = {**asdict(found), "shared_with_zeros": shared.shared}
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in numbers.items()}
