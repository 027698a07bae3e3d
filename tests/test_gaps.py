"""The table of gaps: a row a case, mode and arm, old verdicts included."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cases import Case, Request
from kvlab.gaps import AXES, case_axes, gap_table
from kvlab.run import open_run
from kvlab.tables import IDENTITY

WHO = dict.fromkeys(IDENTITY, "x")
COMMITTED = sorted(Path(__file__).parents[1].glob("data/h200/*/provenance.json"))


@given(st.lists(st.builds(lambda q, p: Request(q, q + p), st.integers(1, 99), st.integers(0, 99)), min_size=1))
def test_axes_are_the_largest_of_the_requests(requests):
    axes = case_axes(Case("c", tuple(requests)))
    assert axes["batch"] == len(requests)
    assert all(axes["context"] >= request.kv_len and axes["query"] >= request.query_len for request in requests)


def test_each_arm_has_a_row_and_a_case_without_times_has_one():
    arms = {
        "random": {"gap": 0.1, "ci90": [0.05, 0.15], "verdict": "different"},
        "constant": {"gap": 0.0, "ci90": None},
    }
    verdicts = [
        ("a", "isolated", {"text": "a=2*1@64", "phase": "decode", "margin": 0.03, "arms": arms, "topk": 16}),
        ("b", "isolated", {"text": "b=1@9", "margin": 0.03, "arm": "random", "gap": None, "verdict": "invalid"}),
    ]
    table = gap_table(verdicts, WHO)
    assert list(table["case"]) == ["a", "a", "b"]
    assert table.loc[0, ["ci90_lo", "ci90_hi", "context", "batch", "query", "topk"]].tolist() == [
        0.05,
        0.15,
        64,
        2,
        1,
        16,
    ]
    assert table.loc[1:, ["ci90_lo", "ci90_hi"]].isna().all(axis=None)
    assert table.loc[2, "verdict"] == "invalid"
    assert set(gap_table([], WHO)) == set(table)


@pytest.mark.parametrize("record", COMMITTED, ids=lambda record: record.parent.name)
def test_committed_runs_have_gaps_with_their_axes(record):
    gaps = open_run(record.parent).gaps
    assert len(gaps)
    assert gaps[[axis for axis in AXES if axis != "topk"]].notna().all(axis=None)
