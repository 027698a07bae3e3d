"""Layer 6: what a report holds, before it is HTML or PDF."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvlab.pace import OFF_PACE_MARK, OTHER_PACE_WORDS
from kvlab.plots.style import DASH, microseconds, percent, percent_interval
from kvlab.provenance import device_name
from kvlab.report.answer import QUESTION, counted, headline, namer, sentences
from kvlab.report.facts import Interval, Row, RunFacts, by_severity
from kvlab.report.figures import Drawing, drawings
from kvlab.report.origin import Origin, origin_of

HOW_TO_READ = (
    "The gap is estimated from the log ratio of each round (Hodges-Lehmann), its 90 % interval by a block bootstrap"
    " over rounds. Equivalent: the interval lies inside the margin; different: wholly outside; inconclusive: across it,"
    " or too few rounds; invalid: the measurement cannot carry a verdict. A/A is a second zeros arm against the first:"
    " the noise floor, which has to lie inside half the margin. MDE is the smallest gap that these rounds would tell"
    " from zero four times in five. Zeros is the time of a step on zeros, the median of its rounds; MHz (SM clock) and"
    " W (board power) are medians under zeros and under the compared contents."
)


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        marks: a verdict a row, whose mark stands before the first cell; empty for none.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """A report in the order in which it is read; tables are None where they would be empty."""

    title: str
    written: str
    question: str
    headline: str
    counts: Mapping[str, int]
    sentences: tuple[str, ...]
    missing: tuple[str, ...]
    runs: Table | None
    verdicts: Table | None
    how_to_read: str
    drawings: tuple[Drawing, ...]
    undrawn: tuple[str, ...]
    arms: Table | None
    causes: tuple[tuple[str, str], ...]
    parts: tuple[Table, ...]
    clocks: Table | None
    unsettled: tuple[tuple[str, str, tuple[str, ...]], ...]
    remarks: tuple[tuple[str, str], ...]
    origins: tuple[Origin, ...]


def make_report(runs: Sequence[RunFacts], missing: Sequence[str] = (), title: str | None = None) -> Report:
    """The report of some runs.

    Args:
        missing: a sentence for each run that could not be read.
    """
    rows = [row for run in runs for row in run.rows]
    name = namer(rows)
    paced = [row for row in rows if not row.off_pace] or rows
    drawn, undrawn = drawings(runs)
    return Report(
        title=title or _title(rows, runs),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        question=QUESTION,
        headline=headline(paced),
        counts=counted(paced),
        sentences=(*sentences(paced), *_other_pace(rows, name)),
        missing=tuple(missing),
        runs=_runs(runs) if len(runs) > 1 else None,
        verdicts=verdict_table(rows) if rows else None,
        how_to_read=HOW_TO_READ,
        drawings=tuple(drawn),
        undrawn=tuple(undrawn),
        arms=_arms(runs),
        causes=tuple((name(row), row.cause) for row in by_severity(rows) if row.cause and row.verdict != "invalid"),
        parts=_parts(rows),
        clocks=_clocks(rows),
        unsettled=tuple(
            (name(row), row.verdict, row.reasons)
            for row in by_severity(rows)
            if row.verdict in ("inconclusive", "invalid", "unfinished")
        ),
        remarks=tuple(_remarks(rows)),
        origins=tuple(origin_of(run) for run in runs),
    )


def _other_pace(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    """Which gaps are not what their mode means, and so not counted where there are others."""
    if not (off_pace := [row for row in rows if row.off_pace]):
        return []
    counted = "Not counted above" if len(off_pace) < len(rows) else "All of these were"
    return [f"{counted}: {OTHER_PACE_WORDS} ({OFF_PACE_MARK.strip()}): {'; '.join(map(name, by_severity(off_pace)))}."]


def verdict_table(rows: Sequence[Row]) -> Table:
    """One row per case and mode, worst first; columns that would say the same everywhere are left out."""
    rows = by_severity(rows)
    several = [c for c in ("run", "model", "mode", "margin") if len({getattr(r, c) for r in rows} - {""}) > 1]
    if "run" in several and len({(row.model, row.case, row.mode) for row in rows}) == len(rows):
        several.remove("run")
    shown: dict[str, Callable[[Row], str]] = {
        "margin": lambda row: f"{100 * row.margin:g} %",
        "model": lambda row: row.model + (" (real routing)" if row.routing == "real" else ""),
    }
    columns: dict[str, list[str]] = {"verdict": [row.verdict for row in rows]}
    for column in several:
        columns[column] = [shown[column](row) if column in shown else str(getattr(row, column)) for row in rows]
    columns["case"] = [row.text for row in rows]
    columns["zeros"] = [microseconds(row.zeros_us) if row.zeros_us else DASH for row in rows]
    columns["gap, % (90 % interval)"] = [
        estimate_text(row.gap, row.ci90) + OFF_PACE_MARK * row.off_pace for row in rows
    ]
    columns["A/A, % (90 % interval)"] = [estimate_text(row.aa_gap, row.aa_ci90) for row in rows]
    columns["MDE, %"] = [DASH if row.mde is None else f"{100 * row.mde:.2f}" for row in rows]
    columns["rounds"] = [row.progress if row.verdict == "unfinished" else str(row.rounds) for row in rows]
    if any(row.mhz for row in rows):
        columns["MHz"] = [_change(row.mhz) for row in rows]
    if any(row.watts for row in rows):
        columns["W"] = [_change(row.watts) for row in rows]
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)), tuple(row.verdict for row in rows))


def estimate_text(gap: float | None, interval: Interval | None) -> str:
    """In percent: `+13.11 (+12.55 .. +13.53)`."""
    told = percent_interval(*interval) if interval else ""
    return percent(gap).removesuffix(" %") + (f" ({told})" if told else "")


def _change(pair: Interval | None) -> str:
    return f"{pair[0]:.0f}→{pair[1]:.0f}" if pair else DASH


def _runs(runs: Sequence[RunFacts]) -> Table:
    found = []
    for run in runs:
        first = run.rows[0] if run.rows else None
        what = [getattr(first, key) if first else str(run.study.get(key)) for key in ("model", "engine", "gpu")]
        told = ", ".join(f"{n} {verdict}" for verdict, n in counted(run.rows).items())
        found.append(
            (run.label, *what, ", ".join(dict.fromkeys(row.mode for row in run.rows if row.mode)), told or "no case")
        )
    return Table(("run", "model", "engine", "GPU", "mode", "verdicts"), tuple(found))


def _arms(runs: Sequence[RunFacts]) -> Table | None:
    """The gaps of all arms but those that the verdicts are about."""
    found: list[tuple[str, ...]] = []
    marks: list[str] = []
    for run in runs:
        claims = {(row.case, row.mode): row.arm for row in run.rows}
        for gap in run.gaps.to_dict("records"):
            if gap["arm"] == claims.get((gap["case"], gap["mode"])) or not math.isfinite(gap["gap"]):
                continue
            interval = (gap["ci90_lo"], gap["ci90_hi"])
            told = estimate_text(gap["gap"], interval if all(map(math.isfinite, interval)) else None)
            label = (run.label,) if len(runs) > 1 else ()
            found.append((str(gap["verdict"]), *label, str(gap["text"] or gap["case"]), gap["mode"], gap["arm"], told))
            marks.append(str(gap["verdict"]))
    label = ("run",) if len(runs) > 1 else ()
    head = ("verdict", *label, "case", "mode", "contents", "gap, % (90 % interval)")
    return Table(head, tuple(found), tuple(marks)) if found else None


ABOUT_PARTS = (
    "Parts are in % of the step under zeros, with 90 % intervals where they are known."
    " Selection: top-k and gathers, by the kernels of the profiled replays, which are few and share their moment;"
    " without a profile, the effect of the indexer's contents in cycles. Clock: what of the rest of the gap the change"
    " of clock can explain. Neither: what is left. Indexer and KV: effects of the contents of either, from the arms"
    " that fill one alone; in cycles (time x SM clock) the KV's contents have no effect where it is the clock."
)


def _parts(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Of each gap that has a cause: how much is selection, how much clock; then the 2x2 of the cache's roles."""
    name = namer(rows)
    explained = [row for row in by_severity(rows) if row.parts.get("kind", "none") != "none"]
    columns: dict[str, list[str]] = {"case": [name(row) for row in explained]}
    columns["gap, %"] = [estimate_text(row.gap, row.ci90) for row in explained]
    for key, head in (("selection", "selection"), ("clocks", "clock"), ("other", "neither")):
        columns[f"{head}, %"] = [_part(row.parts.get(key), row.zeros_us) for row in explained]
    crossed = [row for row in explained if "indexer" in row.parts]
    effects: dict[str, list[str]] = {"case": [name(row) for row in crossed]}
    for key, head in (("indexer", "indexer"), ("kv", "KV")):
        for more, unit in (("", ", %"), ("_cycles", " in cycles, %")):
            found = [row.parts.get(key + more) for row in crossed]
            effects[head + unit] = [estimate_text(e["gap"], e["ci90"]) if e else DASH for e in found]
    tables = [of for of in (columns, effects) if of["case"]]
    return tuple(Table(tuple(of), tuple(zip(*of.values(), strict=True))) for of in tables)


def _part(part: Mapping[str, Any] | None, zeros_us: float | None) -> str:
    """In percent of the step, as the table's other numbers: `-9.77 (-9.93 .. -9.60)`."""
    if not part:
        return DASH
    ends = part.get("ci90") if part["us"] else None
    step = part["us"] / part["of_step"] if part["of_step"] else zeros_us
    return estimate_text(part["of_step"], (ends[0] / step, ends[1] / step) if ends and step else None)


def _clocks(rows: Sequence[Row]) -> Table | None:
    """Time and cycles of the cases whose verdict asks for a cause."""
    name = namer(rows)
    found: list[tuple[str, ...]] = []
    for row in by_severity(rows):
        if row.mhz and row.cycles_gap is not None:
            clock = percent(row.mhz[1] / row.mhz[0] - 1)
            cycles = estimate_text(row.cycles_gap, row.cycles_ci90)
            found.append(
                (name(row), estimate_text(row.gap, row.ci90), cycles, _change(row.mhz), clock, _change(row.watts))
            )
    head = ("case", "gap in time, %", "gap in cycles, %", "MHz", "clock", "W")
    return Table(head, tuple(found)) if found else None


def _remarks(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What verdicts say beside their first reason, with the cases of which it is said.

    Sentences that differ in the share that they begin with are one; each case's name then has its share.
    """
    name = namer(rows)
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict in ("equivalent", "different"):
            for reason in row.reasons[1:]:
                share = re.match(r"\d+ ?% (?=of )", reason)
                said = f"A share {reason[share.end() :]}" if share else reason
                found.setdefault(said, []).append(f"{name(row)}: {share[0].strip()}" if share else name(row))
    return [(", ".join(names), reason) for reason, names in found.items()]


def _title(rows: Sequence[Row], runs: Sequence[RunFacts]) -> str:
    models: Any = dict.fromkeys(row.model for row in rows) or dict.fromkeys(str(r.study.get("model")) for r in runs)
    gpus = dict.fromkeys(device_name(row.gpu) for row in rows)
    return f"KV contents and time: {', '.join(models)}" + (f" on {', '.join(gpus)}" if gpus else "")
