"""Small multiples: a panel a model and phase, every gap in its panel, one scale a phase."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from handmade_frames import gaps, legible

from kvlab.errors import RunError
from kvlab.plots import plot_context_panels, plot_topk_panels, plot_zero_panels

MODELS = ("deepseek-v3.2-6l", "deepseek-v4.1-flash", "gpt-oss-20b", "llama-3.1-8b", "qwen3-next-24l")


def lines(ax):
    return [line for line in ax.lines if line.get_linewidth() == 1.2 and line.get_marker() == "None"]


def test_a_panel_a_model_and_phase_and_a_line_a_mode():
    table = gaps(models=MODELS, modes=("isolated", "sustained"))
    fig, axes = plot_context_panels(table)
    said = legible(fig)
    assert axes.shape == (2, 5)
    assert {*MODELS, "1k", "100k", "isolated: each step alone", "sustained: back to back", "margin ±3 %"} <= set(said)
    for at, phase in enumerate(("decode", "hit")):
        for ax, model in zip(axes[at], MODELS, strict=True):
            rows = table[(table["phase"] == phase) & (table["model"] == model)]
            drawn = sorted(y for line in lines(ax) for y in line.get_ydata())
            assert drawn == pytest.approx(sorted(rows["gap"]))
        assert len({ax.get_ylim() for ax in axes[at]}) == 1


def test_a_phase_that_a_model_lacks_is_said():
    table = pd.concat([gaps(models=("a",)), gaps(models=("b",), phases=("decode",))])
    assert "not measured" in legible(plot_context_panels(table)[0])


def test_one_context_is_a_figure_and_another_arm_is_refused():
    legible(plot_context_panels(gaps(contexts=(8192,)))[0])
    with pytest.raises(RunError, match="levels"):
        plot_context_panels(gaps(), arm="levels")


def parts(axis):
    topks = (512.0, 1024.0, 1536.0, 2048.0) if axis == "topk" else (2048.0,)
    shares = {"random": 0.0, "random(zero_fraction=0.5)": 0.5} if axis != "topk" else {"random": 0.0}
    whole = gaps(models=MODELS[:2], contexts=(100000,), topks=topks, arms=tuple(shares)).assign(part="whole step")
    whole["zero_fraction"] = whole["arm"].map(shares)
    made = {"top-k": -0.05, "attention": 0.02, "GEMM": 0.0001, "rest": 0.5}
    roles = [
        whole.assign(part=part, gap=gap, ci90_lo=math.nan, ci90_hi=math.nan, verdict="") for part, gap in made.items()
    ]
    return pd.concat([whole, *roles], ignore_index=True)


def test_parts_are_lines_beside_the_whole_step_but_for_small_ones():
    fig, axes = plot_topk_panels(parts("topk"))
    said = legible(fig)
    assert {"whole step", "top-k", "attention", "512", "2048"} <= set(said)
    assert not {"GEMM", "rest"} & set(said)
    assert all(len(lines(ax)) == 3 for ax in axes.flat)


def test_parts_in_two_modes_have_panels_of_their_own():
    table = pd.concat([parts("topk"), parts("topk").assign(mode="sustained")])
    fig, axes = plot_topk_panels(table)
    legible(fig)
    assert axes.shape == (2, 4)
    whole = table[table["part"] == "whole step"]
    assert plot_topk_panels(whole)[1].shape == (2, 2)


def test_a_line_of_shares_ends_without_a_gap():
    fig, axes = plot_zero_panels(parts("zeros"))
    assert {"all random", "half zero", "all zero"} <= set(legible(fig))
    led = [line for line in axes[0, 0].lines if line.get_linewidth() == 0.8 and len(line.get_xdata()) == 2]
    led = [line for line in led if line.get_linestyle() == ":"]
    measured = lines(axes[0, 0])
    # What lies between the last share and all zeros was not measured: dots lead there, no line.
    assert len(led) == len(measured) > 0
    for dots, line in zip(led, measured, strict=True):
        assert dots.get_xydata()[-1] == pytest.approx((1.0, 0.0))
        assert dots.get_xydata()[0] == pytest.approx(line.get_xydata()[-1])
        assert line.get_xydata()[-1][0] < 0.9
    several = pd.concat([parts("zeros"), parts("zeros").assign(topk=512.0)])
    assert plot_zero_panels(several)[1].shape == (2, 4)
