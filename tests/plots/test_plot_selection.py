"""Which tokens an indexer picks: from a layer's tensor or from a table, padding left out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from handmade_frames import legible

from kvlab.errors import RunError
from kvlab.plots import plot_selection


def picks(rows=64, k=512, context=20_000):
    rng = np.random.default_rng(0)
    zeros = np.tile(np.arange(k), (rows, 1))
    random = np.stack([rng.choice(context, k, replace=False) for _ in range(rows)])
    random[:, -3:] = -1
    return {"zeros": zeros, "random": random}


def shares(axes):
    return [patch.get_data().values for patch in axes[-1].patches]


def test_shares_add_to_one_and_lie_where_the_picks_do():
    fig, axes = plot_selection(picks(), context=20_000)
    said = legible(fig)
    assert {"zeros: 512 picks a row", "random: 509 picks a row"} <= set(said)
    zeros, random = shares(axes)
    assert zeros.sum() == pytest.approx(1)
    assert random.sum() == pytest.approx(1)
    assert zeros[:4].sum() == pytest.approx(1)  # 512 of 20,000 tokens lie in the first 4 of 128 bins
    assert random.max() < 0.02


def test_a_table_and_tensors_say_the_same():
    found = picks(rows=5, k=7, context=40)
    table = pd.DataFrame(
        [
            {"arm": arm, "row": row, "position": position}
            for arm, chosen in found.items()
            for row, positions in enumerate(chosen)
            for position in positions
        ]
    )
    _, from_table = plot_selection(table, context=40)
    _, from_tensors = plot_selection({arm: torch.as_tensor(chosen) for arm, chosen in found.items()}, context=40)
    for a, b in zip(shares(from_table), shares(from_tensors), strict=True):
        assert a == pytest.approx(b)


def test_one_row_and_thousands_of_rows():
    legible(plot_selection({"zeros": [[0, 1, 2]]})[0])
    legible(plot_selection(picks(rows=3000, k=16))[0])


def test_no_picks_are_refused():
    with pytest.raises(RunError, match="no picks"):
        plot_selection({"zeros": [[-1, -1]]})
    with pytest.raises(RunError, match="no column position"):
        plot_selection(pd.DataFrame({"arm": ["zeros"], "row": [0]}))
