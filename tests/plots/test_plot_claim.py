"""The claim in one picture: a row a step, both modes in it, verdicts in words."""

from __future__ import annotations

import pandas as pd
import pytest
from handmade_frames import LONG, gaps, legible

from kvlab.errors import RunError
from kvlab.plots import plot_claim
from kvlab.plots.claim import verdict_words


def table(**how):
    rows = gaps(**how)
    return rows.assign(step=rows["phase"] + " at " + rows["context"].astype(int).astype(str))


def test_a_row_a_step_with_a_mark_a_mode():
    rows = table(models=(LONG, "b"), modes=("isolated", "sustained"), contexts=(8192, 100000))
    fig, ax = plot_claim(rows)
    said = legible(fig)
    assert said.count("hit at 8192") == 2
    assert {"b", "isolated: each step alone", "sustained: back to back", "verdict"} <= set(said)
    marks = [line for line in ax.lines if line.get_marker() in ("o", "s")]
    assert sorted(line.get_xdata()[0] for line in marks) == pytest.approx(sorted(rows["gap"]))
    assert len({round(line.get_ydata()[0]) for line in marks}) == 8


def test_other_columns_group_and_label():
    rows = table(contexts=(8192,), arms=("levels", "pow2")).assign(place="m: step")
    said = legible(plot_claim(rows, group="phase", label="arm", title="Other contents")[0])
    assert said.count("levels") == 2
    assert "Other contents" in said
    with pytest.raises(RunError, match="no gaps"):
        plot_claim(rows.iloc[:0])


def test_verdicts_that_differ_are_said_isolated_first():
    rows = pd.DataFrame({"mode": ["sustained", "isolated"], "verdict": ["different", "equivalent"]})
    assert verdict_words(rows) == "equivalent / different"
    assert verdict_words(rows.assign(verdict="different")) == "different"
