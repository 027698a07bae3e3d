"""Layer 4: which kernels a gap is made of: the times of each under two arms, pure."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd

from kvlab.errors import StudyError
from kvlab.estimates import BASELINE
from kvlab.intervals import Floats, student_quantile
from kvlab.kernel_names import OTHER, REST

TOTAL = "(total)"
_COLUMNS = ("role", "kernel", "baseline_us", "arm_us", "gap_us", "lo_us", "hi_us", "share", "of_step")


def kernel_gap_table(
    kernels: pd.DataFrame, arm: str = "random", baseline: str = BASELINE, by: str = "kernel"
) -> pd.DataFrame:
    """The times of each kernel, or of each role, under two arms, and what each adds to the gap.

    Args:
        kernels: one case in one mode, as `Run.kernels`: `arm`, `kernel`, `role`, `us` (of one step), and `us_each` (by
            replay; lists or their JSON text) where it was kept. A kernel that comes several times in an arm was
            profiled on several visits.
        by: `kernel` or `role`.

    Returns:
        Columns `role`, `kernel` (none by role), `baseline_us`, `arm_us`, `gap_us`; `lo_us`, `hi_us`: the gap's 90 %
        interval by Welch, over visits where there are several, else over replays, which share their moment: it then
        says how steady the kernel was, not how the gap would repeat; NaN where neither is known. `share`: of the
        total gap (NaN where that is 0); `of_step`: of the baseline's total. Largest gap first, then the rest between
        kernels, then a closing row with the totals, to which the others add.

    Raises:
        StudyError: when a column or an arm is missing, or rows of several cases or modes are mixed.
    """
    if arm == baseline:
        raise StudyError(f"the gap of {arm!r} against itself is asked for; give another arm")
    if by not in ("kernel", "role"):
        raise StudyError(f"a table of kernels by {by!r} is unknown; give kernel or role")
    rows = _checked(kernels, (baseline, arm))
    keys = ["role", "kernel"] if by == "kernel" else ["role"]
    tables = {name: _by_key(rows[rows["arm"] == name], keys) for name in (baseline, arm)}
    steady = [max((len(each) for _, each in table.values()), default=0) for table in tables.values()]
    found = []
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        (base_us, base), (arm_us, other) = (
            table.get(key, (0.0, np.zeros(count))) for table, count in zip(tables.values(), steady, strict=True)
        )
        half = _welch(base, other)
        gap = arm_us - base_us
        numbers = {"baseline_us": base_us, "arm_us": arm_us, "gap_us": gap, "lo_us": gap - half, "hi_us": gap + half}
        found.append({**dict(zip(keys, key, strict=True)), **numbers})
    table = pd.DataFrame(found)
    order = table["gap_us"].abs().where(table["role"] != REST, -1.0)
    table = table.loc[order.sort_values(ascending=False, kind="stable").index]
    sums = table[["baseline_us", "arm_us", "gap_us"]].sum()
    closing = {"role": TOTAL, "kernel": TOTAL, **sums, "lo_us": math.nan, "hi_us": math.nan}
    table = pd.concat([table, pd.DataFrame([{k: v for k, v in closing.items() if k in table}])], ignore_index=True)
    table["share"] = table["gap_us"] / (sums["gap_us"] or math.nan)
    table["of_step"] = table["gap_us"] / (sums["baseline_us"] or math.nan)
    return table[[column for column in _COLUMNS if column in table]]


def profiled_samples(kernels: pd.DataFrame, arm: str = "random", baseline: str = BASELINE) -> str:
    """What the intervals of `kernel_gap_table` are over, `3 profiled replays` or `2 visits`; empty where they are not.

    Args:
        kernels, arm, baseline: as there.
    """
    rows = _checked(kernels, (baseline, arm))
    visits, counts = False, []
    for name in (baseline, arm):
        of_arm = rows[rows["arm"] == name]
        visits = visits or bool(of_arm.duplicated(["kernel", "role"]).any())
        counts.append(max((len(each) for _, each in _by_key(of_arm, ["role"]).values()), default=0))
    return f"{min(counts)} {'visits' if visits else 'profiled replays'}" if min(counts) > 1 else ""


def _checked(kernels: pd.DataFrame, arms: tuple[str, str]) -> pd.DataFrame:
    if missing := [column for column in ("arm", "kernel", "us") if column not in kernels]:
        raise StudyError(f"kernels lack column {missing[0]!r}; they need arm, kernel, us")
    for column in ("run", "case", "mode"):
        if column in kernels and kernels[column].nunique() > 1:
            found = ", ".join(map(str, kernels[column].unique()[:3]))
            raise StudyError(f"kernels mix values of {column!r} ({found}, ...); look at one {column} at a time")
    profiled = list(dict.fromkeys(kernels["arm"]))
    for arm in arms:
        if arm not in profiled:
            raise StudyError(f"no kernels of arm {arm!r}; profiled arms are {', '.join(map(repr, profiled)) or 'none'}")
    role = kernels["role"].fillna(OTHER) if "role" in kernels else OTHER
    return kernels.assign(role=role)


def _by_key(rows: pd.DataFrame, keys: list[str]) -> dict[tuple[Any, ...], tuple[float, Floats]]:
    """Microseconds by key, and the values by visit or by replay that they are the mean of; none where unknown."""
    visit = rows.groupby(["kernel", "role"]).cumcount()
    visits = int(visit.max()) + 1
    table: dict[tuple[Any, ...], tuple[float, Floats]] = {}
    for key, group in rows.assign(visit=visit).groupby(keys, sort=False):
        us = group["us"].to_numpy(float)
        if visits > 1:
            each: Floats = np.bincount(group["visit"], weights=us, minlength=visits).astype(np.float64)
            table[tuple(key)] = float(each.mean()), each
            continue
        lists = [_numbers(value) for value in group["us_each"]] if "us_each" in group else []
        known = lists and len({len(values) for values in lists}) == 1
        table[tuple(key)] = float(us.sum()), np.sum(lists, axis=0) if known else np.zeros(0)
    return table


def _numbers(value: Any) -> Floats:
    if isinstance(value, str):
        value = json.loads(value)
    return np.asarray(value if isinstance(value, (list, tuple, np.ndarray)) else [], dtype=np.float64)


def _welch(a: Floats, b: Floats) -> float:
    """Half-width of the 90 % interval of a difference of means; NaN for fewer than two values on a side."""
    if min(len(a), len(b)) < 2:
        return math.nan
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    if not sum(parts):
        return 0.0
    df = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (a, b), strict=True))
    return student_quantile(0.05, max(1.0, df)) * math.sqrt(sum(parts))
