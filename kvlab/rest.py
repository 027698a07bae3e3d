"""Layer 5: how long a lone step rests, so that the power cap does not carry the heat of the last replay into the next.

Isolated mode asks what one step takes on a card that has nothing else to do. A step of tens of milliseconds near the
power limit does not get that by waiting for its end alone: replays follow within microseconds, the cap averages over
them, and the clock is that of a busy card (seen on an H200 from 25 ms a step on). What a busy card does is for
sustained mode to say. A step long enough to meet the cap by itself is slowed with any rest, and rightly so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kvlab.engines.base import Step
from kvlab.measure.sampler import Sampler
from kvlab.measure.telemetry import Telemetry
from kvlab.measure.timer import Timer
from kvlab.plan import AGAIN, Plan
from kvlab.run import Run

# As multiples of a replay's time: the share of time that the card works is 1, 1/2, 1/4.
RESTS = (0.0, 1.0, 3.0)
# Seconds of replays under each arm, and how many of the readings in them may say that a cap holds the clock.
_WATCHED_S = 0.4
_CAPPED = 0.1
# Seconds of replays with each rest, of which the first part only brings the card to its pace.
_TRIED_S = 0.8
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
        without, with_it = self.us[f"{0:g}"], self.us[f"{self.share:g}"]
        return (
            f"Each replay was followed by a rest of {self.share:g} times its length, as the power cap held the clock"
            f" under {held}: {self.arm} took {without / 1e3:,.1f} ms without, {with_it / 1e3:,.1f} ms with it."
        )


def rest_of(run: Run, step: Step, timer: Timer, plan: Plan, telemetry: Telemetry) -> Rest:
    """The rest of the step's case in the timer's mode: as the run has it, so that all its rounds are alike, or found
    and stored. Sets `timer.rest`."""
    name, key = step.case.name, f"rest_{timer.mode}"
    stored = run.facts_of(name).get(key)
    rest = Rest(**stored) if stored else find_rest(step, timer, plan, telemetry)
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
    capped = {
        arm.name: share
        for arm in plan.arms
        if arm.name != AGAIN and (share := _capped(step, timer, plan, telemetry, arm.name)) is not None
    }
    if max(capped.values(), default=0.0) <= _CAPPED:
        return Rest(0.0, capped)
    most = max(capped, key=lambda name: capped[name])
    _fill(step, plan, most)
    us = {}
    for share in RESTS:
        timer.rest = share
        timer.settle(_TRIED_S / 2)
        first = timer.time(2)
        us[share] = median([*first, *timer.time(_count(_TRIED_S / 2, first[-1], share))])
    best = next(share for share in RESTS if us[share] <= min(us.values()) * (1 + _GAIN))
    return Rest(best, capped, most, {f"{share:g}": taken for share, taken in us.items()})


def _count(seconds: float, us: float, share: float) -> int:
    """Replays of `us` microseconds, with their rests, in some seconds; one at least."""
    return max(1, int(seconds / (us / 1e6 * (1 + share))))


def _capped(step: Step, timer: Timer, plan: Plan, telemetry: Telemetry, name: str) -> float | None:
    """Share of the readings beside an arm's replays that say a cap; None where nothing is read."""
    _fill(step, plan, name)
    timer.settle(_WATCHED_S / 2)
    with Sampler(telemetry) as sampler:
        timer.settle(_WATCHED_S)
    said = [reading.throttled for reading in sampler.readings if reading.throttled is not None]
    return sum(said) / len(said) if said else None


def _fill(step: Step, plan: Plan, name: str) -> None:
    step.fill(next(arm.fill for arm in plan.arms if arm.name == name), plan.seed)
