"""The picture of what a step may write: each block that is drawn is one, each that is not is counted."""

from __future__ import annotations

import pytest
from handmade_frames import blocks, legible
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import RunError
from kvlab.plots import plot_views
from kvlab.plots.views import _stretches


def test_requests_that_look_alike_share_a_row():
    fig, _ = plot_views(blocks())
    said = legible(fig)
    assert said.count("0 to 31 (32 requests)") == 3
    assert {"512 blocks each, 3 touched", "1 block each, 1 touched"} <= set(said)
    assert {"freed (null block)", "read only", "touched tail", "touched whole (state)"} <= set(said)
    assert {"503", "497"} <= set(said)  # blocks between those drawn of the 509 read and the 503 freed


def test_written_shares_are_drawn_and_strays_stand_out():
    table = blocks(requests=1, written=True)
    fig, ax = plot_views(table)
    assert "written, and not touched" not in legible(fig)
    heights = [patch.get_height() for patch in ax.patches if patch.get_facecolor()[:3] == (0, 0, 0)]
    assert heights == pytest.approx([0.25 * 0.72] * 7)
    table.loc[0, "written"][1] = 0.5
    assert "written, and not touched" in legible(plot_views(table)[0])


def test_more_requests_than_fit_are_counted():
    table = blocks(requests=7)
    table = table[table["kind"] == "attention"].copy()
    table["tokens"] = [8192 + 16 * 2**n for n in range(7)]
    fig, _ = plot_views(table)
    said = legible(fig)
    assert "3 more" in said
    assert "blocks 1 to 512, 3 touched" in said


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_block_is_in_one_stretch(data):
    begin = data.draw(st.integers(1, 100))
    lo = begin + data.draw(st.integers(0, 50))
    hi = lo + data.draw(st.integers(0, 50))
    end = hi + data.draw(st.integers(0, 3))
    kind = data.draw(st.sampled_from(["attention", "window", "state"]))
    size, tokens = data.draw(st.integers(1, 64)), data.draw(st.none() | st.integers(1, 5000))
    row = {"group": 0, "kind": kind, "request": 0, "begin": begin, "end": end, "block_size": size, "layers": 1}
    parts = _stretches({**row, "touched_begin": lo, "touched_end": hi, "tokens": tokens})
    counts = {sort: sum(part.size for part in parts if part.sort == sort) for sort in ("read", "freed")}
    assert sum(part.size for part in parts if part.sort in ("touched", "state")) == hi - lo
    assert counts["read"] == (end - begin) - (hi - lo)
    logical = -(-tokens // size) if tokens and kind != "state" else 0
    assert counts["freed"] == max(0, logical - (end - begin))


def test_ranges_and_shares_that_do_not_fit_are_refused():
    table = blocks(requests=1)
    table.loc[0, "touched_end"] = 10_000
    with pytest.raises(RunError, match="not within those owned"):
        plot_views(table)
    table = blocks(requests=1, written=True)
    table.loc[0, "written"].pop()
    with pytest.raises(RunError, match="511 shares"):
        plot_views(table)
    with pytest.raises(RunError, match="holds none"):
        plot_views(blocks(requests=0).reindex(columns=blocks(1).columns))
