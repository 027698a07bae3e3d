"""Engine arguments: sized by the cases, bounded by the model, and the user's own win."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cases import Case, Request, parse_case
from kvlab.engines.presets import find_model
from kvlab.engines.vllm.arguments import engine_arguments, forget_launch, set_environment
from kvlab.engines.vllm.flavour import SUPPORTED

CUDA, CPU = SUPPORTED
QWEN = find_model("qwen3-tiny").location

requests = st.tuples(st.integers(1, 900), st.integers(0, 31000)).map(lambda r: Request(r[0], r[0] + r[1]))
cases = st.lists(st.lists(requests, min_size=1, max_size=70), min_size=1, max_size=3).map(
    lambda lists: [Case(f"c{i}", tuple(reqs)) for i, reqs in enumerate(lists)]
)


@pytest.mark.parametrize("flavour", SUPPORTED, ids=lambda f: f.device)
@given(cases=cases)
def test_every_case_fits_what_it_sized(flavour, cases):
    found = engine_arguments(flavour, QWEN, cases, {})
    assert found["max_model_len"] <= 32768
    for case in cases:
        assert len(case.requests) <= found["max_num_seqs"]
        assert case.num_tokens <= found["max_num_batched_tokens"]
        assert all(request.kv_len <= found["max_model_len"] for request in case.requests)


def test_the_longest_context_is_the_models_even_if_a_case_fills_it():
    (case,) = [parse_case("d=1@32768")]
    assert engine_arguments(CPU, QWEN, [case], {})["max_model_len"] == 32768
    stretched = {"hf_overrides": {"max_position_embeddings": 65536}}
    assert engine_arguments(CPU, QWEN, [case], stretched)["max_model_len"] > 32768


def test_overrides_win_and_without_cases_the_model_decides():
    found = engine_arguments(CUDA, QWEN, [], {"load_format": "auto", "max_model_len": 99})
    assert (found["load_format"], found["max_model_len"]) == ("auto", 99)
    assert "max_model_len" not in engine_arguments(CUDA, QWEN, [], {})


@pytest.mark.parametrize(("model", "limited"), [("deepseek-v4.1-flash", True), ("qwen3-tiny", False)])
def test_a_model_with_a_vision_tower_takes_no_images(model, limited):
    found = engine_arguments(CUDA, find_model(model).location, [], {})
    assert found.get("limit_mm_per_prompt") == ({"image": 0, "video": 0, "audio": 0} if limited else None)


@pytest.mark.parametrize("flavour", SUPPORTED, ids=lambda f: f.device)
def test_the_environment_is_one_process_and_quiet_on_standard_output(monkeypatch, flavour):
    for name in [name for name in os.environ if name.startswith("VLLM_")] + ["RANK", "MASTER_PORT", "HF_HUB_OFFLINE"]:
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        set_environment(flavour, QWEN)
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == ("1" if flavour.runner == "v2" else "0")
        assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        first = dict(os.environ)
        set_environment(flavour, QWEN)
        assert os.environ == first
        forget_launch()
        assert "RANK" not in os.environ
        assert "MASTER_PORT" not in os.environ


def test_a_launcher_s_environment_is_left_alone(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1234"})
        os.environ.pop("KVLAB_LAUNCH", None)
        set_environment(CUDA, QWEN)
        forget_launch()
        assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("1", "1234")


def test_a_child_does_not_meet_its_parent_s_port(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in ("RANK", "KVLAB_LAUNCH")})
        set_environment(CUDA, QWEN)
        port = os.environ["MASTER_PORT"]
        set_environment(CUDA, QWEN)
        assert os.environ["MASTER_PORT"] == port
        patch.setattr(os, "getpid", lambda: 1)
        set_environment(CUDA, QWEN)
        assert os.environ["MASTER_PORT"] != port
        assert (os.environ["KVLAB_LAUNCH"], os.environ["WORLD_SIZE"]) == ("1", "1")
        forget_launch()
        assert "MASTER_PORT" not in os.environ
