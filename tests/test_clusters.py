"""Intervals over restarts: as before for one process, wider where processes disagree, of nominal coverage."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.clusters import between_variance, clustered_interval
from kvlab.estimates import arm_estimate
from kvlab.intervals import block_variance, bootstrap_interval
from kvlab.stats import decide, p_different

sizes = st.lists(st.integers(2, 12), min_size=2, max_size=5)


def drawn(counts, between, seed, within=0.004):
    rng = np.random.default_rng(seed)
    process = np.repeat(np.arange(len(counts)), counts)
    return (between * rng.standard_normal(len(counts)))[process] + within * rng.standard_normal(len(process)), process


@given(st.integers(1, 30), st.integers(0, 99))
def test_one_process_is_the_plain_bootstrap(n, seed):
    x, process = drawn([n], 0.0, seed)
    assert clustered_interval(x, process)[:2] == bootstrap_interval(x)


@given(sizes, st.integers(0, 999), st.sampled_from([0.0, 0.002, 0.02]))
def test_an_interval_is_never_narrower_for_its_processes_nor_its_names(counts, seed, between):
    x, process = drawn(counts, between, seed)
    lo, hi, df = clustered_interval(x, process)
    plain = bootstrap_interval(x)
    assert lo <= plain[0]
    assert plain[1] <= hi
    assert 0 < df <= block_variance(len(x))[1] + len(counts) - 1 + 1e-9
    assert clustered_interval(x, 7 - 3 * process) == pytest.approx((lo, hi, df))


@given(sizes, st.integers(0, 999), st.floats(-1, 1), st.floats(0.1, 10))
def test_the_variance_between_knows_no_origin_and_scales(counts, seed, shift, factor):
    x, process = drawn(counts, 0.01, seed)
    found = between_variance(x, process)
    assert found >= 0
    assert between_variance(x * factor + shift, process) == pytest.approx(found * factor**2, rel=1e-6, abs=1e-12)


def test_the_variance_between_is_unbiased_enough():
    found = [between_variance(*drawn([6] * 5, 0.01, seed)) for seed in range(400)]
    assert np.mean(found) == pytest.approx(1e-4, rel=0.15)


@pytest.mark.parametrize(("between", "least"), [(0.0, 0.86), (0.004, 0.86), (0.02, 0.86)])
def test_processes_that_differ_are_covered(between, least):
    """Five processes of six rounds: the plain bootstrap covers the mean of all processes 65 % of the time at 0.02."""
    covered = np.mean(
        [lo <= 0 <= hi for lo, hi, _ in (clustered_interval(*drawn([6] * 5, between, s)) for s in range(400))]
    )
    assert least <= covered <= 0.985


def test_samples_say_which_process_timed_a_round():
    rng = np.random.default_rng(0)
    rows = [
        {"round": n, "process": n // 8, "arm": arm, "us": 1000 * math.exp(level + 0.001 * rng.standard_normal())}
        for n in range(16)
        for arm, level in (("zeros", 0.0), ("zeros_again", 0.0), ("random", 0.02 * (n // 8)))
    ]
    samples = pd.DataFrame(rows)
    clustered, plain = arm_estimate(samples, "random"), arm_estimate(samples.drop(columns="process"), "random")
    assert (clustered.processes, plain.processes) == (2, 1)
    assert clustered.half_width > 4 * plain.half_width
    assert clustered.standard_error > plain.standard_error
    assert p_different(clustered, 0) > p_different(plain, 0)
    assert decide(samples).verdict == "inconclusive"
    assert decide(samples.drop(columns="process")).verdict in ("equivalent", "inconclusive")
    # A round that lacks an arm takes its process with it.
    holed = samples.drop(samples.index[(samples["round"] == 3) & (samples["arm"] == "random")])
    assert arm_estimate(holed, "random").n == 15
