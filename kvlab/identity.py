"""Layer 4: what a run is about: what its rows carry, and what must be equal for it to be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import RunError
from kvlab.provenance import IDENTITY, identity
from kvlab.tables import to_json


def row_identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Identity column -> what a run as a whole says of it.

    Args:
        record: `run` (its name), `study`, and `provenance`: one of each process that wrote.
    """
    study, found = record["study"], identity(record["provenance"][0])
    stated = {**(study.get("versions") or {}), "gpu": study.get("gpu")}
    seed = study.get("seed")
    return {
        "run": record["run"],
        "model": study.get("model"),
        "engine": study.get("engine"),
        **{key: str(stated.get(key) or value) for key, value in found.items()},
        "routing": study.get("routing"),
        "seed": seed if isinstance(seed, int | None) else to_json(seed),
    }


def refuse_other(folder: Path, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise RunError, naming the first difference, unless what is asked for is what the folder's run is about."""
    there, here = ({key: row_identity(side)[key] for key in IDENTITY} for side in (stored, asked))
    if found := difference(stored["study"], asked["study"]) or difference(there, here):
        key, old, new = found
        raise RunError(
            f"{folder} holds a run with {key} = {old}, not {new}; choose another --out, or remove the folder"
        )


def difference(old: Any, new: Any, key: str = "") -> tuple[str, str, str] | None:
    """The first key, dotted, under which two values differ, and both values as text."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else (key, to_json(old), to_json(new))
    for name in {**old, **new}:
        inner = f"{key}.{name}" if key else str(name)
        if name not in old or name not in new:
            shown = [to_json(side[name]) if name in side else "absent" for side in (old, new)]
            return inner, shown[0], shown[1]
        if found := difference(old[name], new[name], inner):
            return found
    return None
