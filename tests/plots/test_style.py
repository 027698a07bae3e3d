"""The look: numbers as text, names that fit, limits that show what matters, and the test of legibility itself."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from handmade_frames import legible
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from kvlab.plots.style import (
    arm_styles,
    gap_limits,
    microseconds,
    percent,
    percent_interval,
    place_rows,
    shorten,
    tokens,
)


def test_text_that_is_cut_or_covered_is_found():
    fig = Figure()
    fig.text(0.5, 0.5, "one")
    assert legible(fig) == ["one"]
    fig.text(0.5, 0.5, "two")
    with pytest.raises(AssertionError, match="covers"):
        legible(fig)
    cut = Figure()
    cut.text(0.99, 0.5, "a long text")
    with pytest.raises(AssertionError, match="is cut"):
        legible(cut)


@given(st.floats(-1, 100))
def test_a_percentage_reads_back(value):
    text = percent(value)
    assert text.endswith(" %")
    assert text[0] in "+\N{MINUS SIGN}"
    assert float(text[:-2].replace("\N{MINUS SIGN}", "-")) == pytest.approx(100 * value, abs=0.00501)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(value):
    assert percent(value) == "\N{EN DASH}"
    assert percent_interval(value, 0.1) == percent_interval(0.1, value) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1"), (999, "999"), (1024, "1k"), (8192, "8k"), (100_000, "100k"), (131_072, "128k"), (100_016, "100k")],
)
def test_token_counts_are_short(count, text):
    assert tokens(count) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.5, "0.500 µs"),
        (123.4, "123 µs"),
        (999.6, "1.00 ms"),
        (999_600.0, "1.00 s"),
        (3e9, "3,000 s"),
        (8759.2, "8.76 ms"),
        (117305.0, "117 ms"),
        (2.5e6, "2.50 s"),
    ],
)
def test_times_have_three_digits(us, text):
    assert microseconds(us) == text


@given(st.text(max_size=200), st.integers(5, 60))
def test_a_name_fits_and_keeps_its_ends(name, most):
    short = shorten(name, most).lstrip("\N{HAIR SPACE}")
    assert len(short) <= most
    assert short == name or (len(name) > most and short[0] == name[0] and short[-1] == name[-1]) or name[0] == "\u200a"


@given(st.lists(st.text(min_size=1), max_size=12))
def test_each_arm_has_a_look_and_the_usual_ones_always_the_same(arms):
    styles = arm_styles(["zeros", *arms, "random", "zeros_again"])
    assert set(styles) == {"zeros", "zeros_again", "random", *arms}
    assert list(styles)[:3] == ["zeros", "zeros_again", "random"]
    usual = arm_styles(["zeros", "zeros_again", "random"])
    assert {arm: styles[arm] for arm in usual} == usual
    if len(styles) <= 10:
        assert len(set(styles.values())) == len(styles)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_rows_and_headings_have_places_of_their_own(heads):
    places, headings = place_rows(heads)
    assert len(places) == len(heads)
    taken = [*places, *headings]
    assert sorted(taken) == list(range(len(taken)))
    assert bool(headings) == (len(set(heads)) > 1)
    for place, head in headings.items():
        assert heads[places.index(place + 1)] == head


@given(
    st.lists(st.tuples(st.floats(-0.5, 5), st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=8),
    st.floats(0.001, 0.1),
)
def test_limits_hold_each_gap_and_the_margin_whatever_the_intervals(rows, margin):
    table = pd.DataFrame([{"gap": g, "ci90_lo": g - down, "ci90_hi": g + up, "margin": margin} for g, down, up in rows])
    low, high = gap_limits(table)
    assert low < min(-margin, table["gap"].min())
    assert high > max(margin, table["gap"].max())
    # No interval may press the gaps into less than a quarter of the axis.
    span = max(margin, table["gap"].max()) - min(-margin, table["gap"].min())
    assert high - low <= 4 * span
