"""The bar on the terminal: it ends full, whatever the pilots decide."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.progress import Bar
from kvlab.ticks import Tally, Tick


@pytest.mark.parametrize("rounds", [(8, 8), (8, 20, 3), (6,)])
def test_the_bar_ends_full(rounds):
    with Bar(hidden=False) as bar:
        bar._bar.disable = True  # counts without drawing
        for index, count in enumerate(rounds):
            for done in range(1, count + 1):
                bar(Tick(f"c{index}", "isolated", done, count, index, len(rounds), "ok" if done == count else ""))
                assert bar._bar.total >= bar._tally.done
        assert bar._bar.total == sum(rounds)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_a_tally_never_passes_its_total_and_ends_at_it(rounds):
    tally = Tally()
    for index, count in enumerate(rounds):
        for done in range(1, count + 1):
            tally.count(Tick(f"c{index}", "isolated", done, count, index, len(rounds)))
            assert tally.done <= tally.total
    assert tally.done == tally.total == sum(rounds)
