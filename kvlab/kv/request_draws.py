"""Layer 1: what is drawn once a request and group, so that all layers of the group agree on it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvlab.kv.batch import Batch
from kvlab.kv.draws import generator_of
from kvlab.kv.scores import Scores
from kvlab.kv.views import BlockRanges, LayerTensor


class RequestDraws:
    """Which tokens are zero and which scales an indexer has, request by request; independent of the other requests.

    Tables cover the pool's kernel blocks, so that a block's row is found by its ID; only owned rows mean anything.
    """

    def __init__(
        self, seed: int, batch: Batch, owned: Mapping[int, BlockRanges], num_blocks: int, device: torch.device
    ) -> None:
        """Draw nothing yet.

        Args:
            owned: by group, the allocator blocks [begin, end) of each request.
            num_blocks: allocator blocks of the pool.
        """
        self.seed = seed
        self.owned = owned
        self.num_blocks = num_blocks
        self.device = device
        self._computed = [sum(batch.expected[req_id][:2]) for req_id in batch.req_ids]
        self._tables: dict[tuple[object, ...], torch.Tensor] = {}

    def kernel_blocks(self, group_id: int, factor: int) -> torch.Tensor:
        """The kernel blocks that requests own, in ascending order within each: int32."""
        key = ("blocks", group_id, factor)
        if key not in self._tables:
            ranges = self.owned[group_id] * factor
            ids = [np.arange(begin, end, dtype=np.int32) for begin, end in ranges.tolist()]
            self._tables[key] = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *ids])).to(self.device)
        return self._tables[key]

    def zero_tokens(self, layer: LayerTensor, share: float) -> torch.Tensor:
        """Which tokens are zero, an exact share of each request's: bool [kernel blocks, tokens]."""
        tokens = _tokens(layer)
        key = ("zero", layer.group_id, tokens, share)
        if key not in self._tables:
            table = torch.zeros(self.num_blocks, tokens, dtype=torch.bool, device=self.device)
            for begin, end in self.owned[layer.group_id].tolist():
                count = (end - begin) * tokens
                generator = generator_of(self.device, self.seed, "zero tokens", begin, end, tokens)
                order = torch.randperm(count, generator=generator, device=self.device)
                table[begin:end] = (order < round(share * count)).view(-1, tokens)
            self._tables[key] = table
        return self._tables[key].view(self.num_blocks * layer.factor, -1)

    def scales(self, layer: LayerTensor, fill: Scores) -> torch.Tensor:
        """Scales of an indexer's tokens: float32 [kernel blocks, tokens].

        A request's fill its tokens in order; slots after the last token repeat its scale.
        """
        tokens = _tokens(layer)
        key = ("scales", layer.group_id, tokens, fill)
        if key not in self._tables:
            table = torch.ones(self.num_blocks, tokens, device=self.device)
            ranges = self.owned[layer.group_id].tolist()
            for (begin, end), computed in zip(ranges, self._computed, strict=True):
                slots = (end - begin) * tokens
                # A slot may stand for several tokens, or for those of one rank: never more than there are slots.
                count = min(slots, -(-computed * tokens // int(layer.spec.block_size)))
                if count:
                    generator = generator_of(self.device, self.seed, "scales", begin, end, tokens)
                    scales = fill.scales(count, generator)
                    table[begin:end] = torch.cat([scales, scales[-1:].expand(slots - count)]).view(-1, tokens)
            self._tables[key] = table
        return self._tables[key].view(self.num_blocks * layer.factor, -1)


def _tokens(layer: LayerTensor) -> int:
    """Token slots of an allocator block."""
    return layer.factor * layer.token_major(0, 1).shape[-2]
