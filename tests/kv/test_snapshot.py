"""Snapshots bring back every byte of their views, once, and no other."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from standins import tensors_of, worlds

from kvlab.kv.snapshot import Snapshot, distinct_views
from kvlab.kv.views import touched_kv_views


def all_bytes(world):
    return [buffer.view(torch.uint8).clone() for buffer in world.buffers]


def randomise(world, seed):
    generator = torch.Generator().manual_seed(seed)
    for buffer in world.buffers:
        data = buffer.view(torch.uint8)
        data.copy_(torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8))


@settings(max_examples=120, deadline=None)
@given(worlds())
def test_restore_brings_back_the_bytes_of_the_views_and_no_other(world):
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
    snapshot.save()
    (address,) = (t.data_ptr() for t in snapshot.saved)
    view.fill_(1)
    snapshot.save()
    assert snapshot.saved[0].data_ptr() == address
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
