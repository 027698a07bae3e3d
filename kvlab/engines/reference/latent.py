"""Layer 2: multi-head latent attention in its absorbed form (DeepSeek-V2), and its sparse kind (DeepSeek-V3.2).

Queries are mapped into the latent space, so that all heads share one cached row a token: 512 latent values, which
are also the values, and 64 rotated ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kvlab.engines.reference.attention import Observer, chunks, paged_attention, rotate
from kvlab.engines.reference.paging import Index, Pages
from kvlab.engines.reference.plan import Bucket, Context, Plan
from kvlab.engines.reference.presets import INDEX_WIDTH, LATENT_RANK, LATENT_WIDTH, ROPE_WIDTH, ReferenceConfig


class LatentAttention(nn.Module):
    """MLA over the whole context, `[B, N, 576]` bf16 or 656 packed bytes."""

    def __init__(self, config: ReferenceConfig, group_id: int, pages: Pages) -> None:
        super().__init__()
        self.group_id, self.pages = group_id, pages
        heads, width = config.num_heads, config.head_dim
        self.widths = [width, ROPE_WIDTH]
        self.scale = (width + ROPE_WIDTH) ** -0.5
        self.query = nn.Linear(config.hidden_size, heads * (width + ROPE_WIDTH), bias=False)
        self.latent = nn.Linear(config.hidden_size, LATENT_WIDTH, bias=False)
        self.latent_norm = nn.RMSNorm(LATENT_RANK, eps=1e-6)
        self.key_up = nn.Parameter(torch.empty(heads, width, LATENT_RANK))
        self.value_up = nn.Parameter(torch.empty(heads, width, LATENT_RANK))
        self.out = nn.Linear(heads * width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, plan: Plan, observe: Observer | None) -> torch.Tensor:
        index = plan.writes[self.group_id]
        assert index is not None
        latent, rope = self.latent(x).split_with_sizes([LATENT_RANK, ROPE_WIDTH], -1)
        rope = rotate(rope.unsqueeze(1), plan.cos, plan.sin).squeeze(1)
        self.pages.write(index, torch.cat([self.latent_norm(latent), rope], -1))
        q, q_rope = self.query(x).unflatten(-1, (-1, sum(self.widths))).split_with_sizes(self.widths, -1)
        # Absorbed: q . (W c) = (q W) . c
        q = torch.einsum("thd,hdl->thl", q, self.key_up)
        q = torch.cat([q, rotate(q_rope, plan.cos, plan.sin)], -1)
        seen = self.attend(x, q, plan, observe)
        return self.out(torch.einsum("thl,hdl->thd", seen, self.value_up).flatten(1))

    def attend(self, x: torch.Tensor, q: torch.Tensor, plan: Plan, observe: Observer | None) -> torch.Tensor:
        """Latent outputs [tokens, heads, 512] of latent queries [tokens, heads, 576]."""
        out = q.new_empty(*q.shape[:2], LATENT_RANK)
        for bucket in plan.buckets:
            context = bucket.contexts[self.group_id]
            assert context is not None
            queries = q[bucket.rows].unflatten(0, (bucket.num_requests, -1)).transpose(1, 2).unsqueeze(1)
            seen = paged_attention(queries, self._read, bucket, context, self.scale)
            out[bucket.rows] = seen[:, 0, :, :, :LATENT_RANK].transpose(1, 2).flatten(0, 1)
        return out

    def _read(self, index: Index) -> tuple[torch.Tensor, torch.Tensor]:
        # Keys serve as values too, the 64 rotated ones to be dropped: fused kernels want equal widths.
        latents = self.pages.read(index, self.out.weight.dtype).unsqueeze(1)
        return latents, latents


class Indexer(nn.Module):
    """Scores every token of the context for every query: `sum over heads of w * relu(q . k)`.

    Keys are 128 values a token, the first 64 rotated, in 132 packed bytes. Scores are float32 whatever the model's
    dtype: in bf16 most of them would tie.
    """

    def __init__(self, config: ReferenceConfig, pages: Pages) -> None:
        super().__init__()
        self.pages, self.heads = pages, config.index_heads
        self.query = nn.Linear(config.hidden_size, self.heads * INDEX_WIDTH, bias=False)
        self.key = nn.Linear(config.hidden_size, INDEX_WIDTH, bias=False)
        self.key_norm = nn.LayerNorm(INDEX_WIDTH, eps=1e-6)
        self.weight = nn.Linear(config.hidden_size, self.heads, bias=False)

    def write(self, x: torch.Tensor, plan: Plan, index: Index) -> None:
        """Store the tokens' keys."""
        self.pages.write(index, self._rotate(self.key_norm(self.key(x)).unsqueeze(1), plan).squeeze(1))

    def queries(self, x: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 queries [tokens, heads, 128] and head weights [tokens, heads]."""
        q = self._rotate(self.query(x).unflatten(-1, (self.heads, INDEX_WIDTH)), plan)
        return q.float(), self.weight(x).float() * (self.heads * INDEX_WIDTH) ** -0.5

    def _rotate(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        rope, rest = x.split_with_sizes([ROPE_WIDTH, INDEX_WIDTH - ROPE_WIDTH], -1)
        return torch.cat([rotate(rope, plan.cos, plan.sin), rest], -1)


def index_scores(q: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [R, Q, T] of queries [R, Q, heads, 128], head weights [R, Q, heads] and keys [R, T, 128]."""
    scores = torch.relu(q.flatten(1, 2) @ keys.mT).unflatten(1, (q.shape[1], -1))
    return (scores * weight.unsqueeze(-1)).sum(2)


def select_tokens(scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, topk: int) -> torch.Tensor:
    """The `topk` best visible tokens of each query, in no order: int64 [R, Q, min(topk, T)], distinct.

    A query that sees fewer tokens than that also gets later ones; they must be masked.

    Args:
        scores: [R, Q, T], overwritten.
        queries, keys: their positions, [Q] and [T].
    """
    scores = scores.masked_fill_(keys > queries.unsqueeze(1), -torch.inf)
    return scores.topk(min(topk, scores.shape[-1]), -1, sorted=False).indices


class SparseLatentAttention(LatentAttention):
    """MLA over the tokens that an indexer picks."""

    def __init__(self, config: ReferenceConfig, group_id: int, pages: Pages, index_pages: Pages, name: str) -> None:
        super().__init__(config, group_id, pages)
        self.name, self.topk = name, config.topk
        self.indexer = Indexer(config, index_pages)

    def attend(self, x: torch.Tensor, q: torch.Tensor, plan: Plan, observe: Observer | None) -> torch.Tensor:
        write = plan.writes[self.group_id]
        assert write is not None
        self.indexer.write(x, plan, write)
        index_q, weight = self.indexer.queries(x, plan)
        out = q.new_empty(*q.shape[:2], LATENT_RANK)
        for bucket in plan.buckets:
            context = bucket.contexts[self.group_id]
            assert context is not None
            split = (bucket.num_requests, bucket.num_queries)
            parts = tuple(part[bucket.rows].unflatten(0, split) for part in (q, index_q, weight))
            out[bucket.rows] = self._attend_bucket(parts, bucket, context, observe).flatten(0, 1)
        return out

    def _attend_bucket(
        self, parts: tuple[torch.Tensor, ...], bucket: Bucket, context: Context, observe: Observer | None
    ) -> torch.Tensor:
        q, index_q, weight = parts
        length = len(context.positions)
        keys = self.indexer.pages.read(context.index, torch.float32)
        # As in vLLM, many queries unpack the context once and few unpack what they chose. Decided by shape, so that
        # every KV content runs the same kernels.
        unpack_once = bucket.num_queries * min(self.topk, length) > length
        latents = self.pages.read(context.index, q.dtype) if unpack_once else None
        scratch = bucket.num_requests * max(length * self.indexer.heads * 8, self.topk * LATENT_WIDTH * 8)
        pieces = []
        for piece in chunks(bucket.num_queries, scratch, q.device):
            seen = bucket.computed + piece.stop
            scores = index_scores(index_q[:, piece], weight[:, piece], keys[:, :seen])
            positions = bucket.positions[piece]
            if observe:
                observe(f"{self.name}.indexer", scores)
            chosen = select_tokens(scores, positions, context.positions[:seen], self.topk)
            if observe:
                observe(f"{self.name}.indexer.chosen", chosen)
            pieces.append(self._attend_chosen(q[:, piece], chosen, positions, context.index, latents))
        return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]

    def _attend_chosen(
        self,
        q: torch.Tensor,
        chosen: torch.Tensor,
        positions: torch.Tensor,
        index: Index,
        latents: torch.Tensor | None,
    ) -> torch.Tensor:
        requests, queries, count = chosen.shape
        if latents is None:
            flat = chosen.flatten(1)
            found = self.pages.read(tuple(part.gather(1, flat) for part in index), q.dtype)
        else:
            offsets = torch.arange(requests, device=q.device)[:, None, None] * latents.shape[1]
            found = F.embedding(chosen + offsets, latents.flatten(0, 1))
        found = found.view(requests * queries, 1, count, LATENT_WIDTH)
        mask = (chosen <= positions.unsqueeze(1)).view(requests * queries, 1, 1, count) if queries > 1 else None
        folded = q.flatten(0, 1).unsqueeze(1)
        seen = F.scaled_dot_product_attention(folded, found, found, mask, scale=self.scale)
        return seen.view(requests, queries, -1, LATENT_WIDTH)[..., :LATENT_RANK]
