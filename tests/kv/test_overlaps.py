"""Overlaid groups: the check agrees with a byte mask, whatever the strides."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import GeometryError
from kvlab.kv.batch import Batch
from kvlab.kv.overlaps import check_overlaps
from kvlab.kv.views import LayerTensor


class FullAttentionSpec:
    block_size = 4


def batch_of(ranges):
    return Batch(["r"], {"r": (1, 0, False)}, {}, {}, {}, {}, ranges, {}, 16)


def layer(group, buffer, offset, stride, width):
    tensor = buffer.as_strided((16, width), (stride, 1), offset)
    return LayerTensor(group, f"layer{group}", 0, FullAttentionSpec(), tensor, 0, 1)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24), st.integers(1, 24)), min_size=2, max_size=2),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_it_raises_exactly_when_owned_bytes_of_two_groups_meet(places, first, second):
    buffer = torch.zeros(1024, dtype=torch.uint8)
    ranges = [[(1, 1 + first)], [(1 + first, 1 + first + second)]]
    layers = [layer(g, buffer, o, max(s, w), w) for g, (o, s, w) in enumerate(places)]
    for it, ((begin, end),) in zip(layers, ranges, strict=True):
        it.blocks(begin, end).add_(1)
    if (buffer > 1).any():
        with pytest.raises(GeometryError, match=r"layer0.*layer1"):
            check_overlaps(layers, batch_of(ranges))
    else:
        check_overlaps(layers, batch_of(ranges))


def test_blocks_of_one_stride_may_be_overlaid_and_storages_never_meet():
    buffer = torch.zeros(1024, dtype=torch.uint8)
    ranges = [[(1, 5)], [(5, 9)]]
    check_overlaps([layer(0, buffer, 0, 24, 24), layer(1, buffer, 4, 24, 20)], batch_of(ranges))
    check_overlaps([layer(0, buffer, 0, 24, 24), layer(1, torch.zeros_like(buffer), 0, 8, 8)], batch_of(ranges))
    assert np.array_equal(buffer, torch.zeros(1024))


def test_many_layers_that_lie_apart_need_no_look_at_their_blocks(monkeypatch):
    """Layer after layer, or side by side in each block, as vLLM overlays its groups."""
    monkeypatch.setattr("kvlab.kv.overlaps._share_bytes", lambda *layers: pytest.fail("looked"))
    for layer_stride, block_stride in ((16 * 24, 24), (24, 16 * 24)):
        buffer = torch.zeros(16 * 16 * 24, dtype=torch.uint8)
        layers = [layer(g, buffer, i * layer_stride, block_stride, 24 - g) for g in range(3) for i in range(16)]
        check_overlaps(layers, batch_of([[(1, 5)], [(5, 9)], [(9, 13)]]))
