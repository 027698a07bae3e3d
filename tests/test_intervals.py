"""The interval of a round's typical log ratio: oracles, symmetries, and whether it covers what it says."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import StudyError
from kvlab.intervals import (
    _resampled_medians,
    block_length,
    block_variance,
    bootstrap_interval,
    hodges_lehmann,
    student_quantile,
    student_tail,
)

LOG_RATIOS = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=25)


def by_hand(x) -> float:
    pairs = sorted((x[i] + x[j]) / 2 for i in range(len(x)) for j in range(i, len(x)))
    return (pairs[(len(pairs) - 1) // 2] + pairs[len(pairs) // 2]) / 2


@given(LOG_RATIOS)
def test_hodges_lehmann_is_the_median_of_all_pair_averages(x):
    assert hodges_lehmann(x) == pytest.approx(by_hand(x), abs=1e-15)


def test_hodges_lehmann_shrugs_off_a_quarter_of_outliers():
    x = np.concatenate([np.linspace(-0.01, 0.01, 15), np.full(5, 9.0)])
    assert abs(hodges_lehmann(x)) <= 0.01


@given(st.lists(st.floats(-1, 1).map(lambda v: round(v, 1)), min_size=2, max_size=12), st.integers(0, 99))
def test_weights_stand_for_resamples(x, seed):
    drawn = np.random.default_rng(seed).integers(0, len(x), (20, len(x)))
    counts = np.stack([np.bincount(row, minlength=len(x)) for row in drawn], axis=1).astype(np.int32)
    expected = [by_hand(np.asarray(x)[row]) for row in drawn]
    np.testing.assert_allclose(_resampled_medians(np.asarray(x), counts), expected, atol=1e-12)


@given(LOG_RATIOS.filter(lambda x: len(x) > 1), st.floats(-1, 1))
def test_the_interval_holds_its_estimate_and_moves_with_the_data(x, shift):
    lo, hi = bootstrap_interval(x, resamples=200)
    assert lo <= hodges_lehmann(x) <= hi
    assert bootstrap_interval(x, resamples=200) == (lo, hi)
    moved = bootstrap_interval(np.asarray(x) + shift, resamples=200)
    mirrored = bootstrap_interval(-np.asarray(x), resamples=200)
    np.testing.assert_allclose(moved, (lo + shift, hi + shift), atol=1e-9)
    np.testing.assert_allclose(mirrored, (-hi, -lo), atol=1e-9)


def test_identical_rounds_give_a_point_and_one_round_gives_none():
    lo, hi = bootstrap_interval([0.02] * 10)
    assert lo == hi == pytest.approx(0.02)
    assert bootstrap_interval([0.02]) == (-math.inf, math.inf)


@pytest.mark.parametrize("x", [[], [[0.1, 0.2]], [0.1, math.nan], [math.inf, 0.1]])
def test_values_that_are_no_rounds_are_refused(x):
    for function in (hodges_lehmann, bootstrap_interval):
        with pytest.raises(StudyError, match="log ratios"):
            function(x)


@pytest.mark.parametrize("how", [{"level": 0}, {"level": 90}, {"resamples": 0}])
def test_levels_and_resamples_out_of_range_are_refused(how):
    with pytest.raises(StudyError, match=r"give"):
        bootstrap_interval([0.1, 0.2], **how)


def test_student_against_published_quantiles():
    for df, t in {1: 6.3138, 2: 2.9200, 5: 2.0150, 10: 1.8125, 30: 1.6973}.items():
        assert student_quantile(0.05, df) == pytest.approx(t, abs=1e-4)
        assert student_tail(t, df) == pytest.approx(0.05, abs=1e-5)
        assert student_tail(-t, df) == pytest.approx(0.95, abs=1e-5)
    # df = 2 has a closed form far out too.
    assert student_tail(300, 2) == pytest.approx((1 - 300 / math.sqrt(2 + 300**2)) / 2, rel=1e-3)


@pytest.mark.parametrize("n", [2, 7, 20])
def test_block_variance_against_simulation(n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((40_000, n + 20))
    for k in range(1, n + 20):
        x[:, k] += 0.05 * x[:, k - 1]
    x = x[:, 20:]
    length = block_length(n)
    blocks = np.stack([np.roll(x, -s, axis=1)[:, :length].mean(axis=1) for s in range(n)])
    form = length * ((blocks - x.mean(axis=1)) ** 2).mean(axis=0)
    bias, df = block_variance(n)
    assert form.mean() / (n * x.mean(axis=1).var()) == pytest.approx(bias, rel=0.04)
    assert 2 * form.mean() ** 2 / form.var() == pytest.approx(df, rel=0.06)


def noise(kind: str, rng: np.random.Generator, data_sets: int, n: int) -> np.ndarray:
    if kind == "t3":
        return rng.standard_t(3, (data_sets, n))
    x = rng.standard_normal((data_sets, n + 30))
    if kind == "ar":
        for k in range(1, n + 30):
            x[:, k] += 0.3 * x[:, k - 1]
    return x[:, 30:]


def covered(kind: str, n: int, data_sets: int) -> float:
    x = noise(kind, np.random.default_rng(n), data_sets, n)
    return float(np.mean([lo <= 0 <= hi for lo, hi in map(bootstrap_interval, x)]))


# Correlation of 0.3 between rounds is more than orders drawn afresh leave, and is not made good in full.
@pytest.mark.parametrize(("kind", "least"), [("normal", 0.87), ("t3", 0.87), ("ar", 0.84)])
def test_coverage_at_few_rounds(kind, least):
    # Give or take two standard errors of 400 data sets.
    assert least - 0.03 <= covered(kind, 12, 400) <= 0.96


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("normal", 0.87), ("t3", 0.87), ("ar", 0.84)])
@pytest.mark.parametrize("n", [12, 20, 40])
def test_coverage(kind, least, n):
    assert least - 0.018 <= covered(kind, n, 1000) <= 0.93 + 0.018


def test_twenty_rounds_take_little_time_and_memory():
    x = np.random.default_rng(0).standard_normal(20)
    bootstrap_interval(x)
    seconds = []
    for _ in range(10):
        begin = time.process_time()
        bootstrap_interval(x)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.02
    tracemalloc.start()
    bootstrap_interval(np.random.default_rng(0).standard_normal(60))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
