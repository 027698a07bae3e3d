"""Gaps along context, top-k and the share of zeros: a line a phase, each gap in its place."""

from __future__ import annotations

import io
import math

import pandas as pd
import pytest
from handmade_frames import LONG, any_gaps, gaps, legible
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import RunError
from kvlab.kv.fills import parse_fill
from kvlab.plots import plot_context_sweep, plot_topk_sweep, plot_zero_fraction
from kvlab.plots.sweeps import zero_fraction


def lines(ax):
    """The lines through gaps: those without a mark and of the width that only they have."""
    return [line for line in ax.lines if line.get_linewidth() == 1.2 and line.get_marker() == "None"]


def legend(fig):
    return [text.get_text() for text in fig.legends[0].get_texts()]


def test_a_line_a_phase_through_its_gaps_by_context():
    table = gaps()
    fig, ax = plot_context_sweep(table.sample(frac=1, random_state=0))
    said = legible(fig)
    assert len(lines(ax)) == 2
    for line, phase in zip(sorted(lines(ax), key=lambda line: line.get_ydata()[-1]), ("decode", "hit"), strict=True):
        rows = table[table["phase"] == phase].sort_values("context")
        assert list(line.get_ydata()) == pytest.approx(list(rows["gap"]))
        assert list(line.get_xdata()) == pytest.approx(list(rows["context"]), rel=0.05)
    assert {"1k", "8k", "32k", "100k", "decode", "hit", "margin ±3 %", "equivalent", "different"} <= set(said)
    # In grey, the dashes tell the lines apart.
    assert len({line.get_linestyle() for line in lines(ax)}) == 2


def test_models_modes_and_topks_are_lines_of_their_own():
    table = gaps(models=(LONG, "deepseek-v3.2-6l"), modes=("isolated", "sustained"))
    fig, ax = plot_context_sweep(table)
    legible(fig)
    assert len(lines(ax)) == 8
    table = gaps(topks=(256.0, 512.0, 2048.0), phases=("decode", "verify", "hit"), modes=("isolated", "sustained"))
    fig, ax = plot_context_sweep(table)
    legible(fig)
    assert len(lines(ax)) == 18
    assert "decode, sustained, top-512" in legend(fig)


def test_a_batch_that_follows_the_context_makes_no_line_of_its_own():
    table = gaps(phases=("decode",)).assign(batch=[32.0, 32.0, 8.0, 3.0])
    assert len(lines(plot_context_sweep(table)[1])) == 1
    several = pd.concat([table, table.assign(batch=1.0, case="alone")])
    fig, ax = plot_context_sweep(several)
    assert len(lines(ax)) > 1
    assert "1 request" in " ".join(legend(fig))


def test_what_was_not_measured_is_marked_and_no_line_goes_through_it():
    table = gaps(phases=("decode",))
    table.loc[1, ["gap", "ci90_lo", "ci90_hi"]] = math.nan
    table.loc[1, "verdict"] = "invalid"
    table.loc[2, ["ci90_lo", "ci90_hi"]] = math.nan
    fig, ax = plot_context_sweep(table)
    assert "invalid" in legible(fig)
    assert len(lines(ax)[0].get_xdata()) == 3
    tried = [line for line in ax.lines if line.get_marker() == "X"]
    assert [line.get_xdata()[0] for line in tried] == pytest.approx([8192])


def test_one_context_and_one_case_are_a_figure():
    legible(plot_context_sweep(gaps(contexts=(8192,)))[0])
    legible(plot_context_sweep(gaps(contexts=(8192,), phases=("hit",)))[0])


@settings(max_examples=4, deadline=None)
@given(any_gaps())
def test_any_table_is_drawn(table):
    for plot in (plot_context_sweep, plot_topk_sweep, plot_zero_fraction):
        fig, ax = plot(table)
        assert sum(len(line.get_ydata()) for line in lines(ax)) >= table["gap"].notna().sum()
        fig.savefig(io.BytesIO(), format="png", dpi=40)


def test_topk_is_on_a_binary_logarithm_and_dense_models_are_left_out():
    table = pd.concat([gaps(topks=(256.0, 512.0, 2048.0), contexts=(8192, 100000)), gaps(models=("dense",))])
    fig, ax = plot_topk_sweep(table)
    said = legible(fig)
    assert {"256", "512", "2,048", "decode, 100k tokens"} <= set(said)
    assert len(lines(ax)) == 4
    with pytest.raises(RunError, match="all are dense"):
        plot_topk_sweep(gaps())


def test_a_line_of_shares_runs_from_random_to_zeros():
    arms = ("random", "random(zero_fraction=0.25)", "random(zero_fraction=0.5)", "constant(0.015)")
    table = gaps(phases=("hit",), contexts=(8192,), arms=arms)
    fig, ax = plot_zero_fraction(table)
    assert "zeros, by definition" in legible(fig)
    (line,) = lines(ax)
    assert list(line.get_xdata()) == pytest.approx([0, 0.25, 0.5, 1])
    assert list(line.get_ydata()) == pytest.approx([*table["gap"][:3], 0])
    again = gaps(phases=("hit",), contexts=(8192,), arms=(*arms[:2], "zeros_again"))
    (line,) = lines(plot_zero_fraction(again)[1])
    assert list(line.get_ydata()) == pytest.approx([*again["gap"][:3]])
    scaled = gaps(phases=("hit",), contexts=(8192,), arms=("random", "random(std=0.5, zero_fraction=0.5)"))
    assert len(lines(plot_zero_fraction(scaled)[1])) == 2


@given(st.floats(0.01, 100), st.floats(0, 1))
def test_an_arms_share_of_zeros_is_what_its_fill_says(std, share):
    fill = parse_fill(f"random(std={std!r}, zero_fraction={share!r})")
    contents, found = zero_fraction(str(fill))
    assert found == fill.zero_share
    assert parse_fill(contents).std == std


def test_arms_that_are_not_there_are_said():
    with pytest.raises(RunError, match="the run has random"):
        plot_context_sweep(gaps(), arm="constant(0.015)")
    with pytest.raises(RunError, match="add --arm 'random"):
        plot_zero_fraction(gaps(arms=("constant(0.015)",)))
    with pytest.raises(RunError, match="no column context"):
        plot_context_sweep(gaps().drop(columns="context"))
    assert zero_fraction("levels") is None
