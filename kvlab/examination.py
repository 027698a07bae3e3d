"""Layer 5: what is seen of a step before any time is taken: finite outputs, writes where it may, the captured step."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvlab.engines.base import Step
from kvlab.engines.loads import loads_moved
from kvlab.errors import EngineError
from kvlab.kv.extents import storage_extents
from kvlab.kv.views import iter_tensors
from kvlab.measure.timer import GraphTimer, Timer
from kvlab.plan import BASELINE, Plan
from kvlab.verification import verify_step

# The byte-level check needs a copy of the caches; a check makes it unasked only where that is cheap.
_VERIFY_BYTES = 2 * 2**30
# A captured forward that is further from the eager one than this, and than eager is from itself, is another step.
_CAPTURE_DISTANCE = 0.02


@dataclass(frozen=True)
class Examination:
    """What was found.

    Attributes:
        finite: arm -> its output is finite.
        outside_writes: bytes that the step writes outside its touched views; None where nobody looked.
        culprits: sentences that say why nothing can be timed; empty for a sound step.
        expert_loads: arm -> MoE layer -> tokens that each expert gets; empty for a model without experts.
        routing_moved: arm -> share of the tokens that went to other experts than under zeros.
    """

    finite: dict[str, bool] = field(default_factory=dict)
    outside_writes: int | None = None
    culprits: tuple[str, ...] = ()
    expert_loads: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    routing_moved: dict[str, float] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """What a run stores of it."""
        # As text: in columns, an expert load a layer and arm would be thousands. Arms that moved nothing are left out.
        moved = {BASELINE, *(arm for arm, share in self.routing_moved.items() if share)}
        told = {arm: loads for arm, loads in self.expert_loads.items() if arm in moved}
        loads = {"expert_loads": json.dumps(told, separators=(",", ":"))} if told else {}
        return {"outside_writes": self.outside_writes, **loads}


def examine(step: Step, plan: Plan) -> Examination:
    """Run the step once under each arm of the plan; look at its writes where the caches are small enough to copy."""
    finite, culprits, loads = {}, [], {}
    for arm in plan.arms:
        step.fill(arm.fill, plan.seed)
        layer = step.first_nonfinite()
        finite[arm.name] = layer is None
        if layer is not None:
            culprits.append(f"arm {arm.name!r} has a non-finite output, first in layer {layer!r}; nothing was timed")
        elif step.engine.routing != "none" and (counted := step.expert_loads()):
            loads[arm.name] = counted
    if culprits:
        return Examination(finite, culprits=tuple(culprits))
    # Counted under zeros too, or there is nothing to compare with.
    moved = {arm: loads_moved(loads[BASELINE], counted) for arm, counted in loads.items() if BASELINE in loads}
    lists = {arm: {layer: n.tolist() for layer, n in counted.items()} for arm, counted in loads.items()}
    return Examination(finite, _outside_writes(step, plan.seed), expert_loads=lists, routing_moved=moved)


def captured(step: Step, timer: Timer) -> dict[str, Any]:
    """How far a captured step is from the eager one, and whether its clock is counted; empty for a timer that captures
    nothing.

    Raises:
        EngineError: where it is another step.
    """
    if not isinstance(timer, GraphTimer):
        return {}
    if timer.graph_vs_eager > max(_CAPTURE_DISTANCE, 4 * timer.eager_repeat):
        raise EngineError(
            f"case {step.case.name!r}: the captured step's output is {timer.graph_vs_eager:.1%} from the eager one's:"
            " another step was captured than was asked for"
        )
    return {"eager_repeat": timer.eager_repeat, "graph_vs_eager": timer.graph_vs_eager, "clock": timer.clock}


def _outside_writes(step: Step, seed: int) -> int | None:
    tensors = [t for cache in step.engine.kv_caches.values() for t in iter_tensors(cache)]
    if sum(extent.storage.numel() for extent in storage_extents(tensors).values()) > _VERIFY_BYTES:
        return None
    return verify_step(step, seed, probe_reads=False).bytes_outside
