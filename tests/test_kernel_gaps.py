"""Which kernels a gap is made of: sums close, visits and replays give intervals, mixtures are refused."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import StudyError
from kvlab.kernel_gaps import TOTAL, kernel_gap_table, profiled_samples
from kvlab.kernel_names import REST

times = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.1, 1e5), min_size=1)
ROLE = dict(zip("abcdefgh", ["top-k", "top-k", "attention", "GEMM", "GEMM", "MoE", "other", REST], strict=True))


def table(arms, **more):
    """Kernels of arms: arm -> kernel -> microseconds, or a list of them by replay."""
    rows = []
    for arm, kernels in arms.items():
        for kernel, us in kernels.items():
            each = us if isinstance(us, list) else None
            rows.append({"arm": arm, "kernel": kernel, "role": ROLE.get(kernel, "other"), "us": np.mean(us), **more})
            if each is not None:
                rows[-1]["us_each"] = each
    return pd.DataFrame(rows)


@given(times, times)
@settings(max_examples=25, deadline=None)
def test_rows_add_to_the_closing_row_by_kernel_and_by_role(zeros, random):
    for by in ("kernel", "role"):
        found = kernel_gap_table(table({"zeros": zeros, "random": random}), by=by)
        parts, total = found.iloc[:-1], found.iloc[-1]
        assert total["role"] == TOTAL
        assert total["baseline_us"] == pytest.approx(sum(zeros.values()))
        assert total["arm_us"] == pytest.approx(sum(random.values()))
        for column in ("baseline_us", "arm_us", "gap_us"):
            assert parts[column].sum() == pytest.approx(total[column], abs=1e-6)
        assert (parts["arm_us"] - parts["baseline_us"]).to_numpy() == pytest.approx(parts["gap_us"].to_numpy())
        assert parts["of_step"].sum() == pytest.approx(total["of_step"], abs=1e-6)
        own = parts[parts["role"] != REST]["gap_us"].abs().to_numpy()
        assert (np.diff(own) <= 0).all()
        assert REST not in set(parts["role"].iloc[:-1])
    by_role = found.set_index("role")["gap_us"]
    for role in {ROLE[k] for k in {*zeros, *random}}:
        members = [k for k in ROLE if ROLE[k] == role]
        gap = sum(random.get(k, 0) for k in members) - sum(zeros.get(k, 0) for k in members)
        assert by_role[role] == pytest.approx(gap, abs=1e-6)


def test_replays_give_an_interval_as_lists_or_as_stored_text():
    arms = {"zeros": {"a": [10.0, 11.0, 12.0], "c": [5.0, 5.0, 5.0]}, "random": {"a": [20.0, 22.0, 21.0]}}
    lists = table(arms)
    # Welch by hand: both variances 1 over 3, 4 degrees of freedom.
    half = 2.1318 * np.sqrt(2 / 3)
    for rows in (lists, lists.assign(us_each=lists["us_each"].map(json.dumps))):
        found = kernel_gap_table(rows).set_index("kernel")
        assert found.loc["a", "gap_us"] == pytest.approx(10)
        assert found.loc["a", "hi_us"] - 10 == pytest.approx(half, rel=1e-3)
        assert found.loc["a", "lo_us"] == pytest.approx(10 - half, rel=1e-3)
        # A kernel that one arm never ran took no time there, replay after replay.
        assert found.loc["c", "lo_us"] == found.loc["c", "hi_us"] == -5
        assert np.isnan(found.loc[TOTAL, "lo_us"])
    by_role = kernel_gap_table(lists, by="role").set_index("role")
    assert by_role.loc["top-k", "hi_us"] == pytest.approx(found.loc["a", "hi_us"])


def test_visits_go_before_replays():
    steady = {"a": [10.0, 10.0]}
    first = table({"zeros": steady, "random": {"a": [12.0, 12.0]}})
    second = table({"zeros": {"a": [11.0, 11.0]}, "random": {"a": [12.0, 12.0]}})
    found = kernel_gap_table(pd.concat([first, second])).set_index("kernel")
    assert found.loc["a", "baseline_us"] == pytest.approx(10.5)
    assert found.loc["a", "hi_us"] > found.loc["a", "gap_us"] + 1
    assert kernel_gap_table(first).set_index("kernel").loc["a", "hi_us"] == 2
    assert profiled_samples(pd.concat([first, second])) == "2 visits"
    assert profiled_samples(first) == "2 profiled replays"


def test_no_replays_no_interval():
    found = kernel_gap_table(table({"zeros": {"a": 1.0}, "random": {"a": 2.0}}))
    assert found["lo_us"].isna().all()
    assert profiled_samples(table({"zeros": {"a": 1.0}, "random": {"a": 2.0}})) == ""


def test_what_cannot_be_compared_is_refused():
    rows = table({"zeros": {"a": 1.0}, "random": {"a": 2.0}}, case="x", mode="isolated")
    with pytest.raises(StudyError, match=r"several|mix values of 'case'"):
        kernel_gap_table(pd.concat([rows, rows.assign(case="y")]))
    with pytest.raises(StudyError, match="no kernels of arm 'prefill'; profiled arms are 'zeros', 'random'"):
        kernel_gap_table(rows, "prefill")
    with pytest.raises(StudyError, match="against itself"):
        kernel_gap_table(rows, "zeros")
    with pytest.raises(StudyError, match="lack column 'us'"):
        kernel_gap_table(rows.drop(columns="us"))
    with pytest.raises(StudyError, match="give kernel or role"):
        kernel_gap_table(rows, by="stream")
