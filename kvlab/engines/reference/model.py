"""Layer 2: the decoder: embedding, layers of a mixer and a gated MLP, final norm; random weights of unit scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kvlab.engines.reference.attention import DenseAttention, Observer
from kvlab.engines.reference.caches import KVCaches, cache_name, indexer_name
from kvlab.engines.reference.latent import LatentAttention, SparseLatentAttention
from kvlab.engines.reference.mamba import Mamba2
from kvlab.engines.reference.paging import Pages, open_pages
from kvlab.engines.reference.plan import Plan
from kvlab.engines.reference.presets import ReferenceConfig
from kvlab.kv.specs import layer_spec


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """A mixer (attention or Mamba2) and an MLP, each behind a norm and a residual.

    Attributes:
        name: `model.layers.0`.
        mixer_name: with `.self_attn` or `.mixer`.
    """

    def __init__(self, config: ReferenceConfig, index: int, mixer: nn.Module) -> None:
        super().__init__()
        self.name = f"model.layers.{index}"
        self.mixer_name = f"{self.name}.{'mixer' if isinstance(mixer, Mamba2) else 'self_attn'}"
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor, plan: Plan, observe: Observer | None) -> torch.Tensor:
        mixed = self.mixer(self.mixer_norm(x), plan, observe)
        if observe:
            observe(self.mixer_name, mixed)
        x = x + mixed
        out = self.mlp(self.mlp_norm(x))
        if observe:
            observe(f"{self.name}.mlp", out)
        return x + out


class Model(nn.Module):
    """The decoder over its caches.

    Args:
        caches: of all layers; a forward writes them.
    """

    def __init__(self, config: ReferenceConfig, caches: KVCaches) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, i, _mixer(config, caches, i, kind)) for i, kind in enumerate(config.kinds)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)

    def forward(self, plan: Plan, observe: Observer | None = None) -> torch.Tensor:
        """Hidden states [tokens, hidden] in the batch's order.

        Args:
            observe: called with each mixer's and MLP's name and output, and with a sparse layer's scores
                (`....indexer`, before the causal mask) and chosen tokens (`....indexer.chosen`).
        """
        x = self.embedding(plan.token_ids)
        for layer in self.layers:
            x = layer(x, plan, observe)
        x = self.norm(x)
        if observe:
            observe("model.norm", x)
        return x.index_select(0, plan.order)


def _mixer(config: ReferenceConfig, caches: KVCaches, index: int, kind: str) -> nn.Module:
    name = cache_name(index, kind)
    group_id = next(g for g, group in enumerate(caches.groups) if name in group.layer_names)
    if kind == "mamba":
        states = caches.tensors[name]
        assert isinstance(states, tuple)
        return Mamba2(config, group_id, states)
    pages = cache_pages(caches, group_id, name)
    if kind == "mla":
        return LatentAttention(config, group_id, pages)
    if kind == "dsa":
        index_pages = cache_pages(caches, group_id, indexer_name(index))
        return SparseLatentAttention(config, group_id, pages, index_pages, f"model.layers.{index}.self_attn")
    return DenseAttention(config, group_id, pages, config.sliding_window if kind == "window" else None)


def cache_pages(caches: KVCaches, group_id: int, name: str) -> Pages:
    """The pages of an attention layer's cache."""
    tensor = caches.tensors[name]
    assert isinstance(tensor, torch.Tensor)
    return open_pages(tensor, layer_spec(caches.groups[group_id].kv_cache_spec, name), name)


def init_weights(model: Model, seed: int) -> None:
    """Draw all matrices from N(0, 1 / fan_in), so that activations and attention logits are of order one.

    The embedding is N(0, 1); vectors (norms, biases, rates) keep their values. Drawn on the CPU, so that a seed means
    the same model on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in = 1 if parameter is model.embedding.weight else parameter.shape[-1]
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn.mul_(fan_in**-0.5))
