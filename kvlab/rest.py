"""Layer 5: how long a lone step rests, so that the power cap does not carry the heat of the last replay into the next.

Isolated mode asks what one step takes on a card that has nothing else to do. A step of tens of milliseconds near the
power limit does not get that by waiting for its end alone: replays follow within microseconds, the cap averages over
them, and the clock is that of a busy card (seen on an H200 from 25 ms a step on). What a busy card does is for
sustained mode to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvlab.engines.base import Step
from kvlab.measure.sampler import RESTING_PERIOD_S, Sampler
from kvlab.measure.telemetry import Telemetry
from kvlab.measure.timer import Timer
from kvlab.plan import AGAIN, Plan
from kvlab.run import Run

# Tried in turn, as multiples of a replay's time: the share of time that the card works is 1, 1/2, 1/4.
RESTS = (0.0, 1.0, 3.0)
# Seconds of replays under each arm, and how many of the readings in them may say that a cap holds the clock.
_WATCHED = 0.5
_CAPPED = 0.1


@dataclass(frozen=True)
class Rest:
    """The rest of a case's isolated replays, the same under every arm.

    Attributes:
        share: pause after each replay, as a multiple of its time.
        capped: arm -> share of the readings that said a cap, without a rest; empty where there are no sensors.
        still: the same with this rest.
    """

    share: float = 0.0
    capped: Mapping[str, float] = field(default_factory=dict)
    still: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.share:
            return ""
        said = f"Each replay was followed by a rest of {self.share:g} times its length, as the power cap slowed "
        said += ", ".join(f"{arm} ({share:.0%} of the readings)" for arm, share in self.capped.items() if share)
        left = {arm: share for arm, share in self.still.items() if share > _CAPPED}
        return said + (f"; readings told of the cap even so under {', '.join(left)}." if left else ".")


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
    """The shortest of `RESTS` with which no arm's clock is held down; the longest where none does. Sets `timer.rest`.

    Watches the card under every arm's contents before any round, so that one rest serves all arms alike.
    """
    timer.rest = 0.0
    if timer.mode != "isolated" or timer.kind != "cuda_graph_events":
        return Rest()
    first: dict[str, float] = {}
    still: dict[str, float] = {}
    for share in RESTS:
        timer.rest = share
        still = _capped(step, timer, plan, telemetry)
        first = first or still
        if all(capped <= _CAPPED for capped in still.values()):
            break
    return Rest(timer.rest, first, still)


def _capped(step: Step, timer: Timer, plan: Plan, telemetry: Telemetry) -> dict[str, float]:
    shares = {}
    for arm in plan.arms:
        if arm.name == AGAIN:
            continue
        step.fill(arm.fill, plan.seed)
        timer.settle(_WATCHED / 2)
        with Sampler(telemetry, RESTING_PERIOD_S) as sampler:
            timer.settle(_WATCHED)
        said = [reading.throttled for reading in sampler.during(timer.busy) if reading.throttled is not None]
        if said:
            shares[arm.name] = sum(said) / len(said)
    return shares
