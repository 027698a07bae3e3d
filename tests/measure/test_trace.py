"""Traces cut into replays, the restore told from the forward, overlapping kernels counted once."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import EngineError
from kvlab.measure.trace import Event, busy_us, split_replays, timed_region_is_clean, without_restore

RESTORE = ["copy_runs", "copy_runs"]
FORWARD = ["rms_norm_kernel", "nvjet_tst", "Memset (Device)", "flash_fwd", "nvjet_tst"]


def replay(at, launch, names=(*RESTORE, *FORWARD), us=10.0, gap=1.0):
    """One launch of a graph whose kernels run one after the other."""
    return [
        Event(name, at + i * (us + gap), at + i * (us + gap) + us, launch, stream=7) for i, name in enumerate(names)
    ]


def trace(count, **how):
    return [event for i in range(count) for event in replay(1000.0 * i, 40 + i, **how)]


@pytest.mark.parametrize("launches", ["known", "zero", "each its own"])
def test_replays_are_found_with_and_without_correlation_ids(launches):
    events = trace(4)
    if launches != "known":
        events = [replace(e, launch=0 if launches == "zero" else i) for i, e in enumerate(events)]
    random.Random(0).shuffle(events)
    parts = split_replays(events, 4)
    assert [[event.name for event in part] for part in parts] == [[*RESTORE, *FORWARD]] * 4
    assert [part[0].start_us for part in parts] == [0, 1000, 2000, 3000]


def test_a_replay_that_lost_its_first_kernels_is_left_out():
    parts = split_replays(trace(4)[1:], 4)
    assert [part[0].launch for part in parts] == [41, 42, 43]


def test_order_within_a_replay_may_differ_where_streams_run_side_by_side():
    other = replay(1000.0, 41, (*RESTORE, *reversed(FORWARD)))
    assert len(split_replays([*replay(0.0, 40), *other], 2)) == 2


def test_replays_of_different_kernels_are_an_error_not_a_guess():
    with pytest.raises(EngineError, match="do not hold the same ones"):
        split_replays([*trace(2), *replay(2000.0, 42, ("a", "b")), *replay(3000.0, 43, ("c",))], 4)
    with pytest.raises(EngineError, match="no kernels"):
        split_replays([], 3)


def test_the_restore_is_left_out_by_name_and_number():
    assert [event.name for event in without_restore(replay(0.0, 1), RESTORE)] == FORWARD
    with pytest.raises(EngineError, match="no 'copy_runs' among them"):
        without_restore(replay(0.0, 1, ("copy_runs", *FORWARD)), RESTORE)
    assert len(without_restore(replay(0.0, 1, FORWARD), [])) == len(FORWARD)


def test_a_clean_timed_region():
    assert timed_region_is_clean(replay(0.0, 1), RESTORE, FORWARD)
    # The order of events in the list says nothing.
    assert timed_region_is_clean(replay(0.0, 1)[::-1], RESTORE, FORWARD)


@pytest.mark.parametrize(
    "intruder",
    [
        "copy_runs",
        "fill_runs",
        "Memset (Device)",
        "Memcpy DtoD (Device -> Device)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>(...)",
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(...)",
    ],
)
@pytest.mark.parametrize("place", [2, 4, 7])
def test_a_fill_or_copy_in_the_timed_region_is_seen(intruder, place):
    """Public case: a fill running inside the measured interval (vllm PR 56473)."""
    names = [*RESTORE, *FORWARD]
    names.insert(place, intruder)
    assert not timed_region_is_clean(replay(0.0, 1, names), RESTORE, FORWARD)


def test_a_forward_that_is_captured_otherwise_is_no_harness():
    names = [*RESTORE, *FORWARD, "flash_fwd_splitkv_combine_kernel"]
    assert timed_region_is_clean(replay(0.0, 1, names), RESTORE, FORWARD)


def test_a_restore_that_still_runs_when_the_forward_begins_is_seen():
    events = replay(0.0, 1)
    events[1] = replace(events[1], end_us=events[2].start_us + 3)
    assert not timed_region_is_clean(events, RESTORE, FORWARD)


def test_without_a_forward_to_compare_with_any_copy_counts():
    assert timed_region_is_clean(replay(0.0, 1, [*RESTORE, "flash_fwd"]), RESTORE)
    assert not timed_region_is_clean(replay(0.0, 1), RESTORE)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=12))
def test_busy_time_is_that_of_the_covered_microseconds(spans):
    events = [Event("k", float(start), float(start + us)) for start, us in spans]
    covered = {tick for start, us in spans for tick in range(start, start + us)}
    assert busy_us(events) == len(covered)
