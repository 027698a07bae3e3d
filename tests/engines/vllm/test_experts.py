"""Counting at the routers: every token once a choice, whatever kernel runs the experts, and nothing left behind."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvlab.engines.vllm.experts import counted_experts, grouped_routers, moe_layers
from kvlab.engines.vllm.routing import routing_note


class Router:
    """As vLLM's: not a module."""

    def __init__(self, groups=1):
        self.num_expert_group, self.topk_group = groups, 4

    def select_experts(self, hidden_states, router_logits, topk_indices_dtype=None, *, input_ids=None):
        weights, ids = router_logits.topk(2, -1)
        return weights, ids.to(topk_indices_dtype or torch.int32)


class Experts(nn.Module):
    def forward_modular(self, x, topk_ids):
        return x + topk_ids.sum(-1, keepdim=True)

    def forward_monolithic(self, x, router_logits, input_ids=None):
        return x + router_logits.topk(2, -1).indices.sum(-1, keepdim=True)


class Runner(nn.Module):
    def __init__(self, monolithic, groups):
        super().__init__()
        self.router, self.routed_experts, self.monolithic = Router(groups), Experts(), monolithic

    def forward(self, x, logits):
        if self.monolithic:
            return self.routed_experts.forward_monolithic(x=x, router_logits=logits, input_ids=None)
        _, ids = self.router.select_experts(hidden_states=x, router_logits=logits, topk_indices_dtype=torch.int64)
        return self.routed_experts.forward_modular(x, ids)


class Model(nn.Module):
    def __init__(self, groups=1):
        super().__init__()
        self.layers = nn.ModuleList([Runner(False, groups), Runner(True, groups), nn.Linear(2, 2)])
        # gpt-oss calls its gate so; it selects nothing.
        self.layers[2].router = nn.Linear(2, 2)

    def forward(self, logits):
        x = torch.zeros(len(logits), 1)
        for layer in self.layers[:2]:
            x = layer(x, logits)
        return x


@pytest.fixture
def logits():
    return torch.randn(30, 8, generator=torch.Generator().manual_seed(0))


def test_each_layer_counts_what_the_logits_choose(logits):
    model = Model()
    plain = model(logits)
    with counted_experts(model) as loads:
        counted = model(logits)
    expected = torch.bincount(logits.topk(2, -1).indices.flatten(), minlength=8)
    assert set(loads) == {"layers.0", "layers.1"}
    for load in loads.values():
        assert torch.equal(load, expected)
        assert load.sum() == 60
    assert torch.equal(counted, plain)


def test_experts_that_nobody_chose_and_padding(logits):
    model = Model()
    logits[:, 5:] = -9.0
    router = model.layers[0].router
    select = router.select_experts

    def padded(*args, **kwargs):
        weights, ids = select(*args, **kwargs)
        return weights, ids.index_fill(0, torch.tensor([3]), -1)

    router.select_experts = padded
    with counted_experts(model) as loads:
        model(logits)
    assert loads["layers.0"].sum() == 58
    assert loads["layers.0"][5:].sum() == 0
    assert len(loads["layers.0"]) == 8


def test_nothing_is_left_in_the_model_even_when_a_forward_fails(logits):
    model = Model()
    with pytest.raises(RuntimeError), counted_experts(model):
        model(logits[:, :1])
    for layer in model.layers[:2]:
        assert "select_experts" not in vars(layer.router)
        assert "forward_monolithic" not in vars(layer.routed_experts)
    assert list(moe_layers(model)) == ["layers.0", "layers.1"]
    with counted_experts(nn.Linear(2, 2)) as loads:
        pass
    assert loads == {}


def test_grouped_top_k_under_the_balanced_fixture_is_said_to_be_pinned_only():
    assert grouped_routers(Model(8)) == {(8, 4)}
    note = routing_note("balanced", Model(8))
    assert "pinned, but not balanced" in note
    assert "picks 4 of 8 groups" in note
    assert "\n" not in note
    for routing, groups in (("real", 8), ("balanced", 1), ("none", 1)):
        assert routing_note(routing, Model(groups)) == ""
    assert grouped_routers(SimpleNamespace(named_modules=lambda: iter([]))) == set()
