"""What the notebooks share: where figures come from, folders that resume, errors as a sentence."""

import shutil
import subprocess
import sys

import pytest

import kvlab
from kvlab import lab
from kvlab.errors import RunError, StudyError
from kvlab.evidence import profiled_cases

SWEEP = {"contexts": [64], "phases": ["decode"], "batch": [1]}


def test_the_same_parameters_have_the_same_folder():
    one = lab.folder("name", model="m", rounds=6)
    assert one == lab.folder("name", rounds=6, model="m")
    assert one.parent.name == "runs"
    others = [lab.folder("name", model="m", rounds=7), lab.folder("other", model="m", rounds=6)]
    assert len({one, *others}) == 3


def test_committed_runs_are_found_by_what_they_hold():
    runs = lab.stored("committed", lab.in_vllm)
    assert {run.study["engine"] for run in runs} == {"vllm"}
    kept = lab.stored("committed", lambda run: run.study["model"] == "tiny-mla")
    assert {run.study["model"] for run in kept} == {"tiny-mla"}
    assert lab.stored("committed", lambda run: run.study["model"] == "no-such") == []
    modes = {mode for run in runs for mode in run.verdicts["mode"]}
    assert modes == {"isolated", "sustained"}


def test_a_watermark_has_a_row_for_runs_that_agree():
    runs = lab.stored("committed", lab.in_vllm)
    mark = lab.watermark(*runs)
    assert mark.index[0] == "this machine"
    assert mark["runs"].sum() == len(runs)
    assert len(mark) < 1 + len(runs)
    assert set(mark["figures"][1:]) == {"committed"}
    assert set(mark["gpu"][1:]) == {"NVIDIA H200"}
    assert mark["clocks"].iloc[1] == "up to 1980 MHz SM, 3201 MHz memory, 700 W"
    assert lab.watermark()["figures"].tolist() == ["live"]
    said = lab.origin(*runs)
    assert said.startswith(f"**Committed figures**: from {len(runs)} runs that came with the repository; NVIDIA H200")
    assert "vLLM 0.33.0" in said


def test_other_sources(tmp_path):
    assert lab.stored("live") == []
    with pytest.raises(RunError, match="no run at"):
        lab.stored(str(tmp_path / "absent"))
    place = lab.COMMITTED / "reference-tiny-mla-isolated"
    assert [run.path for run in lab.stored(str(place), lambda run: False)] == [place]
    shutil.copytree(place, tmp_path / "one")
    shutil.copytree(lab.COMMITTED / "vllm-gpt-oss-20b-isolated", tmp_path / "two")
    assert [run.path.name for run in lab.stored(str(tmp_path))] == ["one", "two"]
    (run,) = lab.stored(str(tmp_path), lab.in_vllm)
    assert lab.stored(str(tmp_path), lambda run: len(run.kernels)) == []
    assert lab.watermark(run)["figures"].tolist() == ["", "stored"]
    assert lab.origin(run).startswith("**Stored figures**: from 1 run in ")
    (tmp_path / "vllm-m-loads.json").write_text('[{"model": "m"}]')
    assert lab.records(str(tmp_path), "loads") == [{"model": "m"}]
    assert lab.records("live", "loads") == []


def test_a_verdict_table_is_escaped_and_gives_reasons_where_they_are_needed():
    (run,) = lab.stored(str(lab.COMMITTED / "vllm-llama-3.1-8b-sustained"))
    table = lab.verdict_table(run)
    assert table.data["verdict"].tolist()[0] == "different"
    shown = table.to_html()
    assert "hit100k" in shown
    assert "llama-3.1-8b, hit100k" in table.caption
    assert "decode100k" not in table.caption
    assert lab.title(run) == "llama-3.1-8b on NVIDIA H200, vllm engine, sustained"


def test_measuring_goes_on_with_its_own_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    how = {"sweep": SWEEP, "rounds": 2, "explain": True}
    run = lab.measure("test", "sweep", "tiny-dsa", "reference", **how)
    assert run.path.parent == tmp_path / "runs"
    assert run.finished_rounds("decode-b1-k64", "isolated") == [0, 1]
    assert profiled_cases([run]) == [(run, "decode-b1-k64", "isolated")]
    assert lab.origin(run).startswith("**Live figures**: measured by this notebook in `test-")
    again = lab.measure("test", "sweep", "tiny-dsa", "reference", **how)
    assert again.samples["us"].tolist() == run.samples["us"].tolist()
    assert lab.watermark(run)["figures"].tolist() == ["", "live"]
    with pytest.raises(StudyError, match="margin"):
        lab.measure("test", "sweep", "tiny-dsa", "reference", sweep=SWEEP, margin=3.0)


def test_picks_of_ties_and_of_random_scores():
    engine = kvlab.load_engine("tiny-dsa", "reference", topk=16)
    step = engine.prepare(kvlab.parse_case("hit=4@128"))
    table = lab.picks(step, ["zeros", "random"])
    assert set(table["arm"]) == {"zeros", "random"}
    assert table.groupby(["arm", "row"])["position"].nunique().eq(16).all()
    assert table["position"].between(0, 127).all()
    dense = kvlab.load_engine("tiny-dense", "reference")
    assert lab.picks(dense.prepare(kvlab.parse_case("hit=4@128")), ["zeros"]).empty


def test_setup_works_without_jupyter_and_importing_loads_none():
    code = (
        "import sys; from kvlab import lab; lab.setup(); from kvlab.errors import RunError;"
        "assert RunError('a\\nb')._render_traceback_() == ['RunError: a b'];"
        "assert not {'IPython', 'ipywidgets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
