"""Reading a buffer that all indexers share: each one's own choice, in positions, or nothing where it did not choose."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvlab.engines.vllm.selection import indexers, watched_selection

TOKENS, TOPK = 6, 3


class SparseAttnIndexer(nn.Module):
    """The operator within an indexer."""

    def __init__(self, buffer):
        super().__init__()
        self.topk_indices_buffer, self.topk_tokens = buffer, TOPK


class DeepseekIndexer(nn.Module):
    def __init__(self, buffer, states, ratio):
        super().__init__()
        self.topk_indices_buffer, self.topk_tokens, self.states = buffer, TOPK, states
        if ratio != 1:
            self.compress_ratio = ratio
        self.indexer_op = SparseAttnIndexer(buffer)

    def forward(self):
        if self.states is not None:
            self.topk_indices_buffer[: len(self.states), :TOPK] = self.states


class Attention(nn.Module):
    """It holds the buffer too, and chooses nothing where it has no indexer."""

    def __init__(self, buffer, states, ratio, owns):
        super().__init__()
        self.topk_indices_buffer, self.topk_tokens = buffer, TOPK
        self.indexer = DeepseekIndexer(buffer, states, ratio) if owns else None

    def forward(self):
        if self.indexer is not None:
            self.indexer()
        return self.topk_indices_buffer.clone()


class Layer(nn.Module):
    def __init__(self, *attention):
        super().__init__()
        self.self_attn = Attention(*attention)

    def forward(self, x):
        self.read = self.self_attn()
        return x


class Model(nn.Module):
    """Layers (states chosen, ratio, owns an indexer) over one buffer, wider and longer than the step."""

    def __init__(self, *layers):
        super().__init__()
        self.buffer = torch.full((10, TOPK + 1), 77, dtype=torch.int32)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(self.buffer, *layer) for layer in layers)
        self.model.decoder_replay_layers, self.model.decoder_replay_start = None, 99

    def forward(self):
        x = torch.zeros(TOKENS, 1)
        for layer in self.model.layers:
            x = layer(x)
        return x


def chosen(seed):
    return torch.randint(0, 50, (TOKENS, TOPK), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def test_every_indexer_s_choice_is_kept_and_consumers_see_the_same_as_ever():
    model = Model((chosen(1), 1, True), (None, 1, False), (chosen(2), 1, True))
    assert list(indexers(model)) == ["model.layers.0.self_attn.indexer", "model.layers.2.self_attn.indexer"]
    with watched_selection(model, TOKENS) as found:
        model()
    assert torch.equal(found["model.layers.0.self_attn.indexer"], chosen(1).long())
    assert torch.equal(found["model.layers.2.self_attn.indexer"], chosen(2).long())
    # A layer without an indexer reads what the one below it chose.
    assert torch.equal(model.model.layers[1].read[:TOKENS, :TOPK], chosen(1))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_none_stays_none_and_a_state_of_several_tokens_stands_for_its_first():
    states = chosen(3)
    states[2, 1:] = -1
    model = Model((states, 2, True))
    with watched_selection(model, TOKENS) as found:
        model()
    (positions,) = found.values()
    assert torch.equal(positions, torch.where(states < 0, -1, states * 2).long())


def test_an_indexer_that_did_not_choose_is_absent():
    """Few tokens: all are attended to, and the buffer keeps what an earlier layer or step left in it."""
    model = Model((chosen(1), 1, True), (None, 1, True))
    with watched_selection(model, TOKENS) as found:
        model()
    assert list(found) == ["model.layers.0.self_attn.indexer"]


def test_layers_that_run_on_the_last_rows_only_say_so():
    """DeepSeek-V4.1 runs the layers past its last KV source on each request's last window."""
    kept = torch.tensor([1, 4, 5])
    model = Model((chosen(1), 2, True), (chosen(2)[:3], 1, True))
    model.model.decoder_replay_layers = SimpleNamespace(replay_batch=SimpleNamespace(rows=kept))
    model.model.decoder_replay_start = 1
    with watched_selection(model, TOKENS) as found:
        model()
    first, last = found.values()
    assert torch.equal(first, chosen(1).long() * 2)
    assert torch.equal(last[kept], chosen(2)[:3].long())
    assert (last[[0, 2, 3]] == -1).all()


def test_a_model_without_an_indexer_gives_nothing():
    with watched_selection(Model((None, 1, False)), TOKENS) as found:
        pass
    assert found == {}


def test_hooks_are_removed_when_the_forward_fails():
    model = Model((chosen(1)[:, :2], 1, True))
    with pytest.raises(RuntimeError), watched_selection(model, TOKENS):
        model()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
