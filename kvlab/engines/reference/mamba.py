"""Layer 2: Mamba2 (Dao & Gu 2024, arXiv:2405.21060): a causal convolution and a state-space scan, states in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kvlab.engines.reference.attention import Observer
from kvlab.engines.reference.plan import Bucket, Plan
from kvlab.engines.reference.presets import ReferenceConfig

CHUNK = 64


def ssd_scan(
    x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence `h = exp(log_decay) * h + x (outer) b; y = h . c`, in chunks of 64 tokens.

    Within a chunk it is a masked matrix product, from chunk to chunk a scan over states (section 6 of the paper).

    Args:
        x: [R, Q, heads, P], the inputs already scaled by their time step.
        log_decay: [R, Q, heads], at most 0.
        b, c: [R, Q, N], shared by all heads.
        state: h before the first token, [R, heads, P, N]; None for zero.

    Returns:
        y [R, Q, heads, P] and h after the last token.
    """
    queries, size = x.shape[1], min(CHUNK, x.shape[1])
    pad = -queries % size
    # A padded token neither decays the state (log 0) nor adds to it.
    x, log_decay = F.pad(x, (0, 0, 0, 0, 0, pad)), F.pad(log_decay, (0, 0, 0, pad))
    b, c = F.pad(b, (0, 0, 0, pad)), F.pad(c, (0, 0, 0, pad))
    x, log_decay, b, c = (part.unflatten(1, (-1, size)) for part in (x, log_decay, b, c))
    total = log_decay.cumsum(2)  # [R, chunks, L, heads]
    between = total.unsqueeze(3) - total.unsqueeze(2)
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    weights = between.masked_fill(future[..., None], -torch.inf).exp() * (c @ b.mT).unsqueeze(-1)
    y = torch.einsum("rklsh,rkshp->rklhp", weights, x)
    to_end = (total[:, :, -1:] - total).exp()
    added = torch.einsum("rklh,rklhp,rkln->rkhpn", to_end, x, b)
    decays = total[:, :, -1].exp()[..., None, None]
    if state is None:
        state = torch.zeros_like(added[:, 0])
    before = []
    for k in range(added.shape[1]):
        before.append(state)
        state = torch.addcmul(added[:, k], decays[:, k], state)
    y = y + torch.einsum("rklh,rkln,rkhpn->rklhp", total.exp(), c, torch.stack(before, 1))
    return y.flatten(1, 2)[:, :queries], state


class Mamba2(nn.Module):
    """Mamba2 with one group of B and C.

    States of a request, read unless it starts here and written in place: the convolution's last inputs, bf16
    [conv_kernel - 1, channels], and h, float32 [heads, head_dim, state_size].
    """

    def __init__(self, config: ReferenceConfig, group_id: int, states: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.group_id = group_id
        self.conv_state, self.ssm_state = states
        self.heads, self.head_dim = config.mamba_heads, config.mamba_head_dim
        width, channels = config.mamba_width, config.conv_width
        self.splits = [width, channels, self.heads]
        self.conv_splits = [width, config.state_size, config.state_size]
        self.inputs = nn.Linear(config.hidden_size, sum(self.splits), bias=False)
        self.conv = nn.Parameter(torch.empty(channels, config.conv_kernel))
        # Time steps of 0.001 to 0.1 and decay rates of 1 to 16, as Mamba2 is initialised.
        steps = torch.logspace(-3, -1, self.heads)
        self.step_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.rate = nn.Parameter(torch.linspace(1, 16, self.heads).log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.out = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, plan: Plan, observe: Observer | None) -> torch.Tensor:
        gate, channels, step = self.inputs(x).split_with_sizes(self.splits, -1)
        # Rounded to the state's dtype first, so that where steps are cut does not change what the convolution sees.
        channels = channels.to(self.conv_state.dtype).float()
        step = F.softplus(step.float() + self.step_bias.float())
        y = torch.empty_like(gate)
        for bucket in plan.buckets:
            split = (bucket.num_requests, bucket.num_queries)
            scanned = self._scan(
                channels[bucket.rows].unflatten(0, split), step[bucket.rows].unflatten(0, split), bucket
            )
            y[bucket.rows] = scanned.flatten(0, 1).to(y.dtype)
        return self.out(self.norm(y * F.silu(gate)))

    def _scan(self, channels: torch.Tensor, step: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        blocks = bucket.states[self.group_id]
        assert blocks is not None
        kept = self.conv_state.shape[1]
        if bucket.computed:
            past, state = self.conv_state[blocks].float(), self.ssm_state[blocks]
        else:
            past, state = channels.new_zeros(channels.shape[0], kept, channels.shape[2]), None
        stream = torch.cat([past, channels], 1)
        mixed = F.silu(F.conv1d(stream.mT, self.conv.float().unsqueeze(1), groups=stream.shape[2])).mT
        x, b, c = mixed.split_with_sizes(self.conv_splits, -1)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        log_decay = -step * self.rate.float().exp()
        y, state = ssd_scan(x * step.unsqueeze(-1), log_decay, b, c, state)
        self.conv_state[blocks] = stream[:, -kept:].to(self.conv_state.dtype)
        self.ssm_state[blocks] = state
        return (y + x * self.skip.float().unsqueeze(-1)).flatten(2)
