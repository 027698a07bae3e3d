"""Presets, folders and hub names: what a model name stands for, and one line where it stands for nothing."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from kvlab.engines import presets
from kvlab.engines.presets import ModelSource, find_model, list_models, merged, missing_presets, vllm_presets
from kvlab.errors import EngineError

PRESETS = vllm_presets()
TINY = {name for name in PRESETS if name.endswith("-tiny")}


def config_in(folder, **values):
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **values}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_it_is_and_what_was_cut(name):
    preset = PRESETS[name]
    assert preset.source
    assert len(preset.architectures) == 1
    assert preset.text_config["num_hidden_layers"] >= 2
    assert preset.text_config["vocab_size"] >= 1024
    assert preset.longest_context is None or preset.longest_context >= 8192
    if preset.reduced:
        assert preset.reduced["why"]
        assert all(" -> " in cut for key, cut in preset.reduced.items() if key != "why")
    if name in TINY:
        assert "made up" in preset.source


def test_the_presets_cover_every_kind_of_cache():
    kinds = {
        "dense": "qwen3-8b",
        "window": "gemma-3-12b",
        "mla": "glm-4.7-flash",
        "mamba": "granite-4-h-small",
        "kda": "kimi-linear-48b",
        "gdn": "qwen3-next-24l",
        "sparse": "deepseek-v3.2-6l",
        "sparse and window": "deepseek-v4.1-flash",
    }
    assert set(kinds.values()) <= set(PRESETS)
    assert len(TINY) == 7


def test_models_are_listed_with_engine_source_and_cuts():
    rows = {(row["engine"], row["model"]): row for row in list_models()}
    assert set(PRESETS) == {model for engine, model in rows if engine == "vllm"}
    assert ("reference", "tiny-dsa") in rows
    assert rows["vllm", "deepseek-v3.2-6l"]["reduced"]["num_hidden_layers"] == "61 -> 6"
    assert all(row["layers"] and row["source"] and row["architecture"] for row in rows.values())


def test_a_folder_goes_before_a_preset_of_the_same_name(tmp_path, monkeypatch):
    assert find_model("qwen3-tiny").location == str(presets.PRESETS_FOLDER / "qwen3-tiny")
    monkeypatch.chdir(tmp_path)
    config_in(tmp_path / "qwen3-tiny", num_hidden_layers=7)
    assert find_model("qwen3-tiny").text_config["num_hidden_layers"] == 7
    assert find_model(str(tmp_path / "qwen3-tiny")).text_config["num_hidden_layers"] == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no config.json in this folder; give a folder that has one"),
        ("{", "cannot read its config.json"),
        ("[1]", "lacks architectures or model_type"),
        ('{"model_type": "qwen3"}', "lacks architectures or model_type"),
    ],
)
def test_a_folder_without_a_usable_configuration(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError) as error:
        find_model(str(tmp_path))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_the_presets():
    with pytest.raises(EngineError, match=r"no folder, no preset and no hub name ORG/NAME; presets are .*qwen3-tiny"):
        find_model("qwen9")
    with pytest.raises(EngineError, match="for engine 'reference'"):
        find_model("tiny-dsa")


def test_without_a_checkout_it_says_what_to_do(monkeypatch, tmp_path):
    assert missing_presets() is None
    monkeypatch.setattr(presets, "PRESETS_FOLDER", tmp_path / "absent")
    assert vllm_presets() == {}
    assert "pip install --editable" in missing_presets()
    assert {row["engine"] for row in list_models()} == {"reference"}
    with pytest.raises(EngineError, match=r"come with a checkout .* or give a folder with a config\.json"):
        find_model("qwen3-tiny")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub's client: call it with what a download returns or raises."""
    package, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")

    class EntryNotFoundError(Exception):
        pass

    class LocalEntryNotFoundError(EntryNotFoundError):
        pass

    errors.EntryNotFoundError, errors.LocalEntryNotFoundError = EntryNotFoundError, LocalEntryNotFoundError
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)

    def answer(result):
        def download(name, file):
            if isinstance(result, type):
                raise result("cannot reach\nthe hub")
            return str(result / file)

        package.hf_hub_download = download

    answer.errors = errors
    return answer


def test_a_hub_name_brings_its_configuration(hub, tmp_path):
    hub(config_in(tmp_path / "snapshot", index_topk=2048))
    found = find_model("org/name-1.5")
    assert (found.name, found.location, found.index_topk) == ("org/name-1.5", "org/name-1.5", 2048)


def test_a_hub_model_of_another_layout_is_left_to_vllm(hub):
    hub(hub.errors.EntryNotFoundError)
    assert find_model("org/name") == ModelSource("org/name", "org/name")


@pytest.mark.parametrize("failure", ["LocalEntryNotFoundError", "OSError"])
def test_a_hub_that_cannot_be_reached_is_one_line(hub, failure):
    hub(getattr(hub.errors, failure, OSError))
    with pytest.raises(EngineError, match=r"no folder here, and the hub gave no config\.json: cannot reach; give"):
        find_model("org/name")


def test_topk_goes_where_the_model_keeps_it():
    assert find_model("deepseek-v3.2-6l").topk_override(256) == {"index_topk": 256}
    assert find_model("deepseek-v4.1-flash").topk_override(256) == {"text_config": {"index_topk": 256}}
    for name in ("deepseek-v3.2-6l", "deepseek-v4.1-flash"):
        source = find_model(name)
        assert source.overridden(source.topk_override(256)).index_topk == 256
    with pytest.raises(EngineError, match=r"attends to all tokens.* or load deepseek-v3\.2-6l or deepseek-v4\.1-flash"):
        find_model("qwen3-tiny").topk_override(256)
    with pytest.raises(EngineError, match="topk is 0"):
        find_model("deepseek-v3.2-6l").topk_override(0)


@pytest.mark.parametrize(
    ("values", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 8}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 8}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear"}, "model_type": "gemma3_text"}, 4096),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, 8192),
        ({"text_config": {"n_positions": 512}}, 512),
        ({}, None),
    ],
)
def test_longest_context(values, longest):
    assert ModelSource("m", "m", {"model_type": "llama", **values}).longest_context == longest


def test_merging_leaves_both_arguments_alone():
    config, overrides = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "d": {"e": 5}}
    assert merged(config, overrides) == {"a": {"b": 4, "c": 2}, "d": {"e": 5}}
    assert config == {"a": {"b": 1, "c": 2}, "d": 3}


def test_overrides_are_applied_as_vllm_does():
    """A sub-configuration is gone into; another dictionary is one value."""
    rope = {"rope_type": "linear", "factor": 4}
    config = {
        "rope_parameters": rope,
        "quantization_config": {"bits": 8, "group": 32},
        "text_config": {"rope_parameters": dict(rope), "index_topk": 9},
    }
    source = ModelSource("m", "m", config)
    new = {"rope_parameters": {"rope_theta": 1e6}}
    found = source.overridden({**new, "quantization_config": {"bits": 4}, "text_config": {**new, "layers": 2}}).config
    assert found["rope_parameters"] == {"rope_theta": 1e6}
    assert found["quantization_config"] == {"bits": 4}
    assert found["text_config"] == {"rope_parameters": {**rope, "rope_theta": 1e6}, "index_topk": 9, "layers": 2}
    assert source.config == config
    assert source.overridden(None).config == config


@pytest.mark.vllm
def test_lengths_are_read_from_keys_that_this_vllm_reads():
    vllm = Path(find_spec("vllm").origin).parent
    text = (vllm / "transformers_utils" / "model_arch_config_convertor.py").read_text(encoding="utf-8")
    assert [key for key in (*presets._CONTEXT_KEYS, "model_max_length") if f'"{key}"' not in text] == []
