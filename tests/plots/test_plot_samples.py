"""Replays, clocks and power as they were taken."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from handmade_frames import legible, samples

from kvlab.errors import RunError
from kvlab.estimates import round_table
from kvlab.plots import plot_clocks, plot_samples

MANY = ("zeros", "zeros_again", "random", "levels", "pow2", "cluster", "hot_contiguous", "random(zero_fraction=0.25)")


def test_each_replay_is_a_dot_and_flagged_ones_are_hollow():
    table = samples()
    fig, ax = plot_samples(table, "c")
    said = legible(fig)
    assert {"zeros", "zeros_again", "random", "throttled or slow clock", "time of one replay (ms)"} <= set(said)
    drawn = np.concatenate([np.asarray(dots.get_offsets())[:, 1] for dots in ax.collections])
    assert sorted(drawn) == pytest.approx(sorted(table["us"] / 1e3))
    hollow = [dots for dots in ax.collections if not len(dots.get_facecolors())]
    assert sum(len(dots.get_offsets()) for dots in hollow) == table["flagged"].sum()
    clock = fig.axes[1]
    assert clock.get_ylabel() == "SM clock (MHz)"


@pytest.mark.parametrize(("mode", "throttled"), [("isolated", True), ("sustained", False), ("sustained", True)])
def test_a_line_is_what_the_verdict_compares(mode, throttled):
    table = samples(modes=(mode,), clock=False).assign(throttled=throttled)
    swing = np.where(table.groupby(["round", "arm"]).cumcount() == 0, 400.0, 0.0)
    table["us"] += swing  # one replay of five: the mean sees it, the median does not
    _, ax = plot_samples(table, "c")
    drawn = [line.get_ydata()[0] * 1e3 for line in ax.lines]
    levels = round_table(table).median()
    assert drawn == pytest.approx([levels[arm] for arm in ("zeros", "zeros_again", "random")])
    rounds = table[table["arm"] == "random"].groupby("round")["us"]
    assert levels["random"] == pytest.approx(
        (rounds.mean() if throttled and mode == "sustained" else rounds.median()).median()
    )


def test_a_column_a_mode_unless_one_is_chosen():
    table = samples(modes=("isolated", "sustained"))
    both, _ = plot_samples(table, "c")
    legible(both)
    assert len(both.axes) == 4
    one, ax = plot_samples(table, "c", mode="sustained", clock=False)
    assert one.axes == [ax]
    with pytest.raises(RunError, match="there are isolated, sustained"):
        plot_samples(table, "c", mode="idle")


@pytest.mark.parametrize("rounds", [1, 60])
def test_many_arms_and_rounds_and_names_with_signs(rounds):
    table = samples(arms=MANY, rounds=rounds, clock=False, case="a$1 <b>")
    fig, _ = plot_samples(table, "a$1 <b>")
    assert "a$1 <b>, isolated: every replay; lines are the times compared" in legible(fig)


def test_samples_of_another_case_or_of_two_runs_are_refused():
    with pytest.raises(RunError, match="there are c"):
        plot_samples(samples(), "d")
    with pytest.raises(RunError, match="no samples to plot"):
        plot_samples(samples().iloc[:0], "c")
    with pytest.raises(RunError, match="several runs"):
        plot_samples(pd.concat([samples(), samples().assign(run="other")]), "c")


def test_readings_count_once_a_round_and_arm():
    table = samples(rounds=4)
    fig, axes = plot_clocks(table, power_limit_watts=700)
    said = legible(fig)
    assert {"board power (W)", "SM clock (MHz)", "dotted: power limit, 700 W"} <= set(said)
    watts, mhz = axes
    assert sum(len(dots.get_offsets()) for dots in watts.collections) == 4 * 3
    strokes = [line.get_xdata()[0] for line in mhz.lines if line.get_color() == "#222222"]
    assert strokes == [1980, 1880, 1780]


def test_cases_are_headings_and_telemetry_alone_will_do():
    tables = [samples(arms=MANY, case=case).assign(model=f"model-{case}") for case in ("decode", "hit")]
    fig, axes = plot_clocks(pd.concat(tables))
    said = legible(fig)
    assert "model-hit, hit" in said
    telemetry = pd.DataFrame(
        [
            {"case": "c", "mode": "isolated", "arm": arm, "t_s": 0.03 * i, "sm_mhz": 1980.0 - i, "watts": math.nan}
            for arm in ("zeros", "random")
            for i in range(50)
        ]
    )
    fig, axes = plot_clocks(telemetry)
    assert "not sensed" in legible(fig)
    assert len(axes[1].collections) == 2


def test_a_run_without_sensors_has_no_clocks():
    with pytest.raises(RunError, match="without NVML"):
        plot_clocks(samples(clock=False))
