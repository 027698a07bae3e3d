"""check(): one engine, simulated clocks: verdicts, rows, resumption, refusals."""

import itertools
import json
import time
from functools import partial

import numpy as np
import pandas as pd
import pytest

from kvlab.errors import CapacityError, CaseError, EngineError, FillError, RunError, StudyError
from kvlab.examination import Examination
from kvlab.kv.fills import parse_fill
from kvlab.pilot import PILOT_ROUNDS
from kvlab.plan import Plan
from kvlab.run import open_run
from kvlab.stats import MIN_ROUNDS
from kvlab.study import check
from kvlab.verdict import case_verdict

CASES = ("decode=2*1@40", "hit=8@40")


def fill_of(step):
    """Which arm the contents are of: random ones have unequal bytes."""
    return "zeros" if not step.engine.kv_caches["attn"][1:].any() else "other"


def steady(gap=0.0, noise=0.001, seed=0):
    rng = np.random.default_rng(seed)
    return lambda step: 100 * (1 + gap * (fill_of(step) == "other")) * np.exp(noise * rng.standard_normal())


@pytest.mark.parametrize(
    ("gap", "noise", "verdict"),
    [
        (0.0, 0.002, "equivalent"),
        (0.10, 0.002, "different"),
        (-0.10, 0.002, "different"),
        (0.03, 0.005, "inconclusive"),
    ],
)
def test_the_verdict_follows_the_gap(hand_engine, simulated_clock, tmp_path, gap, noise, verdict):
    simulated_clock(steady(gap, noise))
    run = check(hand_engine, ["d=1@40"], rounds=20, out=tmp_path / "run")
    (row,) = run.verdicts.to_dict("records")
    assert row["verdict"] == verdict
    assert row["gap"] == pytest.approx(gap, abs=0.004)
    assert row["ci90_lo"] < row["gap"] < row["ci90_hi"]


def test_the_same_step_against_itself_200_times(make_hand_engine, simulated_clock, tmp_path):
    """Public case: A/A (nvbench 316): none different, the flag at its nominal rate, no position faster."""
    from kvlab.stats import decide, position_bias

    engine, drift, rng = make_hand_engine(), itertools.count(), np.random.default_rng(7)
    # 2 % drift over the run and a burst now and then, the same for every arm.
    simulated_clock(
        lambda step: (
            100 * (1 + 1e-5 * next(drift)) * np.exp(0.004 * rng.standard_normal() + 0.2 * (rng.random() < 0.01))
        )
    )
    run = check(engine, [f"c{i}=1@40" for i in range(200)], rounds=12, replays=3, out=tmp_path / "run", arms=["random"])
    assert (run.verdicts["verdict"] != "different").all()
    nonzero = run.verdicts["nonzero"].astype(bool).mean()
    assert 0.05 <= nonzero <= 0.16
    pooled = run.samples[run.samples["case"].isin([f"c{i}" for i in range(10)])]
    pooled = pooled.assign(round=pooled["round"] + 100 * pooled["case"].str[1:].astype(int)).assign(case="all")
    bias = position_bias(pooled)
    assert len(bias) == 3
    assert ((bias["lo"] <= 0) & (bias["hi"] >= 0)).all()
    assert decide(run.samples[run.samples["case"] == "c3"], "random").gap.n == 12


def test_rows_carry_arm_seed_position_and_identity(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady())
    run = check(
        hand_engine, CASES, rounds=8, replays=2, arms=["random(std=0.5)", "constant(0.015)"], out=tmp_path / "run"
    )
    samples = run.samples
    assert len(samples) == 2 * 8 * 4 * 2
    assert set(samples["arm"]) == {"zeros", "zeros_again", "random(std=0.5)", "constant(0.015)"}
    assert samples.groupby(["case", "round"])["position"].apply(set).map(len).eq(4).all()
    for column in ("model", "engine", "gpu", "kvlab", "torch", "routing", "seed", "run"):
        assert samples[column].notna().all(), column
    assert samples[samples["arm"] == "random(std=0.5)"]["seed"].nunique() == 4


def test_one_line_json_has_the_keys_of_the_design(hand_engine, simulated_clock, tmp_path, verdict_keys):
    simulated_clock(steady())
    run = check(hand_engine, CASES, rounds=8, out=tmp_path / "run")
    verdict = run.verdict_of("decode", "isolated")
    assert verdict_keys <= set(verdict)
    assert set(verdict["aa"]) == {"gap", "ci90"}
    assert set(verdict["median_us"]) == set(verdict["finite"]) == {"zeros", "zeros_again", "random"}


def test_an_interrupted_check_keeps_finished_rounds_and_resumes(hand_engine, simulated_clock, tmp_path):
    calls = itertools.count()

    def until_150(step):
        if next(calls) == 150:
            raise KeyboardInterrupt
        return 100.0

    simulated_clock(until_150)
    with pytest.raises(KeyboardInterrupt):
        check(hand_engine, CASES, rounds=8, out=tmp_path / "run", seed=3)
    kept = open_run(tmp_path / "run").samples
    whole = kept.groupby(["case", "round"]).size()
    assert len(whole) >= 4
    assert whole.eq(15).all()
    simulated_clock(steady())
    run = check(hand_engine, CASES, rounds=8, out=tmp_path / "run", seed=3)
    assert len(run.samples) == 2 * 8 * 15
    assert run.samples.merge(kept, on=["case", "round", "arm", "replay", "us"]).shape[0] == len(kept)
    assert set(run.verdicts["case"]) == {"decode", "hit"}


def test_a_finished_check_recomputes_nothing(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady())
    check(hand_engine, CASES, rounds=8, out=tmp_path / "run").close()
    simulated_clock(lambda step: pytest.fail("measured again"))
    run = check(hand_engine, CASES, rounds=8, out=tmp_path / "run")
    assert len(run.verdicts) == 2


@pytest.mark.parametrize("change", [{"margin": 0.01}, {"seed": 4}, {"arms": ["constant"]}, {"replays": 2}])
def test_another_studys_folder_is_refused(hand_engine, simulated_clock, tmp_path, change):
    simulated_clock(steady())
    check(hand_engine, CASES, rounds=8, out=tmp_path / "run").close()
    with pytest.raises(RunError, match=next(iter(change))) as error:
        check(hand_engine, CASES, rounds=8, out=tmp_path / "run", **change)
    assert "\n" not in str(error.value)


def test_bad_input_is_refused_before_anything_is_measured(hand_engine, tmp_path):
    bad = [
        ({"cases": ["d=5@4"]}, CaseError, "K=4 is less than Q=5"),
        ({"cases": ["d=1@5000"]}, CaseError, "5000 tokens of KV, but the model takes 4096"),
        ({"cases": ["d=40*1@400"]}, CapacityError, "needs 1041 KV blocks .* only 64 exist"),
        ({"cases": ["a=1@4", "a=1@5"]}, CaseError, "two cases are named 'a'"),
        ({"cases": []}, CaseError, "no case given"),
        ({"cases": ["a=1@4"], "arms": ["rnd"]}, FillError, "unknown"),
        ({"cases": ["a=1@4"], "arms": ["zeros"]}, StudyError, "nothing to compare"),
        ({"cases": ["a=1@4"], "arms": ["random", "random()"]}, StudyError, "given twice"),
        ({"cases": ["a=1@4"], "margin": 0}, StudyError, "margin"),
        ({"cases": ["a=1@4"], "mode": "busy"}, StudyError, "isolated, sustained or both"),
        ({"cases": ["a=1@4"], "rounds": 0}, StudyError, "rounds is 0"),
        ({"cases": ["a=1@4"], "margin": "3%"}, StudyError, "margin is '3%'; give a number"),
        ({"cases": ["a=1@4"], "rounds": 2.5}, StudyError, "rounds is 2.5; give a whole number"),
        ({"cases": ["a=1@4"], "replays": None}, StudyError, "replays is None"),
        ({"cases": ["a=1@4"], "budget": float("inf")}, StudyError, "budget is inf"),
        ({"cases": ["a=1@4"], "budget": float("nan")}, StudyError, "budget is nan"),
        ({"cases": ["a=1@4"], "seed": 2**80}, StudyError, r"under 2\^31"),
    ]
    for kwargs, error, match in bad:
        with pytest.raises(error, match=match) as caught:
            check(hand_engine, out=tmp_path / "run", **kwargs)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert hand_engine.forwards == 0


@pytest.mark.parametrize("error", [FillError("no"), KeyboardInterrupt(), ZeroDivisionError(), EngineError("failed")])
@pytest.mark.parametrize("where", ["examine", "make_timer", "measure_round", "apply_rest"])
def test_whatever_ends_a_case_its_step_is_closed_and_the_engine_serves_the_next(
    hand_engine, simulated_clock, monkeypatch, tmp_path, error, where
):
    def fail(*_, **__):
        raise error

    simulated_clock(steady())
    steps, prepare = [], hand_engine.prepare
    monkeypatch.setattr(hand_engine, "prepare", lambda *args: steps.append(prepare(*args)) or steps[-1])
    with monkeypatch.context() as patch:
        patch.setattr(f"kvlab.study.{where}", fail)
        if isinstance(error, EngineError):
            run = check(hand_engine, ["d=1@40"], rounds=6, out=tmp_path / "failed")
            assert list(run.verdicts["verdict"]) == ["invalid"]
            run.close()
        else:
            with pytest.raises(type(error)):
                check(hand_engine, ["d=1@40"], rounds=6, out=tmp_path / "failed")
    assert [step.closed for step in steps] == [True]
    run = check(hand_engine, ["d=1@40"], rounds=20, out=tmp_path / "run")
    assert list(run.verdicts["verdict"]) == ["equivalent"]


def test_a_nan_in_an_output_makes_the_case_invalid_before_any_time(hand_engine, simulated_clock, tmp_path):
    simulated_clock(lambda step: pytest.fail("timed in spite of a NaN"))
    hand_engine.nonfinite_in = "model.layers.3.self_attn"
    run = check(hand_engine, ["d=1@40"], rounds=8, out=tmp_path / "run")
    verdict = run.verdict_of("d", "isolated")
    assert verdict["verdict"] == "invalid"
    assert verdict["finite"] == {"zeros": False, "zeros_again": False, "random": False}
    assert "model.layers.3.self_attn" in " ".join(verdict["reasons"])
    assert run.samples.empty


def test_a_step_that_writes_outside_is_invalid(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady())
    hand_engine.stray_block = 60
    verdict = check(hand_engine, ["d=1@40"], rounds=8, out=tmp_path / "run").verdict_of("d", "isolated")
    assert verdict["verdict"] == "invalid"
    assert verdict["outside_writes"] > 0


def test_samples_that_were_all_throttled_are_kept_flagged_and_reported(
    hand_engine, simulated_clock, tmp_path, monkeypatch
):
    """Public case: every sample throttled (nvbench 231)."""
    from kvlab.measure import telemetry

    class Hot(telemetry.Telemetry):
        source = "simulated"

        def read(self):
            return telemetry.Reading(sm_mhz=345.0, watts=700.0, throttled=True)

    monkeypatch.setattr("kvlab.study.make_telemetry", lambda device: Hot())
    simulated_clock(steady())
    run = check(hand_engine, ["d=1@40"], rounds=8, out=tmp_path / "run")
    assert len(run.samples) == 8 * 15
    assert run.samples["flagged"].all()
    verdict = run.verdict_of("d", "isolated")
    assert verdict["flagged"] == 1.0
    assert verdict["verdict"] == "equivalent"
    assert "100% of the samples were throttled" in " ".join(verdict["reasons"])


def test_slow_clocks_are_flagged_by_the_highest_seen(hand_engine, simulated_clock, tmp_path, monkeypatch):
    from kvlab.measure import telemetry

    class Uneven(telemetry.Telemetry):
        source = "simulated"

        def read(self):
            filled = hand_engine.kv_caches["attn"][1:].any()
            return telemetry.Reading(sm_mhz=1400.0 if filled else 1980.0, watts=690.0, throttled=False)

    monkeypatch.setattr("kvlab.study.make_telemetry", lambda device: Uneven())
    simulated_clock(steady())
    run = check(hand_engine, ["d=1@40"], rounds=8, out=tmp_path / "run")
    assert run.verdict_of("d", "isolated")["flagged"] == pytest.approx(1 / 3)
    beside = run.telemetry
    assert len(beside) == 8 * 3  # a row a round and arm
    assert beside.groupby("arm")["sm_mhz"].unique().to_dict() == {
        "random": [1400],
        "zeros": [1980],
        "zeros_again": [1980],
    }
    assert beside["readings"].ge(2).all()


def test_a_sensor_that_fails_on_the_way_is_told_and_the_times_stand(
    hand_engine, simulated_clock, tmp_path, monkeypatch
):
    from kvlab.measure import telemetry

    class Lost(telemetry.Telemetry):
        source = "simulated"
        left = 12

        def read(self):
            self.left -= 1
            if self.left < 0:
                raise OSError("card lost")
            return telemetry.Reading(sm_mhz=1980.0, watts=690.0, throttled=False)

    monkeypatch.setattr("kvlab.study.make_telemetry", lambda device: Lost())
    simulated_clock(steady())
    run = check(hand_engine, ["d=1@40"], rounds=8, out=tmp_path / "run")
    verdict = run.verdict_of("d", "isolated")
    assert verdict["verdict"] == "equivalent"
    (told,) = verdict["added"]
    assert told == "Some rounds have no clocks or watts, as a sensor failed: OSError: card lost."
    assert verdict["reasons"][-1] == told
    failed = run.telemetry["failure"]
    assert failed.notna().any()
    assert failed.isna().any()


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_too_few_rounds_are_inconclusive_and_plain_json(hand_engine, simulated_clock, tmp_path, rounds):
    simulated_clock(steady())
    run = check(hand_engine, ["d=1@40"], rounds=rounds, out=tmp_path / "run")
    verdict = run.verdict_of("d", "isolated")
    assert verdict["verdict"] == "inconclusive"
    assert verdict["rounds"] == rounds
    assert json.loads(json.dumps(verdict, allow_nan=False)) == verdict


def test_a_case_that_the_engine_cannot_run_is_invalid_and_the_next_goes_on(hand_engine, simulated_clock, tmp_path):
    from kvlab.errors import EngineError

    simulated_clock(steady())
    prepare = hand_engine.prepare

    def fails_on_hits(case, seed=0):
        if case.phase == "hit":
            raise EngineError("vLLM failed inside the forward: RuntimeError: no kernel")
        return prepare(case, seed)

    hand_engine.prepare = fails_on_hits
    run = check(hand_engine, ("hit=8@40", "decode=2*1@40"), rounds=8, out=tmp_path / "run")
    assert run.verdicts.set_index("case")["verdict"].to_dict() == {"hit": "invalid", "decode": "equivalent"}
    assert "no kernel" in " ".join(run.verdict_of("hit", "isolated")["reasons"])


@pytest.mark.parametrize("where", ["examine", "make_timer", "measure_round", "captured"])
def test_a_failure_never_takes_back_what_rounds_have_shown(hand_engine, simulated_clock, monkeypatch, tmp_path, where):
    """More rounds, or a cause, asked of a decided case: the attempt fails, and the verdict stands with a word of it."""

    def fail(*_, **__):
        raise EngineError("out of memory")

    simulated_clock(steady())
    cause = {"cause": {"kind": "none", "sentence": "No cause to look for."}}
    monkeypatch.setattr("kvlab.study.explain", lambda *_: cause)
    again = partial(check, hand_engine, ["d=1@40"], explain=True, out=tmp_path / "run")
    with again(rounds=8) as run:
        before = run.verdict_of("d", "isolated")
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvlab.study.{where}", fail)
            with again(rounds=9) as run:
                kept = run.verdict_of("d", "isolated")
        assert (kept["verdict"], kept["rounds"], kept["gap"]) == ("equivalent", 8, before["gap"])
        assert kept["added"] == ["It went no further: out of memory"]
        assert kept["cause"] == cause["cause"]
    with again(rounds=9) as run:
        assert run.verdict_of("d", "isolated")["rounds"] == 9
        assert "added" not in run.verdict_of("d", "isolated")


@pytest.mark.parametrize("error", [EngineError, StudyError])
def test_an_error_late_in_the_rounds_leaves_a_verdict_of_those_before(
    hand_engine, simulated_clock, monkeypatch, tmp_path, error
):
    from kvlab import study

    simulated_clock(steady())
    measure = study.measure_round

    def fail_late(step, timer, plan, index, *rest):
        if index == 7:
            raise error("a kernel failed")
        return measure(step, timer, plan, index, *rest)

    monkeypatch.setattr(study, "measure_round", fail_late)
    run = check(hand_engine, ["d=1@40", "e=1@40"], rounds=20, out=tmp_path / "run")
    for case in ("d", "e"):
        verdict = run.verdict_of(case, "isolated")
        assert (verdict["verdict"], verdict["rounds"]) == ("equivalent", 7)
        assert verdict["reasons"][-1] == "It went no further: a kernel failed"


def test_real_routing_is_marked(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady())
    hand_engine.routing = "real"
    run = check(hand_engine, ["d=1@40"], rounds=8, out=tmp_path / "run")
    assert run.samples["routing"].eq("real").all()
    assert "routing was real" in " ".join(run.verdict_of("d", "isolated")["reasons"])


def test_a_pilot_plans_the_rounds_and_an_interruption_keeps_the_plan(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady(noise=0.01))
    ticks = []
    run = check(hand_engine, CASES[:1], budget=1e6, out=tmp_path / "whole", progress=ticks.append)
    verdict = run.verdict_of("decode", "isolated")
    plan = verdict["plan"]
    assert plan["rounds"] == verdict["rounds"] == len(run.finished_rounds("decode", "isolated")) > PILOT_ROUNDS
    assert next(tick.note for tick in ticks if tick.note).startswith(f"{plan['rounds']} rounds")
    draw, calls = steady(noise=0.01), itertools.count()

    def then_stop(step):
        if next(calls) > 15 * (PILOT_ROUNDS + 2) + 40:
            raise KeyboardInterrupt
        return draw(step)

    simulated_clock(then_stop)
    with pytest.raises(KeyboardInterrupt):
        check(hand_engine, CASES[:1], budget=1e6, out=tmp_path / "cut")
    planned = open_run(tmp_path / "cut").cases["plan_isolated_rounds"][0]
    simulated_clock(steady(gap=0.5, noise=0.2, seed=9))  # by other noise another number would be planned
    run = check(hand_engine, CASES[:1], budget=1e6, out=tmp_path / "cut")
    assert run.verdict_of("decode", "isolated")["rounds"] == planned


def test_the_budget_bounds_the_rounds_and_is_said(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady(noise=0.2))
    run = check(hand_engine, CASES[:1], budget=1e-6, out=tmp_path / "run")
    plan = run.verdict_of("decode", "isolated")["plan"]
    # The pilot, too: it goes on past the least of a verdict only as far as the budget does.
    assert (plan["rounds"], plan["limit"]) == (MIN_ROUNDS, "budget")
    assert plan["wanted"] > PILOT_ROUNDS > MIN_ROUNDS


def test_a_larger_budget_adds_rounds_and_a_smaller_one_takes_none(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady(noise=0.01))
    check(hand_engine, CASES[:1], budget=1e-6, out=tmp_path / "run").close()
    run = check(hand_engine, CASES[:1], budget=1e6, out=tmp_path / "run")
    verdict = run.verdict_of("decode", "isolated")
    assert verdict["plan"]["limit"] != "budget"
    assert verdict["rounds"] == verdict["plan"]["rounds"] > PILOT_ROUNDS
    run.close()
    simulated_clock(lambda step: pytest.fail("measured again"))
    run = check(hand_engine, CASES[:1], budget=1e-6, out=tmp_path / "run")
    assert run.verdict_of("decode", "isolated") == verdict


@pytest.mark.parametrize("mode", ["isolated", "sustained"])
def test_a_pilot_over_earlier_rounds_times_one_to_keep_to_the_budget(hand_engine, simulated_clock, tmp_path, mode):
    draw = steady(noise=0.05)

    def slow_beside_its_replays(step):
        time.sleep(1e-3)
        return draw(step)

    simulated_clock(slow_beside_its_replays)
    options = {"mode": mode, "replays": 2, "out": tmp_path / "run"}
    check(hand_engine, CASES[:1], rounds=PILOT_ROUNDS + 2, **options).close()
    plan = check(hand_engine, CASES[:1], budget=0.5, **options).verdict_of("decode", mode)["plan"]
    assert plan["seconds_per_round"] > 6e-3  # the replays alone say 0.6 ms
    assert plan["rounds"] == max(PILOT_ROUNDS + 3, int(0.5 / plan["seconds_per_round"])) < plan["wanted"]


@pytest.mark.parametrize("last", [False, True])
def test_rounds_that_were_added_come_to_a_verdict_wherever_it_was_cut(
    hand_engine, simulated_clock, tmp_path, monkeypatch, last
):
    simulated_clock(steady())
    check(hand_engine, CASES[:1], rounds=6, out=tmp_path / "run").close()

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvlab.study.case_verdict" if last else "kvlab.study.measure_round", stop)
        with pytest.raises(KeyboardInterrupt):
            check(hand_engine, CASES[:1], rounds=9, out=tmp_path / "run")
    run = check(hand_engine, CASES[:1], rounds=9, out=tmp_path / "run")
    assert run.verdict_of("decode", "isolated")["rounds"] == 9


def test_an_output_that_was_not_finite_is_remembered_over_an_interruption(
    hand_engine, simulated_clock, tmp_path, monkeypatch
):
    from kvlab.rounds import measure_round

    def bad_then_stop(step, timer, plan, index, telemetry, finite):
        if index == 3:
            raise KeyboardInterrupt
        found = measure_round(step, timer, plan, index, telemetry, finite)
        finite["random"] = False
        return found

    simulated_clock(steady())
    with monkeypatch.context() as patch:
        patch.setattr("kvlab.study.measure_round", bad_then_stop)
        with pytest.raises(KeyboardInterrupt):
            check(hand_engine, CASES[:1], rounds=8, out=tmp_path / "run")
    verdict = check(hand_engine, CASES[:1], rounds=8, out=tmp_path / "run").verdict_of("decode", "isolated")
    assert verdict["verdict"] == "invalid"
    assert verdict["finite"] == {"zeros": True, "zeros_again": True, "random": False}


def test_a_cause_that_cannot_be_found_leaves_the_verdict(hand_engine, simulated_clock, tmp_path, monkeypatch):
    from kvlab.errors import EngineError

    def fails(*_):
        raise EngineError("the profiler saw no kernels")

    simulated_clock(steady())
    monkeypatch.setattr("kvlab.study.explain", fails)
    verdict = check(hand_engine, CASES[:1], rounds=8, explain=True, out=tmp_path / "run").verdict_of(
        "decode", "isolated"
    )
    assert (verdict["verdict"], verdict["rounds"]) == ("equivalent", 8)
    assert "the profiler saw no kernels" in verdict["reasons"][-1]
    assert "cause" not in verdict


def test_one_who_stops_the_search_for_a_cause_keeps_the_verdict_and_may_go_on(
    hand_engine, simulated_clock, tmp_path, monkeypatch
):
    def stopped(*_):
        raise KeyboardInterrupt

    def found(*_):
        return {"cause": {"kind": "none", "sentence": "No cause."}}

    simulated_clock(steady())
    how = {"rounds": 8, "explain": True, "out": tmp_path / "run"}
    monkeypatch.setattr("kvlab.study.explain", stopped)
    with pytest.raises(KeyboardInterrupt):
        check(hand_engine, CASES[:1], **how)
    left = open_run(tmp_path / "run").verdict_of("decode", "isolated")
    assert (left["verdict"], left["rounds"], "cause" in left) == ("equivalent", 8, False)
    assert left["text"]
    assert left["context"]
    monkeypatch.setattr("kvlab.study.explain", found)
    monkeypatch.setattr("kvlab.study.measure_round", stopped)  # no round is timed again
    whole = check(hand_engine, CASES[:1], **how).verdict_of("decode", "isolated")
    assert whole == {**left, "cause": {"kind": "none", "sentence": "No cause."}}


def test_one_case_and_one_arm_need_no_list(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady())
    run = check(hand_engine, "d=1@40", arms="constant", rounds=6, out=tmp_path / "run")
    assert list(run.gaps["arm"]) == [str(parse_fill("constant"))]


def test_more_rounds_and_another_mode_go_on_with_the_same_run(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady())
    check(hand_engine, CASES[:1], rounds=6, out=tmp_path / "run").close()
    check(hand_engine, CASES[:1], rounds=9, out=tmp_path / "run").close()
    run = check(hand_engine, CASES[:1], rounds=6, mode="sustained", out=tmp_path / "run")
    assert run.finished_rounds("decode", "isolated") == list(range(9))
    assert run.finished_rounds("decode", "sustained") == list(range(6))
    assert list(run.verdicts["mode"]) == ["isolated", "sustained"]


def test_ticks_count_every_case_and_mode_to_the_end(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady())
    for _ in range(2):  # the second time all is finished
        ticks = []
        check(hand_engine, CASES, rounds=7, out=tmp_path / "run", progress=ticks.append)
        if ticks:
            assert {tick.of for tick in ticks} == {2}
            assert [tick.index for tick in ticks] == sorted(tick.index for tick in ticks)
            assert {(tick.case, tick.done) for tick in ticks} >= {("decode", 7), ("hit", 7)}
            assert [tick.case for tick in ticks if tick.decided] == ["decode", "hit"]
    assert not ticks


def test_a_plan_is_told_before_the_verdict_and_is_none(hand_engine, simulated_clock, tmp_path):
    simulated_clock(steady(noise=0.2))
    ticks = []
    check(hand_engine, CASES[:1], budget=1e-6, out=tmp_path / "run", progress=ticks.append)
    assert [tick.decided for tick in ticks if tick.note] == [False, True]


@pytest.mark.parametrize("mode", ["both", "sustained"])
def test_a_cpu_measures_one_of_both_modes_and_says_so(hand_engine, simulated_clock, tmp_path, mode):
    simulated_clock(steady())
    run = check(hand_engine, CASES[:1], rounds=6, mode=mode, out=tmp_path / "run")
    assert list(run.verdicts["mode"]) == ["isolated" if mode == "both" else mode]
    assert f"mode {mode}: a CPU has no launch queue" in run.provenance["notes"][0]


def test_clocks_are_medians_of_visits_however_many_replays_these_kept():
    """Three capped visits of many replays do not outvote seven free ones of few."""
    rows = []
    for number in range(10):
        for arm in ("zeros", "zeros_again", "random"):
            held = arm == "random" and number < 3
            read = {"sm_mhz": 1600.0 if held else 1980.0, "watts": 700.0 if held else 500.0, "throttled": held}
            rows += [
                {"round": number, "arm": arm, "us": 1000.0 + number, "routing": "none", "flagged": held, **read}
                for _ in range(64 if held else 5)
            ]
    plan = Plan.of(["random"])
    verdict = case_verdict(pd.DataFrame(rows), plan, Examination({arm.name: True for arm in plan.arms}))
    assert verdict["clocks"]["random"] == {"MHz": 1980.0, "W": 500.0}
