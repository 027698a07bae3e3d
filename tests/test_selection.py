"""What an index tensor says of locality, against sets counted one by one."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvlab.errors import StudyError
from kvlab.selection import describe_selection, selection_overlap

LENGTH = 40


@st.composite
def selections(draw, rows=None):
    """Rows of distinct picks, some with fewer than k, in any order and with -1 anywhere."""
    rows = rows or draw(st.integers(1, 5))
    k = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, LENGTH - 1), max_size=k, unique=True)
    made = [draw(row) for _ in range(rows)]
    return np.array([draw(st.permutations(picks + [-1] * (k - len(picks)))) for picks in made])


@given(selections(), st.integers(1, 16))
def test_numbers_are_those_of_the_rows_as_sets(indices, page_size):
    rows = [sorted(set(row.tolist()) - {-1}) for row in indices]
    pairs = [b - a for row in rows for a, b in pairwise(row)]
    found = describe_selection(indices, LENGTH, page_size)
    assert found.rows == len(rows)
    assert found.picks == pytest.approx(np.mean([len(row) for row in rows]))
    assert found.neighbours == pytest.approx(pairs.count(1) / len(pairs) if pairs else math.nan, nan_ok=True)
    assert found.pages == pytest.approx(np.mean([len({i // page_size for i in row}) for row in rows]))
    assert found.in_range
    assert found.distinct
    assert found == describe_selection(torch.from_numpy(indices), np.full(len(rows), LENGTH), page_size) or pairs == []


@given(arrays(np.int64, (4, 6), elements=st.integers(-3, 12)))
def test_range_and_distinctness_are_those_of_each_row(indices):
    """Public case: tied scores, a plateau, one histogram bin: the picks stay in range and distinct (vllm 51782)."""
    lengths = np.array([3, 6, 9, 12])
    found = describe_selection(indices, lengths, 4)
    rows = [row[row != -1].tolist() for row in indices]
    assert found.in_range == all(0 <= i < length for row, length in zip(rows, lengths, strict=True) for i in row)
    assert found.distinct == all(len(row) == len(set(row)) for row in rows)


@given(st.data(), selections())
def test_overlap_is_that_of_sets(data, a):
    b = data.draw(selections(rows=len(a)))
    sets = [({*x.tolist()} - {-1}, {*y.tolist()} - {-1}) for x, y in zip(a, b, strict=True)]
    some = [(x, y) for x, y in sets if x or y]
    found = selection_overlap(a, torch.from_numpy(b))
    if not some:
        assert math.isnan(found.shared)
        return
    assert found.shared == pytest.approx(np.mean([len(x & y) / max(len(x), len(y)) for x, y in some]))
    assert found.jaccard == pytest.approx(np.mean([len(x & y) / len(x | y) for x, y in some]))
    itself = math.nan if not any(x for x, _ in sets) else 1.0
    assert selection_overlap(a, a).jaccard == pytest.approx(itself, nan_ok=True)
    assert found == selection_overlap(b, a)


def test_neighbouring_and_scattered_picks_of_the_same_number():
    together = np.arange(256)[None]
    scattered = (np.arange(256) * 64)[None]
    assert describe_selection(together, 16384).neighbours == 1
    assert describe_selection(together, 16384).spread == 1
    assert describe_selection(scattered, 16384).neighbours == 0
    assert describe_selection(scattered, 16384).pages == 256
    assert describe_selection(scattered, 16384).spread == 64


def test_wrong_shapes_are_refused():
    with pytest.raises(StudyError, match="integers"):
        describe_selection(np.zeros((2, 3)), 5)
    with pytest.raises(StudyError, match=r"\[rows, k\]"):
        describe_selection(np.zeros(3, int), 5)
    with pytest.raises(StudyError, match="one a row"):
        describe_selection(np.zeros((2, 3), int), [1, 2, 3])
    with pytest.raises(StudyError, match="page size 0"):
        describe_selection(np.zeros((2, 3), int), 5, 0)
    with pytest.raises(StudyError, match="2 and 3 rows"):
        selection_overlap(np.zeros((2, 3), int), np.zeros((3, 3), int))
