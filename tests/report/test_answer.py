"""The answer follows from the rows, whatever they are."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvlab.plots.style import percent
from kvlab.report.answer import counted, headline, namer, sentences
from kvlab.report.content import verdict_table
from kvlab.report.facts import VERDICTS, Row, adjusted, by_severity
from kvlab.stats import holm

ROW = Row("r", "m", "reference", "NVIDIA H200", "none", "c", "c=1@9", "decode", "isolated", "equivalent", 0.03)


@st.composite
def some_rows(draw, verdicts=VERDICTS):
    rows = []
    for number in range(draw(st.integers(1, 12))):
        verdict = draw(st.sampled_from(verdicts))
        gap = draw(st.floats(-0.5, 0.5))
        measured = verdict != "unfinished" or draw(st.booleans())
        rows.append(
            replace(
                ROW,
                case=f"c{number}",
                model=draw(st.sampled_from(["m", "n"])),
                verdict=verdict,
                gap=gap if measured else None,
                ci90=(gap - 0.01, gap + 0.01) if measured else None,
                p=draw(st.floats(0, 1)) if verdict not in ("invalid", "unfinished") and draw(st.booleans()) else None,
                routing=draw(st.sampled_from(["none", "real"])),
                also={"0.01": verdict, "0.05": "equivalent"} if verdict != "unfinished" else {},
            )
        )
    return adjusted(rows)


@given(some_rows())
def test_the_headline_is_yes_for_any_difference_and_no_only_for_all_equivalent(rows):
    verdicts = {row.verdict for row in rows}
    said = headline(rows)
    assert said.startswith("Yes") == ("different" in verdicts)
    assert said.startswith("No, not beyond 3 %") == (verdicts == {"equivalent"})
    assert said.startswith("Nothing is decided") == (verdicts == {"unfinished"})
    assert sum(counted(rows).values()) == len(rows)
    if "different" in verdicts and len(rows) > 1:
        n = sum(row.verdict == "different" for row in rows)
        assert f"in {n} of {len(rows)} cases" in said


@given(some_rows())
def test_what_differs_is_named_as_holm_leaves_it(rows):
    judged = [row for row in rows if row.p is not None]
    if judged:
        adjusted_p = dict(zip((row.case for row in judged), holm([row.p for row in judged]), strict=True))
        assert {row.case: row.p_holm for row in judged} == adjusted_p
    assert all(row.p_holm is None for row in rows if row.p is None)
    name = namer(rows)
    told = " ".join(sentences(rows))
    beyond = re.search(r"Beyond the margin after Holm's correction over (\d+)", told)
    held = [row for row in judged if row.verdict == "different" and row.p_holm <= 0.05]
    assert bool(beyond) == bool(held)
    if beyond:
        assert int(beyond[1]) == len(judged)
    for row in held[:1]:
        largest = max(held, key=lambda row: abs(row.gap))
        assert f"{name(largest)} ({percent(largest.gap)})" in told
        assert row.case in told or len(held) > 6


@given(some_rows())
def test_names_tell_rows_apart_and_the_table_has_each_once_worst_first(rows):
    name = namer(rows)
    assert len({name(row) for row in rows}) == len(rows)
    table = verdict_table(rows)
    assert len(table.rows) == len(table.marks) == len(rows)
    assert {len(row) for row in table.rows} == {len(table.head)}
    order = [VERDICTS.index(mark) for mark in table.marks]
    assert order == sorted(order)
    assert [row.verdict for row in by_severity(rows)] == list(table.marks)


@given(some_rows(verdicts=("equivalent",)))
def test_small_gaps_that_are_not_zero_are_said(rows):
    told = " ".join(sentences(rows))
    nonzero = [row for row in rows if row.ci90[0] > 0 or row.ci90[1] < 0]
    assert ("small but not zero" in told) == bool(nonzero)
    assert ("intersection-union" in told) == (len(rows) > 1)


def test_one_case_is_spoken_of_as_one():
    assert headline([replace(ROW, verdict="different", gap=0.1)]).startswith("Yes, in the one case measured")
    assert "in the one case measured" in headline([ROW])
    assert "of 1 case, 1 invalid" in headline([replace(ROW, verdict="invalid")])


def test_real_routing_is_not_laid_at_the_caches_door():
    rows = [replace(ROW, verdict="different", gap=0.4, routing="real"), replace(ROW, case="d")]
    assert "all with real routing, whose gap is not the KV cache's alone" in headline(rows)
    assert any(sentence.endswith("alone: c.") for sentence in sentences(rows))
