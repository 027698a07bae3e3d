"""Kernels that write random values in a cache's own format: in Triton's interpreter, and on a GPU where there is one.

Without a GPU these tests run in a process of their own, started by the last one here: a process interprets its kernels
or compiles them.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvlab.cases import parse_case
from kvlab.kv import draws, fill_plan
from kvlab.kv.batch import build_batch
from kvlab.kv.codecs import decode_ue8m0, from_bytes
from kvlab.kv.detect import format_of
from kvlab.kv.draws import key_of
from kvlab.kv.filling import FillPlans, fill_kv_blocks
from kvlab.kv.formats import Fp8Format, RawFormat
from kvlab.kv.rules import STATE_SCALE, Random
from kvlab.kv.views import layer_tensors

from standins import (
    GUARD,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    World,
    is_state,
    owned_bytes,
    refill_guards,
    zero_tokens_of,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_BLOCKS, TOKENS = 7, 16
# Layers that no kernel fills: blocks that do not begin at multiples of eight values, and a format that has none.
GENERIC = {"odd", "int8 heads"}
FORMATS = {"fp8 bytes": Fp8Format(torch.float8_e4m3fn, 0.5)}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        from triton.runtime import interpreter

        # The interpreter drops the carry where an fp8 mantissa rounds up, and does not round to bf16 at all.
        monkeypatch.setattr(interpreter, "_convert_float", rounded)
        for module in (draws, fill_plan):
            monkeypatch.setattr(module, "draw_method", lambda device: "triton")
    return torch.device(request.param)


def rounded(values, input_dtype, output_dtype, rounding_mode):
    """The bits of a float32 array cast to another type, to nearest even."""
    dtype = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16}[output_dtype.name]
    bits = {1: torch.uint8, 2: torch.uint16}[dtype.itemsize]
    assert input_dtype.name == "fp32"
    return torch.from_numpy(values.copy()).to(dtype).view(bits).numpy()


@pytest.fixture
def launched(monkeypatch):
    """Names of the layers that kernels have filled."""
    from kvlab.kv.launches import LaunchPlan

    add, names = LaunchPlan.add, set()

    def spy(self, layer, *rest):
        taken = add(self, layer, *rest)
        names.update([layer.layer] if taken else [])
        return taken

    monkeypatch.setattr(LaunchPlan, "add", spy)
    return names


def kernel_world(device):
    """Every format and every way to lie that a kernel knows, and some that none does, with guards between."""
    mla = {"block_size": TOKENS}
    v32, v4 = {"cache_dtype_str": "fp8_ds_mla"}, {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    buffers = []

    def raw(num_bytes):
        buffers.append(torch.full((num_bytes,), GUARD, dtype=torch.uint8, device=device))
        return buffers[-1]

    def dense(*shape, dtype=torch.bfloat16):
        return raw(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def strided(shape, block_bytes, dtype=torch.uint8, offset=0, buffer=None):
        buffer = raw(shape[0] * block_bytes) if buffer is None else buffer
        inner = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
        return buffer.view(dtype).as_strided(shape, (block_bytes // dtype.itemsize, *inner), offset // dtype.itemsize)

    blocks, half = NUM_BLOCKS, TOKENS // 2
    # Two layers side by side in each block of one buffer, as a uniform-type group packs them.
    page = TOKENS * (656 + 132) + 144
    shared = raw(blocks * 2 * page)
    caches = {
        "heads first": dense(blocks, 2, TOKENS, 24),
        "heads last": dense(blocks, TOKENS, 2, 24).transpose(1, 2),
        "kv first": dense(2, blocks, TOKENS, 3, 8),
        "heads outside": dense(3, blocks, TOKENS, 8).transpose(0, 1),
        "kernel blocks": dense(blocks * 2, 2, half, 8),
        "latent": strided((blocks, TOKENS, 576), TOKENS * 576 * 2 + 64, torch.bfloat16),
        "fp16": dense(blocks, TOKENS, 40, dtype=torch.float16),
        "fp32": dense(blocks, TOKENS, 24, dtype=torch.float32),
        "fp8": dense(blocks, 2, TOKENS, 24, dtype=torch.float8_e4m3fn),
        "fp8 bytes": dense(blocks, 2, TOKENS, 24, dtype=torch.uint8),
        "656": strided((blocks, TOKENS, 656), 2 * page, buffer=shared),
        "656 again": strided((blocks, TOKENS, 656), 2 * page, offset=page, buffer=shared),
        "132": strided((blocks, TOKENS, 132), 2 * page, offset=TOKENS * 656, buffer=shared),
        "132 again": strided((blocks, 1, TOKENS, 132), 2 * page, offset=page + TOKENS * 656, buffer=shared),
        "132 split": dense(blocks * 2, half, 132, dtype=torch.uint8),
        "584": strided((blocks, TOKENS, 584), TOKENS * 584 + 576),
        "int8 heads": dense(blocks, 2, TOKENS, 40, dtype=torch.uint8),
        "odd": strided((blocks, TOKENS, 3), 98, torch.bfloat16),
    }
    states = raw(blocks * 1280)
    caches["state"] = (
        strided((blocks, 3, 32), 1280, torch.bfloat16, buffer=states),
        strided((blocks, 4, 8, 8), 1280, torch.float32, offset=192, buffer=states),
    )
    members = {name: FullAttentionSpec(block_size=TOKENS) for name in caches if name != "state"}
    for name in ("656", "656 again", "132", "132 again", "132 split", "584"):
        role = {"cache_role": "indexer"} if name.startswith("132") else v4 if name == "584" else v32
        members[name] = MLAAttentionSpec(**mla, **role)
    members["int8 heads"] = FullAttentionSpec(block_size=TOKENS, kv_quant_mode="INT8_PER_TOKEN_HEAD")
    groups = [
        Group(UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=members), list(members), 0),
        Group(MambaSpec(block_size=TOKENS, shapes=((3, 32), (4, 8, 8))), ["state"], 1),
    ]
    case = parse_case("case=1@20,10@12c")
    batch = build_batch(case, groups, blocks, 100, np.random.default_rng(0))
    dims = {name: 1 if name == "kv first" else 0 for name in caches}
    factors = {name: 2 if name in ("kernel blocks", "132 split") else 1 for name in caches}
    return World(batch, groups, caches, dims, factors, blocks, 1, 0, case, buffers, set())


def fill(world, text, batch=None, groups=None, seed=0, plans=None):
    generator = torch.Generator(world.buffers[0].device).manual_seed(seed)
    arguments = (world.kv_caches, groups or world.groups, batch or world.batch, NUM_BLOCKS, text, generator)
    fill_kv_blocks(*arguments, formats=FORMATS, block_dims=world.dims, plans=plans)


def bytes_of(world):
    return [buffer.clone() for buffer in world.buffers]


def decoded(world):
    """(layer, its format, values of each request's blocks) for every tensor."""
    for layer in layer_tensors(world.kv_caches, world.groups, NUM_BLOCKS, world.dims):
        fmt = FORMATS.get(layer.layer) or format_of(layer.spec, layer.tensor, layer.layer)
        ranges = world.batch.group_block_ranges[layer.group_id]
        yield layer, fmt, torch.cat([fmt.decode(layer.token_major(*r)) for r in ranges])


def only_owned_blocks_changed(world):
    for buffer, owned in zip(world.buffers, owned_bytes(world), strict=True):
        assert (buffer[~owned] == GUARD).all()
        yield buffer[owned]


def test_every_layout_is_filled_by_a_kernel_with_normal_values_and_nothing_else_changes(device, launched):
    world = kernel_world(device)
    fill(world, "random")
    assert launched == set(world.kv_caches) - GENERIC
    for data in only_owned_blocks_changed(world):
        # A byte in 256 is a guard's by chance; none was left out.
        assert (data == GUARD).float().mean() < 0.05
    for layer, fmt, values in decoded(world):
        scale = STATE_SCALE if is_state(layer.spec) else 1.0
        assert values.isfinite().all()
        # No two calls of the generator are alike: no run of a block repeats another's values.
        eights = values.flatten().unflatten(0, (-1, 8))
        assert len(eights.unique(dim=0)) == len(eights), layer.layer
        ordered = values.double().flatten().sort().values / scale
        steps = torch.arange(len(ordered), device=device) / len(ordered)
        # The 0.1 % point of Kolmogorov's distribution, and half a step of a format of few codes.
        coarse = 0 if isinstance(fmt, RawFormat) else 0.02
        assert (torch.special.ndtr(ordered) - steps).abs().max() < 1.95 / math.sqrt(len(ordered)) + coarse
        assert abs(values.std().item() / scale - 1) < 5 / math.sqrt(2 * len(ordered)) + coarse


def test_packed_bytes_are_those_of_the_format_s_encoder(device):
    from kvlab.kv.launches import launch_normals

    world = kernel_world(device)
    fill(world, "random", seed=4)
    packed = 0
    for layer in layer_tensors(world.kv_caches, world.groups, NUM_BLOCKS, world.dims):
        if layer.layer.split()[0] not in ("656", "584", "132"):
            continue
        fmt = format_of(layer.spec, layer.tensor, layer.layer)
        for begin, end in world.batch.group_block_ranges[0]:
            view = layer.token_major(begin, end)
            shape = (*view.shape[:-1], fmt.width)
            key = key_of(4, layer.layer, layer.index)
            values = launch_normals(key, begin * layer.factor, len(view), math.prod(shape[1:]), device).view(shape)
            for name, field in fmt.encode_fields(values).items():
                assert torch.equal(fmt.fields(view)[name], field), (layer.layer, name)
                if name == "scales":
                    scales = decode_ue8m0(field) if layer.layer == "584" else from_bytes(field, torch.float32)
                    # Powers of two, as writers store them; normal values need these two or a neighbour.
                    assert set(scales.unique().tolist()) <= {2.0**e for e in (-9, -8, -7, -6)}
        packed += 1
    assert packed == 6


def test_one_go_and_one_request_and_layer_at_a_time_give_the_same_bytes(device):
    world = kernel_world(device)
    fill(world, "random(std=2, zero_fraction=0.3)")
    whole = bytes_of(world)
    refill_guards(world)
    for group in world.groups:
        for name in reversed(group.layer_names):
            for request, req_id in enumerate(world.batch.req_ids):
                ranges = [[rows[request]] for rows in world.batch.group_block_ranges]
                batch = replace(world.batch, req_ids=[req_id], group_block_ranges=ranges)
                alone = [Group(group.kv_cache_spec, [name], group.kv_cache_group_id)]
                fill(world, "random(std=2, zero_fraction=0.3)", batch, alone)
    assert all(map(torch.equal, bytes_of(world), whole))
    fill(world, "random(std=2, zero_fraction=0.3)", seed=1)
    assert not any(map(torch.equal, bytes_of(world), whole))


def test_zero_tokens_are_the_same_in_all_layouts_and_the_others_keep_their_bytes(device, launched):
    plain, world = kernel_world(device), kernel_world(device)
    fill(plain, "random")
    fill(world, "random(zero_fraction=0.25)")
    assert launched == set(world.kv_caches) - GENERIC
    for _ in only_owned_blocks_changed(world):
        pass
    layers = layer_tensors(world.kv_caches, world.groups, NUM_BLOCKS, world.dims)
    others = layer_tensors(plain.kv_caches, plain.groups, NUM_BLOCKS, world.dims)
    attention = [pair for pair in zip(layers, others, strict=True) if pair[0].group_id == 0]
    for begin, end in world.batch.group_block_ranges[0]:
        first = zero_tokens_of(layers[0], begin, end)
        assert int(first.sum()) == round(0.25 * len(first))
        for layer, other in attention:
            if layer.layer in FORMATS:
                continue
            assert torch.equal(zero_tokens_of(layer, begin, end), first), layer.layer
            fmt = format_of(layer.spec, layer.tensor, layer.layer)
            views = [one.token_major(begin, end) for one in (layer, other)]
            kept = ~first.view(len(views[0]), *(1,) * (views[0].dim() - 3), -1, 1)
            for name, field in fmt.fields(views[0]).items():
                assert torch.equal(field, fmt.fields(views[1])[name] * kept), (layer.layer, name)


@pytest.mark.parametrize("std", [1e-3, 3e4])
def test_any_deviation_gives_finite_values_of_that_size(device, std):
    world = kernel_world(device)
    world.groups = [Group(world.groups[0].kv_cache_spec, ["fp16", "fp32", "fp8", "fp8 bytes", "132"])]
    fill(world, Random(std))
    for layer, fmt, values in decoded(world):
        assert values.isfinite().all()
        wanted = std * (STATE_SCALE if is_state(layer.spec) else 1)
        limit = min(
            3e38, torch.finfo(getattr(fmt, "dtype", torch.bfloat16)).max if "heads" not in layer.layer else 3e38
        )
        limit *= getattr(fmt, "scale", 1.0)
        if 4 * wanted < limit and (std > 0.1 or "fp8" not in layer.layer):
            assert abs(values.double().std().item() / wanted - 1) < 0.15, layer.layer
        elif wanted > limit:
            assert values.abs().max() == limit, layer.layer


def test_zeros_in_several_ranges_are_written_by_a_kernel(device, launched):
    world = kernel_world(device)
    fill(world, "zeros")
    # Layers whose blocks are whole 16 bytes.
    assert {"656", "584", "132", "heads first", "state"} <= launched
    assert "odd" not in launched
    assert all(not data.any() for data in only_owned_blocks_changed(world))


def test_roles_and_scores_go_with_kernels(device, launched):
    world = kernel_world(device)
    fill(world, "mix(kv=random, indexer=ramp, state=zeros)")
    assert launched == set(world.kv_caches) - GENERIC - {"132", "132 again", "132 split"}
    for layer, _, values in decoded(world):
        assert bool(values.any()) == (layer.layer != "state")
        assert values.isfinite().all()
    for _ in only_owned_blocks_changed(world):
        pass


def test_a_plan_gives_what_a_fill_without_one_gives_and_never_goes_stale(device, launched):
    world, plans = kernel_world(device), FillPlans()

    def check(text, seed, planned):
        results = []
        for keep in (plans, None):
            refill_guards(world)
            launched.clear()
            fill(world, text, seed=seed, plans=keep)
            assert bool(launched) == (keep is None or not planned)
            results.append(bytes_of(world))
        assert all(map(torch.equal, *results))

    check("random", 0, planned=False)
    check("random(zero_fraction=0.3)", 0, planned=False)
    check("random", 1, planned=True)
    check("random(zero_fraction=0.3)", 2, planned=True)
    # The second request's blocks move; then a cache does, within its buffer.
    world.batch.group_block_ranges[0][1] = (5, 6)
    check("random", 1, planned=False)
    cache = world.kv_caches["latent"]
    cache.as_strided_(cache.shape, cache.stride(), 16)
    check("random", 1, planned=False)
    check("random", 2, planned=True)


@pytest.mark.gpu
def test_many_layers_and_requests_are_one_launch(monkeypatch):
    from kvlab.kv import launches

    calls = []
    packed = launches._launch_packed
    monkeypatch.setattr(launches, "_launch_packed", lambda *arguments: (calls.append(arguments), packed(*arguments)))
    buffer = torch.zeros(61 * 600 * 64 * 656, dtype=torch.uint8, device="cuda").view(61, 600, 64, 656)
    group = Group(MLAAttentionSpec(block_size=64, cache_dtype_str="fp8_ds_mla"), [str(i) for i in range(61)])
    batch = build_batch(parse_case("d=256*1@128"), [group], 600, 100, np.random.default_rng(0))
    fill_kv_blocks({str(i): buffer[i] for i in range(61)}, [group], batch, 600, "random")
    assert len(calls) == 1
    assert buffer[:, 1:513].flatten(2).any(-1).all()
    assert not buffer[:, 0].any()
    assert not buffer[:, 513:].any()


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_the_tests_above_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed; its kernels are tested where it is")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "100%" in done.stdout
