"""Where NaNs first show in a model whose layers are named as vLLM's are."""

import pytest
import torch
from torch import nn

from kvlab.engines.vllm.finite import first_nonfinite_module


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(4, 4)

    def forward(self, x):
        return self.qkv_proj(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), nn.Linear(4, 4)

    def forward(self, x, residual):
        x = x + self.self_attn(x)
        return self.mlp(x), residual + x


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.norm = nn.Identity()

    def forward(self):
        x, residual = torch.ones(2, 4), torch.zeros(2, 4)
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return self.norm(x + residual)


@pytest.fixture
def toy():
    return Toy()


def spoil(module, value):
    module.register_forward_hook(lambda module, inputs, output: output * value)


def test_a_finite_forward_has_none(toy):
    assert first_nonfinite_module(toy, toy) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["self_attn", "mlp"])
@pytest.mark.parametrize("index", range(3))
def test_the_first_module_is_named_and_later_ones_are_not(toy, index, part, value):
    spoil(getattr(toy.model.layers[index], part), value)
    assert first_nonfinite_module(toy, toy) == f"model.layers.{index}.{part}"


def test_a_module_within_attention_is_told_by_its_attention(toy):
    spoil(toy.model.layers[1].self_attn.qkv_proj, float("nan"))
    assert first_nonfinite_module(toy, toy) == "model.layers.1.self_attn"


def test_behind_the_layers_it_is_the_output(toy):
    spoil(toy.norm, float("nan"))
    assert first_nonfinite_module(toy, toy) == "output"


def test_hooks_are_removed_even_when_the_forward_fails(toy):
    def failing():
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        first_nonfinite_module(toy, failing)
    assert not any(module._forward_hooks for module in toy.modules())
