"""Filling: which bytes change, to what values, and what is refused before any byte is written."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlab.cases import parse_case
from kvlab.errors import FillError, FormatError, GeometryError, KvlabError
from kvlab.kv import fill_plan, filling
from kvlab.kv.batch import build_batch
from kvlab.kv.detect import format_of
from kvlab.kv.filling import FillPlans, distinct_layers, fill_kv_blocks, zero_kv_blocks
from kvlab.kv.formats import Fp8Format, IndexerFormat, RawFormat
from kvlab.kv.rules import STATE_SCALE, Constant, Mix, Random, Zeros
from kvlab.kv.views import layer_tensors

from standins import (
    GUARD,
    CircularBufferSpec,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    is_state,
    owned_bytes,
    refill_guards,
    tensors_of,
    worlds,
    zero_tokens_of,
)


def lay_out(text, groups, num_blocks=64, **keywords):
    return build_batch(parse_case(text), groups, num_blocks, 100, np.random.default_rng(0), **keywords)


# Which bytes change.


def formats_of(world):
    """What an engine would tell of one-byte caches; hypothesis' caches are fp8 there."""
    return {
        name: Fp8Format()
        for name, cache in world.kv_caches.items()
        if any(t.dtype == torch.uint8 for t in tensors_of(cache))
    }


@settings(max_examples=120, deadline=None)
@given(worlds(), st.sampled_from(("random", "random(std=3, zero_fraction=0.5)", "constant(2)", "zeros")))
def test_a_fill_changes_owned_blocks_only_or_nothing(world, fill):
    refill_guards(world)
    arguments = (world.kv_caches, world.groups, world.batch, world.num_blocks, fill)
    try:
        fill_kv_blocks(*arguments, formats=formats_of(world), block_dims=world.block_dims)
    except KvlabError as refusal:
        why = str(refusal)
    else:
        why = ""
    if why:
        # Some shapes do not tell which axis holds the tokens; some groups lie over each other's blocks.
        assert fill != "zeros" or "in the same bytes" in why
        assert all((buffer.view(torch.uint8) == GUARD).all() for buffer in world.buffers)
        return
    for buffer, owned in zip(world.buffers, owned_bytes(world), strict=True):
        data = buffer.view(torch.uint8).flatten()
        assert (data[~owned] == GUARD).all()
        if fill == "zeros":
            assert not data[owned].any()


@settings(max_examples=80, deadline=None)
@given(worlds())
def test_zero_fraction_1_is_zeros_byte_for_byte_and_so_is_zero_kv_blocks(world):
    arguments = (world.kv_caches, world.groups, world.batch, world.num_blocks)
    results = []
    for fill in ("random(zero_fraction=1)", "zeros", None):
        refill_guards(world)
        try:
            if fill is None:
                zero_kv_blocks(*arguments, block_dims=world.block_dims)
            else:
                fill_kv_blocks(*arguments, fill, formats=formats_of(world), block_dims=world.block_dims)
        except GeometryError:
            return
        results.append([buffer.view(torch.uint8).clone() for buffer in world.buffers])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def overlaid(num_blocks=20, tokens=8, width=16):
    """Public case 2: fp32 states and bf16 attention over one buffer, blocks of 512 bytes."""
    buffer = torch.full((num_blocks * 512,), GUARD, dtype=torch.uint8)
    caches = {
        "attn": buffer.view(torch.bfloat16).as_strided((num_blocks, tokens, width), (256, width, 1)),
        "state": (
            buffer.view(torch.float32).as_strided((num_blocks, 4, 8), (128, 8, 1)),
            buffer.view(torch.float32).as_strided((num_blocks, 60), (128, 1), 32),
        ),
    }
    groups = [
        Group(FullAttentionSpec(block_size=tokens), ["attn"], 0),
        Group(MambaSpec(block_size=528, shapes=((4, 8), (60,))), ["state"], 1),
    ]
    return buffer, caches, groups


@pytest.mark.parametrize("fill", ["zeros", "random", "random(zero_fraction=0.5)", "constant(0.5)"])
def test_public_case_2_states_and_attention_over_one_buffer_leave_each_other_alone(fill):
    buffer, caches, groups = overlaid()
    batch = lay_out("case=2*1@20", groups, 20)
    blocks = buffer.view(20, 512)
    attention = [b for begin, end in batch.group_block_ranges[0] for b in range(begin, end)]
    states = [b for begin, end in batch.group_block_ranges[1] for b in range(begin, end)]
    others = sorted({*range(20)} - {*attention, *states})
    assert len(others) == 20 - 2 * 4
    fill_kv_blocks(caches, groups, batch, 20, fill)
    assert (blocks[others] == GUARD).all()
    assert (blocks[attention][:, 256:] == GUARD).all()
    assert (blocks[states][:, 368:] == GUARD).all()
    assert caches["attn"][attention].float().abs().max() < 6
    assert all(t[states].abs().max() < 0.6 for t in caches["state"])
    # Only one group's blocks: the other's keep every byte.
    before = blocks.clone()
    fill_kv_blocks(caches, groups[:1], batch, 20, "constant(1)")
    assert torch.equal(blocks[states], before[states])
    assert torch.equal(blocks[others], before[others])
    assert (caches["attn"][attention] == 1).all()


def test_layers_that_share_a_cache_are_filled_once():
    cache = torch.zeros(8, 4, 3)
    group = Group(FullAttentionSpec(block_size=4), ["a", "shares a"])
    batch = lay_out("case=1@16", [group], 8)
    fill_kv_blocks({"a": cache, "shares a": cache}, [group], batch, 8, "random")
    shared = cache.clone()
    fill_kv_blocks({"a": cache}, [Group(group.kv_cache_spec, ["a"])], batch, 8, "random")
    assert torch.equal(cache, shared)
    assert len(distinct_layers(layer_tensors({"a": cache, "shares a": cache}, [group], 8))) == 1


# To what.


def packed_world(num_blocks=40):
    """A group of every byte format, 64 states a block, and one of states."""
    fp8_ds = MLAAttentionSpec(block_size=64, cache_dtype_str="fp8_ds_mla")
    members = {
        "bf16": FullAttentionSpec(block_size=64),
        "split": FullAttentionSpec(block_size=64),
        "kv first": FullAttentionSpec(block_size=64),
        "656": fp8_ds,
        "584": MLAAttentionSpec(block_size=64, cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4"),
        "132": MLAAttentionSpec(block_size=64, cache_role="indexer"),
        "fp8": FullAttentionSpec(block_size=64),
        "int8 heads": FullAttentionSpec(block_size=64, kv_quant_mode="INT8_PER_TOKEN_HEAD"),
    }
    padded = torch.zeros(num_blocks * (64 * 584 + 576), dtype=torch.uint8)
    caches = {
        "bf16": torch.zeros(num_blocks, 2, 64, 24, dtype=torch.bfloat16),
        "split": torch.zeros(num_blocks * 4, 2, 16, 24, dtype=torch.bfloat16),
        "kv first": torch.zeros(2, num_blocks, 64, 3, 24),
        "656": torch.zeros(num_blocks, 64, 656, dtype=torch.uint8),
        "584": padded.as_strided((num_blocks, 64, 584), (64 * 584 + 576, 584, 1)),
        "132": torch.zeros(num_blocks, 64, 132, dtype=torch.uint8),
        "fp8": torch.zeros(num_blocks, 2, 64, 24, dtype=torch.float8_e4m3fn),
        "int8 heads": torch.zeros(num_blocks, 2, 64, 40, dtype=torch.uint8),
        "state": (torch.zeros(num_blocks, 3, 32, dtype=torch.bfloat16), torch.zeros(num_blocks, 4, 8, 8)),
    }
    groups = [
        Group(UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=members), list(members), 0),
        Group(MambaSpec(block_size=64), ["state"], 1),
    ]
    return caches, groups, lay_out("case=1@600,64@500,3*1@64,100@130c", groups, num_blocks)


def decoded(layer, begin, end):
    view = layer.token_major(begin, end)
    return format_of(layer.spec, layer.tensor, layer.layer).decode(view)


@pytest.mark.parametrize("std", [0.25, 1.0, 5.0])
def test_random_values_have_the_asked_spread_in_every_format(std):
    caches, groups, batch = packed_world()
    fill_kv_blocks(caches, groups, batch, 40, Random(std))
    for layer in layer_tensors(caches, groups, 40):
        values = torch.cat([decoded(layer, *r).flatten() for r in batch.group_block_ranges[layer.group_id]])
        wanted = std * (STATE_SCALE if is_state(layer.spec) else 1)
        assert values.isfinite().all()
        assert abs(values.std().item() / wanted - 1) < 0.06, layer.layer
        assert abs(values.mean().item()) < 0.06 * wanted
        # Normal: 68 % within one standard deviation, whatever the format's rounding.
        assert abs((values.abs() < wanted).float().mean().item() - 0.683) < 0.04


@pytest.mark.parametrize("value", [0.015, -3.5, 0.0, 1e30])
def test_constants_are_that_value_up_to_the_format_s_rounding(value):
    caches, groups, batch = packed_world()
    fill_kv_blocks(caches, groups, batch, 40, Constant(value))
    for layer in layer_tensors(caches, groups, 40):
        for begin, end in batch.group_block_ranges[layer.group_id]:
            values = decoded(layer, begin, end)
            wanted = 448.0 if layer.layer == "fp8" and value > 448 else value
            assert torch.allclose(
                values, torch.tensor(wanted), rtol=2**-4, atol=2**-10 if layer.layer == "fp8" else 1e-6
            )
            # Codes and an uncoded rope part may round apart.
            assert values.unique().numel() <= (2 if layer.layer in ("656", "584") else 1)


@pytest.mark.parametrize("fill", ["random", "random(zero_fraction=0.3)", "constant(0.015)", "constant(1e38)"])
def test_public_case_11_scales_are_finite_and_positive(fill):
    caches, groups, batch = packed_world()
    fill_kv_blocks(caches, groups, batch, 40, fill)
    checked = 0
    for layer in layer_tensors(caches, groups, 40):
        fmt = format_of(layer.spec, layer.tensor, layer.layer)
        if layer.layer not in ("656", "584", "132", "int8 heads"):
            continue
        for begin, end in batch.group_block_ranges[layer.group_id]:
            fields = fmt.fields(layer.token_major(begin, end))
            zero_tokens = torch.cat([f.contiguous().flatten(-1) for f in fields.values()], -1).sum(-1) == 0
            for name in (n for n in fields if "scale" in n):
                raw = fields[name].contiguous().numpy()
                scales = raw if layer.layer == "584" else raw.view("<f4")
                good = (scales > 0) & (scales < (255 if layer.layer == "584" else np.inf))
                assert (good.all(-1) | zero_tokens.numpy()).all()
                checked += 1
    assert checked


def test_fills_repeat_with_the_seed():
    def bytes_after(fill, seed):
        caches, groups, batch = packed_world()
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        fill_kv_blocks(caches, groups, batch, 40, fill, generator)
        return [t.view(torch.uint8).clone() for cache in caches.values() for t in tensors_of(cache)]

    for fill in ("random", "random(zero_fraction=0.5)"):
        first = bytes_after(fill, 1)
        assert all(map(torch.equal, first, bytes_after(fill, 1)))
        assert not any(map(torch.equal, first, bytes_after(fill, 2)))
        assert all(map(torch.equal, bytes_after(fill, None), bytes_after(fill, 0)))


def test_the_generator_gives_its_seed_only():
    caches, groups, batch = packed_world()
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    fill_kv_blocks(caches, groups, batch, 40, "random(zero_fraction=0.5)", generator)
    assert torch.equal(generator.get_state(), before)
    first = caches["bf16"].clone()
    fill_kv_blocks(caches, groups, batch, 40, "random(zero_fraction=0.5)", generator)
    assert torch.equal(caches["bf16"], first)


# Contents do not depend on what is filled beside them.


def alone(batch, request):
    """The batch with one of its requests, in the blocks it has."""
    req_id = batch.req_ids[request]
    ranges = [[group[request]] for group in batch.group_block_ranges]
    return replace(batch, req_ids=[req_id], group_block_ranges=ranges)


def bytes_of(world):
    return [buffer.view(torch.uint8).clone() for buffer in world.buffers]


@settings(max_examples=30, deadline=None)
@given(
    worlds(),
    st.sampled_from(("random", "random(std=3, zero_fraction=0.5)")),
    st.sampled_from((1, 100, 1 << 17)),
    st.randoms(use_true_random=False),
)
def test_one_request_and_layer_at_a_time_gives_the_same_bytes(world, fill, chunk, random):
    tensors = [t for cache in world.kv_caches.values() for t in tensors_of(cache)]
    # Overlaid layers of one group are the last one's, whichever that is.
    assume(len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors) or len(world.groups) == 1)
    keywords = {"formats": formats_of(world), "block_dims": world.block_dims}
    refill_guards(world)
    try:
        fill_kv_blocks(world.kv_caches, world.groups, world.batch, world.num_blocks, fill, **keywords)
    except KvlabError:
        assume(False)
    whole = bytes_of(world)
    refill_guards(world)
    pieces = [
        (Group(group.kv_cache_spec, [name], group.kv_cache_group_id), request)
        for group in world.groups
        for name in group.layer_names
        for request in range(len(world.batch.req_ids))
    ]
    if len(world.groups) > 1:
        random.shuffle(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_plan, "_CHUNK_VALUES", {"cpu": chunk})
        for group, request in pieces:
            fill_kv_blocks(world.kv_caches, [group], alone(world.batch, request), world.num_blocks, fill, **keywords)
    assert all(map(torch.equal, bytes_of(world), whole))


def test_blocks_layers_tensors_and_seeds_have_values_of_their_own():
    caches, groups, batch = packed_world()
    state, other = torch.zeros(40, 4, 8, 8), torch.zeros(40, 4, 8, 8)
    caches["state"], caches["bf16 again"] = (state, other), torch.zeros_like(caches["bf16"])
    groups[0].kv_cache_spec.kv_cache_specs["bf16 again"] = FullAttentionSpec(block_size=64)
    groups[0].layer_names.append("bf16 again")
    fill_kv_blocks(caches, groups, batch, 40, "random")
    (begin, end), *_ = batch.group_block_ranges[0]
    blocks = torch.cat([caches[name][begin:end].flatten(1) for name in ("bf16", "bf16 again")]).float()
    (begin, end), *_ = batch.group_block_ranges[1]
    for rows in (blocks, torch.cat([state[begin:end], other[begin:end]]).flatten(1)):
        alike = torch.corrcoef(rows).abs().fill_diagonal_(0)
        assert alike.max() < 6 / math.sqrt(rows.shape[1])


# Roles.


def test_each_role_of_a_mix_gets_its_own_fill_and_the_rest_that_of_kv():
    mix = Mix(Random(0.5), indexer=Constant(3.0), state=Zeros())
    caches, groups, batch = packed_world()
    fill_kv_blocks(caches, groups, batch, 40, mix)
    single = {}
    for part in ("random(std=0.5)", "constant(3)", "zeros"):
        single[part], *_ = packed_world()
        fill_kv_blocks(single[part], groups, batch, 40, part)
    for name, cache in caches.items():
        wanted = single[{"132": "constant(3)", "state": "zeros"}.get(name, "random(std=0.5)")][name]
        for ours, theirs in zip(tensors_of(cache), tensors_of(wanted), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


def test_zero_tokens_of_a_mix_are_zero_in_their_role_only():
    caches, groups, batch = packed_world()
    fill_kv_blocks(caches, groups, batch, 40, "mix(kv=random(zero_fraction=0.5), indexer=random)")
    layers = {layer.layer: layer for layer in layer_tensors(caches, groups, 40)}
    begin, end = batch.group_block_ranges[0][0]
    assert not zero_tokens_of(layers["132"], begin, end).any()
    assert int(zero_tokens_of(layers["656"], begin, end).sum()) == 64 * (end - begin) // 2


@pytest.mark.parametrize(
    ("fill", "match"),
    [
        ("mix(kv=random, indexer=zeros)", "no layer of this model has the role indexer; its roles are kv"),
        ("mix(kv=random, window=zeros)", "role window; its roles are kv"),
        ("mix(kv=random, state=zeros)", "role state; its roles are kv"),
        ("levels", "no layer of this model is one; its roles are kv"),
        ("prefill", "only an engine can write it"),
    ],
)
def test_a_role_that_no_layer_has_is_refused_with_the_roles_that_are_there(fill, match):
    caches, groups, batch = two_layers(FullAttentionSpec(block_size=4), torch.zeros(7, 4, 2))
    assert isinstance(refused(match, caches, groups, batch, 7, fill), FillError)


def test_a_state_of_unknown_bytes_can_be_zeroed_in_a_mix():
    ring = torch.full((7, 4, 3), 7, dtype=torch.uint8)
    caches, groups, batch = two_layers(CircularBufferSpec(block_size=4), ring)
    refused("'bad': unknown", caches, groups, batch, 7, "mix(kv=random)")
    ring.fill_(7)
    fill_kv_blocks(caches, groups, batch, 7, "mix(kv=random, state=zeros)")
    begin, end = batch.group_block_ranges[0][0]
    assert not ring[begin:end].any()
    assert (ring[0] == 7).all()
    assert caches["good"][begin:end].abs().max() > 0


# Zero tokens.


@pytest.mark.parametrize("chunk", [None, 1000, 64 * 600])
@pytest.mark.parametrize("share", [0.25, 1 / 3, 0.5, 0.9, 1e-9])
def test_the_zeroed_tokens_are_an_exact_share_of_each_request_and_the_same_in_all_layers(share, chunk, monkeypatch):
    if chunk:
        # Large caches are filled piece by piece; pieces differ by layer.
        monkeypatch.setattr(fill_plan, "_CHUNK_VALUES", {"cpu": chunk})
    caches, groups, batch = packed_world()
    fill_kv_blocks(caches, groups, batch, 40, Random(zero_fraction=share))
    layers = [layer for layer in layer_tensors(caches, groups, 40) if layer.group_id == 0]
    assert len(layers) == 8
    for begin, end in batch.group_block_ranges[0]:
        first = zero_tokens_of(layers[0], begin, end)
        assert int(first.sum()) == round(share * 64 * (end - begin))
        for layer in layers[1:]:
            assert torch.equal(zero_tokens_of(layer, begin, end), first), layer.layer


def test_zeroed_tokens_are_scattered_and_differ_between_requests():
    caches, groups, batch = packed_world()
    fill_kv_blocks(caches, groups, batch, 40, Random(zero_fraction=0.5))
    layer = layer_tensors(caches, groups, 40)[0]
    rows = [zero_tokens_of(layer, *r) for r in batch.group_block_ranges[0][2:5]]
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])
    long = zero_tokens_of(layer, *batch.group_block_ranges[0][0])
    runs = int((long[1:] != long[:-1]).sum()) + 1
    assert abs(runs - len(long) / 2) < 4 * math.sqrt(len(long)) / 2


def test_states_zero_elements_and_keep_the_others_spread():
    state = torch.zeros(8, 100, 100)
    group = Group(MambaSpec(block_size=64), ["state"])
    batch = lay_out("case=7*1@64", [group], 8)
    fill_kv_blocks({"state": state}, [group], batch, 8, Random(zero_fraction=0.25))
    values = state[1:]
    zero = values.view(torch.int32) == 0
    assert abs(zero.float().mean().item() - 0.25) < 0.01
    assert abs(values[~zero].std().item() - STATE_SCALE) < 0.002
    assert not (values.view(torch.int32) == -(1 << 31)).any()
    assert not state[0].any()


# Refusals, before any byte.


def refused(match, caches, groups, batch, num_blocks, fill, **keywords):
    tensors = [t for cache in caches.values() for t in tensors_of(cache)]
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(GUARD)
    with pytest.raises(KvlabError, match=match) as error:
        fill_kv_blocks(caches, groups, batch, num_blocks, fill, **keywords)
    assert len(str(error.value).splitlines()) == 1
    assert all((tensor.view(torch.uint8) == GUARD).all() for tensor in tensors)
    return error.value


def two_layers(second_spec, second):
    spec = FullAttentionSpec(block_size=4)
    groups = [
        Group(UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"good": spec, "bad": second_spec}), ["good", "bad"])
    ]
    return {"good": torch.zeros(7, 4, 5), "bad": second}, groups, lay_out("case=2*1@8", groups, 7)


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "formats", "match"),
    [
        ({}, (7, 4, 6), torch.uint8, {}, r"'bad': unknown .*uint8.*\(7, 4, 6\)"),
        ({}, (7, 4, 6), torch.int32, {}, r"'bad': unknown .*int32.*\(7, 4, 6\)"),
        ({"cache_role": "indexer"}, (7, 4, 68), torch.uint8, {}, r"'bad'.*\(7, 4, 68\).*132"),
        ({}, (7, 4, 68), torch.uint8, {"bad": IndexerFormat()}, r"'bad'.*132 bytes, not 68"),
        ({}, (7, 4, 6), torch.uint8, {"bad": RawFormat(torch.bfloat16)}, r"'bad', shape \(7, 4, 6\): bfloat16.*uint8"),
        ({"cache_role": "indexer"}, (7, 2, 4, 132), torch.uint8, {}, r"'bad', shape \(7, 2, 4, 132\).*planar"),
        ({}, (7, 4, 4, 3, 6), torch.bfloat16, {}, r"'bad'.*no one axis.*\(7, 4, 4, 3, 6\)"),
        ({}, (7, 3, 6), torch.bfloat16, {}, r"'bad'.*no one axis.*\(7, 3, 6\)"),
        ({}, (5, 4, 6), torch.bfloat16, {}, r"'bad': no block dimension in shape \(5, 4, 6\)"),
    ],
)
def test_a_layer_that_cannot_be_filled_stops_the_fill_before_the_first_byte(spec, shape, dtype, formats, match):
    caches, groups, batch = two_layers(MLAAttentionSpec(block_size=4, **spec), torch.zeros(shape, dtype=dtype))
    refused(match, caches, groups, batch, 7, "random(zero_fraction=0.5)", formats=formats)


def test_a_cache_without_a_token_axis_takes_no_zero_fraction():
    caches, groups, batch = two_layers(FullAttentionSpec(block_size=4), torch.zeros(7, 24))
    error = refused("'bad'.*no axis of tokens", caches, groups, batch, 7, "random(zero_fraction=0.5)")
    assert isinstance(error, GeometryError)
    fill_kv_blocks(caches, groups, batch, 7, "random")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_kernel_with_its_own_order_within_a_block_takes_no_zero_fraction(dtype):
    """vLLM's CPU attention keeps K transposed: values fill such a block, but no token's can be told."""
    own_order = (Fp8Format if dtype.itemsize == 1 else RawFormat)(dtype, token_major=False)
    group = Group(FullAttentionSpec(block_size=16), ["own"])
    caches, formats = {"own": torch.zeros(7, 2, 16, 8).to(dtype)}, {"own": own_order}
    batch = lay_out("d=1@40", [group], 7)
    with pytest.raises(FillError, match=r"layer 'own': .* drop zero_fraction"):
        fill_kv_blocks(caches, [group], batch, 7, "random(zero_fraction=0.5)", formats=formats)
    assert not caches["own"].float().any()
    fill_kv_blocks(caches, [group], batch, 7, "random", formats=formats)
    assert caches["own"][1:4].float().std() == pytest.approx(1.0, abs=0.2)
    assert own_order != type(own_order)(dtype)


def test_a_batch_of_a_larger_pool_or_a_bad_text_changes_nothing():
    caches, groups, _ = two_layers(FullAttentionSpec(block_size=4), torch.zeros(7, 4, 2))
    large = lay_out("case=1@40", groups, 99)
    for fill in ("zeros", "random"):
        assert isinstance(refused("'good'.* 1 to 6", caches, groups, large, 7, fill), GeometryError)
    assert isinstance(refused("std", caches, groups, large, 7, "random(std=-1)"), FillError)
    assert isinstance(refused("ones", caches, groups, large, 7, "ones"), FillError)
    del caches["bad"]
    refused("'bad' of group 0 has no entry", caches, groups, large, 7, "zeros")


def test_zeros_need_no_format():
    caches, groups, batch = two_layers(FullAttentionSpec(block_size=4), torch.full((7, 4, 6), 7, dtype=torch.uint8))
    fill_kv_blocks(caches, groups, batch, 7, "zeros")
    begin, end = batch.group_block_ranges[0][0][0], batch.group_block_ranges[0][-1][1]
    assert not caches["bad"][begin:end].any()
    assert (caches["bad"][:begin] == 7).all()
    with pytest.raises(FormatError, match="'bad'"):
        fill_kv_blocks(caches, groups, batch, 7, "random")


def test_rings_are_filled_small():
    ring = torch.zeros(8, 4, 500)
    group = Group(CircularBufferSpec(block_size=4), ["ring"])
    fill_kv_blocks({"ring": ring}, [group], lay_out("case=7*1@64", [group], 8), 8, "random")
    assert abs(ring[1:].std().item() - STATE_SCALE) < 0.005


# Plans.


@pytest.fixture
def made(monkeypatch):
    """The plans that are made."""
    plans = []

    def spy(*arguments):
        plans.append(fill_plan.FillPlan(*arguments))
        return plans[-1]

    monkeypatch.setattr(filling, "FillPlan", spy)
    return plans


def test_a_plan_is_made_once_for_all_seeds_and_gives_what_a_fill_without_one_gives(made):
    buffer, caches, groups = overlaid()
    batch, plans = lay_out("case=2*1@20", groups, 20), FillPlans()
    texts = ("random(zero_fraction=0.5)", "mix(kv=random, state=zeros)", "zeros")
    for seed in (0, 1, 0):
        for text in texts:
            results = []
            for keep in (FillPlans(), plans):
                buffer.fill_(GUARD)
                fill_kv_blocks(caches, groups, batch, 20, text, torch.Generator().manual_seed(seed), plans=keep)
                results.append(buffer.clone())
            assert torch.equal(*results)
    # One a call without a plan at hand, and one a text.
    assert len(made) == 3 * len(texts) + len(texts)


def test_what_differs_has_a_plan_of_its_own(made):
    tokens, plans = 8, FillPlans()
    caches = {name: torch.zeros(20, tokens, 16, dtype=torch.uint8) for name in "ab"}
    groups = [Group(FullAttentionSpec(block_size=tokens), ["a", "b"], 0)]
    given = {"batch": lay_out("case=2*1@20", groups, 20), "num_blocks": 20, "fill": "random(std=3)", "block_dims": 0}
    given |= {"kv_caches": caches, "attn_groups": groups, "formats": {"a": Fp8Format(), "b": Fp8Format()}}

    def fill(**changes):
        """Whether a plan was made; the contents are those of a fill without plans in any case."""
        arguments, results = {**given, **changes}, []
        for keep in (FillPlans(), plans):
            before = len(made)
            for cache in arguments["kv_caches"].values():
                cache.fill_(GUARD)
            fill_kv_blocks(**arguments, plans=keep)
            results.append([cache.clone() for cache in arguments["kv_caches"].values()])
        assert all(map(torch.equal, *results))
        return len(made) > before

    assert fill()
    assert not fill()
    # As good as the same: the same request in the same blocks, equal specs and formats.
    assert not fill(batch=lay_out("other=2*1@20", groups, 20))
    assert not fill(attn_groups=[Group(FullAttentionSpec(block_size=tokens), ["a", "b"], 0)])
    assert not fill(formats={name: Fp8Format() for name in "ab"})
    assert fill(batch=lay_out("case=3*1@20", groups, 20))
    assert fill(fill="random(std=2)")
    assert fill(fill="constant(0.0)")
    assert fill(fill="constant(-0.0)")
    assert fill(num_blocks=10, kv_caches={name: cache[:10] for name, cache in caches.items()})
    assert fill(formats={"a": Fp8Format(scale=0.5), "b": Fp8Format()})
    assert fill(attn_groups=[Group(FullAttentionSpec(block_size=tokens), ["b", "a"], 0)])
    assert fill(kv_caches={name: cache.clone() for name, cache in caches.items()})
    assert not fill()
    # In place: another storage, another batch, another scale.
    caches["a"].set_(torch.zeros_like(caches["a"]))
    assert fill()
    given["batch"].group_block_ranges[0][1] = (12, 14)
    assert fill()
    vars(given["formats"]["b"])["scale"] = 0.25
    assert fill()
    assert not fill()


def test_the_oldest_plans_go(made):
    _, caches, groups = overlaid()
    batch, plans = lay_out("case=2*1@20", groups, 20), FillPlans()
    for number in [*range(40), 39, 0]:
        fill_kv_blocks(caches, groups, batch, 20, Constant(number), plans=plans)
    assert len(made) == 41
