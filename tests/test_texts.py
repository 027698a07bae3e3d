"""Lists of numbers and JSON objects as people type them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import StudyError
from kvlab.texts import fractions, json_object, token_counts, words


@given(st.lists(st.tuples(st.integers(1, 10**9), st.booleans())))
def test_counts_are_read_with_and_without_k(parts):
    text = " , ".join(f"{n}{'k' if kilo else ''}" for n, kilo in parts)
    assert token_counts(text, "contexts") == tuple(n * (1024 if kilo else 1) for n, kilo in parts)


@given(st.lists(st.floats(0, 1)))
def test_fractions_are_read_as_written(values):
    assert fractions(",".join(map(repr, values)), "zero fractions") == tuple(values)


@pytest.mark.parametrize("text", ["0", "k", "1.5k", "-3", "8k, x"])
def test_what_is_no_count_is_named(text):
    with pytest.raises(StudyError, match="contexts"):
        token_counts(text, "contexts")


@pytest.mark.parametrize("text", ["1.1", "-0.1", "half", "nan"])
def test_what_is_no_share_is_named(text):
    with pytest.raises(StudyError, match="is no number from 0 to 1"):
        fractions(text, "zero fractions")


def test_words():
    assert words(" decode, hit,") == ("decode", "hit")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(values)
def test_a_json_object_is_read_as_written_and_any_other_json_is_named(value):
    text = json.dumps(value)
    if isinstance(value, dict):
        assert json_object(text, "options") == value
    else:
        with pytest.raises(StudyError, match=r"^options: .* is no JSON object; write e\.g\. "):
            json_object(text, "options")


@pytest.mark.parametrize("text", ["", "{", "a=1", "{'a': 1}"])
def test_what_is_no_json_is_named(text):
    with pytest.raises(StudyError, match=r"^options: .* is no JSON \("):
        json_object(text, "options")
