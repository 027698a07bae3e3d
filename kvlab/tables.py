"""Layer 4: the tables of a run as DataFrames: their columns, and the identity that every row carries."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvlab.errors import RunError

# `seed` is the arm's own in `samples`, else the study's unless the record says otherwise.
IDENTITY = ("run", "model", "engine", "gpu", "kvlab", "torch", "vllm", "routing", "seed")

_KINDS: dict[str, Any] = {
    "str": str,
    "int64": int,
    "float64": (int, float),
    "bool": bool,
    "boolean": bool,
}

Records: TypeAlias = Iterable[Mapping[str, Any]] | pd.DataFrame


@dataclass(frozen=True)
class Table:
    """One table of a run.

    Attributes:
        name: `cases`, `samples`, `verdicts`, `kernels` or `telemetry`.
        columns: column -> dtype of what every frame has, an empty one too.
        optional: column -> dtype of what a frame has where some row has a value.
        required: what a record must say when it is stored.
    """

    name: str
    columns: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()


TABLES = {
    table.name: table
    for table in (
        # Then the facts of `add_case` and `case_facts`, flattened.
        Table("cases", {"case": "str", "text": "str", "phase": "str", "requests": "str"}),
        Table(
            "samples",
            {
                "case": "str",
                "mode": "str",
                "round": "int64",
                "process": "int64",  # index of the process that timed the round, from 0
                "position": "int64",  # of the arm in its round, from 0
                "arm": "str",
                "fill": "str",
                "seed": "int64",
                "replay": "int64",
                "us": "float64",
                "flagged": "bool",
            },
            {
                "sm_mhz": "float64",
                "mem_mhz": "float64",
                "watts": "float64",
                "celsius": "float64",
                "throttled": "boolean",
            },
            required=("position", "arm", "fill", "seed", "replay", "us"),
        ),
        # Then the verdict's further keys, flattened: median_us_<arm>, finite_<arm>, ...
        Table(
            "verdicts",
            {
                "case": "str",
                "phase": "str",
                "mode": "str",
                "margin": "float64",
                "verdict": "str",
                "gap": "float64",
                "ci90_lo": "float64",
                "ci90_hi": "float64",
                "aa_gap": "float64",
                "aa_ci90_lo": "float64",
                "aa_ci90_hi": "float64",
                "mde": "float64",
                "rounds": "int64",
            },
            required=("verdict",),
        ),
        # Then whatever the profiler says of a kernel: role, calls, us_each, ...
        Table(
            "kernels",
            {"case": "str", "mode": "str", "arm": "str", "kernel": "str", "us": "float64"},
            required=("case", "mode", "arm", "kernel", "us"),
        ),
        # Then whatever the sensors say: t_s, sm_mhz, mem_mhz, watts, celsius, throttled, ...
        Table("telemetry", {"case": "str", "mode": "str", "arm": "str"}, required=("case", "mode", "arm")),
    )
}

# A row of `Run.add_round`, in the order of the columns.
SAMPLE = (
    *(c for c in TABLES["samples"].columns if c not in ("case", "mode", "round", "process")),
    *TABLES["samples"].optional,
    "routing",
)


def check(table: Table, record: Mapping[str, Any], where: str, study: Mapping[str, Any]) -> None:
    """See that a record says what the table requires, in the types that it has, and who it is of.

    Args:
        record: of plain Python values.
        where: for the message, as in "round 3 of case 'c', row 7".
        study: says `routing` and `seed` where the record does not.

    Raises:
        RunError: naming the key that is absent or of another type.
    """
    for name in table.required:
        if _absent(record.get(name)):
            raise RunError(f"{where} says no {name!r}; it must say {', '.join(table.required)}")
    for name in ("routing", "seed"):
        if _absent(record.get(name)) and _absent(study.get(name)):
            raise RunError(f"{where} says no {name!r}, nor does the study; say it in one of them")
    for name, value in flatten(record).items():
        dtype = table.columns.get(name) or table.optional.get(name)
        if not dtype or _absent(value):
            continue
        if not isinstance(value, _KINDS[dtype]) or (dtype == "int64" and not -(2**63) <= value < 2**63):
            raise RunError(f"{where} has {name} = {value!r}, which is not of type {dtype}; correct the value")


def sample(row: Mapping[str, Any], where: str, study: Mapping[str, Any]) -> list[Any]:
    """The values of a row of `Run.add_round`, in the order of `SAMPLE`; arguments as of `check`.

    Raises:
        RunError: as `check`, and for an unknown key or a time that is not finite and positive.
    """
    record = {key: value.item() if isinstance(value, np.generic) else value for key, value in row.items()}
    if unknown := [key for key in record if key not in SAMPLE]:
        raise RunError(f"{where} has an unknown key {unknown[0]!r}; it may say {', '.join(SAMPLE)}")
    check(TABLES["samples"], record, where, study)
    if not (math.isfinite(record["us"]) and record["us"] > 0):
        raise RunError(f"{where} (arm {record['arm']!r}) took {record['us']} us; a time is finite and above 0")
    record["flagged"] = bool(record.get("flagged"))
    return [record.get(key) for key in SAMPLE]


def frame(table: Table, records: Records, identity: Mapping[str, Any]) -> pd.DataFrame:
    """The table as a DataFrame.

    Columns come in the table's order, then what else the records say, then `IDENTITY`. A column without a single
    value is left out unless the table always has it.

    Args:
        records: one mapping a row; nested mappings and intervals are flattened.
        identity: `IDENTITY` column -> value; the run's word stands for all but `routing` and `seed`, where a
            record's own does.
    """
    data = records if isinstance(records, pd.DataFrame) else pd.DataFrame([flatten(r) for r in records])
    if data.empty:
        return _empty(table)
    columns: dict[str, pd.Series] = {}
    for name, dtype in table.columns.items():
        column = data[name] if name in data else pd.Series(None, index=data.index, dtype="object")
        columns[name] = _typed(column, dtype)
    for name in (*table.optional, *(str(c) for c in data if c not in table.optional)):
        if name in data and name not in columns and name not in IDENTITY and data[name].notna().any():
            columns[name] = _typed(data[name], table.optional.get(name))
    for name in IDENTITY:
        if name in columns:
            columns[name] = columns.pop(name)
            continue
        column = pd.Series(identity.get(name), index=data.index)
        if name in ("routing", "seed") and name in data and data[name].notna().any():
            column = data[name].where(data[name].notna(), column)
        columns[name] = _typed(column, None)
    return pd.DataFrame(columns)


def concat(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Put the tables of several runs into one.

    Raises:
        RunError: for no frames; a frame that lacks an identity column or the value of one, or whose timed rows
            lack their arm; a run that comes twice.
    """
    kept: list[pd.DataFrame] = []
    seen: set[str] = set()
    for number, data in enumerate(frames):
        needed = [*IDENTITY, *(["arm"] if "us" in data else [])]
        if missing := [name for name in needed if name not in data]:
            raise RunError(
                f"table {number} has no column {', '.join(missing)}: rows of different runs would be mixed"
                " unseen; take tables from a Run"
            )
        for name in needed:
            if data[name].isna().any():
                row = int(np.argmax(data[name].isna().to_numpy()))
                raise RunError(f"table {number}, row {row} has no {name}; take tables from a Run")
        names = set(data["run"])
        if names & seen:
            raise RunError(
                f"run {sorted(names & seen)[0]!r} comes twice, so its rows could not be told apart;"
                " leave one out, or rename the folder of one"
            )
        seen |= names
        kept.append(data)
    if not kept:
        raise RunError("no tables to put into one; name at least one run")
    filled = [data for data in kept if len(data)]
    return pd.concat(filled, ignore_index=True) if filled else kept[0].reset_index(drop=True)


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to flat columns: `{"aa": {"gap": g, "ci90": [a, b]}}` to `aa_gap, aa_ci90_lo, aa_ci90_hi`.

    A pair under a key that begins with `ci` is an interval; any other list becomes its JSON text.
    """
    flat: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(flatten(value, f"{name}_"))
        elif isinstance(value, (list, tuple)):
            if str(key).startswith("ci") and len(value) == 2:
                flat[f"{name}_lo"], flat[f"{name}_hi"] = value
            else:
                flat[name] = to_json(value)
        else:
            flat[name] = value
    return flat


def to_json(value: Any) -> str:
    """JSON text of plain values and of NumPy's; RunError for what has no JSON form."""
    try:
        return json.dumps(value, default=_from_numpy, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise RunError(f"cannot store a value: {error}; pass numbers, text, lists and mappings") from error


def plain(value: Any) -> Any:
    """The value as it comes back from disk."""
    return json.loads(to_json(value))


def _absent(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _typed(column: pd.Series, dtype: str | None) -> pd.Series:
    gaps = bool(column.isna().any())
    if dtype is None or dtype == "str":
        return _one_type(column, gaps)
    if dtype == "int64" and gaps:
        return column.astype("float64")
    if dtype in ("bool", "boolean"):
        return column.astype("boolean" if gaps else "bool")
    return column.astype(np.dtype(dtype))


def _one_type(column: pd.Series, gaps: bool) -> pd.Series:
    """A column of one type: booleans with gaps as `boolean`, values of several types as their JSON texts."""
    types = {type(value) for value in column[column.notna()]} if column.dtype == object else set()
    if types == {bool}:
        return column.astype("boolean" if gaps else "bool")
    if types and types <= {int, float}:
        return column.astype("float64")
    if types and types != {str}:
        texts = [None if pd.isna(v) else v if isinstance(v, str) else to_json(v) for v in column]
        return pd.Series(texts, index=column.index)
    return column


def _empty(table: Table) -> pd.DataFrame:
    dtypes = {**table.columns, **{name: "str" for name in IDENTITY if name != "seed"}, "seed": "int64"}
    order = [*(c for c in table.columns if c not in IDENTITY), *IDENTITY]
    return pd.DataFrame({name: pd.Series(dtype=dtypes[name]) for name in order})
