"""Snapshots bring back every byte of their views, once, and no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.kv.snapshot import Snapshot, cut_runs, distinct_views
from kvlab.kv.views import touched_kv_views

from standins import tensors_of, worlds


def all_bytes(world):
    return [buffer.view(torch.uint8).clone() for buffer in world.buffers]


def randomise(world, seed):
    generator = torch.Generator().manual_seed(seed)
    for buffer in world.buffers:
        data = buffer.view(torch.uint8)
        data.copy_(torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8))


def copy_runs_on_cpu(self, target, source, to, start):
    """What the CUDA kernel does, run by run."""
    for t, s, n in zip(to.tolist(), start.tolist(), self._count.tolist(), strict=True):
        assert n <= self._block
        target[t : t + n] = source[s : s + n]


@pytest.fixture(params=["foreach", "triton"])
def method(request, monkeypatch):
    """Both ways of copying; the kernel's stands in on the CPU as a loop."""
    if request.param == "triton":
        monkeypatch.setattr("kvlab.kv.snapshot._method", lambda views: "triton")
        monkeypatch.setattr("kvlab.kv.snapshot._RunCopy._copy", copy_runs_on_cpu)
        monkeypatch.setattr("kvlab.kv.snapshot._RUN_BYTES", 64)
    return request.param


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=worlds())
def test_restore_brings_back_the_bytes_of_the_views_and_no_other(method, world):
    views = touched_kv_views(
        world.kv_caches,
        world.groups,
        world.batch,
        world.num_blocks,
        world.dcp_size,
        world.lookahead,
        block_dims=world.block_dims,
    )
    randomise(world, 0)
    saved = all_bytes(world)
    snapshot = Snapshot(views)
    snapshot.save()
    randomise(world, 1)
    scribbled = all_bytes(world)
    inside = [torch.zeros_like(data, dtype=torch.bool) for data in saved]
    where = {b.untyped_storage().data_ptr(): mask for b, mask in zip(world.buffers, inside, strict=True)}
    for view in views:
        mask = where[view.untyped_storage().data_ptr()].flatten().view(torch.uint8)
        size = view.element_size()
        strides = [s * size for s in view.stride()]
        mask.as_strided((*view.shape, size), (*strides, 1), view.storage_offset() * size).fill_(1)
    for _ in range(2):
        snapshot.restore()
        for now, before, after, mask in zip(all_bytes(world), saved, scribbled, inside, strict=True):
            assert torch.equal(now, torch.where(mask, before, after))
        randomise(world, 1)


def test_the_copies_keep_their_addresses():
    view = torch.zeros(4, 4)[1:3]
    snapshot = Snapshot([view])
    assert snapshot.method == "foreach"
    snapshot.save()
    (address,) = (t.data_ptr() for t in snapshot._copies[0].saved)
    view.fill_(1)
    snapshot.save()
    assert snapshot._copies[0].saved[0].data_ptr() == address
    view.fill_(2)
    snapshot.restore()
    assert (view == 1).all()
    assert snapshot.num_bytes == 2 * 4 * 4


def test_a_view_that_repeats_is_saved_once_and_empty_ones_not_at_all():
    cache = torch.arange(24.0).view(2, 3, 4)
    views = [cache[0], cache[1], cache[0], cache[:0], cache[0].view(torch.int32), cache[0].t()]
    distinct = distinct_views(views)
    assert [id(v) for v in distinct] == [id(views[i]) for i in (0, 1, 4, 5)]
    assert Snapshot(views[:4]).num_bytes == 24 * 4


def test_no_views_and_a_restore_without_a_save_change_nothing():
    empty = Snapshot([])
    empty.save()
    empty.restore()
    assert empty.num_bytes == 0


def test_every_kind_of_bytes_comes_back():
    dtypes = (
        torch.uint8,
        torch.int8,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float32,
    )
    caches = [torch.randint(0, 256, (6, 8), dtype=torch.uint8).view(dtype) for dtype in dtypes]
    # NaN patterns too: bytes, not values.
    before = [cache.view(torch.uint8).clone() for cache in tensors_of(caches)]
    snapshot = Snapshot([view for cache in caches for view in (cache[1:3], cache[::2], cache[:, 1:])])
    snapshot.save()
    for cache in caches:
        cache.view(torch.uint8).fill_(0xFF)
    snapshot.restore()
    untouched = torch.zeros(6, 8, dtype=torch.bool)
    untouched[(3, 5), 0] = True
    for cache, old in zip(caches, before, strict=True):
        data, mask = cache.view(torch.uint8), untouched
        if cache.element_size() > 1:
            mask = torch.zeros_like(data, dtype=torch.bool)
            mask[(3, 5), : cache.element_size()] = True
        assert torch.equal(data, torch.where(mask, 0xFF, old))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 90)), max_size=8), st.integers(1, 40))
def test_cut_runs_are_the_same_bytes_in_order_and_none_is_longer(gaps, longest):
    intervals, cursor = [], 0
    for gap, length in gaps:
        intervals.append((cursor + gap, cursor + gap + length))
        cursor += gap + length + 1
    cut = cut_runs(np.array(intervals, np.int64).reshape(-1, 2), longest).tolist()
    assert [i for b, e in cut for i in range(b, e)] == [i for b, e in intervals for i in range(b, e)]
    assert all(0 < e - b <= longest for b, e in cut)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 8, 2, 1])
def test_the_kernel_copies_every_byte_at_every_alignment(offset):
    buffer = torch.randint(0, 256, (300_000,), dtype=torch.uint8, device="cuda")
    views = [buffer.as_strided((5, 8200), (20_000, 1), offset), buffer[150_000 + offset : 290_000 + offset]]
    before = buffer.clone()
    snapshot = Snapshot(views)
    assert snapshot.method == "triton"
    snapshot.save()
    buffer.random_(0, 256)
    other = buffer.clone()
    snapshot.restore()
    mask = torch.zeros_like(buffer, dtype=torch.bool)
    mask.as_strided((5, 8200), (20_000, 1), offset).fill_(True)
    mask[150_000 + offset : 290_000 + offset] = True
    assert torch.equal(buffer, torch.where(mask, before, other))
