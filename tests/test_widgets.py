"""The dashboard driven as a browser would: by its traits and buttons, with real child processes and no browser."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed: pip install 'kvlab[lab]'")

from kvlab import background
from kvlab.widgets import Lab


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A dashboard set to the smallest sweep: one case, rounds of some milliseconds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    lab = Lab("runs")
    lab.model.value, lab.contexts.value, lab.batch.value, lab.rounds.value = "tiny-dense", "64", "1", 6
    yield lab
    lab.close()


def wait(lab, until=None, seconds=90):
    """Until something holds, or the measurement has ended."""
    end = time.monotonic() + seconds
    while not (until() if until else lab._job is None):
        assert time.monotonic() < end, (lab.status.value, lab.message.value)
        assert until is None or lab._job is not None, (lab.status.value, lab.message.value)
        time.sleep(0.02)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_start_cancel_go_on_verdict_figure(board, tmp_path):
    rounds = 160  # more than a busy machine finishes between two looks
    board.rounds.value = rounds
    board.start_button.click()
    assert board.start_button.disabled
    assert not board.cancel_button.disabled
    wait(board, until=lambda: board.progress.value >= 1)
    seen = board.progress.value
    wait(board, until=lambda: board.progress.value > seen)
    assert "round" in board.status.value
    board.cancel_button.click()
    wait(board)
    assert board.status.value.startswith("cancelled")
    assert board.progress.bar_style == "warning"
    assert "unfinished" in board.table.value
    kept = board.run.samples
    assert kept["round"].nunique() < rounds

    # The same settings go on with the same run.
    board.start_button.click()
    wait(board)
    assert board.status.value.startswith("done"), board.message.value
    assert [place.name for place in (tmp_path / "runs").iterdir() if place.is_dir()] == [board.run.path.name]
    samples = board.run.samples
    assert samples["round"].nunique() == rounds
    assert samples["us"].head(len(kept)).tolist() == kept["us"].tolist()
    assert board.run.verdicts["verdict"][0] in board.table.value
    assert bytes(board.image.value).startswith(b"\x89PNG")
    assert board.image.layout.display == ""

    board.path.value = "gap.svg"
    board.save_button.click()
    assert str(tmp_path / "gap.svg") in board.saved.value
    assert b"<svg" in (tmp_path / "gap.svg").read_bytes()


@pytest.mark.parametrize(
    ("set_it", "said"),
    [
        (lambda lab: setattr(lab.contexts, "value", "many"), "contexts: 'many' is no number"),
        (lambda lab: setattr(lab.zero_fractions, "value", "2"), "zero fractions: '2' is no number from 0 to 1"),
        (lambda lab: setattr(lab.options, "value", "[1]"), "engine options: '[1]' is no JSON object"),
        (lambda lab: setattr(lab.options, "value", "{<b>"), "engine options: '{&lt;b&gt;' is no JSON"),
    ],
)
def test_what_cannot_be_read_is_said_in_place_and_starts_nothing(board, tmp_path, set_it, said):
    set_it(board)
    board.start_button.click()
    assert said in board.message.value.replace("&#x27;", "'").replace("&quot;", '"')
    assert board._job is None
    assert not board.start_button.disabled
    assert not (tmp_path / "runs").exists()


def test_what_the_child_refuses_is_said_in_place(board):
    board.margin.value = 300.0
    board.start_button.click()
    wait(board)
    assert "margin 3.0 is out of range" in board.message.value
    assert board.progress.bar_style == "danger"
    assert not board.start_button.disabled
    board.contexts.value = "many"
    board.start_button.click()
    assert "margin" not in board.message.value


def test_no_vllm_is_said_in_place(board):
    try:
        from kvlab.engines.vllm.flavour import installed_flavour

        installed_flavour()
    except Exception:
        board.engine.value = "vllm"
        assert "tiny-dsa" not in board.model.options
        board.start_button.click()
        wait(board)
        assert "vLLM is not installed" in board.message.value
    else:
        pytest.skip("vLLM is installed here")


def test_a_second_measurement_is_refused_and_close_ends_the_own_child(board):
    board.rounds.value = 5000
    board.start_button.click()
    child = board._job._process
    board._guarded(board.start)
    assert "under way" in board.message.value
    board.close()
    child.wait(20)
    assert not is_alive(child.pid)


def test_a_new_dashboard_takes_over_what_the_last_one_measures(board):
    board.rounds.value = 5000
    board.start_button.click()
    wait(board, until=lambda: board.progress.value >= 1)
    job = board._job
    second = Lab("runs")
    try:
        assert board._job is None
        assert second._job is job
        wait(second, until=lambda: second.progress.value >= 1)
        assert second.cancel_button.disabled is False
    finally:
        second.close()
    assert not is_alive(job._process.pid)


def test_a_child_that_dies_is_reported_and_its_rounds_are_kept(board):
    board.rounds.value = 5000
    board.start_button.click()
    wait(board, until=lambda: board.progress.value >= 2)
    board._job._process.kill()
    wait(board)
    assert "finished rounds are kept" in board.message.value
    assert not board.start_button.disabled
    assert board.run.finished_rounds("decode-b1-k64", "isolated")


def test_after_a_restart_the_settings_are_filled_in_and_start_goes_on(board, tmp_path):
    board.rounds.value, board.contexts.value = 40, "32"
    board.start_button.click()
    wait(board, until=lambda: board.progress.value >= 2)
    board.close()  # as the end of a kernel does
    second = Lab("runs")
    try:
        assert second.settings() == board.settings()
        assert "is not finished: Start resumes it" in second.status.value
        second.start_button.click()
        wait(second)
        assert second.status.value.startswith("done"), second.message.value
        assert [place.name for place in (tmp_path / "runs").iterdir() if place.is_dir()] == [second.run.path.name]
        assert set(second.run.samples["process"]) == {0, 1}
    finally:
        second.close()


def test_opening_comparing_and_what_cannot_be_opened(board, tmp_path, measured):
    before, after = measured
    board.compare_button.click()
    assert "no run is shown yet" in board.message.value
    board.folder.value = str(tmp_path / "nowhere")
    board.open_button.click()
    assert "no run at" in board.message.value
    board.folder.value = str(before)
    board.open_button.click()
    assert board.message.value == ""
    alone = bytes(board.image.value)
    board.folder.value = str(after)
    board.compare_button.click()
    assert board.message.value == ""
    assert bytes(board.image.value) != alone
    assert f"Beside {after.name}" in board.live.value
    # A figure that this run has nothing for is said, not drawn.
    board.figure.value = "clocks and power"
    assert "NVML" in board.note.value
    board.save_button.click()
    assert "no figure to save" in board.message.value
    board.figure.value = "samples of a case"
    assert board.note.value == ""
    assert bytes(board.image.value) not in (alone, b"")


def test_a_half_written_run_shows_what_is_there(board, unfinished):
    board.open(unfinished)
    assert "unfinished" in board.table.value
    assert "3 of 8 rounds" in board.live.value
    assert board.image.layout.display == ""


@pytest.mark.parametrize(
    ("path", "said"),
    [("figure", "no ending that names a format"), ("no/such/folder/f.png", "choose another place")],
)
def test_a_figure_that_cannot_be_saved(board, measured, path, said):
    board.open(measured[0])
    board.path.value = path
    board.save_button.click()
    assert said in board.message.value


def test_runs_are_offered_newest_first_and_the_repositorys_own_after(board, tmp_path, measured):
    board.runs = tmp_path
    board.refresh_button.click()
    names = [name for name, _ in board.choice.options]
    assert names[0] == measured[1].name
    assert names[1] == measured[0].name
    assert all(name.startswith("data: ") for name in names[2:])
    assert board.choice.value == str(measured[0]) or board.choice.value


@pytest.fixture
def measured(tmp_path, make_hand_engine, simulated_clock):
    """Two finished runs of one case, made without a clock."""
    import kvlab

    folders = []
    for name, gap in (("before", 1.0), ("after", 1.1)):
        simulated_clock(lambda step, gap=gap: 100.0 + next(_JITTER) * gap)
        kvlab.check(make_hand_engine(), ["decode=2*1@64"], rounds=8, out=tmp_path / name).close()
        folders.append(tmp_path / name)
        os.utime(tmp_path / name / "run.sqlite", (len(folders), len(folders)))
    return folders


@pytest.fixture
def unfinished(tmp_path, make_hand_engine, simulated_clock):
    """A run that was interrupted after three rounds."""
    import kvlab

    simulated_clock(lambda step: 100.0 + next(_JITTER))

    def stop(tick):
        if tick.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvlab.check(make_hand_engine(), ["decode=2*1@64"], rounds=8, out=tmp_path / "part", progress=stop)
    return tmp_path / "part"


def _jitter():
    while True:
        yield from (0.1, 0.7, 0.3, 0.9, 0.2, 0.5, 0.8)


_JITTER = _jitter()


def test_the_watcher_survives_an_interrupt(board, sigint):
    """SIGINT reaches the main thread of the kernel; neither the watcher nor the child is it."""
    board.rounds.value = 20
    board.start_button.click()
    assert isinstance(board._job, background.Job)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    wait(board)
    assert board.status.value.startswith("done"), board.message.value


@pytest.fixture
def sigint():
    """Taken, as a kernel does: a shell starts what it runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(3)
