"""Tables: flattening, types, and the refusal of rows that do not say what they are of."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import RunError
from kvlab.run import Run, concat
from kvlab.tables import IDENTITY, TABLES, flatten, frame

from handmade_runs import PROVENANCE, STUDY, add_case, rows, verdict

WHO = dict.fromkeys(IDENTITY, "x") | {"seed": 0}
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text()
keys = st.text("abc", min_size=1, max_size=3)


@pytest.fixture
def runs(tmp_path):
    made = []
    for name, model in (("one", "tiny"), ("two", "huge")):
        with Run.create(tmp_path / name, {**STUDY, "model": model}, PROVENANCE) as run:
            add_case(run)
            run.add_round("decode", "isolated", 0, rows())
            run.add_verdict("decode", "isolated", verdict())
        made.append(run)
    return made


@given(st.recursive(st.dictionaries(keys, scalars), lambda inner: st.dictionaries(keys, scalars | inner), max_leaves=9))
def test_flattening_keeps_every_leaf_under_its_path(record):
    def leaves(value, path):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from leaves(inner, [*path, key])
        else:
            yield "_".join(path), value

    flat = flatten(record)
    assert flat == dict(leaves(record, []))


def test_intervals_become_two_columns_and_other_lists_text():
    assert flatten({"ci90": (1, 2), "aa": {"ci90": [3, 4]}, "pair": [5, 6], "cited": [7]}) == {
        "ci90_lo": 1,
        "ci90_hi": 2,
        "aa_ci90_lo": 3,
        "aa_ci90_hi": 4,
        "pair": "[5, 6]",
        "cited": "[7]",
    }


@settings(max_examples=50)
@given(st.lists(st.dictionaries(keys, scalars), min_size=1, max_size=5))
def test_any_records_make_columns_of_one_type_each(records):
    table = frame(TABLES["telemetry"], [{"case": "c", "mode": "m", "arm": "a", **r} for r in records], WHO)
    assert len(table) == len(records)
    for name in set(table) - {"case", "mode", "arm", *IDENTITY}:
        said = [record.get(name) for record in records]
        assert any(value is not None for value in said), "no column without a value"
        kinds = {type(value) for value in table[name].dropna()}
        assert len(kinds) == 1
        for value, found in zip(said, table[name], strict=True):
            if value is None:
                assert pd.isna(found)
            elif all(type(v) is type(value) for v in said if v is not None):
                assert found == value


def test_tables_of_several_runs_stay_apart(runs):
    table = concat(runs)
    assert table.groupby(["run", "model"]).size().to_dict() == {("one", "tiny"): 6, ("two", "huge"): 6}
    assert len(concat(runs, "verdicts")) == 2
    assert len(concat([runs[0], runs[1].samples])) == 12
    empty = concat(runs, "kernels")
    assert empty.empty
    assert set(IDENTITY) < set(empty)


@pytest.mark.parametrize("column", [*IDENTITY, "arm"])
def test_rows_without_identity_are_refused(runs, column):
    with pytest.raises(RunError, match=f"table 1 has no column {column}"):
        concat([runs[0], runs[1].samples.drop(columns=column)])
    gap = runs[1].samples.astype({column: object})
    gap.loc[3, column] = None
    with pytest.raises(RunError, match=f"table 1, row 3 has no {column}"):
        concat([runs[0], gap])


def test_a_run_cannot_come_twice_nor_none_at_all(runs):
    with pytest.raises(RunError, match="run 'one' comes twice"):
        concat([runs[0], runs[1], runs[0]])
    with pytest.raises(RunError, match="name at least one run"):
        concat([])
    with pytest.raises(RunError, match="a run has no table 'sample'; it has cases, samples"):
        concat(runs, "sample")
