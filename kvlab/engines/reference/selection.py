"""Layer 2: the tokens that a sparse layer chose, put back into the batch's order."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvlab.engines.reference.plan import Plan

_CHOSEN = ".chosen"


class Chosen:
    """An observer of `Model.forward` that keeps what the indexers chose.

    Args:
        topk: tokens that a query chooses, at most.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self._pieces: dict[str, list[torch.Tensor]] = {}

    def observe(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a piece of one bucket's choice: int64 [R, Q, k], k at most topk."""
        if name.endswith(_CHOSEN):
            width = self.topk - tensor.shape[-1]
            self._pieces.setdefault(name.removesuffix(_CHOSEN), []).append(F.pad(tensor, (0, width), value=-1))

    def by_layer(self, plan: Plan) -> dict[str, torch.Tensor]:
        """Indexer name -> int64 [tokens, topk] in the batch's order; -1 where a query sees fewer tokens."""
        return {name: _in_order(plan, pieces) for name, pieces in self._pieces.items()}


def _in_order(plan: Plan, pieces: list[torch.Tensor]) -> torch.Tensor:
    remaining = iter(pieces)
    rows = []
    for bucket in plan.buckets:
        # A bucket's queries come in pieces, all of its requests in each.
        parts = [next(remaining)]
        while sum(part.shape[1] for part in parts) < bucket.num_queries:
            parts.append(next(remaining))
        chosen = torch.cat(parts, 1)
        unseen = chosen > bucket.positions[:, None]
        rows.append(chosen.masked_fill(unseen, -1).flatten(0, 1))
    return torch.cat(rows).index_select(0, plan.order)
