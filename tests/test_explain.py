"""--explain: kernels, selection and cause are stored and follow from what was measured."""

import json

import pytest

import kvlab
from kvlab.explain import cause_record
from kvlab.run import open_run
from kvlab.verdict_table import explanation, verdict_table

ARMS = ["random", "mix(kv=random, indexer=zeros)", "mix(kv=zeros, indexer=random)"]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    engine = kvlab.load_engine("tiny-dsa", num_kv_blocks=40)
    out = tmp_path_factory.mktemp("explained") / "run"
    kvlab.check(engine, ["hit=4@400"], arms=ARMS, rounds=6, replays=1, explain=True, out=out).close()
    return open_run(out)


def test_every_arm_has_kernels_that_add_up_to_the_step(explained):
    verdict, kernels = explained.verdict_of("hit", "isolated"), explained.kernels
    assert set(kernels["arm"]) == set(verdict["profiles"]) == {"zeros", "zeros_again", *ARMS}
    for arm, profile in verdict["profiles"].items():
        assert kernels.loc[kernels["arm"] == arm, "us"].sum() == pytest.approx(profile["timed_us"], rel=1e-3)
        assert profile["restore_outside"]
    assert {"top-k", "attention", "GEMM", "rest"} <= set(kernels["role"])


def test_the_selection_moves_with_the_indexer_and_not_with_the_kv(explained):
    chosen = explained.verdict_of("hit", "isolated")["selection"]
    assert all(picked["in_range"] and picked["distinct"] for picked in chosen.values())
    assert chosen["zeros_again"]["shared_with_zeros"] == 1
    assert chosen["zeros"]["neighbours"] > 2 * chosen["random"]["neighbours"]
    for name, by in ((ARMS[1], "zeros"), (ARMS[2], "random")):
        assert chosen[name]["neighbours"] == pytest.approx(chosen[by]["neighbours"], abs=0.15)


def test_the_record_has_a_sentence_the_roles_and_the_2x2(explained):
    verdict = explained.verdict_of("hit", "isolated")
    assert json.loads(json.dumps(verdict)) == verdict
    cause = verdict["cause"]
    assert cause["sentence"].endswith(".")
    assert {"selection", "other", "roles", "indexer", "kv", "interaction"} <= set(cause)
    assert explained.verdicts["cause_kind"][0] == cause["kind"]


def test_it_is_printed_whole(explained):
    verdict = explained.verdict_of("hit", "isolated")
    text = explanation(verdict, explained.kernels)
    for part in (
        verdict["cause"]["sentence"],
        "selected under random",
        "by role of the cache",
        "(total)",
        "of the timed",
    ):
        assert part in text
    assert "hit, isolated: " in verdict_table([verdict])


def test_a_run_without_one_is_explained_later_and_measures_no_round_again(explained, tmp_path, monkeypatch):
    engine = kvlab.load_engine("tiny-dense", num_kv_blocks=20)
    how = {"rounds": 6, "replays": 1, "out": tmp_path / "run"}
    kvlab.check(engine, ["d=1@64"], **how).close()
    monkeypatch.setattr("kvlab.study.measure_round", lambda *args: pytest.fail("measured again"))
    run = kvlab.check(engine, ["d=1@64"], **how, explain=True)
    assert "sentence" in run.verdict_of("d", "isolated")["cause"]
    assert "selection" not in run.verdict_of("d", "isolated")


def test_a_cause_is_plain_json(explained):
    from kvlab.causes import find_cause

    cause = find_cause(explained.samples_of("hit", "isolated"))
    assert json.loads(json.dumps(cause_record(cause)))["kind"] == cause.kind
