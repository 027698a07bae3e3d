"""Layer 2: expert loads: how many tokens each expert of an MoE layer gets, and how far two sets of them differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvlab.errors import EngineError

Loads = Mapping[str, torch.Tensor]


def loads_moved(a: Loads, b: Loads, tolerance: float = 0.0) -> float:
    """The share of tokens that went to other experts, at least: those that changed places in pairs cannot be seen.

    Args:
        a, b: layer -> tokens an expert, [experts], as `Step.expert_loads` counts them.
        tolerance: share of a layer's tokens that may move unseen, e.g. for near ties that rounding decides.

    Returns:
        0 for equal loads, up to 1; 0 for models without experts.

    Raises:
        EngineError: for loads of other layers, or other numbers of experts or tokens.
    """
    if set(a) != set(b):
        (odd,) = sorted(set(a) ^ set(b))[:1]
        raise EngineError(f"layer {odd!r} has expert loads in one arm only; compare arms of one step")
    moved = total = 0.0
    for layer, one in a.items():
        tokens, other_tokens = int(one.sum()), int(b[layer].sum())
        if one.shape != b[layer].shape or tokens != other_tokens:
            raise EngineError(
                f"layer {layer!r}: loads of {len(one)} experts and {tokens} tokens against {len(b[layer])} and"
                f" {other_tokens}; compare arms of one step"
            )
        # Every token that moved is missing in one place and over in another.
        changed = float((one - b[layer]).abs().sum()) / 2
        moved += changed if changed > tolerance * tokens else 0.0
        total += tokens
    return moved / total if total else 0.0
