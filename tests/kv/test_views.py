"""Touched views against a straight-line oracle, and against the bytes that an engine would write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cases import parse_case
from kvlab.errors import GeometryError
from kvlab.kv.batch import build_batch
from kvlab.kv.views import (
    block_dim,
    iter_tensors,
    layer_tensors,
    owned_kv_views,
    touched_block_ranges,
    touched_kv_views,
)

from standins import (
    CircularBufferSpec,
    FullAttentionSpec,
    Group,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    cases,
    is_state,
    tensors_of,
    worlds,
)


def views_of(world):
    return touched_kv_views(
        world.kv_caches,
        world.groups,
        world.batch,
        world.num_blocks,
        world.dcp_size,
        world.lookahead,
        block_dims=world.block_dims,
    )


def is_sharded(spec):
    first = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    return getattr(spec, "dcp_sharded", None) or getattr(first, "dcp_sharded", False)


def oracle_ranges(world, group, layer):
    """The rule, token by token."""
    spec = world.spec_of(group, layer)
    ranges = []
    for i, req_id in enumerate(world.batch.req_ids):
        begin, end = world.batch.group_block_ranges[group.kv_cache_group_id][i]
        first = begin
        if not is_state(spec):
            # The group's size hands out blocks: a larger member must not shorten the tail.
            sizes = [s.block_size * (world.dcp_size if is_sharded(s) else 1) for s in (spec, group.kv_cache_spec)]
            tokens_in_block = min(sizes)
            scheduled, blocks = world.batch.expected[req_id][0] + world.lookahead, 2
            while scheduled > 0:
                blocks, scheduled = blocks + 1, scheduled - tokens_in_block
            while first < end - blocks:
                first += 1
        ranges.append((first, end))
    return ranges


def oracle_views(world):
    views = []
    for group in world.groups:
        for layer in group.layer_names:
            for tensor in tensors_of(world.kv_caches[layer]):
                for first, end in oracle_ranges(world, group, layer):
                    factor = world.factors[layer]
                    index = [slice(None)] * tensor.dim()
                    index[world.dims[layer]] = slice(first * factor, end * factor)
                    views.append(tensor[tuple(index)])
    return views


def identity(view):
    return view.data_ptr(), tuple(view.shape), view.stride(), view.dtype


@settings(max_examples=250, deadline=None)
@given(worlds())
def test_touched_views_equal_the_oracle_in_shape_stride_address_and_order(world):
    ranges = touched_block_ranges(world.groups, world.batch, world.dcp_size, world.lookahead)
    assert set(ranges) == set(world.kv_caches)
    for group in world.groups:
        for layer in group.layer_names:
            assert ranges[layer].tolist() == [list(r) for r in oracle_ranges(world, group, layer)]
            assert (ranges[layer] >= 1).all()
    assert list(map(identity, views_of(world))) == list(map(identity, oracle_views(world)))


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_no_view_holds_a_byte_of_the_null_block(world):
    for buffer in world.buffers:
        buffer.view(torch.uint8).zero_()
    for group in world.groups:
        for layer in group.layer_names:
            # Other groups lie over the same bytes with other strides, so each is looked at on its own.
            alone = Group(group.kv_cache_spec, [layer], group.kv_cache_group_id)
            for layer_tensor in layer_tensors(world.kv_caches, [alone], world.num_blocks, world.dims):
                layer_tensor.tensor.narrow(layer_tensor.dim, 0, layer_tensor.factor).fill_(1)
                views = touched_kv_views(
                    world.kv_caches, [alone], world.batch, world.num_blocks, world.dcp_size, block_dims=world.dims
                )
                assert not any(view.count_nonzero() for view in views)
                layer_tensor.tensor.zero_()


def engine_slots(world, group, layer):
    """(allocator block, token within it on this rank) of every token that a step and its drafter write."""
    spec = world.spec_of(group, layer)
    sharded = world.dcp_size if getattr(spec, "dcp_sharded", False) else 1
    for i, req_id in enumerate(world.batch.req_ids):
        table = world.batch.block_ids[req_id][group.kv_cache_group_id]
        computed = world.batch.expected[req_id][1]
        for position in range(computed, world.case.requests[i].kv_len + world.lookahead):
            block, token = divmod(position, spec.block_size * sharded)
            yield table[block], token // sharded


@settings(max_examples=120, deadline=None)
@given(worlds(one_block_size=True))
def test_every_byte_that_an_engine_writes_through_its_block_tables_lies_in_a_touched_view(world):
    views = views_of(world)
    for buffer in world.buffers:
        buffer.view(torch.uint8).zero_()
    for group in world.groups:
        for layer in group.layer_names:
            spec, dim, factor = world.spec_of(group, layer), world.dims[layer], world.factors[layer]
            for tensor in tensors_of(world.kv_caches[layer]):
                bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
                rows = bits.movedim(dim, 0)
                if is_state(spec):
                    for req_id in world.batch.req_ids:
                        (block,) = world.batch.block_ids[req_id][group.kv_cache_group_id]
                        rows[block] = -1
                    continue
                tokens = spec.block_size // factor
                # The token axis is where the strategy put it: after the block, or after a head or K/V axis.
                axis = next(a for a in token_axes(rows.shape, tokens))
                by_token = rows.movedim(axis, 1)
                for block, token in engine_slots(world, group, layer):
                    assert block != 0, "a scheduled token's slot is in the null block"
                    by_token[block * factor + token // tokens, token % tokens] = (
                        255 if bits.dtype == torch.uint8 else -1
                    )
    for view in views:
        view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]).zero_()
    assert not any(buffer.view(torch.uint8).any() for buffer in world.buffers)


def token_axes(shape, tokens):
    yield from (axis for axis in range(1, len(shape) - 1) if shape[axis] == tokens)
    yield from (axis for axis in range(1, len(shape)) if shape[axis] == tokens)


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_owned_views_hold_the_touched_ones_and_are_disjoint_in_blocks(world):
    for layer in layer_tensors(world.kv_caches, world.groups, world.num_blocks, world.dims):
        owned = owned_kv_views(layer, world.batch)
        blocks = [b for begin, end in world.batch.group_block_ranges[layer.group_id] for b in range(begin, end)]
        assert len(blocks) == len(set(blocks))
        assert sum(v.shape[layer.dim] for v in owned) == len(blocks) * layer.factor


def test_public_case_1_a_sharded_block_holds_the_tokens_of_both_ranks():
    group = Group(FullAttentionSpec(block_size=16, dcp_sharded=True), ["layer"])
    batch = build_batch(parse_case("case=1@32"), [group], 9, 100, np.random.default_rng(0), dcp_size=2)
    assert batch.group_block_ranges == [[(1, 2)]]
    cache = torch.zeros(9, 16, 4)
    (view,) = touched_kv_views({"layer": cache}, [group], batch, 9, dcp_size=2)
    assert identity(view) == identity(cache[1:2])


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 8), st.sampled_from((1, 4, 16)))
def test_lookahead_and_scheduled_tokens_only_ever_widen_the_tail(case, lookahead, block_size):
    group = Group(FullAttentionSpec(block_size=block_size), ["layer"])
    batch = build_batch(case, [group], 1 << 20, 100, np.random.default_rng(0), lookahead=lookahead)
    widths = [
        int(np.diff(touched_block_ranges([group], batch, lookahead=n)["layer"]).sum()) for n in range(lookahead + 3)
    ]
    assert widths == sorted(widths)


# The block dimension.


@pytest.mark.parametrize(
    ("shape", "num_blocks", "spec", "wanted"),
    [
        # Public case 8: K and V first.
        ((2, 4, 16, 2, 8), 4, None, (1, 1)),
        ((2, 4, 16, 2, 8), 4, FullAttentionSpec(block_size=16), (1, 1)),
        ((2, 1, 16, 3, 5), 1, FullAttentionSpec(block_size=16), (1, 1)),
        ((2, 8, 16, 3, 5), 2, FullAttentionSpec(block_size=64), (1, 4)),
        ((2, 8, 16, 3, 5), 4, FullAttentionSpec(block_size=32), (1, 2)),
        # Blocks first.
        ((4, 2, 16, 2, 8), 4, None, (0, 1)),
        ((8, 2, 16, 2, 8), 4, None, (0, 2)),
        ((4, 1, 16, 8), 4, None, (0, 1)),
        ((1, 2, 16, 3), 1, FullAttentionSpec(block_size=16), (0, 1)),
        # Both are multiples; only one leaves the tokens of one kernel block.
        ((4, 8, 16, 576), 4, FullAttentionSpec(block_size=16), (0, 1)),
        ((8, 4, 16, 576), 4, FullAttentionSpec(block_size=16), (1, 1)),
        ((4, 4, 16, 576), 2, FullAttentionSpec(block_size=256, num_states=32), None),
        ((4, 8, 32, 576), 4, FullAttentionSpec(block_size=256, num_states=32), (0, 1)),
        # A state is one page, and its shape is the rest.
        ((4, 8, 3), 4, MambaSpec(block_size=1), (0, 1)),
        ((4, 4, 3), 4, MambaSpec(block_size=1, shapes=((4, 3),)), None),
        ((4, 8, 3), 4, MambaSpec(block_size=1, shapes=((9, 3),)), None),
        ((6, 2, 3), 2, MambaSpec(block_size=1, shapes=((6, 3),)), (1, 1)),
        ((4, 8, 3), 4, CircularBufferSpec(block_size=8), (0, 1)),
        # Nothing decides.
        ((2, 2, 16, 2, 8), 2, FullAttentionSpec(block_size=16), None),
        ((2, 1, 16, 3, 5), 1, None, None),
        ((2, 4, 16, 2, 8), 2, None, None),
        ((2, 2, 16), 2, FullAttentionSpec(block_size=99), None),
        ((4, 16, 576), 4, FullAttentionSpec(block_size=16), None),
        # Absent.
        ((3, 5, 16), 4, None, None),
        ((5, 3, 4), 4, FullAttentionSpec(block_size=16), None),
        ((7,), 4, None, None),
        ((2, 3), 4, None, None),
    ],
)
def test_the_block_dimension_is_right_or_an_error_that_names_the_tensor(shape, num_blocks, spec, wanted):
    tensor = torch.empty(shape, device="meta")
    if wanted is not None:
        assert block_dim(tensor, num_blocks, spec, layer="model.3") == wanted
        return
    with pytest.raises(GeometryError) as error:
        block_dim(tensor, num_blocks, spec, layer="model.3")
    message = str(error.value)
    both_fit = len(shape) > 1 and shape[0] % num_blocks == shape[1] % num_blocks == 0
    assert ("ambiguous" if both_fit else "no block dimension") in message
    assert "'model.3'" in message
    assert str(shape) in message
    assert str(num_blocks) in message
    assert "block_dims" in message
    assert "\n" not in message


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 8),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((4, 16)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
def test_block_dim_is_never_wrong(num_blocks, factor, block_size, heads, width, kv_first, knows_spec):
    """Whatever the numbers, the answer is the dimension the cache was built with, or an error."""
    if block_size % factor:
        return
    tokens = block_size // factor
    shape = (2, num_blocks * factor, tokens, heads, width) if kv_first else (num_blocks * factor, heads, tokens, width)
    spec = FullAttentionSpec(block_size=block_size) if knows_spec else None
    try:
        found = block_dim(torch.empty(shape, device="meta"), num_blocks, spec)
    except GeometryError:
        fits = [d for d in (0, 1) if shape[d] % num_blocks == 0]
        assert len(fits) == 2
    else:
        assert found == ((1, factor) if kv_first else (0, factor))


def test_block_dims_decides_and_is_checked():
    group = Group(FullAttentionSpec(block_size=16), ["k"])
    cache = {"k": torch.zeros(2, 2, 16, 3)}
    for given_dims in (1, {"k": 1}):
        (layer,) = layer_tensors(cache, [group], 2, given_dims)
        assert (layer.dim, layer.factor) == (1, 1)
        assert layer.blocks(1, 2).data_ptr() == cache["k"][:, 1:2].data_ptr()
    with pytest.raises(GeometryError, match="ambiguous"):
        layer_tensors(cache, [group], 2, {"another": 1})
    for wrong in (0, 1, 2, 3, 4, -1):
        with pytest.raises(GeometryError, match=r"'k': dim .*\(2, 2, 16, 3\).* 5 blocks"):
            layer_tensors(cache, [group], 5, wrong)


def test_a_missing_layer_group_or_member_spec_is_named():
    group = Group(FullAttentionSpec(block_size=16), ["k"])
    batch = build_batch(parse_case("case=1@32"), [group], 8, 100, np.random.default_rng(0))
    with pytest.raises(GeometryError, match="layer 'k' of group 0"):
        touched_kv_views({}, [group], batch, 8)
    with pytest.raises(GeometryError, match=r"group 3 .* 1 group"):
        touched_kv_views({"k": torch.zeros(8, 16, 1)}, [Group(group.kv_cache_spec, ["k"], 3)], batch, 8)
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"other": group.kv_cache_spec})
    with pytest.raises(GeometryError, match=r"'k'.*other"):
        touched_kv_views({"k": torch.zeros(8, 16, 1)}, [Group(uniform, ["k"])], batch, 8)
    with pytest.raises(GeometryError, match="dict"):
        list(iter_tensors({"k": 1}))


@pytest.mark.parametrize("spec", [MambaSpec(block_size=4), CircularBufferSpec(block_size=4, dcp_sharded=True)])
def test_a_state_of_several_blocks_is_touched_whole(spec):
    # As with speculative blocks: more than the tail of 3 that attention would have.
    group = Group(spec, ["m"])
    batch = build_batch(parse_case("case=1@32"), [group], 20, 100, np.random.default_rng(0))
    batch.group_block_ranges[0][0] = (2, 12)
    state = torch.zeros(20, 4, 3)
    (view,) = touched_kv_views({"m": (state,)}, [group], batch, 20)
    assert identity(view) == identity(state[2:12])


def test_groups_without_ids_stand_in_group_order():
    first, second = FullAttentionSpec(block_size=16), FullAttentionSpec(block_size=4)

    class Plain:
        def __init__(self, spec, names):
            self.kv_cache_spec, self.layer_names = spec, names

    groups = [Plain(first, ["a"]), Plain(second, ["b"])]
    batch = build_batch(parse_case("case=2*1@32"), groups, 99, 100, np.random.default_rng(0))
    ranges = touched_block_ranges(groups, batch)
    assert ranges["a"].tolist() == [[1, 3], [11, 13]]
    assert ranges["b"].tolist() == [[8, 11], [18, 21]]


def test_a_layer_in_two_groups_is_refused():
    spec = FullAttentionSpec(block_size=16)
    groups = [Group(spec, ["a"], 0), Group(spec, ["b", "a"], 1)]
    batch = build_batch(parse_case("case=1@32"), groups, 99, 100, np.random.default_rng(0))
    with pytest.raises(GeometryError, match=r"'a'.*group 0.*1"):
        touched_block_ranges(groups, batch)


def test_a_batch_of_another_pool_is_refused():
    group = Group(FullAttentionSpec(block_size=16), ["k"])
    batch = build_batch(parse_case("case=1@320"), [group], 99, 100, np.random.default_rng(0))
    with pytest.raises(GeometryError, match=r"'k': request 0 has blocks \[18, 21\).*\(9, 16, 1\).* 1 to 8"):
        touched_kv_views({"k": torch.zeros(9, 16, 1)}, [group], batch, 9)
    batch.group_block_ranges[0][0] = (0, 3)
    with pytest.raises(GeometryError, match="null block"):
        touched_kv_views({"k": torch.zeros(9, 16, 1)}, [group], batch, 9)
    batch.group_block_ranges[0][0] = (4, 1)
    with pytest.raises(GeometryError, match=r"\[4, 1\)"):
        touched_kv_views({"k": torch.zeros(9, 16, 1)}, [group], batch, 9)


def test_ranges_out_of_order_and_empty_ones_keep_their_request_s_place():
    group = Group(FullAttentionSpec(block_size=16), ["k"])
    batch = build_batch(parse_case("case=3*1@16"), [group], 9, 100, np.random.default_rng(0))
    batch.group_block_ranges[0][:] = [(5, 7), (0, 0), (1, 3)]
    cache = torch.zeros(9, 16, 1)
    views = touched_kv_views({"k": cache}, [group], batch, 9)
    assert list(map(identity, views)) == [identity(cache[5:7]), identity(cache[0:0]), identity(cache[1:3])]


def test_an_empty_state_keeps_the_others_places_in_the_spec():
    spec = MambaSpec(block_size=1, shapes=((0,), (6, 3)))
    (layer,) = layer_tensors({"m": (torch.zeros(2, 0), torch.zeros(6, 2, 3))}, [Group(spec, ["m"])], 2)
    assert (layer.index, layer.dim) == (1, 1)
