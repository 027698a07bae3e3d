"""Layer 2: attention over a paged context, and the dense layers, full or windowed, that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from kvlab.engines.reference.paging import Index, Pages
from kvlab.engines.reference.plan import Bucket, Context, Plan
from kvlab.engines.reference.presets import ReferenceConfig

# Called with a name and a tensor that a layer produced; see `Model.forward`.
Observer = Callable[[str, torch.Tensor], None]
# Reads keys [R, heads, T, width] and values [R, heads, T, width] at an index.
Reader = Callable[[Index], tuple[torch.Tensor, torch.Tensor]]

# Bytes of intermediate results at a time. On a CPU they stay below the allocator's threshold for fresh mappings, whose
# page faults would cost more than the arithmetic.
_SCRATCH_BYTES = {"cpu": 8 * 2**20}
_SCRATCH_BYTES_ELSEWHERE = 2**30


def chunks(count: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """Cut `count` items so that a piece's scratch stays within the device's budget; by shape alone."""
    step = max(1, _SCRATCH_BYTES.get(device.type, _SCRATCH_BYTES_ELSEWHERE) // bytes_each)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves paired: x [tokens, heads, width], cos and sin [tokens, width / 2]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def paged_attention(
    q: torch.Tensor, read: Reader, bucket: Bucket, context: Context, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention of a bucket's queries over its context.

    The G query heads that share a KV head are folded into the queries, so keys are never repeated. Keys that no query
    of a piece may see are cut off by shape before the mask.

    Args:
        q: [R, heads, G, Q, width].
        window: tokens that a query sees, its own included; None for all.

    Returns:
        [R, heads, G, Q, width of the values].
    """
    requests, heads, group, queries, width = q.shape
    length = len(context.positions)
    found = []
    for some in chunks(requests, heads * length * width * 8, q.device):
        keys, values = read(tuple(part[some] for part in context.index))
        pieces = []
        for piece in chunks(queries, heads * group * length * 8, q.device):
            seen = slice(0, bucket.computed + piece.stop - context.first)
            if window is not None:
                seen = slice(max(0, bucket.computed + piece.start + 1 - window - context.first), seen.stop)
            mask = None
            if queries > 1:
                mask = visible(bucket.positions[piece], context.positions[seen], window).repeat(group, 1)
            folded = q[some, :, :, piece].flatten(2, 3)
            out = F.scaled_dot_product_attention(folded, keys[:, :, seen], values[:, :, seen], mask, scale=scale)
            pieces.append(out.unflatten(2, (group, -1)))
        found.append(torch.cat(pieces, 3) if len(pieces) > 1 else pieces[0])
    return torch.cat(found) if len(found) > 1 else found[0]


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """bool [queries, keys] of positions: at or before the query and, with a window, among its last `window` tokens."""
    distance = queries.unsqueeze(1) - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class DenseAttention(nn.Module):
    """Grouped-query attention over K and V, `[B * kernel_blocks, H, N, 2 * head_dim]`.

    Args:
        group_id: KV cache group of the layer.
        window: tokens that a query sees; None for the whole context.
    """

    def __init__(self, config: ReferenceConfig, group_id: int, pages: Pages, window: int | None) -> None:
        super().__init__()
        self.group_id, self.pages, self.window = group_id, pages, window
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, plan: Plan, observe: Observer | None) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split_with_sizes([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = rotate(q, plan.cos, plan.sin), rotate(k, plan.cos, plan.sin)
        index = plan.writes[self.group_id]
        assert index is not None
        self.pages.write(index, torch.cat([k, v], -1).transpose(0, 1))
        out = torch.empty_like(q)
        for bucket in plan.buckets:
            context = bucket.contexts[self.group_id]
            assert context is not None
            # [R * Q, heads * G, D] and back, by way of [R, heads, G, Q, D].
            split = (bucket.num_requests, bucket.num_queries, self.kv_heads, -1, self.head_dim)
            queries = q[bucket.rows].view(split).permute(0, 2, 3, 1, 4)
            seen = paged_attention(queries, self._read, bucket, context, self.head_dim**-0.5, self.window)
            out[bucket.rows].view(split).copy_(seen.permute(0, 3, 1, 2, 4))
        return self.out(out.flatten(1))

    def _read(self, index: Index) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.pages.read(index, self.out.weight.dtype).chunk(2, -1)
        return keys, values
