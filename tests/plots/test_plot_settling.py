"""The figure of a card that comes to its pace."""

from pathlib import Path

import pandas as pd
import pytest

from kvlab.errors import RunError
from kvlab.plots import plot_settling

RECORDED = Path(__file__).parents[2] / "data" / "benchmarks" / "cap_settling"


@pytest.fixture(scope="module")
def recorded():
    return [pd.read_parquet(RECORDED / f"{name}.parquet") for name in ("replays", "readings")]


def test_each_visit_is_a_line_in_milliseconds_over_its_clock_and_power(recorded):
    replays, readings = recorded
    _, axes = plot_settling(replays, readings, timed=(5, 6), power_limit_watts=700)
    assert [ax.get_ylabel() for ax in axes] == ["one step (ms)", "SM clock (MHz)", "board power (W)"]
    for line, (_, of) in zip(axes[0].lines, replays.groupby("visit"), strict=True):
        assert line.get_label().startswith(of["fill"].iloc[0])
        assert line.get_xdata() == pytest.approx(of["t_s"])
        assert line.get_ydata() == pytest.approx(of["us"] / 1e3)
    assert [len(line.get_xdata()) for line in axes[1].lines] == list(readings.groupby("visit").size())
    assert {text.get_text() for ax in axes for text in ax.texts} == {"timed", "limit 700 W"}
    colours = {line.get_label().split(",")[0]: line.get_color() for line in axes[0].lines}
    assert len(set(colours.values())) == 2


def test_without_sensors_there_are_times_alone_and_without_replays_one_sentence(recorded):
    _, axes = plot_settling(recorded[0])
    assert len(axes) == 1
    with pytest.raises(RunError, match="no replays"):
        plot_settling(recorded[0].iloc[:0])
