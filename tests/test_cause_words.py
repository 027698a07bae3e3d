"""Numbers in sentences keep their sign and two or three digits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cause_words import percent


@pytest.mark.parametrize(
    ("share", "text"), [(0.1311, "+13.1 %"), (-0.00051, "-0.05 %"), (0.00996, "+1.0 %"), (0.0099, "+0.99 %")]
)
def test_percentages(share, text):
    assert percent(share) == text


@given(st.floats(-10, 10))
def test_what_is_read_back_is_what_was_meant(share):
    assert float(percent(share).split()[0]) / 100 == pytest.approx(share, rel=0.06, abs=6e-5)
