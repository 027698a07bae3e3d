"""The shared buffer: strides, overlays and padding, and the formats that kvlab reads off the specs."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, tiny_engine

from kvlab.engines.reference.caches import build_caches, kv_cache_groups
from kvlab.engines.reference.presets import PRESETS, find_config
from kvlab.errors import CapacityError, GeometryError
from kvlab.kv.detect import format_of
from kvlab.kv.extents import storage_extents, view_intervals
from kvlab.kv.specs import layer_spec
from kvlab.kv.views import iter_tensors, layer_tensors

families = pytest.mark.parametrize("family", FAMILIES)
CPU = torch.device("cpu")


def caches_of(model, num_blocks=12, **overrides):
    return build_caches(kv_cache_groups(find_config(model, **overrides)), num_blocks, CPU)


@families
def test_no_two_layers_of_a_group_and_no_two_blocks_share_a_byte(family):
    engine = tiny_engine(family)
    layers = layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims)
    for group_id in range(len(engine.kv_cache_groups)):
        views = [layer.blocks(b, b + 1) for layer in layers if layer.group_id == group_id for b in range(12)]
        (extent,) = storage_extents(views).values()
        assert extent.num_bytes == sum(v.numel() * v.element_size() for v in views)


@families
def test_block_b_of_every_group_lies_in_the_same_bytes(family):
    # Block IDs are disjoint across groups, and only this keeps their bytes apart.
    engine = tiny_engine(family)
    stride = engine.caches.block_stride
    layer_stride = engine.num_blocks * stride
    for layer in layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims):
        for block in (0, 5, engine.num_blocks - 1):
            runs = view_intervals(layer.blocks(block, block + 1))
            assert (runs.min() % layer_stride) // stride == block
            assert ((runs.max() - 1) % layer_stride) // stride == block


@families
def test_the_buffer_starts_at_zero_and_holds_every_cache(family):
    config = tiny_engine(family).config
    caches = build_caches(kv_cache_groups(config), 7, CPU)
    assert caches.buffer.dtype == torch.int8
    assert not caches.buffer.any()
    for cache in caches.tensors.values():
        for tensor in iter_tensors(cache):
            assert tensor.untyped_storage().data_ptr() == caches.buffer.data_ptr()


def test_shapes_are_those_of_the_layouts():
    dense = caches_of("tiny-dense").tensors["model.layers.3.self_attn.attn"]
    assert (dense.shape, dense.dtype) == ((24, 2, 16, 64), torch.bfloat16)
    latent = caches_of("tiny-mla").tensors["model.layers.1.self_attn.attn"]
    assert (latent.shape, latent.dtype) == ((12, 64, 576), torch.bfloat16)
    sparse = caches_of("tiny-dsa")
    packed, index = (sparse.tensors[f"model.layers.1.self_attn.{n}"] for n in ("attn", "indexer.k_cache"))
    assert (packed.shape, packed.dtype, index.shape) == ((12, 64, 656), torch.uint8, (12, 64, 132))
    assert packed.stride(0) == index.stride(0) == sparse.block_stride == 2 * 64 * (656 + 132)
    conv, ssm = caches_of("tiny-hybrid").tensors["model.layers.0.mixer"]
    assert (conv.shape, conv.dtype, ssm.shape, ssm.dtype) == (
        (12, 3, 192),
        torch.bfloat16,
        (12, 8, 16, 32),
        torch.float32,
    )


def test_windowed_and_full_layers_overlay_the_same_bytes():
    tensors = caches_of("tiny-swa").tensors
    window, full = (tensors[f"model.layers.{i}.self_attn.attn"] for i in (0, 1))
    assert (window.data_ptr(), window.shape, window.stride()) == (full.data_ptr(), full.shape, full.stride())


def test_a_state_is_padded_to_an_attention_page_that_was_grown_to_hold_it():
    caches = caches_of("tiny-hybrid")
    mamba, full = (group.kv_cache_spec for group in caches.groups)
    assert mamba.state_size_bytes < mamba.page_size_bytes == full.page_size_bytes == caches.block_stride
    assert full.block_size % (16 * full.kernel_blocks) == 0
    assert full.page_size_bytes - mamba.state_size_bytes < full.page_size_bytes // full.block_size * 32


@families
def test_formats_follow_from_the_specs(family):
    engine = tiny_engine(family)
    for group in engine.attn_groups:
        for name in group.layer_names:
            spec = layer_spec(engine.kv_cache_groups[group.kv_cache_group_id].kv_cache_spec, name)
            assert spec == group.kv_cache_spec
            for tensor in iter_tensors(engine.kv_caches[name]):
                packed = {656: "fp8_ds_mla", 132: "indexer"}
                wanted = packed[tensor.shape[-1]] if tensor.dtype == torch.uint8 else str(tensor.dtype)[6:]
                assert format_of(spec, tensor, name).name == wanted


def test_impossible_buffers_are_refused_with_their_size():
    groups = kv_cache_groups(PRESETS["tiny-dense"])
    with pytest.raises(CapacityError, match=r"needs \d+\.\d GiB, which cpu does not have; lower --num-kv-blocks"):
        build_caches(groups, 2**40, CPU)
    with pytest.raises(GeometryError, match=r"mixer.*no multiple of 4; make the convolution's channels even"):
        caches_of("tiny-hybrid", mamba_heads=1, mamba_head_dim=7, state_size=5)
