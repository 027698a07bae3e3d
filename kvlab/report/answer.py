"""Layer 6: the answer that rows give together, in sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvlab.plots.style import percent
from kvlab.report.facts import VERDICTS, Row, by_severity
from kvlab.stats import ALPHA, all_within

QUESTION = (
    "Forward benchmarks time a step on a KV cache of zeros. Does it matter what is in the cache? Each case is one step,"
    " timed under zeros and under other contents, with nothing else changed: the same kernels on the same addresses, in"
    " rounds of random order. A case is equivalent when the 90 % interval of the gap, T(contents) / T(zeros) - 1, lies"
    " inside a margin that was declared before the run."
)
_NAMED = 6  # cases named in a sentence; the table has the rest


def counted(rows: Iterable[Row]) -> dict[str, int]:
    """Verdict -> how many rows, worst first, none left out that occurs."""
    found = Counter(row.verdict for row in rows)
    return {verdict: found[verdict] for verdict in (*VERDICTS, *found) if found[verdict]}


def headline(rows: Sequence[Row]) -> str:
    """The answer in one sentence."""
    counts = counted(rows)
    what, within = _contents(rows), _margin(rows)
    if not rows or set(counts) == {"unfinished"}:
        return "Nothing is decided yet: no case is finished."
    if different := counts.get("different", 0):
        where = f"in {different} of {_number(rows)}" if len(rows) > 1 else "in the one case measured"
        steps = {_step(row) for row in rows if row.verdict == "different"}
        where += f" (of {_count(len(steps), 'step', 'steps')})" if len(steps) < different else ""
        real = sum(row.verdict == "different" and row.routing == "real" for row in rows)
        which = "all" if real == different else f"{real}"
        but = f" ({which} with real routing, whose gap is not the KV cache's alone)" if real else ""
        return f"Yes, {where}{but}: under {what} KV a step takes another time than under zeros, by more than {within}."
    if set(counts) == {"equivalent"}:
        where = f"in all {_number(rows)}" if len(rows) > 1 else "in the one case measured"
        return f"No, not beyond {within}: {where}, a step takes the same time under {what} KV as under zeros."
    return f"Not settled: of {_number(rows)}, {counts_text(counts)}."


def _step(row: Row) -> tuple[str, ...]:
    """What several runs may have measured, whatever they call it."""
    return row.model, row.gpu, row.routing, row.text.partition("=")[2], row.mode, row.arm


def counts_text(counts: Mapping[str, int]) -> str:
    """`9 equivalent, 1 invalid, 5 different`: the best first."""
    return ", ".join(f"{n} {verdict}" for verdict, n in list(counts.items())[::-1])


def sentences(rows: Sequence[Row]) -> list[str]:
    """What goes with the headline: the joint statement, what differs after correction, small gaps, other margins."""
    if not rows:
        return []
    name = namer(rows)
    said = [_joint(rows), *_after_holm(rows, name)]
    small = [row for row in rows if row.verdict == "equivalent" and row.ci90 and not row.ci90[0] <= 0 <= row.ci90[1]]
    if small:
        most = max(small, key=lambda row: abs(row.gap or 0))
        what = _count(len(small), "equivalent gap is", "equivalent gaps are")
        which = "" if len(small) == 1 else " the largest is"
        said.append(f"{what} small but not zero:{which} {percent(most.gap)} ({name(most)}).")
    if other := _other_margins(rows):
        said.append(other)
    if real := [row for row in rows if row.routing == "real"]:
        said.append(
            f"With real routing, contents move tokens between experts, so that a gap is not the KV cache's alone:"
            f" {_names(real, name, gaps=False)}."
        )
    return [sentence for sentence in said if sentence]


def namer(rows: Sequence[Row]) -> Callable[[Row], str]:
    """A function that names a row as briefly as tells it from the others."""
    several = [key for key in ("model", "mode", "run") if len({getattr(row, key) for row in rows} - {""}) > 1]
    # The run's label comes last and only where model, case and mode leave two rows alike.
    told = [key for key in several if key != "run"]
    if len({(row.case, *(getattr(row, key) for key in told)) for row in rows}) < len(rows):
        told = several

    def name(row: Row) -> str:
        before = [row.run] if "run" in told else [row.model] if "model" in told else []
        return " ".join([*before, row.case, *([row.mode] if "mode" in told and row.mode else [])])

    return name


def _joint(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return ""
    if all_within(row.verdict for row in rows):
        return (
            "The joint statement holds too: each interval lies inside the margin at the 5 % level, so all of them do at"
            " 5 % (an intersection-union test, which needs no correction)."
        )
    return "Not every case is equivalent, so the claim for all of them together is not shown."


def _after_holm(rows: Sequence[Row], name: Callable[[Row], str]) -> list[str]:
    judged = [row for row in rows if row.p_holm is not None]
    held = [row for row in judged if row.verdict == "different" and (row.p_holm or 0) <= ALPHA]
    lost = [row for row in judged if row.verdict == "different" and (row.p_holm or 0) > ALPHA]
    unjudged = [row for row in rows if row.verdict == "different" and row.p_holm is None]
    over = f"Holm's correction over {_count(len(judged), 'comparison', 'comparisons')} (family-wise error 5 %)"
    said = []
    if held:
        said.append(f"Beyond the margin after {over}: {_names(held, name)}.")
    if lost:
        said.append(
            f"{_names(lost, name)}: different by {'its' if len(lost) == 1 else 'their'} own interval, but not after"
            f" {over}."
        )
    if unjudged:
        said.append(f"{_names(unjudged, name)}: not part of the correction, as no replays are stored.")
    return said


def _other_margins(rows: Sequence[Row]) -> str:
    margins = sorted({margin for row in rows for margin in row.also}, key=float)
    parts = []
    for margin in margins:
        found = Counter(row.also[margin] for row in rows if margin in row.also)
        told = counts_text({verdict: found[verdict] for verdict in VERDICTS if found[verdict]})
        parts.append(f"at {_fraction(float(margin))}: {told}")
    return f"With other margins, {'; '.join(parts)}." if parts else ""


def _names(rows: Iterable[Row], name: Callable[[Row], str], gaps: bool = True) -> str:
    told = [name(row) + (f" ({percent(row.gap)})" if gaps else "") for row in by_severity(rows)]
    return ", ".join(told[:_NAMED]) + (f" and {len(told) - _NAMED} more" if len(told) > _NAMED else "")


def _number(rows: Sequence[Row]) -> str:
    alone = len({(row.model, row.case) for row in rows}) == len(rows)
    return _count(len(rows), "case", "cases") if alone else _count(len(rows), "comparison", "comparisons")


def _count(n: int, one: str, several: str) -> str:
    return f"{n} {one if n == 1 else several}"


def _contents(rows: Iterable[Row]) -> str:
    arms = {row.arm for row in rows}
    return arms.pop() if len(arms) == 1 else "other"


def _margin(rows: Iterable[Row]) -> str:
    margins = {row.margin for row in rows if not math.isnan(row.margin)}
    return _fraction(margins.pop()) if len(margins) == 1 else "its margin"


def _fraction(margin: float) -> str:
    return f"{100 * margin:g} %"
