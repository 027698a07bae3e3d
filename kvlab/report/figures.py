"""Layer 6: which figures a report shows, and what is said under each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlab import plots
from kvlab.errors import KvlabError
from kvlab.kernel_names import CLOSE
from kvlab.plots.style import percent, percent_interval, shorten
from kvlab.plots.sweeps import zero_fraction
from kvlab.provenance import power_limit
from kvlab.report.answer import namer
from kvlab.report.facts import Row, RunFacts, by_severity
from kvlab.stats import BASELINE

_ROWS = 28  # of gaps in one figure: as many as a page holds
_LINES = 8  # of a sweep in one figure
_SAMPLES, _KERNELS, _CLOCKS = 4, 3, 6  # cases that are shown in detail


@dataclass(frozen=True)
class Drawing:
    """A figure with the sentence that says what it shows."""

    caption: str
    figure: Figure


def drawings(runs: Sequence[RunFacts]) -> tuple[list[Drawing], list[str]]:
    """The figures of some runs, and a sentence for each that could not be drawn."""
    drawn: list[Drawing] = []
    undrawn: list[str] = []
    rows = [row for run in runs for row in run.rows]
    for caption, draw in (*_gaps(rows), *_compare(runs), *_sweeps(runs), *_kernels(runs), *_samples(runs)):
        try:
            drawn.append(Drawing(caption, draw()))
        except KvlabError as error:
            undrawn.append(f"{caption} {error}")
    return drawn, undrawn


Planned = Iterator[tuple[str, Callable[[], Figure]]]


def notable(rows: Sequence[Row], most: int) -> list[Row]:
    """The cases worth a look: those that are not equivalent, worst first; the largest gap where all are."""
    measured = [row for row in by_severity(rows) if row.gap is not None]
    return [row for row in measured if row.verdict != "equivalent"][:most] or measured[:1]


def _gaps(rows: Sequence[Row]) -> Planned:
    table = pd.DataFrame([_flat(row) for row in rows if row.mode])
    parts = [table.iloc[i : i + _ROWS] for i in range(0, len(table), _ROWS)]
    for number, part in enumerate(parts, 1):
        caption = "Each case's gap with its 90 % interval, against the margin; below it, zeros against zeros."
        if len(parts) > 1:
            caption += f" Part {number} of {len(parts)}."
        yield caption, lambda part=part: plots.plot_gaps(part)[0]  # type: ignore[misc]


def _flat(row: Row) -> dict[str, Any]:
    flat = asdict(row)
    for name in ("ci90", "aa_ci90"):
        flat[f"{name}_lo"], flat[f"{name}_hi"] = flat.pop(name) or (math.nan, math.nan)
    numbers = ("gap", "aa_gap")
    return flat | {name: math.nan if flat[name] is None else flat[name] for name in numbers}


_APART = ("model", "vllm", "gpu", "kvlab", "torch", "routing")


def _compare(runs: Sequence[RunFacts]) -> Planned:
    if len(runs) != 2:
        return
    a, b = (run.gaps[run.gaps["arm"] == "random"] for run in runs)
    one_model = all(gaps["model"].nunique() == 1 for gaps in (a, b))
    keys = ["case", "mode"] if one_model else ["model", "case", "mode"]
    common = a[keys].merge(b[keys])
    if common.empty:
        return
    labels = _versions(runs) or [run.label for run in runs]
    for start in range(0, len(common), _ROWS):
        part = common.iloc[start : start + _ROWS]
        caption = f"The two runs' gaps case by case: {labels[0]} against {labels[1]}."
        yield (
            caption,
            lambda part=part: plots.plot_compare(a.merge(part, on=keys), b.merge(part, on=keys), labels)[0],  # type: ignore[misc]
        )


def _versions(runs: Sequence[RunFacts]) -> list[str]:
    """What tells two runs apart: the model, or else a version, the card or the routing where it is but one of them."""
    of_runs = {key: [str(run.gaps[key].iloc[0]) for run in runs] for key in _APART}
    differ = [key for key, values in of_runs.items() if values[0] != values[1]]
    if not differ or ("model" not in differ and len(differ) > 1):
        return []
    key = "model" if "model" in differ else differ[0]
    return [shorten(value if key in ("gpu", "model") else f"{key} {value}", 30) for value in of_runs[key]]


def _sweeps(runs: Sequence[RunFacts]) -> Planned:
    gaps = pd.concat([run.gaps for run in runs], ignore_index=True)
    for (model, mode), rows in gaps.groupby(["model", "mode"], sort=False):
        random = rows[rows["arm"] == "random"]
        for axis, plot, what in (
            ("context", plots.plot_context_sweep, "context length"),
            ("topk", plots.plot_topk_sweep, "top-k"),
        ):
            if random[axis].nunique() > 2:
                caption = f"Gap by {what}: {model}, {mode}."
                yield caption, lambda plot=plot, random=random, t=caption: plot(random, title=t)[0]  # type: ignore[misc]
        yield from _fractions(rows, f"{model}, {mode}")


def _fractions(rows: pd.DataFrame, who: str) -> Planned:
    """Where there is more than random and zeros: the cases with the largest gaps."""
    parsed = [zero_fraction(arm) for arm in rows["arm"]]
    mixed = rows[[found is not None for found in parsed]]
    if len({found for found in parsed if found}) < 2:
        return
    by_case = mixed.groupby(["run", "case"], sort=False)["gap"].apply(lambda gaps: gaps.abs().max())
    kept = set(by_case.sort_values(ascending=False, kind="stable").index[:_LINES])
    shown = mixed[[key in kept for key in zip(mixed["run"], mixed["case"], strict=True)]]
    caption = f"Gap by the share of zero tokens: {who}"
    caption += f"; the {_LINES} of {len(by_case)} cases with the largest gaps." if len(by_case) > _LINES else "."
    yield caption, lambda: plots.plot_zero_fraction(shown, title=f"Gap by the share of zero tokens: {who}")[0]


def _kernels(runs: Sequence[RunFacts]) -> Planned:
    rows = [row for run in runs for row in run.rows]
    name = namer(rows)
    profiled = {run.label: run.kernels for run in runs if len(run.kernels)}
    # An unfinished case may have some of its arms.
    arms = {(label, *key): set(of["arm"]) for label, k in profiled.items() for key, of in k.groupby(["case", "mode"])}
    compared = [row for row in rows if {BASELINE, row.arm} <= arms.get((row.run, row.case, row.mode), set())]
    for row in _explained(compared):
        kernels = profiled[row.run]
        of_case = kernels[(kernels["case"] == row.case) & (kernels["mode"] == row.mode)]
        if "role" in of_case:
            caption = (
                f"{name(row)}: where a step's time goes, and what each part adds to the gap. {_closes(row)}".strip()
            )
            yield caption, lambda k=of_case, arm=row.arm: plots.plot_parts(k, arms=[arm])[0]  # type: ignore[misc]
        caption = f"{name(row)}: the kernels that add most to the gap. {_closes(row)}".strip()
        yield caption, lambda k=of_case, arm=row.arm: plots.plot_kernels(k, arm=arm)[0]  # type: ignore[misc]


def _explained(rows: Sequence[Row]) -> list[Row]:
    """Whose kernels are shown: one a model first, the worst verdict first; invalid ones where there is no other."""
    sound = [row for row in by_severity(rows) if row.verdict != "invalid"] or by_severity(rows)
    first: dict[str, Row] = {}
    for row in sound:
        first.setdefault(row.model, row)
    others = [row for row in sound if row.verdict != "equivalent" and row not in first.values()]
    return [*first.values(), *others][: max(_KERNELS, len(first))]


def _closes(row: Row) -> str:
    """What a profile's kernels leave of the timed step, said where a reader would take the figure for more."""
    if not all(name in row.profiles for name in (BASELINE, row.arm)):
        return ""
    told = []
    for name in (BASELINE, row.arm):
        profile = row.profiles[name]
        told.append(f"{profile['closure']:.1%} under {name}")
        if profile["overlap_us"] > 0.01 * profile["timed_us"]:
            once = profile["busy_us"] / profile["timed_us"]
            told[-1] += f" ({once:.1%} with kernels that ran side by side counted once)"
    bad = [name for name in (BASELINE, row.arm) if not row.profiles[name]["closes"]]
    apart = f"do NOT add up to the timed step within {100 * CLOSE:g} %"
    head = f"The kernels' times {apart if bad else 'add up to'}"
    said = f"{head}: {', '.join(told)}." if bad else f"{head} {', '.join(told)} of the timed step."
    if row.gap is not None:
        zeros, other = (row.profiles[name]["timed_us"] for name in (BASELINE, row.arm))
        rounds = f"{percent(row.gap)} ({percent_interval(*row.ci90)})" if row.ci90 else percent(row.gap)
        said += f" The total gap of the profile is {percent(other / zeros - 1)}, of the rounds {rounds}."
    replays = row.profiles[BASELINE].get("replays")
    return said + (f" Whiskers: 90 %, over {replays} profiled replays." if replays else "")


def _samples(runs: Sequence[RunFacts]) -> Planned:
    rows = [row for run in runs for row in run.rows]
    samples = {run.label: run.samples for run in runs}
    name = namer(rows)
    shown = notable([row for row in rows if row.rounds and len(samples[row.run])], max(_SAMPLES, _CLOCKS))
    sensed = [_of(samples, row) for row in shown[:_CLOCKS] if row.mhz or row.watts]
    if sensed:
        limit = power_limit(run.provenance for run in runs)
        caption = "Board power and SM clock under each arm, in the cases of note."
        yield caption, lambda: plots.plot_clocks(_told_apart(sensed), power_limit_watts=limit)[0]
    for row in shown[:_SAMPLES]:
        caption = f"{name(row)}: every replay, round by round."
        of_row = _of(samples, row)
        title = f"{shorten(row.model)}, {shorten(row.case)}, {row.mode}: every replay; lines are the times compared"
        yield (
            caption,
            lambda s=of_row, case=row.case, t=title: plots.plot_samples(s, case, title=t)[0],  # type: ignore[misc]
        )


def _of(samples: dict[str, pd.DataFrame], row: Row) -> pd.DataFrame:
    table = samples[row.run]
    return table[(table["case"] == row.case) & (table["mode"] == row.mode)]


def _told_apart(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One table; its runs are left out of the headings where model, case and mode tell the tables apart."""
    table = pd.concat(tables, ignore_index=True)
    heads = {(t["model"].iloc[0], t["case"].iloc[0], t["mode"].iloc[0]) for t in tables}
    return table if len(heads) < len(tables) else table.assign(run="")
