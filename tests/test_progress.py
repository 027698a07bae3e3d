"""The bar on the terminal: it ends full, whatever the pilots decide."""

import pytest

from kvlab.progress import Bar
from kvlab.ticks import Tick


@pytest.mark.parametrize("rounds", [(8, 8), (8, 20, 3), (6,)])
def test_the_bar_ends_full(rounds):
    with Bar(hidden=False) as bar:
        bar._bar.disable = True  # counts without drawing
        for index, count in enumerate(rounds):
            for done in range(1, count + 1):
                bar(Tick(f"c{index}", "isolated", done, count, index, len(rounds), "ok" if done == count else ""))
                assert bar._bar.total >= sum(bar._rounds.values())
        assert bar._bar.total == sum(rounds)
