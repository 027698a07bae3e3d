"""Layer 6: what runs say together: which run speaks for a case that several hold, and why its gap is there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.causes import find_cause
from kvlab.errors import KvlabError
from kvlab.export import run_files
from kvlab.gaps import gap_table
from kvlab.kernel_gaps import TOTAL, kernel_gap_table
from kvlab.kernel_names import SELECTION
from kvlab.pace import paces
from kvlab.plots.style import microseconds
from kvlab.plots.sweeps import zero_fraction
from kvlab.run import Run, open_run
from kvlab.tables import TABLES, frame

# A step as it was asked for; its name is not part of it.
STEP = ["model", "engine", "gpu", "routing", "phase", "context", "batch", "query", "topk"]
WHOLE = "whole step"
_MORE_WATTS = 1.02
# Names of `Grid.cases`: made for a sweep, not to answer for a model.
_SWEPT = r"^[a-z]+-b\d+-k\d+"


def open_runs(root: Path, having: Callable[[Run], Any] = bool) -> list[Run]:
    """The runs in the folders of `root` that have a verdict and what is asked for, by name."""
    places = filter(run_files, sorted(root.iterdir()) if root.is_dir() else ())
    return [run for run in map(open_run, places) if len(run.gaps) and having(run)]


def gap_rows(runs: Iterable[Run]) -> pd.DataFrame:
    """`Run.gaps` of all, and what they say of the run and step.

    Returns:
        With `rounds`, `arms` (how many), `utc` and `path` of the run (an export may have another name than the run that
        it is of), `swept` (the case is one of a grid) and `off_pace` (of `kvlab.pace`).
    """
    # Of no run: the columns and their types, for all that asks the table something.
    tables = [gap_table([], {}).assign(rounds=0, off_pace=False, arms=0, utc="", path="")]
    for run in runs:
        table = run.gaps.merge(paces(run), on=["case", "mode"], how="left", validate="m:1")
        arms = table.groupby(["case", "mode"])["arm"].transform("nunique")
        tables.append(table.assign(arms=arms, utc=str(run.provenance.get("utc", "")), path=str(run.path)))
    rows = pd.concat(tables[1:] or tables, ignore_index=True)
    rows["swept"] = rows["case"].astype("str").str.contains(_SWEPT, regex=True)
    return rows


def claim_gaps(gaps: pd.DataFrame, arm: str = "random") -> pd.DataFrame:
    """One row per model, routing, phase, context and mode: of the runs that were not sweeps, where a model has such.

    Of several batches at a context it is the largest; of several runs one that is not `off_pace`, then
    one that holds both modes, then that of most rounds.

    Args:
        gaps: of `gap_rows`.
    """
    # A step that could not be timed is part of the answer too.
    rows = gaps[(gaps["arm"] == arm) & (gaps["gap"].notna() | (gaps["verdict"] == "invalid"))]
    if rows.empty:
        return rows
    checked = ~rows["swept"].astype(bool)
    rows = rows[checked | ~rows["model"].isin(rows.loc[checked, "model"])]
    place = ["model", "engine", "routing", "phase", "context"]
    rows = rows[rows["batch"] == rows.groupby(place)["batch"].transform("max")]
    # Of as many rounds a run with few arms goes before one with many.
    kept = _speaking(rows.assign(fewer=-rows["arms"]), place, ["fewer"]).drop(columns="fewer")
    return kept.sort_values([*place[:3], "context", "phase", "mode"], kind="stable").reset_index(drop=True)


def context_gaps(gaps: pd.DataFrame, arm: str = "random") -> pd.DataFrame:
    """One row per model, phase, context and mode. A line over contexts is of one batch: the one with most contexts,
    then the largest; where no batch has two contexts, the largest batch at each.

    Of several runs of a step it is one that is not `off_pace`, then one that holds both modes, then that of most
    rounds, then the newest.

    Args:
        gaps: of `gap_rows`.
    """
    rows = gaps[(gaps["arm"] == arm) & gaps["context"].notna() & gaps["gap"].notna()]
    if rows.empty:
        return rows
    line = ["model", "engine", "routing", "phase"]
    contexts = rows.groupby([*line, "batch"])["context"].transform("nunique")
    most = contexts.groupby([rows[name] for name in line]).transform("max")
    rows = rows[contexts == most]
    largest = (
        rows.groupby(line)["batch"]
        .transform("max")
        .where(most > 1, rows.groupby([*line, "context"])["batch"].transform("max"))
    )
    rows = rows[rows["batch"] == largest]
    return _speaking(rows, [*line, "context"])


def sparsity_gaps(runs: Sequence[Run], axis: str) -> pd.DataFrame:
    """Gaps of the whole step along `topk` or `zero_fraction`, and of each role where its kernels were profiled.

    Args:
        runs: any; of those the steps count that were measured at several top-k, or under a zero fraction.

    Returns:
        The columns of `Run.gaps`, `part` (`WHOLE`, or a role; a role's gap is of the whole step's time, without a
        verdict) and, for that axis, `zero_fraction`.
    """
    rows = gap_rows(runs).assign(part=WHOLE)
    if axis == "topk":
        rows = rows[(rows["arm"] == "random") & rows["topk"].notna() & rows["gap"].notna()]
        line = [*(name for name in STEP if name != "topk"), "mode"]
        rows = rows[rows.groupby(line, dropna=False)["topk"].transform("nunique") > 1]
    else:
        shares = {arm: found for arm in rows["arm"].unique() if (found := zero_fraction(arm)) and found[0] == "random"}
        rows = rows[rows["arm"].isin(shares)]
        rows = rows.assign(zero_fraction=[shares[arm][1] for arm in rows["arm"]])
        line = [*STEP, "mode", "path"]
        rows = rows[rows.groupby(line, dropna=False)["zero_fraction"].transform("nunique") > 1]
        speaks = _speaking(rows, [*STEP])[[*STEP, "mode", "path"]]
        rows = rows.merge(speaks, on=[*STEP, "mode", "path"])  # a line is of one run
    rows = _speaking(rows, [*STEP, "arm"])
    kernels = {str(run.path): run.kernels for run in runs}
    parts = [{**row, **part} for row in rows.to_dict("records") for part in _parts(kernels[row["path"]], row)]
    return pd.concat([rows, pd.DataFrame(parts, columns=rows.columns)], ignore_index=True) if parts else rows


def _parts(kernels: pd.DataFrame, row: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Each role's part of a gap, as shares of the step; none where the two arms were not profiled."""
    of = kernels[(kernels["case"] == row["case"]) & (kernels["mode"] == row["mode"])]
    if not {"zeros", row["arm"]} <= set(of["arm"]):
        return []
    table = kernel_gap_table(of, str(row["arm"]), by="role").set_index("role")
    step = float(table["baseline_us"][TOTAL])
    return [
        {"part": role, "gap": us / step, "ci90_lo": low / step, "ci90_hi": high / step, "verdict": ""}
        for role, us, low, high in table[["gap_us", "lo_us", "hi_us"]].itertuples()
        if role != TOTAL
    ]


def profiled_cases(runs: Sequence[Run]) -> list[tuple[Run, str, str]]:
    """Of each model the case and mode with the largest gap among those whose kernels were profiled.

    Cases of a grid come last, and before them those that are `off_pace`.
    """
    found: dict[str, tuple[tuple[Any, ...], tuple[Run, str, str]]] = {}
    for run in runs:
        kernels = run.kernels[run.kernels["arm"] == "random"]
        rows = gap_rows([run])
        keys = set(zip(kernels["case"], kernels["mode"], strict=True))
        for row in rows[rows["arm"] == "random"].to_dict("records"):
            if (row["case"], row["mode"]) not in keys:
                continue
            gap = 0.0 if math.isnan(row["gap"]) else abs(row["gap"])
            rank = (not row["swept"], not row["off_pace"], gap)
            if row["model"] not in found or rank > found[row["model"]][0]:
                found[row["model"]] = (rank, (run, row["case"], row["mode"]))
    return [case for _, case in found.values()]


def other_arms(runs: Iterable[Run]) -> pd.DataFrame:
    """The gaps of contents that are neither random, nor zero in part, nor a mix of such: `prefill`, shapes of scores.

    Columns as of `gap_rows`, one row per step, mode and arm; with the row of `random` that was timed beside them.
    """
    rows = gap_rows(runs)
    rows = rows[rows["gap"].notna()]
    usual = rows["arm"].map(lambda arm: zero_fraction(arm) is not None or arm.startswith("mix(kv=")).astype(bool)
    beside = (~usual).groupby([rows[key] for key in ("path", "case", "mode")]).transform("any")
    return _speaking(rows[~usual | (beside & (rows["arm"] == "random"))], [*STEP, "arm"])


def readings(cases: Iterable[tuple[Run, str, str]]) -> pd.DataFrame:
    """The replays under zeros and random of some cases of some runs, for `kvlab.plots.plot_clocks`."""
    tables = [run.samples_of(case, mode) for run, case, mode in cases] or [frame(TABLES["samples"], [], {})]
    rows = pd.concat([table[table["arm"].isin(("zeros", "random"))] for table in tables], ignore_index=True)
    # One model's run needs no second name above its bars.
    return rows.assign(run="")


def find_causes(
    runs: Iterable[Run], rows: pd.DataFrame, loads: Iterable[Mapping[str, Any]] = ()
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Why the gaps are there: step and mode -> a stored `cause` of the same step, else what the replays tell.

    Args:
        runs: all that may know.
        rows: of `gap_rows`; a cause is looked for of each.
        loads: of `records(root, "loads")`: how far the routing moved in steps whose run did not count it.

    Returns:
        Keys as of `step_key`; fields as of `kvlab.causes.Cause`, as a mapping.
    """
    runs = list(runs)
    stored: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: str(run.provenance.get("utc", ""))):
        known_rows = gap_rows([run])
        for row in known_rows[known_rows["arm"] == "random"].to_dict("records"):
            if cause := (run.verdict_of(row["case"], row["mode"]) or {}).get("cause"):
                stored[step_key(row)] = cause
                if not row["swept"]:  # at the model's own top-k, which older runs do not say
                    stored[step_key({**row, "topk": None})] = cause
    by_path = {str(run.path): run for run in runs}
    counted = {(row["model"], row["routing"], row["case"].partition("=")[0]): row["moved"] for row in loads}
    causes = {}
    for row in rows.to_dict("records"):
        key = step_key(row)
        run = by_path[row["path"]]
        verdict = run.verdict_of(row["case"], row["mode"]) or {}
        # The run's own before another's of the same step.
        known = verdict.get("cause") or stored.get(key)
        # Another run of the same step may have seen no gap where this one did.
        if known and not (known["kind"] == "none" and row["verdict"] == "different"):
            causes[key] = known
            continue
        telemetry = run.telemetry
        of = telemetry[(telemetry["case"] == row["case"]) & (telemetry["mode"] == row["mode"])]
        moved = verdict.get("routing_moved") or {}
        try:
            samples = run.samples_of(row["case"], row["mode"])
            routed = moved.get(row["arm"], counted.get((row["model"], row["routing"], row["case"])))
            found = find_cause(samples, None, row["arm"], telemetry=of, routing_moved=routed)
        except KvlabError:
            continue
        causes[key] = asdict(found)
    return causes


def step_key(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What tells a step in a mode from others, whatever run holds it and whatever its name."""
    return tuple(None if pd.isna(row[name]) else row[name] for name in [*STEP, "mode"])


def cause_clause(cause: Mapping[str, Any] | None) -> str:
    """A cause in a few words: `clock 1,845 to 1,620 MHz, 591 to 692 W`, `top-k -24 µs`."""
    if not cause:
        return "not looked for"
    kind, roles = cause["kind"], dict(cause.get("roles") or {})
    if kind == "none":
        return "within the noise"
    if kind == "clocks":
        return "likely " * bool(cause.get("likely")) + _clock(cause)
    if kind == "routing":
        return f"{100 * float(cause['routing']):.0f} % of the tokens go to other experts"
    if kind == "selection":
        us = float(cause["selection"]["us"])
        names = [name for name in SELECTION if roles.get(name, 0.0) * us > 0]
        if not names:  # nothing was profiled: told from the 2x2 of the cache's roles
            return f"the indexer's contents {_signed(us)}"
        return _moved(roles, sorted(names, key=lambda name: -abs(roles[name]))[:2])
    if kind == "cancelling":
        ends = [min(roles, key=lambda name: roles[name]), max(roles, key=lambda name: roles[name])]
        return _moved(roles, sorted(ends, key=lambda name: -abs(roles[name])), " against ") + _beside(cause)
    if kind == "kernels" and roles:
        return _moved(roles, [max(roles, key=lambda name: abs(roles[name]))])
    return ("not known: no kind of kernel moved enough" if roles else "kernels not profiled") + _beside(cause)


def _clock(cause: Mapping[str, Any]) -> str:
    before, after = cause["mhz"]
    watts = cause.get("watts")
    # At the limit both arms draw what they may.
    told = f", {watts[0]:.0f} to {watts[1]:.0f} W" if watts and watts[1] > watts[0] * _MORE_WATTS else ""
    return f"clock {before:,.0f} to {after:,.0f} MHz{told}"


def _beside(cause: Mapping[str, Any]) -> str:
    """The clock, where it moved too."""
    mhz = cause.get("mhz")
    return f", {_clock(cause)}" if mhz and abs(mhz[1] / mhz[0] - 1) >= 0.01 else ""


def _moved(roles: Mapping[str, float], names: Sequence[str], between: str = ", ") -> str:
    return between.join(f"{name} {_signed(roles[name])}" for name in names)


def _signed(us: float) -> str:
    return ("+" if us > 0 else "") + microseconds(us)


def records(root: Path, part: str) -> list[dict[str, Any]]:
    """The rows of the files `*-PART.json` beside the runs, e.g. of `selection` or `loads`."""
    return [row for path in sorted(root.glob(f"*-{part}.json")) for row in json.loads(path.read_text())]


def _speaking(rows: pd.DataFrame, place: list[str], then: Sequence[str] = ()) -> pd.DataFrame:
    """One row per place and mode: of a run that is not `off_pace`, then one with both modes there, then most rounds,
    then the last by `then`, then the newest."""
    modes = rows.groupby([*place, "path"], dropna=False)["mode"].transform("nunique")
    rows = rows.assign(modes=modes, paced=~rows["off_pace"].astype(bool))
    kept = _last(rows, [*place, "mode"], ["paced", "modes", "rounds", *then, "utc"])
    return kept.drop(columns=["paced", "modes"])


def _last(rows: pd.DataFrame, keys: list[str], by: list[str]) -> pd.DataFrame:
    """One row for each key, the last by `by`; in the order that they came in."""
    ordered = rows.sort_values(by, kind="stable")
    return ordered.drop_duplicates(keys, keep="last").sort_index()
