"""Layer 5: how long a lone step rests, so that the power cap does not carry the heat of the last replay into the next.

Isolated mode asks what one step takes on a card that has nothing else to do. A step of tens of milliseconds near the
power limit does not get that by waiting for its end alone: replays follow within microseconds, the cap averages over
them, and the clock is that of a busy card (seen on an H200 from 25 ms a step on). What a busy card does is for
sustained mode to say. A step long enough to meet the cap by itself is slowed with any rest, and rightly so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean, median, variance
from typing import Any

from kvlab.engines.base import Step
from kvlab.measure.sampler import Sampler
from kvlab.measure.settling import SETTLE_CAPPED_S, SETTLE_S
from kvlab.measure.telemetry import Telemetry
from kvlab.measure.timer import Timer
from kvlab.plan import AGAIN, Plan
from kvlab.run import Run

# As multiples of a replay's time: the share of time that the card works is 1, 1/2, 1/4.
RESTS = (0.0, 1.0, 3.0)
# Seconds that are watched under each arm, the last of the `SETTLE_S` by which a cap that will hold the clock does; and
# how many of the readings in them may say that it does.
_WATCHED_S = 0.4
_CAPPED = 0.1
# Turns through all rests; in each, seconds of replays that bring the card to its pace, and replays that count.
_TURNS, _TRIED_S, _REPLAYS = 3, 0.2, 2
# A longer rest is taken where it makes the step faster by more than this.
_GAIN = 0.003


@dataclass(frozen=True)
class Rest:
    """The rest of a case's isolated replays, the same under every arm.

    Attributes:
        share: pause after each replay, as a multiple of its time.
        capped: arm -> share of the readings that said a cap, without a rest; empty where there are no sensors.
        arm: with the most such readings; empty where no arm was held.
        us: rest that was tried -> median replay under that arm, microseconds.
    """

    share: float = 0.0
    capped: Mapping[str, float] = field(default_factory=dict)
    arm: str = ""
    us: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.share:
            return ""
        held = ", ".join(f"{arm} ({share:.0%} of the readings)" for arm, share in self.capped.items() if share)
        last = "; a longer one was not tried" * (self.share == RESTS[-1])
        said = f"Each replay was followed by a rest of {self.share:g} times its length, as the power cap held the clock"
        if not self.us:  # stored by a kvlab that did not time its rests
            return f"{said} under {held}." if held else f"{said}."
        without, with_it = (f"{self.us[f'{share:g}'] / 1e3:,.1f} ms" for share in (0, self.share))
        return (
            f"{said} under {held}: {self.arm} took {without} without, {with_it} with it{last}. No watts are told, as"
            " their sensor averages over the rests."
        )


def apply_rest(run: Run, step: Step, timer: Timer, plan: Plan, telemetry: Telemetry) -> Rest:
    """The rest of the step's case in the timer's mode: as the run has it, so that all its rounds are alike, or found.

    Sets `timer.rest`, and stores what `kvlab.pace` reads: the rest, and how long sustained rounds settle under a cap.
    """
    name, key = step.case.name, f"rest_{timer.mode}"
    stored = run.facts_of(name).get(key)
    if stored:
        rest = Rest(**{each.name: stored[each.name] for each in fields(Rest) if each.name in stored})
    elif run.finished_rounds(name, timer.mode):
        # Of an older kvlab, or a CPU: the rounds to come are like those, and nothing is said of a rest.
        timer.rest = 0.0
        return Rest()
    else:
        rest = find_rest(step, timer, plan, telemetry)
        if timer.mode == "sustained":
            run.case_facts(name, settle_capped_s=SETTLE_CAPPED_S)
    timer.rest = rest.share
    run.case_facts(name, **{key: rest.as_dict()})
    return rest


def find_rest(step: Step, timer: Timer, plan: Plan, telemetry: Telemetry) -> Rest:
    """The shortest of `RESTS` with which the arm that the cap holds most is as fast as with the longest.

    Watches the card under every arm's contents before any round, so that one rest serves all arms alike; nothing is
    tried where no arm is held.
    """
    timer.rest = 0.0
    if timer.mode != "isolated" or timer.kind != "cuda_graph_events":
        return Rest()
    seen = {arm.name: _watch(step, timer, plan, telemetry, arm.name) for arm in plan.arms if arm.name != AGAIN}
    capped = {name: share for name, (share, _) in seen.items() if share is not None}
    if max(capped.values(), default=0.0) <= _CAPPED:
        return Rest(0.0, capped)
    # Of several that are held all the time, the one at the lowest clock.
    most = max(capped, key=lambda name: (round(capped[name], 1), -seen[name][1]))
    _fill(step, plan, most)
    tried: dict[float, list[float]] = {share: [] for share in RESTS}
    for _ in range(_TURNS):
        for share in RESTS:
            timer.rest = share
            timer.settle(_TRIED_S)
            tried[share] += timer.time(_REPLAYS)
    us = {share: median(times) for share, times in tried.items()}
    # What a median of so many replays wanders by (1.25 sd / sqrt(n)), of two of them, twice.
    wander = 2 * 1.25 * math.sqrt(2 * fmean(variance(times) for times in tried.values()) / (_TURNS * _REPLAYS))
    enough = max(min(us.values()) * (1 + _GAIN), min(us.values()) + wander)
    best = next(share for share in RESTS if us[share] <= enough)
    return Rest(best, capped, most, {f"{share:g}": taken for share, taken in us.items()})


def _watch(step: Step, timer: Timer, plan: Plan, telemetry: Telemetry, name: str) -> tuple[float | None, float]:
    """Share of the readings beside an arm's replays that say a cap (None where nothing is read), and their MHz."""
    _fill(step, plan, name)
    timer.settle(SETTLE_S - _WATCHED_S)
    with Sampler(telemetry) as sampler:
        timer.settle(_WATCHED_S)
    said = [reading.throttled for reading in sampler.readings if reading.throttled is not None]
    return (sum(said) / len(said) if said else None), sampler.summary().sm_mhz or 0.0


def _fill(step: Step, plan: Plan, name: str) -> None:
    step.fill(next(arm.fill for arm in plan.arms if arm.name == name), plan.seed)
