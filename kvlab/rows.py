"""Layer 4: the rows of a run's SQLite file: SQL here, plain records outside."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvlab.errors import RunError
from kvlab.tables import SAMPLE, Records, to_json

# A round is a row of its own, so that half of one cannot be told from none, and so that its samples stay short.
SCHEMA = (
    "CREATE TABLE study (record TEXT NOT NULL)",
    "CREATE TABLE provenance (process INTEGER PRIMARY KEY, record TEXT NOT NULL)",
    """CREATE TABLE cases ("case" TEXT PRIMARY KEY, text TEXT NOT NULL, phase TEXT NOT NULL,
        requests TEXT NOT NULL, facts TEXT NOT NULL)""",
    """CREATE TABLE rounds (id INTEGER PRIMARY KEY, "case" TEXT NOT NULL, mode TEXT NOT NULL,
        round INTEGER NOT NULL, process INTEGER NOT NULL, UNIQUE ("case", mode, round))""",
    """CREATE TABLE samples (round_id INTEGER NOT NULL, position INTEGER NOT NULL, arm TEXT NOT NULL,
        fill TEXT NOT NULL, seed INTEGER NOT NULL, replay INTEGER NOT NULL, us REAL NOT NULL, sm_mhz REAL,
        mem_mhz REAL, watts REAL, celsius REAL, throttled INTEGER, flagged INTEGER NOT NULL, routing TEXT,
        PRIMARY KEY (round_id, position, replay)) WITHOUT ROWID""",
    """CREATE TABLE verdicts ("case" TEXT NOT NULL, mode TEXT NOT NULL, record TEXT NOT NULL,
        PRIMARY KEY ("case", mode))""",
    """CREATE TABLE kernels (id INTEGER PRIMARY KEY, "case" TEXT NOT NULL, mode TEXT NOT NULL,
        arm TEXT NOT NULL, record TEXT NOT NULL)""",
    """CREATE TABLE telemetry (id INTEGER PRIMARY KEY, "case" TEXT NOT NULL, mode TEXT NOT NULL,
        arm TEXT NOT NULL, record TEXT NOT NULL)""",
)


def read_record(db: sqlite3.Connection, name: str) -> dict[str, Any] | None:
    """Run name, study, and the provenance of each process that wrote; None for a run that has not begun."""
    study = db.execute("SELECT record FROM study").fetchone()
    if study is None:
        return None
    processes = db.execute("SELECT record FROM provenance ORDER BY process")
    return {
        "run": name,
        "study": json.loads(study[0]),
        "provenance": [json.loads(record) for (record,) in processes],
    }


def read_verdicts(db: sqlite3.Connection) -> list[tuple[str, str, dict[str, Any]]]:
    """(case, mode, verdict) in the order of the cases' first verdicts."""
    stored = db.execute('SELECT "case", mode, record FROM verdicts ORDER BY rowid')
    return [(case, mode, json.loads(record)) for case, mode, record in stored]


def read_samples(db: sqlite3.Connection, case: str | None = None, mode: str | None = None) -> pd.DataFrame:
    """The samples, of one case in one mode where these are given, in the order in which they were taken."""
    columns = ["case", "mode", "round", "process", *SAMPLE]
    names = ", ".join(f'"{column}"' for column in columns)
    only, given = ("", ()) if case is None else ('WHERE "case" = ? AND mode = ?', (case, mode))
    query = f"SELECT {names} FROM samples JOIN rounds ON id = round_id {only} ORDER BY id, position, replay"
    return pd.DataFrame(db.execute(query, given).fetchall(), columns=columns)


def read_records(db: sqlite3.Connection, name: str) -> Records:
    """The rows of one of `kvlab.tables.TABLES`, for `kvlab.tables.frame`."""
    if name == "samples":
        return read_samples(db)
    if name == "cases":
        rows = db.execute('SELECT facts, "case", text, phase, requests FROM cases ORDER BY rowid')
        keys = ("case", "text", "phase", "requests")
        return [{**json.loads(facts), **dict(zip(keys, row, strict=True))} for facts, *row in rows]
    if name == "verdicts":
        phases = dict(db.execute('SELECT "case", phase FROM cases').fetchall())
        return [
            {"phase": phases.get(case), **record, "case": case, "mode": mode}
            for case, mode, record in read_verdicts(db)
        ]
    return [json.loads(record) for (record,) in db.execute(f"SELECT record FROM {name} ORDER BY id")]


def write_study(db: sqlite3.Connection, study: Mapping[str, Any]) -> None:
    """Store what the run is asked for; once."""
    db.execute("INSERT INTO study VALUES (?)", (to_json(study),))


def write_process(db: sqlite3.Connection, process: int, provenance: Mapping[str, Any]) -> None:
    """Store what one process measures with; processes count from 0."""
    db.execute("INSERT INTO provenance VALUES (?, ?)", (process, to_json(provenance)))


def write_case(db: sqlite3.Connection, case: str, text: str, phase: str, requests: Any) -> None:
    """Store a case; the same one again does nothing.

    Raises:
        RunError: for a name that stands for another case.
    """
    row = (case, text, phase, to_json(requests))
    old = db.execute('SELECT "case", text, phase, requests FROM cases WHERE "case" = ?', (case,)).fetchone()
    if old is None:
        db.execute("INSERT INTO cases VALUES (?, ?, ?, ?, '{}')", row)
    elif old != row:
        raise RunError(f"case {case!r} is {old[1]!r} in this run, not {text!r}; give one of them another name")


def merge_facts(db: sqlite3.Connection, case: str, facts: Mapping[str, Any]) -> None:
    """Add facts to a stored case, in place of earlier ones of the same name."""
    (old,) = db.execute('SELECT facts FROM cases WHERE "case" = ?', (case,)).fetchone()
    merged = to_json({**json.loads(old), **facts})
    db.execute('UPDATE cases SET facts = ? WHERE "case" = ?', (merged, case))


def read_facts(db: sqlite3.Connection, case: str) -> dict[str, Any]:
    """The facts of a stored case; empty for one that is not."""
    stored = db.execute('SELECT facts FROM cases WHERE "case" = ?', (case,)).fetchone()
    facts: dict[str, Any] = json.loads(stored[0]) if stored else {}
    return facts


def finished_rounds(db: sqlite3.Connection, case: str, mode: str) -> list[int]:
    """The numbers of the stored rounds, in order."""
    query = 'SELECT round FROM rounds WHERE "case" = ? AND mode = ? ORDER BY round'
    return [number for (number,) in db.execute(query, (case, mode))]


def write_round(
    db: sqlite3.Connection, case: str, mode: str, round: int, process: int, samples: Sequence[Sequence[Any]]
) -> None:
    """Store a round and its samples, each a `SAMPLE`.

    Raises:
        RunError: for a round that is stored already.
    """
    key = (case, mode, round)
    if db.execute('SELECT 1 FROM rounds WHERE "case" = ? AND mode = ? AND round = ?', key).fetchone():
        raise RunError(f"round {round} of case {case!r} ({mode}) is stored already; leave out Run.finished_rounds")
    number = db.execute("INSERT INTO rounds VALUES (NULL, ?, ?, ?, ?)", (*key, process)).lastrowid
    marks = ", ".join("?" * len(SAMPLE))
    db.executemany(f"INSERT INTO samples (round_id, {', '.join(SAMPLE)}) VALUES ({number}, {marks})", samples)


def write_verdict(db: sqlite3.Connection, case: str, mode: str, verdict: Mapping[str, Any]) -> None:
    """Store a verdict, in place of an earlier one."""
    replace = 'ON CONFLICT ("case", mode) DO UPDATE SET record = excluded.record'
    db.execute(f"INSERT INTO verdicts VALUES (?, ?, ?) {replace}", (case, mode, to_json(verdict)))


def write_records(db: sqlite3.Connection, name: str, records: Iterable[Mapping[str, Any]], replace: bool) -> None:
    """Store records of `kernels` or `telemetry`; with `replace` in place of those of the same case, mode and arm."""
    keyed = [(r["case"], r["mode"], r["arm"], to_json(r)) for r in records]
    if replace:
        keys = {row[:3] for row in keyed}
        db.executemany(f'DELETE FROM {name} WHERE "case" = ? AND mode = ? AND arm = ?', keys)
    db.executemany(f"INSERT INTO {name} VALUES (NULL, ?, ?, ?, ?)", keyed)
