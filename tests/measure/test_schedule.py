"""The order of arms: random, balanced, and a function of seed and round only."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvlab.measure.schedule import round_order

ARMS = ("zeros", "zeros_again", "random")
names = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=7, unique=True)


@given(names, st.integers(0, 10_000), st.integers(0, 2**31))
def test_a_round_holds_each_arm_once_and_is_repeatable(arms, index, seed):
    order = round_order(arms, index, seed)
    assert sorted(order) == sorted(arms)
    assert order == round_order(arms, index, seed)


@given(st.integers(0, 2**31), st.integers(0, 20))
def test_six_rounds_of_a_deck_hold_every_order_of_three_arms_once(seed, deck):
    orders = Counter(tuple(round_order(ARMS, 6 * deck + i, seed)) for i in range(6))
    assert len(orders) == 6
    positions = Counter((arm, order.index(arm)) for order in orders for arm in order)
    assert set(positions.values()) == {2}


def test_orders_differ_between_seeds_and_decks():
    seen = {tuple(tuple(round_order(ARMS, i, seed)) for i in range(12)) for seed in range(20)}
    assert len(seen) == 20


def test_seven_arms_are_first_about_equally_often():
    first = Counter(round_order("abcdefg", i, 0)[0] for i in range(1400))
    assert min(first.values()) > 150
