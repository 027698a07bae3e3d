"""Layer 6: what runs say, row by row, as plain values for any report of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.errors import KvlabError, RunError
from kvlab.estimates import round_table
from kvlab.pace import paces
from kvlab.report.measured import Interval, Measured, finite
from kvlab.run import Run, open_run
from kvlab.stats import AGAIN, BASELINE, holm

# Worst first: what a reader must see before the rest.
VERDICTS = ("different", "inconclusive", "invalid", "unfinished", "equivalent")


@dataclass(frozen=True)
class Row:
    """One case in one mode of one run, decided or not.

    Attributes:
        run: the run's label, unique within a report.
        mode: empty for a case that was not begun.
        verdict: as the run has it; `unfinished` before there is one.
        arm: whose gap against `zeros` it is.
        gap, ci90, aa_gap, aa_ci90, mde: fractions; None where not known.
        rounds, planned: done, and asked for (None where the run does not say).
        zeros_us: median time under zeros.
        mhz, watts: medians under `zeros` and under the arm; None where not sensed.
        cycles_gap, cycles_ci90: the gap of time x SM clock: what is left when the clock is taken out; for
            `different` and `inconclusive` alone.
        p: of "the gap is within the margin"; None where the case was not judged.
        p_holm: p adjusted for all rows of the report that have one.
        reasons: sentences of the verdict.
        cause: a sentence; the verdict's, else, for the same two, what `kvlab.causes` finds in what is stored.
        parts: of the gap, with intervals: the verdict's `cause` as a mapping; empty where nobody looked.
        profiles: arm -> how its kernels add up to the timed step; empty where nothing was profiled.
        also: margin as text -> verdict there.
        off_pace: timed at another pace than the mode means, see `kvlab.pace`.
    """

    run: str
    model: str
    engine: str
    gpu: str
    routing: str
    case: str
    text: str
    phase: str
    mode: str
    verdict: str
    margin: float
    arm: str = "random"
    gap: float | None = None
    ci90: Interval | None = None
    aa_gap: float | None = None
    aa_ci90: Interval | None = None
    mde: float | None = None
    rounds: int = 0
    planned: int | None = None
    zeros_us: float | None = None
    mhz: Interval | None = None
    watts: Interval | None = None
    cycles_gap: float | None = None
    cycles_ci90: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    reasons: tuple[str, ...] = ()
    cause: str | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    profiles: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    off_pace: bool = False

    @property
    def progress(self) -> str:
        """`7 of 20`, or `7` where the run does not say how many were asked for."""
        return f"{self.rounds} of {self.planned}" if self.planned else str(self.rounds)


@dataclass(frozen=True)
class RunFacts:
    """One run, read once.

    Attributes:
        label: its folder's name, with as much of the path as tells it from the others.
        gaps, samples, kernels: its tables, with the label as `run`.
        provenance: as the run has it.
    """

    label: str
    rows: tuple[Row, ...]
    gaps: pd.DataFrame
    samples: pd.DataFrame
    kernels: pd.DataFrame
    provenance: Mapping[str, Any]
    study: Mapping[str, Any]


def read_runs(runs: Sequence[Path | str | Run]) -> tuple[list[RunFacts], list[str]]:
    """The facts of each run that can be read, and a sentence for each that cannot.

    Raises:
        RunError: when no run is named or none can be read.
    """
    opened: list[Run] = []
    missing: list[str] = []
    seen: set[Path] = set()
    for run in runs:
        try:
            found = run if isinstance(run, Run) else open_run(run)
        except KvlabError as error:
            missing.append(str(error))
            continue
        if found.path.resolve() not in seen:
            seen.add(found.path.resolve())
            opened.append(found)
    if not opened:
        raise RunError("; ".join(missing) or "no run to report on; name the folder of a check or a sweep")
    labels = _labels([run.path for run in opened])
    facts = []
    for run, label in zip(opened, labels, strict=True):
        try:
            facts.append(read_run(run, label))
        except KvlabError as error:
            missing.append(str(error))
    if not facts:
        raise RunError("; ".join(missing))
    rows = adjusted([row for each in facts for row in each.rows])
    by_run = {label: tuple(row for row in rows if row.run == label) for label in labels}
    return [replace(each, rows=by_run[each.label]) for each in facts], missing


def read_run(run: Run, label: str | None = None) -> RunFacts:
    """The facts of one run as it is on disk now; `p_holm` is within it."""
    label = label or run.path.name
    cases, samples, verdicts = run.cases, run.samples, run.verdicts
    kernels, telemetry = run.kernels, run.telemetry
    groups = {
        (str(case), str(mode)): Measured(of, _of(kernels, case, mode), _of(telemetry, case, mode))
        for (case, mode), of in samples.groupby(["case", "mode"], sort=False)
    }
    facts: dict[str, Any] = {str(row["case"]): row for row in cases.to_dict("records")}
    decided = list(zip(verdicts["case"], verdicts["mode"], strict=True))
    identity: dict[str, Any] = {key: str(value) for key, value in _identity(run, verdicts, samples, cases).items()}
    rows = [
        _decided(run.verdict_of(case, mode) or {}, groups.get((case, mode)), case, mode, identity, label)
        for case, mode in decided
    ]
    rows += [
        _unfinished(groups[key], facts.get(key[0], {}), key, identity, label, run.study)
        for key in groups
        if key not in decided
    ]
    of_pace = paces(run)
    off_pace = set(of_pace.loc[of_pace["off_pace"], ["case", "mode"]].itertuples(index=False, name=None))
    rows = [replace(row, off_pace=(row.case, row.mode) in off_pace) for row in rows]
    begun = {row.case for row in rows}
    for case, fact in facts.items():
        if case not in begun:
            rows.append(_unfinished(None, fact, (case, ""), identity, label, run.study))
    return RunFacts(
        label,
        tuple(adjusted(rows)),
        run.gaps.assign(run=label),
        samples.assign(run=label),
        kernels.assign(run=label),
        run.provenance,
        run.study,
    )


def adjusted(rows: Iterable[Row]) -> list[Row]:
    """The rows with Holm's p-values over all of them that have one."""
    rows = list(rows)
    judged = [i for i, row in enumerate(rows) if row.p is not None]
    if judged:
        for i, p in zip(judged, holm([rows[i].p for i in judged]), strict=True):  # type: ignore[arg-type]
            rows[i] = replace(rows[i], p_holm=float(p))
    return rows


def by_severity(rows: Iterable[Row]) -> list[Row]:
    """Worst verdict first, then the largest gap."""
    order = {verdict: i for i, verdict in enumerate(VERDICTS)}
    return sorted(rows, key=lambda row: (order.get(row.verdict, len(order)), -abs(row.gap or 0.0)))


def _labels(paths: Sequence[Path]) -> list[str]:
    """The folders' names, each with as many parents as it takes to be the only one of its name."""
    labels = []
    for path in paths:
        depth = 1
        while depth < len(path.parts) and sum(path.parts[-depth:] == p.parts[-depth:] for p in paths) > 1:
            depth += 1
        labels.append("/".join(path.parts[-depth:]))
    return labels


def _identity(run: Run, *tables: pd.DataFrame) -> dict[str, Any]:
    first = next((table.iloc[0] for table in tables if len(table)), None)
    keys = ("model", "engine", "gpu", "routing")
    return {key: run.study.get(key) if first is None else first[key] for key in keys}


def _decided(
    verdict: Mapping[str, Any],
    measured: Measured | None,
    case: str,
    mode: str,
    identity: Mapping[str, Any],
    label: str,
) -> Row:
    arm = str(verdict.get("arm") or "random")
    aa = verdict.get("aa") or {}
    plan = verdict.get("plan") or {}
    row = Row(
        run=label,
        **{**identity, "routing": str(verdict.get("routing") or identity["routing"])},
        case=case,
        text=str(verdict.get("text") or case),
        phase=str(verdict.get("phase") or ""),
        mode=mode,
        verdict=str(verdict.get("verdict")),
        margin=float(verdict.get("margin") or math.nan),
        arm=arm,
        gap=verdict.get("gap"),
        ci90=_pair(verdict.get("ci90")),
        aa_gap=aa.get("gap"),
        aa_ci90=_pair(aa.get("ci90")),
        mde=verdict.get("mde"),
        rounds=int(verdict.get("rounds") or 0),
        planned=plan.get("rounds"),
        zeros_us=(verdict.get("median_us") or {}).get(BASELINE),
        reasons=_sentences(verdict.get("reasons")),
        parts=verdict["cause"] if isinstance(verdict.get("cause"), Mapping) else {},
        profiles=verdict.get("profiles") or {},
        also=verdict.get("also") or {},
    )
    if measured is None:
        return row
    row = replace(row, mhz=measured.medians("sm_mhz", arm), watts=measured.medians("watts", arm))
    if row.verdict != "invalid" and row.margin > 0:
        row = replace(row, p=measured.p(arm, row.margin))
    cause, moved = _sentence(verdict.get("cause")), verdict.get("routing_moved") or {}
    if row.verdict in ("equivalent", "invalid") or row.gap is None:
        return replace(row, cause=cause)
    return replace(row, cause=cause or measured.cause(arm, moved.get(arm)), **measured.cycles(arm))


def _unfinished(
    measured: Measured | None,
    fact: Mapping[str, Any],
    key: tuple[str, str],
    identity: Mapping[str, Any],
    label: str,
    study: Mapping[str, Any],
) -> Row:
    case, mode = key
    planned = fact.get(f"plan_{mode}_rounds", study.get("rounds"))
    arms = [] if measured is None else [a for a in dict.fromkeys(measured.samples["arm"]) if a not in (BASELINE, AGAIN)]
    arm = "random" if "random" in arms or not arms else str(arms[0])
    row = Row(
        run=label,
        **identity,
        case=case,
        text=str(fact.get("text") or case),
        phase=str(fact.get("phase") or ""),
        mode=mode,
        verdict="unfinished",
        margin=float(study.get("margin", math.nan)),
        arm=arm,
        planned=int(planned) if planned is not None and not pd.isna(planned) else None,
    )
    if measured is None:
        return replace(row, reasons=("No round of it is stored.",))
    samples = measured.samples
    row = replace(row, rounds=int(samples["round"].nunique()))
    gap, aa = measured.estimate(arm), measured.estimate(AGAIN)
    zeros = samples[samples["arm"] == BASELINE]
    return replace(
        row,
        reasons=(f"It has {row.progress} rounds and no verdict; the same command resumes it.",),
        gap=gap.gap if gap else None,
        ci90=finite(gap.ci90) if gap else None,
        aa_gap=aa.gap if aa else None,
        aa_ci90=finite(aa.ci90) if aa else None,
        zeros_us=float(round_table(zeros)[BASELINE].median()) if len(zeros) else None,
        mhz=measured.medians("sm_mhz", arm),
        watts=measured.medians("watts", arm),
    )


def _of(table: pd.DataFrame, case: Any, mode: Any) -> pd.DataFrame:
    return table[(table["case"] == case) & (table["mode"] == mode)]


def _pair(value: Any) -> Interval | None:
    return (float(value[0]), float(value[1])) if value else None


def _sentences(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value or ()))


def _sentence(cause: Any) -> str | None:
    """A stored cause in words: a text, or a mapping with one as `sentence`."""
    found = cause.get("sentence") if isinstance(cause, Mapping) else cause
    return str(found) if found else None
