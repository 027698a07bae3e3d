"""A job in a child process: it measures, says how far it is, stops when asked, and never outlives its Job."""

import gc
import os
import subprocess
import sys
import time

import pytest

from kvlab.background import start
from kvlab.errors import StudyError
from kvlab.run import open_run

CHECK = {
    "command": "check",
    "model": "tiny-dense",
    "engine": "reference",
    "engine_options": {"num_kv_blocks": 64},
    "cases": ["decode=1@64"],
    "rounds": 6,
    "replays": 1,
}
LONG = {**CHECK, "rounds": 100_000}


def until(job, reached, seconds=90):
    deadline = time.monotonic() + seconds
    while not reached(state := job.state()):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    return state


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_job_measures_and_says_so(tmp_path):
    job = start(CHECK, tmp_path / "run")
    state = job.wait(120)
    assert state.stage == "done", state
    assert state.done == state.total == 6
    assert len(state.verdicts) == 1
    assert state.verdicts[0].startswith("decode: ")
    with open_run(job.out) as run:
        assert len(run.verdicts) == 1
        assert run.provenance["command"].startswith("kvlab check tiny-dense --engine reference")


def test_cancel_keeps_the_finished_rounds_and_the_same_spec_goes_on(tmp_path):
    job = start(LONG, tmp_path / "run")
    until(job, lambda state: state.done >= 2)
    job.cancel()
    state = job.wait(60)
    assert state.stage == "cancelled", state
    kept = len(open_run(tmp_path / "run").samples)
    assert kept >= 6
    job = start({**CHECK, "rounds": 6}, tmp_path / "run")
    assert job.wait(120).stage == "done"
    assert len(open_run(tmp_path / "run").samples) >= kept


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": "tiny-tree"}, "tiny-tree"),
        ({"cases": ["decode=9@4"]}, "K=4 is less than Q=9"),
        ({"cases": []}, "no case given"),
        ({"margin": 7}, "margin 7"),
        ({"command": "sweep", "sweep": {"contexts": [64], "phases": ["train"]}}, "phase 'train'"),
        ({"command": "sweep", "sweep": {"contexts": [64], "topk": [8]}}, "topk has no meaning"),
    ],
)
def test_bad_input_is_the_jobs_last_word(tmp_path, change, match):
    state = start({**CHECK, **change}, tmp_path / "run").wait(120)
    assert state.stage == "failed"
    assert match in state.message
    assert "\n" not in state.message


def test_a_child_that_dies_is_a_sentence(tmp_path):
    job = start(LONG, tmp_path / "run")
    until(job, lambda state: state.done >= 1)
    os.kill(job._process.pid, 9)
    state = job.wait(30)
    assert state.stage == "failed"
    assert "finished rounds are kept" in state.message
    assert len(open_run(tmp_path / "run").samples) >= 3


def test_a_child_ends_with_its_job_and_the_files_with_it(tmp_path):
    job = start(LONG, tmp_path / "run")
    until(job, lambda state: state.stage == "measuring")
    pid, files = job._process.pid, job._files
    del job
    gc.collect()
    assert not is_alive(pid)
    assert not files.exists()


def test_what_it_came_to_is_said_after_its_files_are_gone(tmp_path):
    job = start(CHECK, tmp_path / "run")
    state = job.wait(120)
    job.close()
    assert state.stage == "done"
    assert job.state() == state
    ended = start(LONG, tmp_path / "long")
    ended.close()
    ended.close()
    assert ended.state().stage == "cancelled"


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    code = (
        f"import sys, json; from kvlab.background import start; job = start({LONG!r}, sys.argv[1]);"
        "print(job._process.pid, job._files, flush=True); job.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    pid, files = parent.stdout.readline().split()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while is_alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(pid))
    assert not os.path.exists(files)


@pytest.mark.parametrize("spec", [{}, {"command": "dance", "model": "tiny-dense"}, {**CHECK, "arms": [object()]}])
def test_what_is_no_spec_is_refused_at_once(tmp_path, spec):
    with pytest.raises(StudyError):
        start(spec, tmp_path / "run")
