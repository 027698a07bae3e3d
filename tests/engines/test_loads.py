"""Expert loads of two arms: what share of the tokens went elsewhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.engines.loads import loads_moved
from kvlab.errors import EngineError

choices = st.lists(st.integers(0, 7), min_size=1, max_size=60)


def loads(*layers):
    return {f"layers.{i}": torch.bincount(torch.tensor(chosen), minlength=8) for i, chosen in enumerate(layers)}


@given(choices, choices)
def test_it_is_the_least_share_of_tokens_that_must_have_moved(first, second):
    second = (second * 60)[: len(first)]
    moved = loads_moved(loads(first), loads(second))
    assert 0 <= moved <= 1
    assert moved == loads_moved(loads(second), loads(first))
    assert moved <= sum(a != b for a, b in zip(first, second, strict=True)) / len(first) + 1e-9
    assert loads_moved(loads(first), loads(sorted(first))) == 0


def test_over_layers_it_is_the_share_of_all_tokens():
    assert loads_moved(loads([0] * 10, [1] * 10), loads([0] * 10, [2] * 10)) == 0.5
    assert loads_moved({}, {}) == 0


def test_near_ties_may_be_let_pass_layer_by_layer():
    a, b = loads([0] * 100, [0] * 100), loads([0] * 98 + [1] * 2, [0] * 80 + [1] * 20)
    assert loads_moved(a, b) == pytest.approx(0.11)
    assert loads_moved(a, b, tolerance=0.02) == pytest.approx(0.1)
    assert loads_moved(a, b, tolerance=0.2) == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (loads([0]), "layer 'layers.1' has expert loads in one arm only"),
        (loads([0], [0, 1]), "layer 'layers.1': loads of 8 experts and 1 tokens against 8 and 2"),
    ],
)
def test_loads_of_other_steps_are_refused(other, said):
    with pytest.raises(EngineError, match=said):
        loads_moved(loads([0], [0]), other)
