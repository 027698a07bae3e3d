"""Gaps case by case: what is drawn is what the table says, and all of it can be read."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from handmade_frames import LONG, any_gaps, gaps, legible, verdicts
from hypothesis import given, settings

from kvlab.errors import RunError
from kvlab.plots import plot_compare, plot_gaps


def marks(ax, marker):
    return [
        float(line.get_xdata()[0]) for line in ax.lines if line.get_marker() == marker and len(line.get_xdata()) == 1
    ]


@pytest.mark.parametrize("count", [1, 4, 30])
def test_gaps_and_intervals_are_where_the_table_says(count):
    table = verdicts(count)
    fig, ax = plot_gaps(table)
    said = legible(fig)
    for verdict, marker in (("equivalent", "o"), ("different", "D"), ("inconclusive", "s"), ("invalid", "X")):
        rows = table[table["verdict"] == verdict]
        # Each row has its mark twice: at the gap, and at 1 (the edge of the axes) before the verdict's name.
        assert sorted(marks(ax, marker)) == pytest.approx(sorted([*rows["gap"], *[1] * len(rows)]))
        assert said.count(verdict) == len(rows)
    spans = {tuple(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2}
    assert set(zip(table["ci90_lo"], table["ci90_hi"], strict=True)) <= spans
    assert [label.get_text() for label in ax.get_yticklabels()] == list(table["case"])
    low, high = ax.get_xlim()
    assert low < 1 / 1.03 - 1
    assert high > 0.03


def test_what_is_odd_is_drawn_and_said():
    table = pd.concat([verdicts(3, model=LONG), verdicts(3, model="$x_1$ <b>"), verdicts(2, model="_hidden")])
    table = table.reset_index(drop=True)
    table.loc[1, ["gap", "ci90_lo", "ci90_hi", "aa_gap", "aa_ci90_lo", "aa_ci90_hi"]] = math.nan
    table.loc[2, ["ci90_lo", "ci90_hi"]] = math.nan
    table.loc[4, ["ci90_lo", "ci90_hi"]] = [-0.9, 5.0]
    table.loc[5, "margin"] = 0.01
    table.loc[0, "case"] = "a-very-long-case-name-that-somebody-gave-to-decode-100k"
    table.loc[6, "mode"] = "sustained"
    fig, ax = plot_gaps(table)
    said = legible(fig)
    assert "$x_1$ <b>" in said
    assert "\N{EN DASH}" in said
    assert {"margin ±1 %", "margin ±3 %"} <= set(said)
    # The interval that leaves the axes ends in an arrow on either side, and does not set their limits.
    assert len(marks(ax, "<")) == len(marks(ax, ">")) == 1
    assert ax.get_xlim()[1] < 0.2


def test_nothing_measured_is_a_figure_still():
    table = verdicts(2, verdict="invalid")
    table[["gap", "ci90_lo", "ci90_hi", "aa_gap", "aa_ci90_lo", "aa_ci90_hi"]] = math.nan
    assert legible(plot_gaps(table)[0]).count("invalid") == 2


@settings(max_examples=8, deadline=None)
@given(any_gaps())
def test_any_table_is_drawn(table):
    fig, ax = plot_gaps(table)
    fig.savefig(io.BytesIO(), format="png", dpi=40)
    assert all(map(math.isfinite, ax.get_xlim()))


def test_an_empty_table_and_one_of_something_else_are_refused():
    with pytest.raises(RunError, match="no finished case"):
        plot_gaps(verdicts(1).iloc[:0])
    with pytest.raises(RunError, match="no column aa_gap"):
        plot_gaps(verdicts(1).drop(columns="aa_gap"))


def test_two_runs_meet_case_by_case():
    before, after = gaps(), gaps(models=("m-fp8",))
    after = after.drop(index=0).assign(gap=after["gap"] + 0.02, verdict="different")
    fig, ax = plot_compare(before, after, ["vllm 0.33.0", "vllm 0.34.0"])
    said = legible(fig)
    assert marks(ax, "o") == pytest.approx(list(before["gap"][1:]))
    assert marks(ax, "s") == pytest.approx(list(after["gap"]))
    assert {"vllm 0.33.0", "vllm 0.34.0", "equivalent → different"} <= set(said)
    with pytest.raises(RunError, match="no case in common"):
        plot_compare(before, after.assign(case="other"))


def test_the_look_does_not_depend_on_the_callers_style():
    with matplotlib.rc_context({"text.color": "white", "figure.facecolor": "black", "font.size": 30}):
        fig, _ = plot_gaps(verdicts(2))
    plain, _ = plot_gaps(verdicts(2))
    assert fig.get_facecolor() == plain.get_facecolor() == (1, 1, 1, 1)
    assert legible(fig) == legible(plain)
    assert matplotlib.rcParams["font.size"] == matplotlib.rcParamsDefault["font.size"]


def test_figures_leave_pyplot_alone(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from handmade_frames import verdicts;"
        "from kvlab.plots import plot_gaps; plot_gaps(verdicts(2))[0].savefig(sys.argv[2]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path / "gaps.png")], check=True)
    assert (tmp_path / "gaps.png").stat().st_size > 5000
