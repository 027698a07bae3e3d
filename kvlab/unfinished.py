"""Layer 6: which runs of the dashboard are not finished: the same settings go on with them, also after a restart.

One small file beside the runs says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.database import FILE
from kvlab.provenance import identity, machine

RECORD = "unfinished.json"


@dataclass(frozen=True)
class Left:
    """A run that was not finished.

    Attributes:
        folder: of the run.
        settings: as they were typed.
    """

    folder: Path
    settings: Mapping[str, Any]


def begin(runs: Path, spec: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
    """Where to measure a spec: in the run that it left unfinished, else in a new one; unfinished until `finish`.

    With other versions or another card it is another run.

    Args:
        runs: the folder of runs.
        spec: of `kvlab.background.start`.
        settings: JSON-able, for `last_left`.
    """
    records, key = _read(runs), _key(spec)
    found = records.pop(key, None)
    if found is None or not (runs / found["folder"] / FILE).is_file():
        name = f"{Path(spec['model']).name}-{spec['engine']}-{time.strftime('%Y%m%d-%H%M%S')}"
        found = {"folder": name, "settings": dict(settings)}
    _write(runs, {**records, key: found})
    return runs / str(found["folder"])


def finish(runs: Path, spec: Mapping[str, Any]) -> None:
    """The spec's run is done: the next one of the same spec begins another."""
    _write(runs, {key: found for key, found in _read(runs).items() if key != _key(spec)})


def last_left(runs: Path) -> Left | None:
    """The run that was begun last of those that are not finished; None where there is none."""
    for found in reversed(_read(runs).values()):
        if (runs / found["folder"] / FILE).is_file():
            return Left(runs / found["folder"], found["settings"])
    return None


def _key(spec: Mapping[str, Any]) -> str:
    return json.dumps([spec, identity(machine())], sort_keys=True)


def _read(runs: Path) -> dict[str, dict[str, Any]]:
    try:
        stored: dict[str, dict[str, Any]] = json.loads((runs / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # nothing was begun here, or the file is lost: the runs are still there to be opened
    return stored


def _write(runs: Path, records: Mapping[str, Any]) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    draft = runs / f"{RECORD}.new"
    draft.write_text(json.dumps(records, indent=1), encoding="utf-8")
    draft.replace(runs / RECORD)
