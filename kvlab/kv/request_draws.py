"""Layer 1: what is drawn once a request and group, so that all layers of the group agree on it."""

from __future__ import annotations

import torch

from kvlab.kv.draws import generator_of, key_of, normals
from kvlab.kv.owned import OwnedBlocks
from kvlab.kv.scores import Scores
from kvlab.kv.views import LayerTensor

# Apart enough that normal values, none of which is beyond 5.4, keep the requests' order.
_APART = 16.0


class RequestDraws:
    """Which tokens are zero and which scales an indexer has, request by request; independent of the other requests.

    Tables cover the pool's kernel blocks, so that a block's row is found by its ID; only owned rows mean anything.
    """

    def __init__(self, seed: int, blocks: OwnedBlocks) -> None:
        """Draw nothing yet."""
        self.seed = seed
        self.blocks = blocks
        self._tables: dict[tuple[object, ...], torch.Tensor] = {}

    def key(self, layer: LayerTensor) -> int:
        """64-bit key of the values of one cache tensor."""
        return key_of(self.seed, layer.layer, layer.index)

    def zero_tokens(self, layer: LayerTensor, share: float) -> torch.Tensor:
        """Which tokens are zero, an exact share of each request's: bool [kernel blocks, tokens].

        Of values drawn for all tokens, each request's smallest: one sort for all requests.
        """
        tokens = _tokens(layer)
        key = ("zero", layer.group_id, tokens, share)
        if key not in self._tables:
            owned, device = self.blocks, self.blocks.device
            table = torch.zeros(owned.num_blocks, tokens, dtype=torch.bool, device=device)
            blocks = owned.kernel_blocks(layer.group_id, 1).long()
            if len(blocks):
                ranges = owned.ranges[layer.group_id]
                ranges = ranges[ranges[:, 0] < ranges[:, 1]]
                begin, end = int(ranges[:, 0].min()), int(ranges[:, 1].max())
                drawn = normals(key_of(self.seed, "zero tokens", tokens), begin, (end - begin, tokens), device)
                requests, ends = owned.shares(layer.group_id, tokens, share).unsqueeze(-1)
                order = (drawn[blocks - begin].double() + _APART * requests).flatten().argsort(stable=True)
                zero = torch.empty(len(order), dtype=torch.bool, device=device)
                zero[order] = (torch.arange(len(order), device=device).view(-1, tokens) < ends).flatten()
                table[blocks] = zero.view(-1, tokens)
            self._tables[key] = table
        return self._tables[key].view(self.blocks.num_blocks * layer.factor, -1)

    def scales(self, layer: LayerTensor, fill: Scores) -> torch.Tensor:
        """Scales of an indexer's tokens: float32 [kernel blocks, tokens].

        A request's fill its tokens in order; slots after the last token repeat its scale.
        """
        tokens = _tokens(layer)
        key = ("scales", layer.group_id, tokens, fill)
        if key not in self._tables:
            table = torch.ones(self.blocks.num_blocks, tokens, device=self.blocks.device)
            ranges = self.blocks.ranges[layer.group_id].tolist()
            for (begin, end), computed in zip(ranges, self.blocks.computed, strict=True):
                slots = (end - begin) * tokens
                # A slot may stand for several tokens, or for those of one rank: never more than there are slots.
                count = min(slots, -(-computed * tokens // int(layer.spec.block_size)))
                if count:
                    generator = generator_of(self.blocks.device, self.seed, "scales", begin, end, tokens)
                    scales = fill.scales(count, generator)
                    table[begin:end] = torch.cat([scales, scales[-1:].expand(slots - count)]).view(-1, tokens)
            self._tables[key] = table
        return self._tables[key].view(self.blocks.num_blocks * layer.factor, -1)


def _tokens(layer: LayerTensor) -> int:
    """Token slots of an allocator block."""
    return layer.factor * layer.token_major(0, 1).shape[-2]
