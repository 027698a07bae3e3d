"""Where a step's time goes: the parts add up, whatever the kernels are called."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from handmade_frames import kernels, legible

from kvlab.errors import KvlabError, RunError
from kvlab.kernel_gaps import kernel_gap_table
from kvlab.plots import plot_kernels, plot_parts


@pytest.mark.parametrize("arms", [None, ["random"]])
def test_parts_add_to_the_total_and_roles_to_the_gap(arms):
    table = kernels()
    fig, (times, gaps) = plot_parts(table, arms=arms)
    said = legible(fig)
    compared = arms or ["zeros_again", "random"]
    drawn = [bar.get_width() for bar in times.patches]
    positive = table[(table["us"] > 0) & table["arm"].isin(["zeros", *compared])]
    assert sum(drawn) == pytest.approx(positive["us"].sum() / 1e3)
    by_arm = table.groupby("arm")["us"].sum()
    # Bars of one arm: the roles, then their total.
    for number, arm in enumerate(compared):
        bars = gaps.patches[number * len(gaps.patches) // len(compared) :][: len(gaps.patches) // len(compared)]
        *roles, total = [bar.get_width() * (1e3 if "ms" in gaps.get_xlabel() else 1) for bar in bars]
        assert sum(roles) == pytest.approx(total)
        assert total == pytest.approx(by_arm[arm] - by_arm["zeros"])
    assert "other" in said
    assert [label.get_text() for label in gaps.get_yticklabels()][-2:] == ["rest", "total"]


def test_kernels_are_in_the_order_of_what_they_add_and_the_rest_is_one_row():
    table = kernels()
    fig, (times, gaps) = plot_kernels(table, top=5)
    said = legible(fig)
    assert {"\N{MINUS SIGN}1.94 ms", "+600 µs", "not in zeros"} <= set(said)
    widths = [bar.get_width() for bar in gaps.patches]
    assert [abs(w) for w in widths[:5]] == sorted((abs(w) for w in widths[:5]), reverse=True)
    by_arm = table.groupby("arm")["us"].sum()
    assert sum(widths) == pytest.approx(by_arm["random"] - by_arm["zeros"])
    assert times.get_yticklabels()[-1].get_text() == "the other 21 kernels"


def test_one_kernel_and_all_kernels():
    table = kernels()
    legible(plot_kernels(table[table["kernel"] == "fmha_sparse_fwd"])[0])
    legible(plot_kernels(table, top=100)[0])
    legible(plot_parts(table[table["kernel"] == "fmha_sparse_fwd"])[0])


def test_whiskers_are_the_intervals_where_replays_are_known():
    table = kernels(us_each=None)
    assert not whiskers(plot_kernels(table)[1][1])
    each = [[us - 1.0, us, us + 1.0] for us in table["us"]]
    drawn = whiskers(plot_kernels(table.assign(us_each=each), top=5)[1][1])
    expected = kernel_gap_table(table.assign(us_each=each)).iloc[:5]
    assert np.array(drawn) == pytest.approx(expected[["lo_us", "hi_us"]].to_numpy())
    # Profiled on two visits: a kernel's time is their mean, not their sum.
    twice, once = (plot_kernels(t, top=100)[1][1] for t in (pd.concat([table, table]), table))
    assert [bar.get_width() for bar in twice.patches] == pytest.approx([bar.get_width() for bar in once.patches])


def whiskers(ax):
    return [tuple(line.get_xdata()) for line in ax.lines if line.get_linewidth() == 1.1]


def test_what_cannot_be_compared_is_said():
    table = kernels()
    with pytest.raises(RunError, match="say which: case="):
        plot_parts(pd.concat([table, table.assign(case="other")]))
    for plot in (lambda: plot_kernels(table, arm="levels"), lambda: plot_parts(table, arms=["levels"])):
        with pytest.raises(KvlabError, match="no kernels of arm 'levels'"):
            plot()
    with pytest.raises(RunError, match="nothing to compare"):
        plot_parts(table[table["arm"] == "zeros"])
    with pytest.raises(KvlabError, match="no kernels of arm 'zeros'"):
        plot_kernels(table[table["arm"] == "random"])
    with pytest.raises(RunError, match="holds none yet"):
        plot_kernels(table.iloc[:0])


def test_a_role_looks_the_same_in_every_figure():
    looks = {}
    for scale in ({"attention": 9.0, "top-k": 1.0, "MoE": 3.0}, {"MoE": 20.0, "top-k": 5.0, "attention": 1.0}):
        rows = [
            {
                "case": "c",
                "mode": "isolated",
                "arm": arm,
                "kernel": role,
                "role": role,
                "us": us,
                "calls": 1,
                "us_each": us,
            }
            for role, us in scale.items()
            for arm in ("zeros", "random")
        ]
        fig, _ = plot_parts(pd.DataFrame(rows))
        for patch, text in zip(fig.legends[0].get_patches(), fig.legends[0].get_texts(), strict=True):
            looks.setdefault(text.get_text(), set()).add((patch.get_facecolor(), patch.get_hatch()))
    assert {"attention", "top-k", "MoE"} <= set(looks)
    assert all(len(found) == 1 for found in looks.values())
    assert len(set.union(*looks.values())) == len(looks)
