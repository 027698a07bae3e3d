"""Draws: normal values that depend on their key and place alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.kv.draws import Place, draw_method, generator_of, key_of, normals, seed_of

CPU = torch.device("cpu")


def kolmogorov_distance(values, cdf=torch.special.ndtr):
    """Largest distance between a sample's distribution function and `cdf`."""
    ordered = values.double().flatten().sort().values
    exact, steps = cdf(ordered), torch.arange(len(ordered) + 1, dtype=torch.float64, device=ordered.device)
    return float(torch.maximum(steps[1:] / len(ordered) - exact, exact - steps[:-1] / len(ordered)).max())


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_values_are_normal_to_the_far_ends(key):
    values = normals(key, 0, (64, 16384), CPU)
    # The 0.1 % point of Kolmogorov's distribution.
    assert kolmogorov_distance(values) < 1.95 / math.sqrt(values.numel())
    for beyond in (3.0, 4.0):
        wanted = values.numel() * math.erfc(beyond / math.sqrt(2))
        assert abs(int((values.abs() > beyond).sum()) - wanted) < 5 * math.sqrt(wanted)
    assert values.abs().max() < math.sqrt(2 * math.log(2**21))


def test_no_two_values_of_a_block_or_of_neighbouring_blocks_go_together():
    values = normals(3, 0, (200, 4096), CPU)
    for other in (values.roll(1, 0), values.roll(1, 1), values.roll(2048, 1), values.flip(1)):
        for power in (1, 2):
            pair = torch.stack([values.flatten() ** power, other.flatten() ** power])
            assert torch.corrcoef(pair)[0, 1].abs() < 5 / math.sqrt(values.numel())


@settings(max_examples=60, deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    begin=st.integers(0, 1 << 31),
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple),
    cut=st.integers(0, 9),
)
def test_a_block_s_values_are_the_same_alone_and_among_others(key, begin, shape, cut):
    whole = normals(key, begin, shape, CPU)
    cut = min(cut, shape[0])
    parts = [normals(key, begin, (cut, *shape[1:]), CPU), normals(key, begin + cut, (shape[0] - cut, *shape[1:]), CPU)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.shape == shape
    assert whole.isfinite().all()


def test_keys_tell_every_place_apart():
    places = [
        (0, "a", 0),
        (0, "a", 1),
        (1, "a", 0),
        (0, "b", 0),
        (
            0,
            "a\0000",
        ),
        (0, "a0"),
        ("0a", 0),
    ]
    keys = {key_of(*place) for place in places}
    assert len(keys) == len(places)
    assert all(0 <= key < 1 << 64 for key in keys)
    assert key_of(0, "a", 0) == key_of(0, "a", 0)
    first, again = (torch.rand(4, generator=generator_of(CPU, 1, "x")) for _ in range(2))
    assert torch.equal(first, again)


def test_a_seed_is_read_without_a_draw():
    assert seed_of(None) == 0
    generator = torch.Generator().manual_seed(2**63)
    torch.rand(3, generator=generator)
    assert seed_of(generator) == 2**63


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.25, 0.5, 0.999, 1.0])
def test_events_happen_as_often_as_asked_and_not_with_the_values(share):
    place = Place(5, 1, (64, 4096), CPU, True)
    events = place.chance(share)
    assert events.shape == place.shape
    spread = math.sqrt(share * (1 - share) / events.numel())
    assert abs(events.double().mean().item() - share) <= 5 * spread
    if spread > 1e-4:
        assert torch.corrcoef(torch.stack([events.float().flatten(), place.normal().flatten()]))[0, 1].abs() < 0.01


def test_the_processor_has_no_use_for_triton():
    assert draw_method(CPU) == "numpy"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["triton", "torch"])
def test_values_on_the_gpu_are_normal_and_of_their_blocks(method, monkeypatch):
    monkeypatch.setattr("kvlab.kv.draws.draw_method", lambda device: method)
    cuda = torch.device("cuda")
    values = normals(7, 5, (64, 16385), cuda)
    assert kolmogorov_distance(values) < 1.95 / math.sqrt(values.numel())
    assert torch.equal(torch.cat([normals(7, block, (1, 16385), cuda) for block in range(5, 69)]), values)
    assert not torch.equal(normals(8, 5, (1, 16385), cuda), values[:1])
