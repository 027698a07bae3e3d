"""The reference models once more: whole sequences at a time, float64, no cache, no blocks, one head after another.

Only the rounding of what a cache would hold is shared with the engine.
"""

from __future__ import annotations

import math

import torch

from kvlab.engines.reference import ReferenceEngine
from kvlab.kv.formats import Fp8DsMlaFormat, IndexerFormat


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


def packed(fmt, x: torch.Tensor) -> torch.Tensor:
    return fmt.decode_fields(fmt.encode_fields(x.float())).double()


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def turn(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of [tokens, width] as complex numbers, token t at position t."""
    half = x.shape[1] // 2
    z = torch.complex(x[:, :half], x[:, half:])
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    z = z * torch.exp(1j * torch.arange(len(x), dtype=torch.float64)[:, None] * frequency)
    return torch.cat([z.real, z.imag], 1)


def attend(scores: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    weights = torch.exp(scores - scores.max()) * allowed
    return weights @ values / weights.sum(1, keepdim=True)


class DenseOracle:
    """The model of an engine.

    Args:
        chosen: of a sparse model, by layer and position, the tokens that the engine attended to. They must be a top-k
            of the oracle's own scores; which of several tied tokens is chosen is the engine's business.
    """

    def __init__(self, engine: ReferenceEngine, chosen: list[list[set[int]]] | None = None) -> None:
        self.config, self.chosen = engine.config, chosen
        self.weights = {k: v.double().clone() for k, v in engine.network.state_dict().items()}

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Hidden states [tokens, hidden] after the final norm."""
        x = self.weights["embedding.weight"][torch.as_tensor(tokens)]
        for i, kind in enumerate(self.config.kinds):
            w = {k.removeprefix(f"layers.{i}."): v for k, v in self.weights.items() if k.startswith(f"layers.{i}.")}
            mixer = {k.removeprefix("mixer."): v for k, v in w.items() if k.startswith("mixer.")}
            normed = rms_norm(x, w["mixer_norm.weight"])
            x = x + (self._dsa(normed, mixer, i) if kind == "dsa" else getattr(self, "_" + kind)(normed, mixer))
            gate, up = (rms_norm(x, w["mlp_norm.weight"]) @ w["mlp.gate_up.weight"].T).chunk(2, 1)
            x = x + (silu(gate) * up) @ w["mlp.down.weight"].T
        return rms_norm(x, self.weights["norm.weight"])

    def _full(self, x, w, window=None):
        c, d = self.config, self.config.head_dim
        heads = (x @ w["qkv.weight"].T).split(d, 1)
        q, k, v = heads[: c.num_heads], heads[c.num_heads :][: c.num_kv_heads], heads[-c.num_kv_heads :]
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        allowed = (distance >= 0) & (distance < (window or len(x)))
        out = []
        for h in range(c.num_heads):
            shared = h * c.num_kv_heads // c.num_heads
            key = bf16(turn(k[shared], c.rope_theta))
            out.append(attend(turn(q[h], c.rope_theta) @ key.T / math.sqrt(d), bf16(v[shared]), allowed))
        return torch.cat(out, 1) @ w["out.weight"].T

    def _window(self, x, w):
        return self._full(x, w, self.config.sliding_window)

    def _mla(self, x, w, allowed=None):
        c, d = self.config, self.config.head_dim
        latent, rope = (x @ w["latent.weight"].T).split([512, 64], 1)
        row = torch.cat([rms_norm(latent, w["latent_norm.weight"]), turn(rope, c.rope_theta)], 1)
        is_packed = "dsa" in c.pattern or c.latent_format == "fp8_ds_mla"
        row = packed(Fp8DsMlaFormat(), row) if is_packed else bf16(row)
        allowed = torch.ones(len(x), len(x)).tril() if allowed is None else allowed
        out = []
        for h, q in enumerate((x @ w["query.weight"].T).split(d + 64, 1)):
            # Keys and values drawn out of the latent, where the engine maps queries into it.
            key, value = row[:, :512] @ w["key_up"][h].T, row[:, :512] @ w["value_up"][h].T
            scores = q[:, :d] @ key.T + turn(q[:, d:], c.rope_theta) @ row[:, 512:].T
            out.append(attend(scores / math.sqrt(d + 64), value, allowed))
        return torch.cat(out, 1) @ w["out.weight"].T

    def index_scores(self, x, w) -> torch.Tensor:
        c = self.config

        def turn_half(y):
            return torch.cat([turn(y[:, :64], c.rope_theta), y[:, 64:]], 1)

        key = x @ w["indexer.key.weight"].T
        key = (key - key.mean(1, keepdim=True)) / (key.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
        key = packed(IndexerFormat(), turn_half(key * w["indexer.key_norm.weight"] + w["indexer.key_norm.bias"]))
        queries = (x @ w["indexer.query.weight"].T).split(128, 1)
        heads = (x @ w["indexer.weight.weight"].T).T
        products = [torch.relu(turn_half(q) @ key.T) * head[:, None] for q, head in zip(queries, heads, strict=True)]
        return sum(products)

    def _dsa(self, x, w, layer):
        scores, allowed = self.index_scores(x, w), torch.zeros(len(x), len(x))
        for i, row in enumerate(scores):
            chosen = sorted(self.chosen[layer][i])
            assert len(chosen) == min(self.config.topk, i + 1)
            assert 0 <= chosen[0] <= chosen[-1] <= i
            allowed[i, chosen] = 1
            left = row[: i + 1][allowed[i, : i + 1] == 0]
            # Scores are of order 30; a rounded key may move one by a few thousandths.
            assert not len(left) or row[chosen].min() > left.max() - 0.02
        return self._mla(x, w, allowed)

    def _mamba(self, x, w):
        c = self.config
        gate, channels, step = (x @ w["inputs.weight"].T).split([c.mamba_width, c.conv_width, c.mamba_heads], 1)
        step = torch.log1p(torch.exp(step + w["step_bias"]))
        decay = torch.exp(-step * torch.exp(w["rate"]))
        channels = bf16(channels)
        h = torch.zeros(c.mamba_heads, c.mamba_head_dim, c.state_size, dtype=torch.float64)
        out = []
        for t in range(len(x)):
            window = [channels[t - j] for j in range(min(t + 1, c.conv_kernel))]
            mixed = silu(sum(w["conv"][:, c.conv_kernel - 1 - j] * past for j, past in enumerate(window)))
            value, b, read = mixed.split([c.mamba_width, c.state_size, c.state_size])
            value = value.view(c.mamba_heads, c.mamba_head_dim)
            h = decay[t][:, None, None] * h + (step[t][:, None] * value)[:, :, None] * b
            out.append((h @ read + w["skip"][:, None] * value).flatten())
        return rms_norm(torch.stack(out) * silu(gate), w["norm.weight"]) @ w["out.weight"].T
