"""Numbers in sentences keep their sign and two or three digits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cause_words import duration, percent


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (250.4, "+250 us"),
        (-6572.0, "-6.6 ms"),
        (999.4, "+999 us"),
        (999.6, "+1.0 ms"),
        (-3.14, "-3.1 us"),
        (9.97, "+10 us"),
    ],
)
def test_durations(us, text):
    assert duration(us) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.1311, "+13.1 %"), (-0.00051, "-0.05 %"), (0.00996, "+1.0 %"), (0.0099, "+0.99 %")]
)
def test_percentages(share, text):
    assert percent(share) == text


@given(st.floats(-1e7, 1e7), st.floats(-10, 10))
def test_what_is_read_back_is_what_was_meant(us, share):
    number, unit = duration(us).replace(",", "").split()
    assert float(number) * {"us": 1, "ms": 1000}[unit] == pytest.approx(us, rel=0.06, abs=0.06)
    assert float(percent(share).split()[0]) / 100 == pytest.approx(share, rel=0.06, abs=6e-5)
