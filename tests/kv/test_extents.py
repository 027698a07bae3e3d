"""The byte intervals of views, against a mask that PyTorch itself writes through the view."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.kv.extents import merge_intervals, storage_extents, view_intervals

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


@st.composite
def strided_views(draw):
    """A view into a 4096-byte buffer: any dtype, permuted, sliced, possibly overlapping another."""
    dtype = draw(st.sampled_from(DTYPES))
    buffer = torch.zeros(4096, dtype=torch.uint8).view(dtype)
    dims = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    strides, reach = [], 1
    for size in reversed(shape):
        strides.append(reach * draw(st.integers(1, 2)))
        reach = strides[-1] * size
    if reach >= buffer.numel():
        shape, strides, reach = [1] * dims, [1] * dims, 1
    offset = draw(st.integers(0, buffer.numel() - reach))
    view = buffer.as_strided(shape, strides[::-1], offset)
    return view.permute(draw(st.permutations(range(dims))))


@settings(max_examples=500, deadline=None)
@given(strided_views())
def test_the_intervals_are_the_bytes_that_a_write_through_the_view_changes(view):
    (extent,) = storage_extents([view]).values()
    extent.storage.zero_()
    view.copy_(torch.full_like(view, -1) if view.is_floating_point() else torch.full_like(view, 255))
    written = extent.storage != 0
    mask = extent.mask()
    # A float -1 has zero bytes, so the mask covers what was written and is as long as the view.
    assert not (written & ~mask).any()
    assert extent.num_bytes == view.numel() * view.element_size() == int(mask.sum())


@settings(max_examples=300, deadline=None)
@given(strided_views(), st.integers(0, 4096), st.integers(0, 4096))
def test_a_piece_of_the_mask_is_that_piece(view, one, other):
    (extent,) = storage_extents([view]).values()
    begin, end = sorted((one, other))
    assert torch.equal(extent.mask(begin, end), extent.mask()[begin:end])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=20))
def test_merged_intervals_cover_the_same_bytes_once(pairs):
    intervals = np.array([(b, b + n) for b, n in pairs], np.int64).reshape(-1, 2)
    covered = {i for b, e in intervals.tolist() for i in range(b, e)}
    merged = merge_intervals(intervals).tolist()
    assert sorted(covered) == [i for b, e in merged for i in range(b, e)]
    assert all(e < b for (_, e), (b, _) in itertools.pairwise(merged))


def test_aliased_views_are_counted_once_and_storages_apart():
    buffer, other = torch.zeros(64, dtype=torch.uint8), torch.zeros(8)
    extents = storage_extents([buffer[:16], buffer[8:24], buffer[:16], other[1:2]])
    assert [e.num_bytes for e in extents.values()] == [24, 4]
    assert view_intervals(buffer[:0]).shape == (0, 2)
