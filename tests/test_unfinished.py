"""The same settings go on with the run that they left unfinished, and with no other."""

import pytest

from kvlab.unfinished import RECORD, begin, finish, last_left

SPEC = {"model": "org/tiny", "engine": "reference", "rounds": 20}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr("time.strftime", lambda _: f"{next(seconds):02d}")
    return tmp_path / "runs"


def measure(folder):
    folder.mkdir()
    (folder / "run.sqlite").touch()


def test_a_spec_goes_on_until_it_is_finished(runs):
    first = begin(runs, SPEC, {"rounds": "20"})
    assert first == runs / "tiny-reference-00"
    assert begin(runs, SPEC, {}) != first  # nothing was stored in it
    again = begin(runs, SPEC, {"rounds": "20"})
    measure(again)
    assert begin(runs, SPEC, {}) == again
    other = begin(runs, {**SPEC, "rounds": 21}, {"rounds": "21"})
    assert other != again
    finish(runs, SPEC)
    assert begin(runs, SPEC, {}) not in (again, other)


def test_another_card_begins_another_run(runs, monkeypatch):
    first = begin(runs, SPEC, {})
    measure(first)
    monkeypatch.setattr("kvlab.unfinished.machine", lambda: {"gpus": [{"name": "other"}]})
    assert begin(runs, SPEC, {}) != first


def test_the_last_one_left(runs):
    assert last_left(runs) is None
    one, two = begin(runs, SPEC, {"rounds": "20"}), begin(runs, {**SPEC, "rounds": 21}, {"rounds": "21"})
    assert last_left(runs) is None
    measure(one)
    measure(two)
    assert last_left(runs).folder == two
    begin(runs, SPEC, {})
    assert last_left(runs).folder == one
    assert last_left(runs).settings == {"rounds": "20"}
    finish(runs, SPEC)
    assert last_left(runs).folder == two


def test_a_broken_file_is_as_none(runs):
    runs.mkdir()
    (runs / RECORD).write_text("{")
    assert last_left(runs) is None
    assert begin(runs, SPEC, {}).parent == runs
