"""Layer 4: a run as Parquet files and one JSON file, to keep or to pass on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.database import FILE, FORMAT
from kvlab.errors import RunError
from kvlab.tables import TABLES, frame

RECORD = "provenance.json"
# Wide tables of few rows: what Parquet says of a column weighs more than its values (one case: 37 KB, not 179).
_LEAN: dict[str, Any] = {"store_schema": False, "write_statistics": False, "use_dictionary": False}


def run_files(folder: Path) -> list[Path]:
    """The files that make a folder one that `kvlab.open_run` opens; empty where it is none."""
    return [file for file in (folder / FILE, folder / RECORD) if file.is_file()]


def write_export(folder: Path, record: Mapping[str, Any], frames: Mapping[str, pd.DataFrame]) -> list[Path]:
    """Write each table that has rows as `TABLE.parquet`, and the record, with their rows, as `provenance.json`.

    Raises:
        RunError: for a folder with other files than an earlier export's, or a failing disk.
    """
    files = {name: folder / f"{name}.parquet" for name in TABLES}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if others := {*folder.iterdir()} - {*files.values(), folder / RECORD}:
            raise RunError(f"{folder} holds other files ({min(others).name}); export to a folder of its own")
        for file in (folder / RECORD, *files.values()):
            file.unlink(missing_ok=True)
        written = [files[name] for name, data in frames.items() if len(data)]
        for file in written:
            frames[file.stem].to_parquet(file, engine="pyarrow", compression="zstd", index=False, **_LEAN)
        # Last, so that half an export does not open as a run.
        rows = {file.stem: len(frames[file.stem]) for file in written}
        text = json.dumps({"format": FORMAT, **record, "tables": rows}, indent=1, ensure_ascii=False)
        (folder / RECORD).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: {error.strerror or error} while exporting; free or choose another folder") from error
    return [*written, folder / RECORD]


def read_export(folder: Path) -> dict[str, Any]:
    """The record that `write_export` wrote.

    Raises:
        RunError: for a file that is no such record, or that a newer kvlab wrote.
    """
    file = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] > FORMAT:
            raise RunError(f"{file} has table format {record['format']}, this kvlab knows {FORMAT}; upgrade kvlab")
        if missing := {"run", "study", "provenance", "verdicts"} - record.keys():
            raise KeyError(*missing)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} is not the record of an export; export the run again") from error
    return record


def read_table(folder: Path, name: str, record: Mapping[str, Any], identity: Mapping[str, Any]) -> pd.DataFrame:
    """The table as it was exported; empty where it had no rows.

    Args:
        record: of `read_export`.

    Raises:
        RunError: for a file that is absent, damaged, or of other rows than the record says.
    """
    file = folder / f"{name}.parquet"
    rows = record["tables"].get(name, 0) if "tables" in record else None  # absent: of a kvlab that did not count
    if not file.exists():
        if rows:
            raise RunError(f"{file} is missing, with {rows} rows; copy the export whole, or export the run again")
        return frame(TABLES[name], [], identity)
    try:
        table = frame(TABLES[name], pd.read_parquet(file, engine="pyarrow"), identity)
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is not a readable Parquet file; export the run again") from error
    if rows not in (None, len(table)):
        raise RunError(f"{file} has {len(table)} rows where its export wrote {rows}; export the run again")
    return table
