"""A closed model is gone, whatever of it a caller keeps, and the next one loads in the same process."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODELS = {"qwen3-tiny": "dense", "deepseek-v2-tiny": "experts"}

every_model = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(scope="module")
def closed(python):
    """What a model answered to `on_close.py`: call it with a preset."""
    told = {}

    def ask(model):
        if model not in told:
            done = python(str(Path(__file__).with_name("on_close.py")), model)
            assert done.returncode == 0, done.stderr[-3000:]
            told[model] = json.loads(done.stdout)
        return told[model]

    return ask


@every_model
def test_nothing_is_left_though_engine_steps_prefills_and_errors_are_kept(closed, model):
    told = closed(model)
    assert told["alive"] == [[], []]
    assert told["parameters"] == 0


def test_experts_with_a_wrapped_loader_would_stay_in_vllm_s_records(closed):
    """Without the clean-up: the scales of DeepSeek-V4.1-Flash load so, of which 30 GiB stayed on an H200."""
    assert closed("qwen3-tiny")["alive_before"] == []
    left = closed("deepseek-v2-tiny")["alive_before"]
    assert left
    assert all("routed_experts" in name for name in left)


@every_model
def test_a_closed_engine_and_its_steps_say_so_in_one_line(closed, model):
    said = closed(model)["said"]
    gone = f"EngineError: model '{model}' was closed; load it again (load_engine)"
    assert [said.pop(name) for name in ("prepare", "prefill", "provenance")] == [gone] * 3
    assert set(said.values()) == {"EngineError: case 'hit': the step is closed; prepare it again"}


@every_model
def test_a_load_that_failed_leaves_nothing_though_its_error_is_kept(closed, model):
    told = closed(model)
    assert told["unloaded"].startswith("CapacityError: ")
    assert told["parameters_unloaded"] == 0


@every_model
def test_an_interrupted_load_leaves_nothing_and_the_next_one_works(closed, model):
    told = closed(model)
    interrupt, failure = told["interrupted"]
    assert interrupt.startswith("KeyboardInterrupt")
    assert failure.startswith(f"EngineError: vLLM could not load model '{model}': ")
    assert "a name that moved" in failure
    assert told["parameters_interrupted"] == 0
    assert told["launch_interrupted"] == []
    assert told["loads_again"] == 64
