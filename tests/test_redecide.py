"""Every committed verdict is what its samples say, by this kvlab; and what is decided again is told and kept."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from kvlab import open_run
from kvlab.run import Run
from kvlab.stats import MIN_ROUNDS

from handmade_runs import PROVENANCE, STUDY, add_case, rows

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = sorted(record.parent for record in (ROOT / "data").glob("*/*/cases.parquet"))
ONE = ROOT / "data" / "h200" / "vllm-llama-3.1-8b-sustained"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("redecide", ROOT / "tools" / "redecide.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_a_committed_verdict_is_what_its_samples_say(tool, folder):
    run = open_run(folder)
    for case, mode, verdict in tool.verdicts_again(run):
        assert tool.differences(run.verdict_of(case, mode), verdict) == []


def test_a_verdict_that_its_samples_do_not_say_is_mended(tool, tmp_path, capsys):
    place = tmp_path / ONE.name
    shutil.copytree(ONE, place)
    record = json.loads((place / "provenance.json").read_text())
    record["verdicts"][0][2]["gap"] = 0.5
    (place / "provenance.json").write_text(json.dumps(record))
    (changed,) = tool.rewrite(place)
    assert "hit100k sustained gap: 0.5 ->" in changed
    assert open_run(place).verdict_of("hit100k", "sustained") == open_run(ONE).verdict_of("hit100k", "sustained")
    assert tool.rewrite(place) == []


def test_whole_rounds_without_a_verdict_get_one(tool, tmp_path):
    """As a process leaves them that was stopped before it decided."""
    place = tmp_path / ONE.name
    shutil.copytree(ONE, place)
    record = json.loads((place / "provenance.json").read_text())
    record["verdicts"] = record["verdicts"][1:]
    (place / "provenance.json").write_text(json.dumps(record))
    tool.rewrite(place)
    run, whole = open_run(place), open_run(ONE).verdict_of("hit100k", "sustained")
    found = run.verdict_of("hit100k", "sustained")
    assert {key: found.get(key) for key in ("gap", "ci90", "verdict", "text", "context", "finite", "clocks")} == {
        key: whole.get(key) for key in ("gap", "ci90", "verdict", "text", "context", "finite", "clocks")
    }
    assert set(run.verdicts["case"]) == set(open_run(ONE).verdicts["case"])
    assert run.samples["us"].tolist() == open_run(ONE).samples["us"].tolist()


def test_an_arm_that_was_not_finite_is_not_taken_for_those_whose_names_are_part_of_its(tool, tmp_path):
    place = tmp_path / "run"
    with Run.create(place, {**STUDY, "replays": 1, "arms": [*STUDY["arms"], "random(std=0.5)"]}, PROVENANCE) as run:
        add_case(run)
        run.case_facts("decode", nonfinite_isolated=["zeros_again", "random(std=0.5)"])
        arms = ("zeros", "zeros_again", "random", "random(std=0.5)")
        for number in range(MIN_ROUNDS):
            run.add_round("decode", "isolated", number, rows(number, arms=arms))
    verdict = tool.redecided(open_run(place), "decode", "isolated")
    assert verdict["finite"] == {"zeros": True, "zeros_again": False, "random": True, "random(std=0.5)": False}
