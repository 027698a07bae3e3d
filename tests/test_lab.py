"""What the notebooks share: where figures come from, folders that resume, errors as a sentence."""

import subprocess
import sys

import pytest

import kvlab
from kvlab import lab
from kvlab.errors import RunError, StudyError

SWEEP = {"contexts": [64], "phases": ["decode"], "batch": [1]}


def test_the_same_parameters_have_the_same_folder():
    one = lab.folder("name", model="m", rounds=6)
    assert one == lab.folder("name", rounds=6, model="m")
    assert one.parent.name == "runs"
    others = [lab.folder("name", model="m", rounds=7), lab.folder("other", model="m", rounds=6)]
    assert len({one, *others}) == 3


def test_committed_runs_and_their_watermark():
    runs = lab.stored("committed", "no-such-*", "reference-*-isolated", "vllm-*-isolated")
    assert {run.study["engine"] for run in runs} == {"reference"}
    kept = lab.stored("committed", "reference-*-isolated", having=lambda run: run.study["model"] == "tiny-mla")
    assert [run.study["model"] for run in kept] == ["tiny-mla"]
    mark = lab.watermark(*runs)
    assert mark.index[0] == "this machine"
    assert set(mark["figures"][1:]) == {"committed"}
    assert set(mark["gpu"][1:]) == {"NVIDIA H200"}
    assert mark["clocks"].iloc[1] == "up to 1980 MHz SM, 3201 MHz memory, 700 W"
    assert lab.watermark()["figures"].tolist() == ["live"]


def test_other_sources(tmp_path):
    assert lab.stored("live", "*") == []
    assert lab.stored("committed", "no-such-*") == []
    with pytest.raises(RunError, match="no run at"):
        lab.stored(str(tmp_path / "absent"), "*")
    place = lab.COMMITTED / "reference-tiny-mla-isolated"
    assert [run.path for run in lab.stored(str(place), "*")] == [place]


def test_a_verdict_table_is_escaped_and_gives_reasons_where_they_are_needed():
    (run,) = lab.stored("committed", "vllm-llama-3.1-8b-isolated")
    table = lab.verdict_table(run)
    assert table.data["verdict"].tolist()[0] == "different"
    shown = table.to_html()
    assert "hit100k" in shown
    assert "llama-3.1-8b, hit100k" in table.caption
    assert "decode100k" not in table.caption
    assert lab.title(run) == "llama-3.1-8b on NVIDIA H200, vllm engine, isolated"


def test_measuring_goes_on_with_its_own_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    how = {"sweep": SWEEP, "rounds": 2, "explain": True}
    run = lab.measure("test", "sweep", "tiny-dsa", "reference", **how)
    assert run.path.parent == tmp_path / "runs"
    assert run.finished_rounds("decode-b1-k64", "isolated") == [0, 1]
    assert lab.profiled_case(run) == ("decode-b1-k64", "isolated")
    again = lab.measure("test", "sweep", "tiny-dsa", "reference", **how)
    assert again.samples["us"].tolist() == run.samples["us"].tolist()
    assert lab.watermark(run)["figures"].tolist() == ["", "live"]
    with pytest.raises(StudyError, match="margin"):
        lab.measure("test", "sweep", "tiny-dsa", "reference", sweep=SWEEP, margin=3.0)


def test_a_run_without_kernels_says_how_to_get_them():
    (run,) = lab.stored("committed", "reference-tiny-mla-isolated")
    with pytest.raises(RunError, match="explain=True"):
        lab.profiled_case(run)


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
