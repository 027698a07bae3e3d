"""Layer 5: one randomised round over all arms of a prepared step."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from kvlab.engines.base import Step
from kvlab.measure.sampler import PERIOD_S, RESTING_PERIOD_S, Sampler
from kvlab.measure.schedule import round_order
from kvlab.measure.settling import MORE_S, PACE_S, SETTLED_S, settle, visit
from kvlab.measure.telemetry import Telemetry
from kvlab.measure.timer import COUNTED, Timer
from kvlab.plan import Plan

# Random contents are drawn anew from this many seeds in turn, so that a verdict is not about one draw.
RANDOM_SEEDS = 4


def measure_round(
    step: Step, timer: Timer, plan: Plan, index: int, telemetry: Telemetry, finite: dict[str, bool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time every arm once, in the round's own order.

    Args:
        index: of the round, from 0.
        finite: arm -> its outputs were finite so far; updated.

    Returns:
        Rows for `Run.add_round`; and what the card did meanwhile, one row per arm for `Run.add_telemetry`, which has
        yet to learn case, mode and round; none where there are no sensors. `failure`: why readings ended early.
    """
    by_name = {arm.name: arm for arm in plan.arms}
    rows: list[dict[str, Any]] = []
    readings: list[dict[str, Any]] = []
    for position, name in enumerate(round_order(list(by_name), index, plan.seed)):
        seed = plan.seed + index % RANDOM_SEEDS
        step.fill(by_name[name].fill, seed)
        if timer.mode != "sustained":
            _discard(timer, plan.discard)
        since = 0.0
        with Sampler(telemetry, RESTING_PERIOD_S if timer.rest else PERIOD_S) as sampler:
            if timer.mode == "sustained":
                capped = settle(timer, sampler, more=_more(plan.seed, index, position))
                since = time.perf_counter() - SETTLED_S
                # The queue ran dry in between: in one call with those that are timed, so that it does not again.
                replays = visit(timer, plan.replays, max(1, plan.discard), capped)
            else:
                replays = timer.replay(plan.replays)
        reading = sampler.summary(timer.busy, since)
        if timer.rest:
            # The power sensor's average reaches into the rests: 338 W where the same step took 653 W without.
            reading = replace(reading, watts=None, watts_source=None)
        if reading.readings or sampler.failure:
            begin = since or (sampler.readings[0].t_s if sampler.readings else time.perf_counter())
            failed = {"failure": sampler.failure} if sampler.failure else {}
            readings.append({"arm": name, "t_s": begin, **asdict(reading), **failed})
        finite[name] &= bool(timer.output().isfinite().all())
        rows += [
            {
                "position": position,
                "arm": name,
                "fill": str(by_name[name].fill),
                "seed": seed,
                "replay": replay,
                "us": each.us,
                "routing": step.engine.routing,
                # Of one source: what the card counts lies some MHz off what its driver reads.
                "sm_mhz": each.mhz if timer.clock == COUNTED else reading.sm_mhz,
                "mem_mhz": reading.mem_mhz,
                "watts": reading.watts,
                "celsius": reading.celsius,
                "throttled": reading.throttled,
                "flagged": bool(reading.throttled),
            }
            for replay, each in enumerate(replays)
        ]
    return rows, readings


def _more(seed: int, index: int, position: int) -> float:
    """Seconds of the settling that chance decides, the same for the same visit."""
    return float(np.random.default_rng((seed, index, position)).uniform(0.0, MORE_S))


def _discard(timer: Timer, count: int) -> None:
    begin = time.perf_counter()
    if count:
        timer.time(count)
    while timer.kind == "cuda_graph_events" and time.perf_counter() - begin < PACE_S:
        timer.time(1)
