"""Layer 4: a run on disk: a folder with one SQLite file that can be killed, resumed, and read while it grows.

Each finished round is one transaction, so `kill -9` costs the round in progress and no other. `Run.export` writes
Parquet files that open like the run itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import tables
from kvlab.database import FILE, Database, refuse_other_file
from kvlab.errors import RunError
from kvlab.export import RECORD, read_export, read_table, write_export
from kvlab.gaps import gap_table
from kvlab.identity import refuse_other, row_identity
from kvlab.provenance import UNKNOWN
from kvlab.rows import (
    finished_rounds,
    merge_facts,
    read_facts,
    read_record,
    read_records,
    read_samples,
    read_verdicts,
    write_case,
    write_process,
    write_records,
    write_round,
    write_study,
    write_verdict,
)
from kvlab.tables import TABLES, plain


class Run:
    """A run, open for writing (`Run.create`) or for reading (`open_run`); a context manager.

    The tables are read afresh at each access, so a reader sees the rounds that were finished meanwhile. Every row
    carries `run` (the folder's name), `model`, `engine`, `gpu`, `kvlab`, `torch`, `vllm`, `routing` and `seed`.

    Attributes:
        path: the folder.
        study: what was asked for; only an equal study resumes the run.
        provenance: what the first process measured with; later ones that resumed it under `resumed`, and under
            `notes` what was fallen back to, a sentence each.
    """

    def __init__(self, path: Path, record: Mapping[str, Any], database: Database | None = None) -> None:
        self.path = path
        self.study: dict[str, Any] = record["study"]
        first, *resumed = record["provenance"]
        self.provenance: dict[str, Any] = {**first, **({"resumed": resumed} if resumed else {})}
        if notes := dict.fromkeys([*first.get("notes", ()), *(database.notes if database else ())]):
            self.provenance["notes"] = list(notes)
        self._record = record
        self._database = database
        self._identity = row_identity(record)
        self._process = len(resumed)
        self._cases: set[str] = set()

    @classmethod
    def create(cls, path: str | Path, study: Mapping[str, Any], provenance: Mapping[str, Any]) -> Run:
        """Begin a run, or resume the one that an equal study began.

        Args:
            path: folder; made where it is absent.
            study: JSON-able; says at least `model` and `engine`, and `routing` and `seed` unless every row does.
                Its `gpu` and `versions` (of `kvlab`, `torch`, `vllm`) go before the provenance's.
            provenance: as `kvlab.provenance.machine` returns it.

        Raises:
            RunError: when the folder holds another study's run or other files, is being written, or cannot be.
        """
        folder = Path(path).absolute()
        asked = plain({"run": folder.name, "study": dict(study), "provenance": [dict(provenance)]})
        stated = {key: value for key, value in row_identity(asked).items() if key not in ("routing", "seed")}
        if unknown := [key for key, value in stated.items() if value in (None, UNKNOWN)]:
            raise RunError(
                f"{folder}: neither study nor provenance says {', '.join(unknown)}, which every row carries;"
                " name model and engine in the study and pass kvlab.provenance.machine()"
            )
        database = Database.write(folder)
        try:
            if database.notes:
                asked["provenance"][0].setdefault("notes", []).extend(database.notes)
            with database.transaction("beginning it") as db:
                stored = read_record(db, folder.name)
                if stored is None:
                    write_study(db, asked["study"])
                    stored = {**asked, "provenance": []}
                else:
                    refuse_other(folder, stored, asked)
                stored["provenance"] += asked["provenance"]
                write_process(db, len(stored["provenance"]) - 1, asked["provenance"][0])
                run = cls(folder, stored, database)
                run._cases = {name for (name,) in db.execute('SELECT "case" FROM cases')}
        except BaseException:
            database.close()
            raise
        return run

    def add_case(self, case: str, text: str, phase: str, requests: Any, **facts: Any) -> None:
        """Store a case before its rounds; the same case again adds `facts` to it.

        Args:
            case: its name.
            text: it in the grammar, `NAME=[N*]Q[@K][c][:D],...`.
            phase: decode, verify, prefill, chunk or hit.
            requests: JSON-able.
            facts: further columns of `cases`, JSON-able.

        Raises:
            RunError: for a name that stands for another case here.
        """
        with self._writing(f"storing case {case!r}") as db:
            write_case(db, case, text, phase, requests)
            merge_facts(db, case, facts)
        self._cases.add(case)

    def case_facts(self, case: str, **facts: Any) -> None:
        """Add facts to a stored case; a fact of the same name is replaced."""
        self._require_case(case, "its facts")
        with self._writing(f"storing facts of case {case!r}") as db:
            merge_facts(db, case, facts)

    def add_round(self, case: str, mode: str, round: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store one finished round: all of its rows or, whatever happens, none.

        Args:
            round: from 0.
            rows: each with `position` (of the arm in the round, from 0), `arm`, `fill`, `seed` (0 for a fill
                without chance), `replay` (from 0) and `us`; where known `sm_mhz`, `mem_mhz`, `watts`, `celsius`,
                `throttled`, `flagged` (bool); and `routing` unless the study says it.

        Raises:
            RunError: for a row that lacks one of these or has another key; a round that is stored already; a full
                or failing disk.
        """
        what = f"round {round} of case {case!r} ({mode})"
        self._require_case(case, what)
        where = f"{self.path}: {what}"
        samples = [tables.sample(row, f"{where}, row {i}", self.study) for i, row in enumerate(rows)]
        if not samples:
            raise RunError(f"{where} has no rows; store a round once it is measured")
        if len({(sample[0], sample[4]) for sample in samples}) < len(samples):
            raise RunError(f"{where} has a replay of a position twice; count replays from 0")
        with self._writing(f"storing {what}") as db:
            write_round(db, case, mode, int(round), self._process, samples)

    def add_verdict(self, case: str, mode: str, verdict: Mapping[str, Any]) -> None:
        """Store the verdict of a case in a mode, in place of an earlier one; JSON-able, with `verdict`."""
        what = f"the verdict of case {case!r} ({mode})"
        self._require_case(case, what)
        record = plain(dict(verdict))
        tables.check(TABLES["verdicts"], record, f"{self.path}: {what}", self.study)
        with self._writing(f"storing {what}") as db:
            write_verdict(db, case, mode, record)

    def add_kernels(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store kernel times, in place of earlier ones of the same case, mode and arm.

        Args:
            rows: each with `case`, `mode`, `arm`, `kernel` (short name), `us` (of one step), and what else is known
                of it, JSON-able.
        """
        self._add_records("kernels", rows, replace=True)

    def add_telemetry(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store readings, each with `case`, `mode`, `arm` and what the sensors said, JSON-able."""
        self._add_records("telemetry", rows, replace=False)

    def facts_of(self, case: str) -> dict[str, Any]:
        """What a run that is being written knows of a case beside its rounds; empty for one that is not stored."""
        with self._writing("reading facts") as db:
            return read_facts(db, case)

    def finished_rounds(self, case: str, mode: str) -> list[int]:
        """The numbers of the stored rounds, in order."""
        if self._database is None:
            samples = self.samples
            chosen = samples["round"][(samples["case"] == case) & (samples["mode"] == mode)]
            return sorted(set(chosen.tolist()))
        with self._database.snapshot() as db:
            return finished_rounds(db, case, mode)

    def verdict_of(self, case: str, mode: str) -> dict[str, Any] | None:
        """The verdict of a case in a mode as `add_verdict` took it; None before there is one."""
        return next((verdict for c, m, verdict in self._verdicts() if (c, m) == (case, mode)), None)

    @property
    def cases(self) -> pd.DataFrame:
        """One row per case: `case`, `text`, `phase`, `requests` (JSON text), its facts."""
        return self._frames("cases")["cases"]

    @property
    def samples(self) -> pd.DataFrame:
        """A row a timed replay, by round and position; `us` in microseconds. Columns: `kvlab.tables`."""
        return self._frames("samples")["samples"]

    def samples_of(self, case: str, mode: str) -> pd.DataFrame:
        """The rows of `samples` of one case in one mode; as quick in a long run as in a short one."""
        if self._database is None:
            samples = self.samples
            return samples[(samples["case"] == case) & (samples["mode"] == mode)].reset_index(drop=True)
        with self._database.snapshot() as db:
            return tables.frame(TABLES["samples"], read_samples(db, case, mode), self._identity)

    @property
    def verdicts(self) -> pd.DataFrame:
        """One row per case and mode, the verdict's nested keys flattened: `aa_gap`, `median_us_<arm>`, ..."""
        return self._frames("verdicts")["verdicts"]

    @property
    def gaps(self) -> pd.DataFrame:
        """One row per case, mode and compared arm: `gap`, `ci90_lo`, `ci90_hi`, `verdict`, and what the case is."""
        return gap_table(self._verdicts(), self._identity)

    @property
    def kernels(self) -> pd.DataFrame:
        """One row per kernel of an arm."""
        return self._frames("kernels")["kernels"]

    @property
    def telemetry(self) -> pd.DataFrame:
        """One row per reading."""
        return self._frames("telemetry")["telemetry"]

    def export(self, folder: str | Path) -> list[Path]:
        """Write each table that has rows as Parquet, and the rest as `provenance.json`; `open_run` reads both.

        Args:
            folder: absent, empty, or with an earlier export, which is replaced.

        Raises:
            RunError: for a folder with other files, or a failing disk.
        """
        record = {**self._record, "verdicts": self._verdicts()}
        return write_export(Path(folder).absolute(), record, self._frames(*TABLES))

    def close(self) -> None:
        """Fold the log into the one file and let others write; the tables can still be read."""
        if self._database is not None:
            self._database.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self._identity['model']} on {self._identity['engine']})"

    def _writing(self, doing: str) -> AbstractContextManager[sqlite3.Connection]:
        if self._database is None:
            raise RunError(f"{self.path} is an export, for reading; write to the run that it came from")
        return self._database.transaction(doing)

    def _require_case(self, case: str, what: str) -> None:
        if case not in self._cases and self._database is not None and self._database.writable:
            raise RunError(f"{self.path}: {what} comes before its case; call add_case({case!r}, ...) first")

    def _add_records(self, name: str, rows: Iterable[Mapping[str, Any]], replace: bool) -> None:
        listed: Iterable[Mapping[Any, Any]] = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
        records = [plain(dict(row)) for row in listed]
        for number, record in enumerate(records):
            tables.check(TABLES[name], record, f"{self.path}: {name} row {number}", self.study)
            self._require_case(record["case"], f"{name} row {number}")
        with self._writing(f"storing {name}") as db:
            write_records(db, name, records, replace)

    def _frames(self, *names: str) -> dict[str, pd.DataFrame]:
        """The named tables, all of one moment."""
        if self._database is None:
            return {name: read_table(self.path, name, self._record, self._identity) for name in names}
        with self._database.snapshot() as db:
            records = {name: read_records(db, name) for name in names}
        return {name: tables.frame(TABLES[name], records[name], self._identity) for name in names}

    def _verdicts(self) -> list[Any]:
        if self._database is None:
            return list(self._record["verdicts"])
        with self._database.snapshot() as db:
            return read_verdicts(db)


def open_run(path: str | Path) -> Run:
    """Open a run, finished, unfinished or being written, or an export of one, for reading.

    Args:
        path: the run's folder, its SQLite file, or the folder of an export.

    Raises:
        RunError: when there is no run, or not one that this kvlab can read.
    """
    place = Path(path).absolute()
    folder, file = (place, place / FILE) if place.is_dir() else (place.parent, place)
    refuse_other_file(place, RECORD)
    if file.is_file() and file.name != RECORD:
        database = Database.read(file)
        with database.snapshot() as db:
            record = read_record(db, folder.name)
        if record is None:
            raise RunError(f"no run at {place}; it ended before it began, so run the command again")
        return Run(folder, record, database)
    if (folder / RECORD).is_file() and place in (folder, folder / RECORD):
        return Run(folder, read_export(folder))
    raise RunError(f"no run at {place}; name the --out folder of a check, a sweep or an export")


def concat(runs: Iterable[Run | pd.DataFrame], table: str = "samples") -> pd.DataFrame:
    """One table of several runs; its rows stay apart by the identity that each carries.

    Args:
        runs: runs, or tables of them.
        table: which table of a Run: `cases`, `samples`, `verdicts`, `kernels` or `telemetry`.

    Raises:
        RunError: for rows without their identity, or the same run twice.
    """
    if table not in TABLES:
        raise RunError(f"a run has no table {table!r}; it has {', '.join(TABLES)}")
    return tables.concat(run._frames(table)[table] if isinstance(run, Run) else run for run in runs)
