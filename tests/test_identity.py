"""What makes two studies different is found, wherever it lies."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from kvlab.identity import difference

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values, values)
def test_a_difference_is_found_exactly_where_there_is_one(old, new):
    assert (difference(old, new) is None) == (old == new)
    assert difference(old, copy.deepcopy(old)) is None


def test_it_is_named_by_its_path():
    old = {"a": {"b": [1, {"c": 2}]}}
    assert difference(old, {"a": {"b": [1, {"c": 3}]}}) == ("a.b.1.c", "2", "3")
    assert difference(old, {"a": {"b": [1]}}) == ("a.b.1", '{"c": 2}', "absent")
