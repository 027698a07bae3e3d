"""Gaps that were timed at another pace than their mode means are shown, marked, and not counted."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.pace import OFF_PACE_MARK, paces
from kvlab.report.answer import headline
from kvlab.report.content import make_report
from kvlab.report.facts import read_runs
from kvlab.run import open_run

H200 = Path(__file__).parents[2] / "data" / "h200"
CLAIM, HIT = "vllm-deepseek-v3.2-6l-claim", "vllm-deepseek-v3.2-6l-hit100k"


@pytest.fixture(scope="module")
def runs():
    return read_runs([H200 / CLAIM, H200 / HIT])[0]


def test_off_pace_rows_are_those_of_the_pace(runs):
    for facts, name in zip(runs, (CLAIM, HIT), strict=True):
        known = paces(open_run(H200 / name)).set_index(["case", "mode"])["off_pace"]
        assert {(row.case, row.mode): row.off_pace for row in facts.rows} == known.to_dict()
        assert 0 < sum(row.off_pace for row in facts.rows) < len(facts.rows)


def test_they_are_marked_and_named_and_not_counted(runs):
    report = make_report(runs)
    rows = [row for facts in runs for row in facts.rows]
    paced = [row for row in rows if not row.off_pace]
    assert sum(report.counts.values()) == len(paced) < len(rows)
    (said,) = [sentence for sentence in report.sentences if sentence.startswith("Not counted above")]
    assert "hit8k sustained" in said
    gaps = report.verdicts.head.index("gap, % (90 % interval)")
    marked = sum(row[gaps].endswith(OFF_PACE_MARK) for row in report.verdicts.rows)
    assert marked == len(rows) - len(paced)


def test_where_all_are_so_they_are_counted_and_said_so(runs):
    off_pace = [replace(facts, rows=tuple(replace(row, off_pace=True) for row in facts.rows)) for facts in runs]
    report = make_report(off_pace)
    assert sum(report.counts.values()) == sum(len(facts.rows) for facts in runs)
    assert any(sentence.startswith("All of these were") for sentence in report.sentences)


def test_one_step_that_two_runs_measured_is_one(runs):
    rows = [row for facts in runs for row in facts.rows if (row.case, row.mode) == ("hit100k", "isolated")]
    assert len(rows) == 2
    assert "in 2 of 2 comparisons (of 1 step)" in headline(rows) or "in 2 of 2 cases (of 1 step)" in headline(rows)
    assert "step)" not in headline([rows[0], replace(rows[1], mode="sustained")])
