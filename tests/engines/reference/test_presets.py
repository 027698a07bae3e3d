"""Presets and what their overrides admit."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import tiny_engine

from kvlab.cases import parse_case
from kvlab.engines.reference import PRESETS, ReferenceEngine, load_reference
from kvlab.engines.reference.presets import find_config
from kvlab.errors import CapacityError, CaseError, EngineError


@pytest.mark.parametrize("model", PRESETS)
def test_a_preset_holds_a_small_decode_by_default(model):
    engine = load_reference(model, device="cpu")
    assert isinstance(engine, ReferenceEngine)
    assert (engine.name, engine.model, engine.routing, engine.max_model_len) == ("reference", model, "none", 131072)
    step = engine.prepare(parse_case("decode=4*1@4096"))
    step.fill("random")
    hidden = step.forward()
    assert hidden.shape == (4, engine.config.hidden_size)
    assert hidden.isfinite().all()
    assert json.loads(json.dumps(engine.provenance()))["model"] == model


def test_provenance_gives_the_geometry():
    said = tiny_engine("tiny-hybrid").provenance()
    mamba, full = said["kv_cache_groups"]
    assert (mamba["spec"], full["spec"]) == ("MambaSpec", "FullAttentionSpec")
    assert mamba["page_bytes"] == full["page_bytes"] == said["kv_block_stride_bytes"]
    assert said["kv_buffer_bytes"] == said["num_kv_blocks"] * full["page_bytes"] * 2
    assert said["geometry"]["block_size"] <= full["block_size"]


def test_overrides_reach_the_model():
    engine = load_reference(
        "tiny-dense", device="cpu", num_layers=6, hidden_size=64, dtype="bfloat16", num_kv_blocks=9, max_model_len=100
    )
    assert len(engine.kv_caches) == 6
    assert (engine.network.norm.weight.shape, engine.network.norm.weight.dtype) == ((64,), torch.bfloat16)
    assert (engine.num_blocks, engine.max_model_len) == (9, 100)
    assert load_reference("tiny-swa", device="cpu", num_layers=3).config.kinds == ("window", "full", "window")
    assert load_reference("tiny-dsa", device="cpu", topk=7).config.topk == 7


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (
            "tiny-moe",
            {},
            "it has tiny-dense, tiny-swa, tiny-mla, tiny-dsa, tiny-hybrid",
        ),
        ("tiny-dense", {"depth": 3}, "has no 'depth'; it takes pattern, num_layers"),
        ("tiny-dense", {"topk": 3}, "selects no tokens, so topk has no meaning"),
        ("tiny-dsa", {"topk": 0}, "topk is 0; give a positive number"),
        ("tiny-dense", {"num_kv_heads": 3}, "num_heads=8 is no multiple of num_kv_heads=3"),
        ("tiny-dense", {"block_size": 33}, "block_size=33 is no multiple of 2"),
        ("tiny-dense", {"pattern": ("full", "gdn")}, "known are full, window, mla, dsa, mamba"),
        ("tiny-dense", {"pattern": ("full", "mla")}, "mixes latent layers with others"),
        ("tiny-mla", {"latent_format": "int4"}, "known are bfloat16, fp8_ds_mla"),
        ("tiny-dense", {"dtype": "int8"}, "give float32, bfloat16 or float16"),
        ("tiny-dense", {"device": "tpu9"}, "give cpu or cuda"),
        ("tiny-dense", {"device": "meta"}, "runs on cpu and cuda"),
        ("tiny-dense", {"num_kv_blocks": 1}, "give at least 2"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(model, given, message):
    with pytest.raises(EngineError, match=message):
        load_reference(model, **{"device": "cpu", **given})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_missing_gpu_is_no_silent_fallback():
    with pytest.raises(EngineError, match="PyTorch sees no CUDA device"):
        load_reference("tiny-dense", device="cuda")


def test_cases_beyond_the_model_or_the_pool_are_refused():
    engine = tiny_engine("tiny-dense")
    with pytest.raises(CaseError, match="holds 4097 tokens of KV, but the model takes 4096"):
        engine.prepare(parse_case("a=1@4097"))
    with pytest.raises(CapacityError, match=r"needs 513 KV blocks .* only 160 exist"):
        engine.prepare(parse_case("a=1@4096"))


def test_every_kind_of_pattern_builds():
    for pattern in (("mamba",), ("window",), ("window", "mamba", "full")):
        config = find_config("tiny-dense", pattern=pattern, num_layers=0)
        step = ReferenceEngine(config, torch.device("cpu")).prepare(parse_case("a=1@600,3"))
        step.fill("random")
        assert step.first_nonfinite() is None
