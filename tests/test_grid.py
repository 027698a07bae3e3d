"""sweep(): the grid, and that nothing finished is measured again wherever it was cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlab
from kvlab.cases import parse_case
from kvlab.errors import RunError, StudyError
from kvlab.grid import PHASES, Grid, sweep
from kvlab.plan import Plan
from kvlab.run import open_run


@given(
    st.sets(st.integers(2, 200_000), min_size=1, max_size=4),
    st.sets(st.sampled_from(PHASES), min_size=1),
    st.sets(st.integers(1, 64), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(2, 4096)),
)
def test_every_point_of_the_grid_is_a_case_that_says_what_it_is(contexts, phases, batch, query):
    # A phase needs room for its tokens: those that a context of 2 cannot hold are another test's.
    contexts = {max(context, 8) for context in contexts}
    grid = Grid(tuple(contexts), tuple(phases), tuple(batch), query)
    cases = grid.cases()
    assert len(cases) == len({case.name for case in cases}) == len(contexts) * len(phases) * len(batch)
    points = set(itertools.product(contexts, phases, batch))
    for case in cases:
        assert parse_case(str(case)) == case
        (request,) = set(case.requests)
        assert (request.kv_len, case.phase, len(case.requests)) in points
        points.remove((request.kv_len, case.phase, len(case.requests)))
        if query and case.phase in ("hit", "chunk"):
            assert request.query_len == min(query, request.kv_len // 2)
    assert not points


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        ({"contexts": ()}, "contexts is empty"),
        ({"contexts": (1,)}, "contexts has 1; give 2 or more"),
        ({"contexts": (64, 64)}, "twice"),
        ({"phases": ("decode", "train")}, "phase 'train' is unknown"),
        ({"batch": (0,)}, "batch has 0"),
        ({"topk": (0,)}, "topk has 0"),
        ({"contexts": ("64",)}, "contexts has '64', which is not a whole number"),
        ({"batch": (1.5,)}, "batch has 1.5"),
        ({"zero_fractions": ("0.5",)}, "zero_fractions has '0.5'"),
        ({"query": 1}, "query is 1"),
        ({"zero_fractions": (0.5, 1.5)}, "zero fraction 1.5 is out of range"),
    ],
)
def test_bad_axes_are_one_line(axes, match):
    with pytest.raises(StudyError, match=match) as error:
        Grid(**{"contexts": (64,), **axes})
    assert "\n" not in str(error.value)


GRID = {"contexts": (32, 64), "phases": ("decode", "hit"), "batch": (2,), "rounds": 6, "replays": 1, "discard": 0}


def test_a_sweep_is_one_run_with_its_axes(hand_engine, simulated_clock, tmp_path):
    simulated_clock(lambda step: 100.0)
    run = sweep(hand_engine, **GRID, zero_fractions=(0, 0.5, 1), out=tmp_path / "run")
    gaps = run.gaps
    assert set(gaps["arm"]) == {"random", "random(zero_fraction=0.5)"}
    assert set(map(tuple, gaps[["phase", "context", "batch"]].to_numpy())) == {
        (phase, context, 2) for phase in ("decode", "hit") for context in (32, 64)
    }
    assert gaps["gap"].eq(0).all()


def test_one_value_alone_is_an_axis_of_one(hand_engine, simulated_clock, tmp_path):
    simulated_clock(lambda step: 100.0)
    run = sweep(hand_engine, contexts=64, phases="decode", batch=2, zero_fractions=0.5, rounds=6, out=tmp_path / "run")
    assert list(run.gaps["arm"]) == ["random", "random(zero_fraction=0.5)"]
    assert list(run.cases["case"]) == ["decode-b2-k64"]


@pytest.mark.parametrize("cut", [1, 17, 18, 19, 40, 71])
def test_a_sweep_cut_anywhere_measures_only_what_was_missing(hand_engine, simulated_clock, tmp_path, cut):
    calls = itertools.count()

    def until_cut(step):
        if next(calls) == cut:
            raise KeyboardInterrupt
        return 100.0

    simulated_clock(until_cut)
    with pytest.raises(KeyboardInterrupt):
        sweep(hand_engine, **GRID, out=tmp_path / "run")
    rounds = len(open_run(tmp_path / "run").samples) // 3
    again = itertools.count()
    simulated_clock(lambda step: 100.0 + 0 * next(again))  # counts
    run = sweep(hand_engine, **GRID, out=tmp_path / "run")
    cases = len(run.verdicts)
    assert cases == 4
    # One replay an arm and round, and one more in each warm-up of a case that was not finished.
    assert 0 <= next(again) - 3 * (4 * 6 - rounds) <= cases
    run.close()
    simulated_clock(lambda step: pytest.fail("measured again"))
    sweep(hand_engine, **GRID, out=tmp_path / "run").close()


def test_each_topk_is_a_load_and_a_finished_one_is_none(make_hand_engine, simulated_clock, tmp_path):
    simulated_clock(lambda step: 100.0)
    loads, closed = [], []

    def load(topk):
        engine = make_hand_engine()
        engine.topk = topk
        engine.close = lambda: closed.append(topk)
        loads.append(topk)
        return engine

    run = sweep(load, **GRID, topk=(16, 32, 64), out=tmp_path / "run")
    assert loads == closed == [16, 32, 64]
    assert sorted(set(run.gaps["topk"])) == [16, 32, 64]
    assert len(run.gaps) == 12
    run.close()
    sweep(load, **GRID, topk=(16, 32, 64), out=tmp_path / "run").close()
    assert loads == [16, 32, 64, 16]  # the first says whose run it is


def test_an_engine_has_one_topk_and_a_run_one_study(hand_engine, simulated_clock, tmp_path):
    with pytest.raises(StudyError, match="engine is 'tiny-dense'; pass"):
        sweep("tiny-dense", **GRID, out=tmp_path / "run")
    with pytest.raises(StudyError, match="pass a function"):
        sweep(hand_engine, **GRID, topk=(16,), out=tmp_path / "run")
    simulated_clock(lambda step: 100.0)
    sweep(hand_engine, **GRID, out=tmp_path / "run").close()
    with pytest.raises(RunError, match="margin"):
        sweep(hand_engine, **GRID, margin=0.01, out=tmp_path / "run")


@pytest.mark.parametrize("arms", ["random", ["random"], [" random( ) "], ["random(zero_fraction=0)"], [], ["constant"]])
def test_an_arm_and_a_zero_fraction_that_are_one_take_part_once(arms):
    plan = Plan.of(Grid((64,), zero_fractions=(0, 0.5, 1)).arms(arms))
    names = [arm.name for arm in plan.compared]
    assert names.count("random") == names.count("random(zero_fraction=0.5)") == 1
    assert len(names) == 3 if "constant" in arms else 2


def test_a_context_that_the_model_does_not_take_costs_no_other_case(hand_engine, simulated_clock, tmp_path):
    simulated_clock(lambda step: 100.0)
    contexts = (64, hand_engine.max_model_len + 1, 40 * 1024)
    run = sweep(hand_engine, contexts=contexts, phases=("decode",), batch=(1,), rounds=6, out=tmp_path / "run")
    assert list(run.verdicts["verdict"]) == ["equivalent", "invalid", "invalid"]
    assert "the model takes" in run.verdict_of(f"decode-b1-k{contexts[1]}", "isolated")["reasons"][0]


def test_importing_the_module_leaves_the_name_a_function():
    assert callable(kvlab.sweep)
    assert callable(kvlab.check)
