"""What a step may write, as tables: the same blocks in both, and those that a batch owns."""

import pytest

import kvlab
from kvlab.engines.reference.presets import PRESETS
from kvlab.plots import plot_views

CASE = "mix=2*1@700,64@500,100"


@pytest.fixture(scope="module", params=PRESETS)
def step(request):
    engine = kvlab.load_engine(request.param, num_kv_blocks=120)
    step = engine.prepare(kvlab.parse_case(CASE))
    yield step
    step.close()


def test_blocks_are_those_of_the_batch_and_the_touched_ones_their_end(step):
    blocks = kvlab.touched_blocks(step)
    assert (blocks["begin"] <= blocks["touched_begin"]).all()
    assert (blocks["touched_end"] == blocks["end"]).all()
    assert blocks["tokens"].tolist()[:4] == [700, 700, 500, 100]
    for group, rows in blocks.groupby("group"):
        owned = list(map(tuple, step.batch.group_block_ranges[group]))
        for _, of_kind in rows.groupby(["kind", "block_size"]):
            assert list(zip(of_kind["begin"], of_kind["end"], strict=True)) == owned
    states = blocks[blocks["kind"] == "state"]
    assert (states["touched_begin"] == states["begin"]).all()


def test_both_tables_count_the_same(step):
    blocks, table = kvlab.touched_blocks(step), kvlab.touched_table(step)
    counted = blocks.assign(
        owned=blocks["end"] - blocks["begin"], touched=blocks["touched_end"] - blocks["touched_begin"]
    )
    sums = counted.groupby(["group", "kind"])[["owned", "touched"]].sum()
    for row in table.itertuples():
        assert (row.blocks_owned, row.blocks_touched) == tuple(sums.loc[row.group, row.kind])
        assert 0 < row.bytes_touched <= row.bytes_owned
        assert row.share_touched == pytest.approx(row.bytes_touched / row.bytes_owned)


def test_the_blocks_can_be_drawn(step):
    fig, _ = plot_views(kvlab.touched_blocks(step))
    assert fig.axes
