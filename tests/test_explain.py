"""--explain: kernels, selection and cause are stored and follow from what was measured."""

import json

import pandas as pd
import pytest

import kvlab
from kvlab.explain import cause_record, may_be_capped
from kvlab.run import open_run
from kvlab.verdict_table import closing, explanation, kernel_records, verdict_table

ARMS = ["random", "mix(kv=random, indexer=zeros)", "mix(kv=zeros, indexer=random)"]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    engine = kvlab.load_engine("tiny-dsa", num_kv_blocks=40)
    out = tmp_path_factory.mktemp("explained") / "run"
    kvlab.check(engine, ["hit=4@400"], arms=ARMS, rounds=6, replays=1, explain=True, out=out).close()
    return open_run(out)


def test_every_arm_has_kernels_that_add_up_to_the_step(explained):
    verdict, kernels = explained.verdict_of("hit", "isolated"), explained.kernels
    assert set(kernels["arm"]) == set(verdict["profiles"]) == {"zeros", "zeros_again", *ARMS}
    for arm, profile in verdict["profiles"].items():
        assert kernels.loc[kernels["arm"] == arm, "us"].sum() == pytest.approx(profile["timed_us"], rel=1e-3)
        assert profile["restore_outside"]
    assert {"top-k", "attention", "GEMM", "rest"} <= set(kernels["role"])


def test_the_selection_moves_with_the_indexer_and_not_with_the_kv(explained):
    chosen = explained.verdict_of("hit", "isolated")["selection"]
    assert all(picked["in_range"] and picked["distinct"] for picked in chosen.values())
    assert chosen["zeros_again"]["shared_with_zeros"] == 1
    assert chosen["zeros"]["neighbours"] > 2 * chosen["random"]["neighbours"]
    for name, by in ((ARMS[1], "zeros"), (ARMS[2], "random")):
        assert chosen[name]["neighbours"] == pytest.approx(chosen[by]["neighbours"], abs=0.15)


def test_the_record_has_a_sentence_the_roles_and_the_2x2(explained):
    verdict = explained.verdict_of("hit", "isolated")
    assert json.loads(json.dumps(verdict)) == verdict
    cause = verdict["cause"]
    assert cause["sentence"].endswith(".")
    assert {"selection", "other", "roles", "indexer", "kv", "interaction"} <= set(cause)
    assert explained.verdicts["cause_kind"][0] == cause["kind"]


def test_it_is_printed_whole(explained):
    verdict = explained.verdict_of("hit", "isolated")
    text = explanation(verdict, explained.kernels)
    for part in (
        verdict["cause"]["sentence"],
        "selected under random",
        "the indexer's contents: ",
        "the restore (",
        "(total)",
        "of the timed",
    ):
        assert part in text
    table = verdict_table([verdict])
    assert "hit, isolated: " in table
    for arm, of in verdict["arms"].items():
        assert (f"hit, isolated: {arm} is {of['gap']:+.2%} (" in table) or arm == verdict["arm"]


def test_a_table_ends_with_the_claim_for_all_of_it_and_what_nobody_looked_at(explained):
    verdict = explained.verdict_of("hit", "isolated")
    assert "All " not in verdict_table([verdict])
    three = [{**verdict, "verdict": said, "outside_writes": None} for said in ("equivalent", "equivalent", "invalid")]
    table = verdict_table(three).splitlines()
    assert table[-2] == "All 3: not shown that every gap is within 3 % (2 equivalent, 1 invalid)."
    assert table[-1] == "Whether hit wrote outside the touched views was not looked at; `kvlab verify` does."
    same = [{**verdict, "verdict": "equivalent", "outside_writes": 0}] * 2
    assert "All 2: every gap is within 3 %" in verdict_table(same).splitlines()[-1]
    apart = [{**each, "margin": margin} for each, margin in zip(same, (0.01, 0.03), strict=True)]
    assert "within its margin" in verdict_table(apart).splitlines()[-1]


def test_what_differs_is_named_as_holm_leaves_it(explained):
    verdict = explained.verdict_of("hit", "isolated")

    def said(*of):
        rows = [{**verdict, "case": f"c{n}", "verdict": word, "p": p} for n, (word, p) in enumerate(of)]
        return [line for line in verdict_table(rows).splitlines() if "Holm" in line]

    assert said(("different", 1e-6)) == said(("equivalent", 0.9), ("equivalent", 0.8)) == []
    assert said(("different", 1e-6), ("equivalent", 0.9), ("different", 0.04)) == [
        "Different after Holm's correction over 3 gaps (family-wise error 5 %) too: c0 isolated.",
        "Different by its own interval, but not after Holm's correction over 3 gaps (family-wise error 5 %): c2"
        " isolated.",
    ]
    # One that is invalid is no finding, and costs the others nothing.
    assert "over 2 gaps" in said(("different", 1e-6), ("invalid", 1e-6), ("equivalent", 0.9))[0]


def test_json_has_the_kernels_of_every_arm(explained):
    verdict = explained.verdict_of("hit", "isolated")
    told = json.loads(json.dumps(kernel_records(verdict, explained.kernels)))["kernels"]
    assert set(told) == {"zeros_again", *ARMS}
    for arm, rows in told.items():
        zeros, other = (verdict["profiles"][name]["timed_us"] for name in ("zeros", arm))
        assert rows[-1]["role"] == "(total)"
        assert rows[-1]["gap_us"] == pytest.approx(other - zeros, rel=1e-3, abs=1e-2)
        assert sum(row["gap_us"] for row in rows[:-1]) == pytest.approx(rows[-1]["gap_us"], abs=1e-2)
    assert kernel_records({**verdict, "case": "other"}, explained.kernels) == {}
    assert kernel_records({k: v for k, v in verdict.items() if k != "cause"}, explained.kernels) == {}


def test_a_cause_beside_an_invalid_verdict_is_a_hint(explained):
    verdict = explained.verdict_of("hit", "isolated")
    for word in ("invalid", "different"):
        head = explanation({**verdict, "verdict": word}, explained.kernels).splitlines()[0]
        assert ("no more than a hint" in head.lower()) == (word == "invalid")


def test_other_arms_that_do_not_close_are_named_too():
    profile = {"closure": 0.99, "closes": True, "busy_us": 990.0, "timed_us": 1000.0, "overlap_us": 0.0}
    profile |= {"restore_us": 11.0, "restore_outside": True}
    odd = {**profile, "closure": 0.9, "closes": False, "busy_us": 900.0}
    told = closing({"zeros": profile, "zeros_again": odd, "random": profile, "levels": profile}, "random")
    assert [line.split()[1] for line in told] == ["zeros", "random", "zeros_again"]
    assert "does not close within 3 %" in told[2]


def test_clocks_and_power_are_printed_of_every_arm(explained):
    verdict = explained.verdict_of("hit", "isolated")
    clocks = {arm: {"MHz": 1980.0 - 15 * n, "W": 500.0 + n} for n, arm in enumerate(["zeros", "zeros_again", *ARMS])}
    (line,) = [line for line in verdict_table([{**verdict, "clocks": clocks}]).splitlines() if "MHz" in line]
    for arm, of in clocks.items():
        assert f"{arm} {of['MHz']:,.0f} MHz, {of['W']:,.0f} W" in line


def test_a_run_without_one_is_explained_later_and_measures_no_round_again(explained, tmp_path, monkeypatch):
    engine = kvlab.load_engine("tiny-dense", num_kv_blocks=20)
    how = {"rounds": 6, "replays": 1, "out": tmp_path / "run"}
    kvlab.check(engine, ["d=1@64"], **how).close()
    monkeypatch.setattr("kvlab.study.measure_round", lambda *args: pytest.fail("measured again"))
    run = kvlab.check(engine, ["d=1@64"], **how, explain=True)
    assert "sentence" in run.verdict_of("d", "isolated")["cause"]
    assert "selection" not in run.verdict_of("d", "isolated")


def test_a_cause_is_plain_json(explained):
    from kvlab.causes import find_cause

    cause = find_cause(explained.samples_of("hit", "isolated"))
    assert json.loads(json.dumps(cause_record(cause)))["kind"] == cause.kind


def test_what_does_not_close_is_said_and_what_runs_side_by_side_is_counted_once():
    profile = {"closure": 1.149, "closes": False, "busy_us": 14_298.6, "timed_us": 14_391.0, "overlap_us": 2241.0}
    profile |= {"restore_us": 11.0, "restore_outside": True}
    told = closing({"zeros": profile, "random": {**profile, "closure": 0.998, "closes": True}}, "random")
    assert told[0] == (
        "under zeros the kernels add up to 114.9% of the timed step, which does not close within 3 %: 2,241 us ran"
        " beside other kernels; counted once, it is 99.4%; the restore (11 us) is left out"
    )
    assert told[1] == "under random the kernels add up to 99.8% of the timed step; the restore (11 us) is left out"
    unsure = {**profile, "restore_outside": False}
    assert "NOT told apart" in closing({"zeros": unsure, "random": unsure}, "random")[0]


def test_parts_are_printed_with_their_intervals():
    from kvlab.verdict_table import parts_told

    cause = {
        "selection": {"us": -6367.0, "of_step": -0.0977, "ci90": [-6475.0, -6259.0]},
        "clocks": {"us": 5132.0, "of_step": 0.0787, "ci90": [4473.0, 8021.0]},
        "other": {"us": 87.0, "of_step": 0.0013},
    }
    assert parts_told(cause) == [
        "of the gap: selection -6,367 us (-6,475 .. -6,259), -9.77% of the step; clock +5,132 us (+4,473 .. +8,021),"
        " +7.87% of the step; neither +87 us, +0.13% of the step"
    ]
    assert parts_told({"other": {"us": 1.0, "of_step": 0.1}}) == []


@pytest.mark.parametrize(
    ("throttled", "capped"),
    [([True, False], True), ([False, False], False), ([None, None], False), (None, True)],  # no sensors, no column
)
def test_a_card_without_sensors_may_be_held_by_a_cap(throttled, capped):
    samples = pd.DataFrame({"us": [1.0, 2.0]} | ({} if throttled is None else {"throttled": throttled}))
    assert may_be_capped(samples) == capped
