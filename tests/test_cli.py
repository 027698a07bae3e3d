"""The command line: exit status, one-line errors, JSON, tables."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.cli import exit_status, main
from kvlab.run import open_run

FAST = ["--engine", "reference", "--device", "cpu", "--num-kv-blocks", "64"]
CHECK = [*FAST, "--rounds", "6", "--replays", "1", "--no-plot", "--no-progress"]


def run(capsys, *argv):
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-swa", "tiny-mla", "tiny-dsa", "tiny-hybrid"])
def test_check_prints_one_object_a_case_and_a_fitting_status(capsys, tmp_path, model, verdict_keys):
    cases = ["--case", "decode=2*1@96", "--case", "hit=8@64"]
    status, out, _ = run(capsys, "check", model, *CHECK, *cases, "--json", "--out", str(tmp_path / "run"))
    verdicts = [json.loads(line) for line in out.splitlines()]
    assert [v["case"] for v in verdicts] == ["decode", "hit"]
    for verdict in verdicts:
        assert verdict_keys <= set(verdict)
        assert verdict["finite"] == {"zeros": True, "zeros_again": True, "random": True}
    assert status == exit_status(verdicts)
    assert status in (0, 1, 3)


def test_the_time_to_the_first_verdict_is_told_in_parts(capsys, tmp_path):
    out_dir = tmp_path / "run"
    _, _, err = run(capsys, "check", "tiny-dense", *CHECK, "--case", "d=1@64", "--json", "--out", str(out_dir))
    told = re.search(r"first verdict: load ([\d.]+) s, warm-up ([\d.]+) s, measure ([\d.]+) s; ([\d.]+) s in all", err)
    *parts, total = map(float, told.groups())
    assert sum(parts) == pytest.approx(total, abs=0.2)
    with open_run(out_dir) as stored:
        assert stored.provenance["load_s"] > 0
        assert stored.cases.iloc[0][["warm_up_s", "measure_s"]].gt(0).all()


def test_check_leaves_a_table_a_run_and_a_plot(capsys, tmp_path):
    out_dir = tmp_path / "run"
    argv = ["check", "tiny-dense", *CHECK, "--case", "d=1@64", "--out", str(out_dir)]
    argv.remove("--no-plot")
    _, out, _ = run(capsys, *argv)
    assert "90 % interval" in out
    assert str(out_dir) in out
    assert (out_dir / "gaps.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (["equivalent"], 0),
        (["equivalent", "different"], 1),
        (["different", "invalid"], 1),
        (["equivalent", "inconclusive"], 3),
        (["invalid"], 3),
    ],
)
def test_exit_status(verdicts, status):
    assert exit_status([{"verdict": verdict} for verdict in verdicts]) == status


BAD = [
    (["check", "tiny-dense", "--case", "a=5@4"], "K=4 is less than Q=5"),
    (["check", "tiny-dense", "--case", "a=x@4"], "cannot read 'x@4'"),
    (["check", "tiny-dense", "--case", "a=1@999999999"], "the model takes"),
    (["check", "tiny-dense", "--case", "a=9*1@4096"], "KV blocks"),
    (["check", "tiny-dense"], "no case given"),
    (["check", "tiny-dense", "--shapes", "/nowhere.json"], "/nowhere.json"),
    (["check", "tiny-dense", "--case", "a=1@4", "--arm", "noise"], "fill 'noise'"),
    (["check", "tiny-dense", "--case", "a=1@4", "--margin", "3"], "no fraction"),
    (["check", "tiny-dense", "--case", "a=1@4", "--mode", "warm"], "isolated, sustained or both"),
    (["check", "no-such-model", "--case", "a=1@4"], "tiny-dense"),
    (["check", "tiny-dense", "--engine", "abacus", "--case", "a=1@4"], "abacus"),
    (["check", "tiny-dense", "--topk", "8", "--case", "a=1@4"], "topk"),
    (["check", "tiny-dense", "--routing", "real", "--case", "a=1@4"], "routing is an option of engine 'vllm'"),
    (["check", "tiny-dense", "--engine-arg", "block_size=16", "--case", "a=1@4"], "--engine-arg is an option of"),
    (["check", "qwen3-tiny", "--case", "a=1@4"], "is for engine 'vllm'"),
    (["check", "qwen3-tiny", "--engine", "vllm", "--device", "cpu", "--case", "a=1@4"], "option of engine 'reference'"),
    (["check", "qwen3-tiny", "--engine", "vllm", "--topk", "8", "--case", "a=1@4"], "has no index_topk"),
    (["check", "qwen3-tiny", "--engine", "vllm", "--case", "a=1@99999"], "the model takes 32768"),
    (["check", "qwen9", "--engine", "vllm", "--case", "a=1@4"], "no preset and no hub name"),
    (["check", "qwen3-tiny", "--engine", "vllm", "--hf-overrides", "[1]", "--case", "a=1@4"], "no JSON object"),
    (["verify", "tiny-dense", "--case", "a=1@4:2"], "D=2"),
    (["views", "tiny-dense", "--case", "a=1@4", "--seed", "-1"], "'-1' is no whole number"),
    (["verify", "tiny-dense", "--case", "a=1@4", "--seed", str(2**31)], "is no whole number"),
    (["views", "tiny-dense", "--case", "a=1@4", "--case", "a=1@5"], "two cases are named 'a'"),
    (["check", "tiny-dense", "--case", "a=1@4", "--budget", "inf"], "budget is inf"),
    (["sweep", "tiny-dense", "--zero-fraction", "0.5,0.5"], "twice"),
    (["views", "tiny-dense", "--case", "=1@4"], "no name"),
    (["check"], "MODEL"),
    (["nothing"], "nothing"),
]


@pytest.mark.parametrize(("argv", "said"), BAD, ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else "")
def test_bad_input_is_one_line_with_status_2(capsys, monkeypatch, tmp_path, argv, said):
    monkeypatch.chdir(tmp_path)
    engine = [] if "--engine" in argv or argv[0] == "nothing" or len(argv) < 2 else FAST
    try:
        status = main([*argv, *engine])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2
    assert said in err
    assert err.count("\n") == 1
    assert not out
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_of_another_study_is_kept(capsys, tmp_path):
    argv = ["check", "tiny-dense", *CHECK, "--case", "d=1@64", "--out", str(tmp_path / "run"), "--json"]
    run(capsys, *argv)
    before = open_run(tmp_path / "run")
    status, _, err = run(capsys, *argv, "--margin", "0.01")
    assert status == 2
    assert "margin" in err
    after = open_run(tmp_path / "run")
    assert after.samples.equals(before.samples)
    assert after.provenance == before.provenance


def test_interruption_says_what_is_kept_and_how_to_go_on(capsys, monkeypatch, tmp_path):
    from kvlab import study

    finished = study.measure_round
    rounds = iter(range(3))

    def three_rounds(*args):
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        return finished(*args)

    argv = ["check", "tiny-dense", *CHECK, "--case", "d=1@64", "--out", str(tmp_path / "run"), "--json"]
    with monkeypatch.context() as patch:
        patch.setattr(study, "measure_round", three_rounds)
        status, _, err = run(capsys, *argv)
    assert status == 130
    assert "the same command resumes" in err
    assert err.count("\n") == 1
    status, out, _ = run(capsys, *argv)
    assert status in (0, 1, 3)
    assert json.loads(out)["rounds"] == 6


def test_a_sweep_shows_what_was_asked_of_it_alone(capsys, tmp_path):
    grid = ["--phase", "decode", "--batch", "1"]
    argv = ["sweep", "tiny-dense", *CHECK, *grid, "--json", "--out", str(tmp_path / "run")]
    for context in ("32", "64"):  # two grids of one study, in one folder; the arms of the design's example
        _, out, _ = run(capsys, *argv, "--contexts", context, "--zero-fraction", "0,0.5,1")
        (verdict,) = map(json.loads, out.splitlines())
        assert verdict["case"] == f"decode-b1-k{context}"
        assert list(verdict["arms"]) == ["random", "random(zero_fraction=0.5)"]


def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "kvlab.cli", "models"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_report_says_which_runs_it_lacks(capsys, tmp_path):
    data = Path(__file__).parents[1] / "data" / "cpu" / "make-check"
    lossy = shutil.copytree(data, tmp_path / "lossy")
    (lossy / "samples.parquet").unlink()
    runs, out = [str(data), str(tmp_path / "absent"), str(lossy)], tmp_path / "r.html"
    status, printed, said = run(capsys, "report", *runs, "--out", str(out))
    assert (status, printed) == (2, f"{out}\n")
    assert out.exists()
    absent, lost = said.splitlines()
    assert absent.startswith(f"kvlab: not in this report: no run at {tmp_path / 'absent'}")
    assert lost.startswith(f"kvlab: not in this report: {lossy / 'samples.parquet'} is missing")


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-swa", "tiny-mla", "tiny-dsa", "tiny-hybrid"])
def test_verify_passes_for_every_family(capsys, model):
    cases = ["--case", "mix=2*1@70,9,8@40,6@30c,3@50:2"]
    status, out, _ = run(capsys, "verify", model, *FAST, *cases, "--json")
    result = json.loads(out)
    assert status == 0
    assert result["ok"]
    assert result["bytes_outside"] == 0
    assert result["bytes_written"] > 0
    assert result["reads_unwritten"] == "no"


def test_verify_fails_when_a_view_lacks_a_block(capsys, monkeypatch):
    from kvlab.engines import base

    whole = base.touched_kv_views

    def shrunk(*args, **kwargs):
        return [view.narrow(0, 0, max(0, view.shape[0] - 2)) for view in whole(*args, **kwargs)]

    monkeypatch.setattr(base, "touched_kv_views", shrunk)
    status, out, _ = run(capsys, "verify", "tiny-dense", *FAST, "--case", "d=1@70")
    assert status == 3
    assert "FAILED" in out
    assert "layer" in out


def test_views_lists_blocks_and_bytes(capsys):
    status, out, _ = run(capsys, "views", "tiny-hybrid", *FAST, "--case", "d=2*1@300", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert {row["kind"] for row in rows} == {"attention", "state"}
    for row in rows:
        assert 0 < row["bytes_touched"] <= row["bytes_owned"]
        assert row["blocks_touched"] <= row["blocks_owned"]
        if row["kind"] == "state":
            assert row["share_touched"] == 1.0


def test_models_and_doctor(capsys):
    status, out, _ = run(capsys, "models")
    assert status == 0
    assert all(name in out for name in ("tiny-dense", "tiny-swa", "tiny-mla", "tiny-dsa", "tiny-hybrid"))
    assert "cut: num_hidden_layers 61 -> 6" in out
    _, out, _ = run(capsys, "models", "--json")
    assert {json.loads(line)["engine"] for line in out.splitlines()} == {"reference", "vllm"}
    status, out, _ = run(capsys, "doctor", "--json")
    assert status == 0
    assert {"kvlab", "torch", "python"} <= set(json.loads(out))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_no_terminal_encoding_costs_the_output(tmp_path, locale):
    argv = ["check", "tiny-dense", *CHECK, "--case", "a=1@64", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "kvlab.cli", *argv],
        env={**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
    )
    assert done.returncode in (0, 1, 3), done.stderr
    assert b"zeros us" in done.stdout


def test_the_package_runs_as_a_module():
    made = subprocess.run([sys.executable, "-m", "kvlab", "models"], capture_output=True, text=True, check=True)
    assert "tiny-dense" in made.stdout
