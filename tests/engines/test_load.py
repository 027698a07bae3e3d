"""Engines by name: each refuses the other's options and models in one line."""

import pytest

from kvlab.engines import load
from kvlab.engines.load import load_engine, longest_context
from kvlab.errors import EngineError


def test_the_reference_engine_loads_and_says_how_long_it_took():
    engine = load_engine("tiny-dense", device="cpu", num_kv_blocks=8)
    assert engine.name == "reference"
    assert engine.load_s > 0


@pytest.mark.parametrize("option", ["routing", "kv_cache_dtype", "load_format", "hf_overrides", "cases"])
def test_the_reference_engine_refuses_options_of_vllm(option):
    with pytest.raises(EngineError, match=f"{option} is an option of engine 'vllm'"):
        load_engine("tiny-dense", **{option: "auto"})


@pytest.mark.parametrize(
    ("model", "engine", "options", "said"),
    [
        ("qwen3-tiny", "reference", {}, "is for engine 'vllm'; the reference engine has tiny-dense"),
        ("tiny-dsa", "vllm", {}, "is for engine 'reference'"),
        ("qwen3-tiny", "vllm", {"device": "cpu"}, "device is an option of engine 'reference'"),
        ("qwen3-tiny", "vllm", {"topk": 8}, "has no index_topk"),
        ("tiny-dense", "abacus", {}, "known are reference, vllm"),
    ],
)
def test_refusals(model, engine, options, said):
    with pytest.raises(EngineError, match=said):
        load_engine(model, engine, **options)


def test_without_vllm_it_says_so(monkeypatch):
    from kvlab.engines.vllm import flavour

    monkeypatch.setattr(flavour, "SUPPORTED", (flavour.Flavour("no-such-package", "1.0", "cpu", "v1"),))
    with pytest.raises(EngineError, match=r"vLLM is not installed; supported are no-such-package 1\.0 \(cpu\)"):
        load_engine("qwen3-tiny", "vllm")


def test_topk_becomes_an_override_of_the_configuration(monkeypatch):
    from kvlab.engines.vllm import admission, flavour

    admitted = {}

    def admit(source, flavour, options):
        admitted.update(source=source, options=options)
        raise EngineError("far enough")

    monkeypatch.setattr(admission, "admit", admit)
    monkeypatch.setattr(flavour, "installed_flavour", lambda: flavour.SUPPORTED[0])
    with pytest.raises(EngineError, match="far enough"):
        load_engine("deepseek-v4.1-flash", "vllm", topk=64, hf_overrides={"text_config": {"num_hidden_layers": 4}})
    assert admitted["source"].index_topk == 64
    assert admitted["options"]["hf_overrides"] == {"text_config": {"num_hidden_layers": 4, "index_topk": 64}}
    assert "topk" not in admitted["options"]


def test_the_longest_context_is_known_before_a_load():
    assert longest_context("qwen3-tiny", "vllm", {}) == 32768
    assert longest_context("qwen3-tiny", "vllm", {"max_model_len": 64}) == 64
    assert longest_context("qwen3-tiny", "vllm", {"hf_overrides": {"max_position_embeddings": 128}}) == 128
    assert longest_context("tiny-dense", "reference", {}) is None
    assert load.ENGINES == ("reference", "vllm")
