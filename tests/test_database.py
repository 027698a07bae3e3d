"""The file under a run: killed, read while written, locked, full, read-only, damaged."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvlab import database
from kvlab.errors import RunError
from kvlab.run import Run, open_run

from handmade_runs import PROVENANCE, STUDY, add_case, rows

WRITER = """
import itertools, sys, time
sys.path.insert(0, {tests!r})
from handmade_runs import PROVENANCE, STUDY, add_case, rows
from kvlab.run import Run
run = Run.create({folder!r}, STUDY, PROVENANCE)
add_case(run)
for number in itertools.count(len(run.finished_rounds("decode", "isolated"))):
    run.add_round("decode", "isolated", number, rows(number, replays=7))
    print(number, flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def writer(tmp_path):
    """Another process that stores rounds until it is killed; says each on stdout."""
    code = WRITER.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run"))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(database.__file__).parents[1]
    )
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def said(process, count):
    """The last of `count` rounds that the writer says it stored."""
    return [int(process.stdout.readline()) for _ in range(count)][-1]


def whole_rounds(samples):
    """How many rounds the samples hold, after seeing that each is whole and right."""
    for number, found in samples.groupby("round"):
        assert found["us"].tolist() == [row["us"] for row in rows(number, replays=7)]
    assert sorted(set(samples["round"])) == list(range(samples["round"].nunique()))
    return samples["round"].nunique()


def test_a_run_is_read_while_written_killed_and_resumed(writer, tmp_path):
    folder = tmp_path / "run"
    last = said(writer, 1)
    run = open_run(folder)
    seen = 0
    for _ in range(10):
        now = whole_rounds(run.samples)
        assert now >= max(seen, last + 1)
        seen, last = now, said(writer, 3)
    with pytest.raises(RunError, match="is being written by another process"):
        Run.create(folder, STUDY, PROVENANCE)
    writer.send_signal(signal.SIGKILL)
    last = max([last, *(int(line) for line in writer.stdout)])
    writer.wait()
    assert (folder / "run.sqlite-wal").exists()

    finished = whole_rounds(open_run(folder).samples)
    assert finished in (last + 1, last + 2), "at most the round that was stored and not yet said is more"
    with Run.create(folder, STUDY, PROVENANCE) as resumed:
        assert resumed.finished_rounds("decode", "isolated") == list(range(finished))
        resumed.add_round("decode", "isolated", finished, rows(finished, replays=7))
    assert whole_rounds(open_run(folder).samples) == finished + 1
    assert [file.name for file in folder.iterdir()] == ["run.sqlite"]


def begun(folder, rounds=2):
    with Run.create(folder, STUDY, PROVENANCE) as run:
        add_case(run)
        for number in range(rounds):
            run.add_round("decode", "isolated", number, rows(number))
    return folder


def test_a_closed_run_is_one_file_that_reading_leaves_alone(tmp_path):
    begun(tmp_path)
    before = (tmp_path / "run.sqlite").read_bytes()
    assert len(open_run(tmp_path).samples) == 12
    assert [file.name for file in tmp_path.iterdir()] == ["run.sqlite"]
    assert (tmp_path / "run.sqlite").read_bytes() == before


def test_closing_while_another_reads_keeps_everything(tmp_path):
    run = Run.create(tmp_path, STUDY, PROVENANCE)
    add_case(run)
    run.add_round("decode", "isolated", 0, rows())
    reader = open_run(tmp_path)
    with reader._database.snapshot() as db:
        assert db.execute("SELECT count(*) FROM samples").fetchone() == (6,)
        run.add_round("decode", "isolated", 1, rows(1))
        run.close()
        assert db.execute("SELECT count(*) FROM samples").fetchone() == (6,), "a snapshot is of one moment"
    assert len(reader.samples) == 12
    begun(tmp_path, rounds=0)
    assert [file.name for file in tmp_path.iterdir()] == ["run.sqlite"]


def test_one_writer_at_a_time_and_a_forgotten_one_does_not_count(tmp_path):
    run = Run.create(tmp_path, STUDY, PROVENANCE)
    with pytest.raises(RunError, match="is being written by another process; wait for it, or choose another --out"):
        Run.create(tmp_path, STUDY, PROVENANCE)
    run.close()
    run = Run.create(tmp_path, STUDY, PROVENANCE)
    del run
    gc.collect()
    Run.create(tmp_path, STUDY, PROVENANCE).close()


def test_a_refused_study_gives_the_lock_back(tmp_path):
    begun(tmp_path)
    for _ in range(2):
        with pytest.raises(RunError, match="margin"):
            Run.create(tmp_path, {**STUDY, "margin": 0.5}, PROVENANCE)
    begun(tmp_path, rounds=0)


def test_without_locks_a_run_says_so_and_keeps_the_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "fcntl", None)
    with pytest.warns(UserWarning, match="no folder locks; start no second writer"):
        begun(tmp_path)
    assert "no folder locks" in open_run(tmp_path).provenance["notes"][0]


def fill_up(run):
    for number in range(1000):
        run.add_round("decode", "isolated", number, rows(number, replays=20))


def test_a_full_disk_keeps_finished_rounds_and_resumes_after_the_mend(tmp_path):
    run = Run.create(tmp_path, STUDY, PROVENANCE)
    add_case(run)
    connection = run._database._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 3}")
    with pytest.raises(RunError) as caught:
        fill_up(run)
    number = len(run.finished_rounds("decode", "isolated"))
    assert str(caught.value) == (
        f"{tmp_path}: database or disk is full while storing round {number} of case 'decode' (isolated);"
        " finished rounds are kept: free space there, then the same command resumes"
    )
    assert number > 0
    assert run.finished_rounds("decode", "isolated") == list(range(number))
    run.close()
    assert len(open_run(tmp_path).samples) == number * 60
    with Run.create(tmp_path, STUDY, PROVENANCE) as run:
        run.add_round("decode", "isolated", number, rows(number, replays=20))
    assert len(open_run(tmp_path).samples) == (number + 1) * 60


def test_a_failing_disk_is_one_line_too(tmp_path):
    """A limit on file sizes makes writes fail as a dying disk would."""
    code = (
        "import resource, sys, itertools\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from handmade_runs import *\n"
        "from kvlab.run import Run\n"
        f"run = Run.create({str(tmp_path / 'run')!r}, STUDY, PROVENANCE)\n"
        "add_case(run)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1))\n"
        "try:\n"
        "    for number in itertools.count():\n"
        "        run.add_round('decode', 'isolated', number, rows(number, replays=7))\n"
        "except Exception as error:\n"
        "    print(number, type(error).__name__, error)\n"
        "run.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(database.__file__).parents[1],
    )
    number, kind, message = done.stdout.strip().split(" ", 2)
    assert kind == "RunError"
    assert "\n" not in message
    assert "finished rounds are kept" in message
    assert whole_rounds(open_run(tmp_path / "run").samples) == int(number)


def test_a_folder_removed_while_written_is_said(tmp_path):
    run = Run.create(tmp_path / "run", STUDY, PROVENANCE)
    add_case(run)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match=r"run.sqlite was deleted while storing round 0"):
        run.add_round("decode", "isolated", 0, rows())
    run.close()


def as_nobody(function):
    """What `function` returns or raises for a user whom permissions bind; pytest may run as root, whom they do not."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            result = function()
        except RunError as error:
            result = RunError(str(error))
        os.write(sending, pickle.dumps(result))
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        result = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.fixture
def open_folder():
    """A folder that every user can reach, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "run"
        (Path(folder) / "run").chmod(0o755)


@pytest.mark.filterwarnings("ignore:.*read-only and its log unmerged")
@pytest.mark.parametrize("left", ["closed", "log", "log and index"])
def test_a_read_only_folder_opens_with_everything_in_it(open_folder, left):
    run = Run.create(open_folder, STUDY, PROVENANCE)
    add_case(run)
    for number in range(3):
        run.add_round("decode", "isolated", number, rows(number))
    if left == "closed":
        run.close()
    else:  # as a killed writer leaves it
        copy = open_folder.with_name("copy")
        shutil.copytree(open_folder, copy)
        run.close()
        shutil.rmtree(open_folder)
        copy.rename(open_folder)
        if left == "log":
            (open_folder / "run.sqlite-shm").unlink()
        assert (open_folder / "run.sqlite-wal").stat().st_size > 0
    for file in open_folder.iterdir():
        file.chmod(0o444)
    open_folder.chmod(0o555)

    def read():
        opened = open_run(open_folder)
        return len(opened.samples), opened.provenance.get("notes", [])

    count, notes = as_nobody(read)
    assert count == 18
    assert ["read from a copy, as of now" in note for note in notes] == [True] * (left == "log"), notes
    with pytest.raises(RunError, match=r"Permission denied|readonly|unable to open") as caught:
        as_nobody(lambda: begun(open_folder))
    assert "\n" not in str(caught.value)


def test_a_folder_out_of_reach_is_said(open_folder):
    begun(open_folder)
    (open_folder / "run.sqlite").chmod(0o000)
    with pytest.raises(RunError, match=r"make it readable|readable and writable"):
        as_nobody(lambda: open_run(open_folder))


def test_other_files_are_not_littered_among(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(
        RunError, match=r"holds other files \(thesis.tex\) and no run; choose an empty or absent folder"
    ):
        Run.create(tmp_path, STUDY, PROVENANCE)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunError, match=r"thesis.tex is a file; choose a folder"):
        Run.create(tmp_path / "thesis.tex", STUDY, PROVENANCE)
    with pytest.raises(RunError, match="choose another --out"):
        Run.create(tmp_path / "thesis.tex" / "run", STUDY, PROVENANCE)


def test_files_beside_a_run_do_not_matter(tmp_path):
    begun(tmp_path)
    (tmp_path / "gaps.png").write_bytes(b"")
    begun(tmp_path, rounds=0)
    assert len(open_run(tmp_path).samples) == 12


@pytest.mark.parametrize("content", [b"not a database, but longer than a header of SQLite's hundred bytes" * 9, None])
def test_a_damaged_file_is_said_so(tmp_path, content):
    begun(tmp_path, rounds=20)
    file = tmp_path / "run.sqlite"
    data = file.read_bytes()
    file.write_bytes(data[:8192] + bytes(len(data) - 8192) if content is None else content)
    with pytest.raises(RunError, match="the file is damaged: restore it from a copy, or remove the folder") as caught:
        _ = open_run(tmp_path).samples
    assert "\n" not in str(caught.value)
    if content is not None:
        with pytest.raises(RunError, match="the file is damaged"):
            Run.create(tmp_path, STUDY, PROVENANCE)
        assert file.read_bytes() == content


@pytest.mark.parametrize("content", [b"", "schema only"])
def test_a_run_killed_before_it_began_is_begun_anew(tmp_path, content):
    if content:
        database.Database.write(tmp_path).close()
    else:
        (tmp_path / "run.sqlite").write_bytes(content)
    with pytest.raises(RunError, match=r"no run at .* ended before it began, so run the command again"):
        open_run(tmp_path)
    begun(tmp_path)
    assert len(open_run(tmp_path).samples) == 12


def test_files_of_others_and_of_newer_kvlabs_are_refused(tmp_path):
    begun(tmp_path / "new")
    with sqlite3.connect(tmp_path / "new" / "run.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    (tmp_path / "foreign").mkdir()
    with sqlite3.connect(tmp_path / "foreign" / "run.sqlite") as other:
        other.execute("CREATE TABLE songs (name TEXT)")
    for connection in (db, other):
        connection.close()
    for use in (open_run, begun):
        with pytest.raises(RunError, match="has table format 99, this kvlab knows 1; upgrade kvlab"):
            use(tmp_path / "new")
        with pytest.raises(RunError, match="another program's SQLite file; choose the folder of a run"):
            use(tmp_path / "foreign")
