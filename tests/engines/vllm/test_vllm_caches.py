"""Caches of kinds that kvlab does not know: one line with layer, spec, dtype and shape, not a guess."""

from types import SimpleNamespace

import pytest
import torch

from kvlab.engines.vllm.caches import attention_groups, layer_formats
from kvlab.errors import FormatError, GeometryError


class AttentionSpec:
    block_size = 16


class FullAttentionSpec(AttentionSpec):
    pass


class CrossAttentionSpec(AttentionSpec):
    """vLLM's: its blocks are sized by an encoder."""


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class FlashBackend:
    pass


def runner_of(spec, name="layers.0.attn", spoken_for=True):
    group = SimpleNamespace(
        kv_cache_group_id=0, kv_cache_spec=spec, layer_names=[name] * spoken_for, backend=FlashBackend
    )
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[name])])
    return SimpleNamespace(attn_groups=[[group]], kv_cache_config=config)


CACHES = {"layers.0.attn": torch.zeros(4, 16, 8, dtype=torch.bfloat16)}


@pytest.mark.parametrize("spec", [FullAttentionSpec(), SinkFullAttentionSpec()])
def test_what_derives_from_a_known_spec_is_one(spec):
    (group,) = attention_groups(runner_of(spec), CACHES)
    assert group.layer_names == ["layers.0.attn"]


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
