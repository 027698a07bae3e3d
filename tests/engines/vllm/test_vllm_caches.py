"""Caches of kinds that kvlab does not know: one line with layer, spec, dtype and shape, not a guess."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvlab.cases import parse_case
from kvlab.engines.vllm import caches
from kvlab.engines.vllm.caches import attention_groups, layer_caches, layer_formats, layer_scales, scale_notes
from kvlab.errors import FormatError, GeometryError
from kvlab.kv.batch import build_batch
from kvlab.kv.fills import fill_kv_blocks


class AttentionSpec:
    block_size = 16


class FullAttentionSpec(AttentionSpec):
    pass


class CrossAttentionSpec(AttentionSpec):
    """vLLM's: its blocks are sized by an encoder."""


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    block_size = 16


class FlashBackend:
    pass


def runner_of(spec, name="layers.0.attn", spoken_for=True):
    group = SimpleNamespace(
        kv_cache_group_id=0, kv_cache_spec=spec, layer_names=[name] * spoken_for, backend=FlashBackend
    )
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[name])])
    return SimpleNamespace(attn_groups=[[group]], kv_cache_config=config)


RNG = partial(np.random.default_rng, 0)
CACHES = {"layers.0.attn": torch.zeros(4, 16, 8, dtype=torch.bfloat16)}


def test_what_derives_from_a_known_spec_may_have_rules_of_its_own():
    (group,) = attention_groups(runner_of(FullAttentionSpec()), CACHES)
    assert group.layer_names == ["layers.0.attn"]
    with pytest.raises(GeometryError, match=r"SinkFullAttentionSpec .* is no spec that kvlab knows"):
        attention_groups(runner_of(SinkFullAttentionSpec()), CACHES)


@pytest.mark.vllm
def test_each_spec_of_this_vllm_is_known_or_left_out_for_a_reason():
    """Blocks sized by an encoder, kept on a host, shared by all requests, of hidden states, or of several specs."""
    from vllm.v1 import kv_cache_interface

    named = {name for name in vars(kv_cache_interface) if name.endswith("Spec")}
    abstract = {"KVCacheSpec", "AttentionSpec", "KVCacheGroupSpec"}
    refused = {"EncoderOnlyAttentionSpec", "CrossAttentionSpec", "HiSparseHotSpec", "HiSparseResidentSpec"}
    refused |= {"SinkFullAttentionSpec", "HiddenStateCacheSpec"}
    assert named - abstract == {*caches._SPECS} | refused


@pytest.mark.parametrize("mode", ["align", "all"])
def test_states_kept_per_block_of_tokens_are_refused(mode):
    spec = MambaSpec()
    attention_groups(runner_of(spec), CACHES)
    spec.mamba_cache_mode = mode
    with pytest.raises(GeometryError, match=f"mamba_cache_mode '{mode}'.* without prefix caching"):
        attention_groups(runner_of(spec), CACHES)


def runner_with(**layers):
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return SimpleNamespace(vllm_config=config)


def test_a_ring_with_token_positions_is_refused_and_one_without_is_not():
    ring = torch.zeros(4, 8, 1, 140, dtype=torch.bfloat16)
    plain = SimpleNamespace(kv_cache=ring, rope_position_cache=None)
    assert list(layer_caches(runner_with(a=plain, b=SimpleNamespace(kv_cache=torch.tensor([]))))) == ["a"]
    positions = ring[..., 128:].view(torch.int64)
    with pytest.raises(FormatError, match=r"layer 'a': SimpleNamespace keeps the tokens' positions \(int64\)"):
        layer_caches(runner_with(a=SimpleNamespace(kv_cache=ring, rope_position_cache=positions)))


@pytest.mark.parametrize("std", [1.0, 0.25])
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_fp8_contents_are_drawn_for_the_layer_s_own_scale(scale, std):
    cache = torch.zeros(4, 2, 16, 128, dtype=torch.float8_e4m3fn)
    layer = SimpleNamespace(kv_cache=cache, _k_scale_float=scale, _v_scale_float=2 * scale)
    runner = runner_with(**{"layers.0.attn": layer, "other": SimpleNamespace()})
    scales = layer_scales(runner)
    assert scales == {"layers.0.attn": (scale, 2 * scale)}
    found = layer_caches(runner)
    formats = layer_formats(attention_groups(runner_of(FullAttentionSpec()), found), found, "fp8", scales)
    batch = build_batch(parse_case("d=1@40"), [SimpleNamespace(kv_cache_spec=FullAttentionSpec())], 4, 9, RNG())
    groups = attention_groups(runner_of(FullAttentionSpec()), found)
    fill_kv_blocks(found, groups, batch, 4, f"random(std={std})", formats=formats, block_dims={"layers.0.attn": 0})
    codes = cache[1:4].float()
    assert float(codes.std()) * scale == pytest.approx(std, rel=0.02)
    (note,) = scale_notes(scales)  # V's scale is another: not in silence
    assert "K's scale in V too, but V has another in 1 layers ('layers.0.attn', ...)" in note
    assert scale_notes({"layers.0.attn": (scale, scale)}) == []


def test_an_unknown_spec_is_refused():
    with pytest.raises(GeometryError) as error:
        attention_groups(runner_of(CrossAttentionSpec()), CACHES)
    assert str(error.value).startswith(
        "layer 'layers.0.attn': CrossAttentionSpec (dtype torch.bfloat16, shape (4, 16, 8)) is no spec that kvlab knows"
    )
    assert "take another model" in str(error.value)


def test_a_member_of_a_uniform_group_is_refused_by_its_own_name():
    uniform = SimpleNamespace(block_size=16, kv_cache_specs={"layers.0.attn": CrossAttentionSpec()})
    with pytest.raises(GeometryError, match=r"layer 'layers\.0\.attn': CrossAttentionSpec"):
        attention_groups(runner_of(uniform), CACHES)


def test_a_cache_that_no_attention_group_speaks_for_is_refused():
    with pytest.raises(GeometryError, match="has a cache but no attention group"):
        attention_groups(runner_of(FullAttentionSpec(), spoken_for=False), CACHES)


def test_an_unknown_format_names_layer_spec_dtype_and_shape():
    caches = {"layers.0.attn": torch.zeros(4, 16, 70, dtype=torch.uint8)}
    groups = attention_groups(runner_of(FullAttentionSpec()), caches)
    with pytest.raises(FormatError) as error:
        layer_formats(groups, caches, "auto")
    for part in ("layer 'layers.0.attn'", "FullAttentionSpec", "torch.uint8", "(4, 16, 70)"):
        assert part in str(error.value)
