"""Layer 2: which experts a forward sends its tokens to, counted at the routers of an eager forward.

Relies on `FusedMoERouter.select_experts` (`vllm/model_executor/layers/fused_moe/router/fused_moe_router.py`) and on
`MoERunner.router` and `.routed_experts` (`fused_moe/runner/moe_runner.py`), the same in 0.32 and 0.33. Kernels that
choose experts themselves ("monolithic") are given their logits; the router is asked what it makes of the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def moe_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Layer name -> MoE runner: a module whose router selects experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if callable(getattr(getattr(module, "router", None), "select_experts", None))
    }


def grouped_routers(model: torch.nn.Module) -> set[tuple[int, int]]:
    """(groups, groups that a token may use) of routers that choose groups of experts first."""
    found = set()
    for module in moe_layers(model).values():
        groups = getattr(module.router, "num_expert_group", None) or 1
        if groups > 1:
            found.add((int(groups), int(getattr(module.router, "topk_group", None) or 1)))
    return found


@contextmanager
def counted_experts(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Count the tokens of each expert while forwards run: layer -> int64 [experts], filled as layers run."""
    loads: dict[str, torch.Tensor] = {}
    patched: list[tuple[Any, str]] = []
    try:
        for name, module in moe_layers(model).items():
            select = _counting(module.router.select_experts, loads, name)
            # Attributes of the instances shadow their methods; a module's own __setattr__ would refuse none of them.
            vars(module.router)["select_experts"] = select
            patched.append((module.router, "select_experts"))
            experts: Any = getattr(module, "routed_experts", None)
            if callable(getattr(experts, "forward_monolithic", None)):
                vars(experts)["forward_monolithic"] = _asking(experts.forward_monolithic, select)
                patched.append((experts, "forward_monolithic"))
        yield loads
    finally:
        for owner, attribute in patched:
            vars(owner).pop(attribute, None)


def _counting(select_experts: Any, loads: dict[str, torch.Tensor], name: str) -> Any:
    def select(hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weights, ids = select_experts(hidden_states, router_logits, *args, **kwargs)
        # Padding and experts of another rank are negative.
        chosen = ids.flatten().long()
        counts = torch.bincount(chosen[chosen >= 0], minlength=router_logits.shape[-1]).cpu()
        loads[name] = loads[name] + counts if name in loads else counts
        return weights, ids

    return select


def _asking(forward_monolithic: Any, select: Any) -> Any:
    def forward(x: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        select(x, router_logits, input_ids=kwargs.get("input_ids"))
        return forward_monolithic(x, router_logits, *args, **kwargs)

    return forward
