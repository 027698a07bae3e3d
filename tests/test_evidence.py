"""Which run speaks for a step: by what runs hold, whatever their names."""

from __future__ import annotations

import json
import math
import shutil

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import evidence, lab_tables, pace
from kvlab.kernel_gaps import kernel_gap_table
from kvlab.lab import COMMITTED
from kvlab.plots.style import MINUS, OTHER_PACE, VERDICT_STYLE
from kvlab.provenance import power_limit
from kvlab.run import Run, open_run
from kvlab.tables import TABLES


def row(**more):
    base = {
        "model": "m",
        "engine": "vllm",
        "gpu": "g",
        "routing": "none",
        "phase": "hit",
        "context": 8192.0,
        "batch": 1.0,
        "query": 2048.0,
        "topk": math.nan,
        "case": "hit8k",
        "mode": "isolated",
        "arm": "random",
        "margin": 0.03,
        "gap": 0.01,
        "verdict": "equivalent",
        "rounds": 8,
        "arms": 1,
        "utc": "2026-01-01",
        "swept": False,
        "off_pace": False,
        "run": "a",
        "path": more.get("run", "a"),
    }
    return base | more


def both(**more):
    return [row(mode=mode, **more) for mode in ("isolated", "sustained")]


def chosen(rows, pick):
    return pick(pd.DataFrame(rows)).set_index(["phase", "context", "mode"])["run"].to_dict()


def test_one_run_speaks_for_both_modes_and_a_newer_for_an_older():
    alone = [row(run="isolated", rounds=20), row(run="sustained", mode="sustained", rounds=20)]
    old, new = both(run="old"), both(run="new", utc="2026-02-01")
    assert set(chosen([*new, *alone, *old], evidence.claim_gaps).values()) == {"new"}
    assert set(chosen([*old, *both(run="more", rounds=9), *new], evidence.claim_gaps).values()) == {"more"}
    assert set(chosen([*both(run="many", arms=9), *old], evidence.claim_gaps).values()) == {"old"}
    assert chosen(alone, evidence.claim_gaps) == {
        ("hit", 8192.0, "isolated"): "isolated",
        ("hit", 8192.0, "sustained"): "sustained",
    }


def test_the_claim_is_not_of_sweeps_and_not_of_the_smaller_batch():
    swept = both(run="sweep", rounds=99, swept=True)
    assert set(chosen([*swept, *both(run="claim")], evidence.claim_gaps).values()) == {"claim"}
    assert set(chosen(swept, evidence.claim_gaps).values()) == {"sweep"}
    small, large = both(run="one", rounds=99), both(run="eight", batch=8.0)
    assert set(chosen([*small, *large], evidence.claim_gaps).values()) == {"eight"}


def test_real_and_pinned_routing_are_two_rows_and_other_arms_none():
    rows = [row(routing="real", gap=0.4), row(routing="balanced"), row(arm="levels", run="scores")]
    found = evidence.claim_gaps(pd.DataFrame(rows))
    assert sorted(found["routing"]) == ["balanced", "real"]
    assert set(found["arm"]) == {"random"}


def test_a_run_that_rested_goes_before_one_that_did_not_whatever_else():
    slowed, rested = both(run="old", rounds=99, off_pace=True), [row(run="new", rounds=6, arms=9)]
    for pick in (evidence.claim_gaps, evidence.context_gaps):
        assert chosen([*slowed, *rested], pick)[("hit", 8192.0, "isolated")] == "new"


def test_a_capped_step_of_before_the_rests_or_the_settling_is_off_pace_and_no_other():
    """Of the committed runs: isolated without `rest_isolated_share`, sustained without `settle_capped_s`, both where
    the cap bound."""
    for run in evidence.open_runs(COMMITTED, lambda run: run.study["engine"] == "vllm"):
        rows = evidence.gap_rows([run]).merge(run.cases, on="case", suffixes=("", "_of"))
        rows = rows.merge(run.verdicts[["case", "mode", "flagged"]], on=["case", "mode"])
        for row in rows.to_dict("records"):
            fact = {"isolated": "rest_isolated_share", "sustained": "settle_capped_s"}[row["mode"]]
            unknown = pd.isna(row.get(fact, math.nan))
            assert row["off_pace"] == (unknown and row["flagged"] > 0.1), (run.path, row["case"], row["mode"])


def test_a_figure_sets_off_pace_gaps_apart_from_every_verdict():
    rows = pd.DataFrame([row(), row(off_pace=True, verdict="different"), row(verdict="invalid")])
    assert pace.drawn(rows)["verdict"].tolist() == ["equivalent", OTHER_PACE, "invalid"]
    assert OTHER_PACE in VERDICT_STYLE


def test_top_k_is_a_line_where_a_step_was_measured_at_several():
    """Whatever runs they are in: of the committed ones 512 and 1024 are in a sweep, the model's own 2048 in others."""
    shown = evidence.sparsity_gaps(evidence.open_runs(COMMITTED), "topk")
    whole = shown[shown["part"] == evidence.WHOLE]
    assert sorted(whole["topk"]) == [512, 1024, 2048]
    assert set(whole["model"]) == {"deepseek-v3.2-6l"}
    assert "top-k" in set(shown.loc[shown["topk"] == 2048, "part"])


def test_an_export_under_another_name_than_its_run_says_the_same(profiled: Run, tmp_path):
    (tmp_path / "other").mkdir()
    profiled.export(tmp_path / "other" / "name")
    (exported,) = evidence.open_runs(tmp_path / "other")
    for axis in ("topk", "zero_fraction"):
        pd.testing.assert_frame_equal(
            *(evidence.sparsity_gaps([run], axis).drop(columns="path") for run in (profiled, exported))
        )
    rows = evidence.gap_rows([exported])
    assert evidence.find_causes([exported], rows) == evidence.find_causes([profiled], evidence.gap_rows([profiled]))
    assert len(lab_tables.cause_table([exported]).data) == len(lab_tables.cause_table([profiled]).data) > 0


def test_no_two_committed_runs_are_one():
    runs = evidence.open_runs(COMMITTED)
    assert len(runs) > 20
    for run in runs:
        assert set(run.gaps["run"]) == {run.path.name}


def test_zero_fractions_of_a_model_without_top_k_are_a_line_too():
    shown = evidence.sparsity_gaps(evidence.open_runs(COMMITTED), "zero_fraction")
    lines = shown[shown["part"] == evidence.WHOLE].groupby("model")["zero_fraction"].agg(set)
    assert {*lines.index} == {"deepseek-v3.2-6l", "deepseek-v4.1-flash", "llama-3.1-8b"}
    assert all(shares == {0.0, 0.25, 0.5, 0.75} for shares in lines)


def test_a_step_that_could_not_be_timed_is_part_of_the_claim():
    rows = [
        row(),
        row(context=100000.0, gap=math.nan, verdict="invalid"),
        row(context=1024.0, gap=math.nan, verdict=None),
    ]
    assert sorted(evidence.claim_gaps(pd.DataFrame(rows))["context"]) == [8192.0, 100000.0]


@given(st.permutations(range(7)))
def test_a_context_line_is_of_one_batch_and_of_several_runs(order):
    eight = [row(run="sweep", batch=8.0, context=float(k)) for k in (1024, 8192, 100000)]
    large = [row(run="claim", batch=32.0, context=8192.0), row(run="claim", batch=32.0, context=100000.0)]
    more = [row(run="more", batch=8.0, context=8192.0, rounds=99), row(run="longer", batch=8.0, context=200000.0)]
    rows = [*eight, *large, *more]
    found = evidence.context_gaps(pd.DataFrame([rows[i] for i in order]))
    assert set(found["batch"]) == {8.0}
    assert dict(zip(found["context"], found["run"], strict=True)) == {
        1024.0: "sweep",
        8192.0: "more",
        100000.0: "sweep",
        200000.0: "longer",
    }


def test_where_no_batch_has_two_contexts_each_has_its_largest():
    rows = [row(batch=32.0), row(batch=8.0, run="b"), row(batch=3.0, context=100000.0, run="c")]
    found = evidence.context_gaps(pd.DataFrame(rows))
    assert dict(zip(found["context"], found["batch"], strict=True)) == {8192.0: 32.0, 100000.0: 3.0}


def test_committed_runs_have_a_row_a_step_and_mode():
    rows = evidence.claim_gaps(evidence.gap_rows(evidence.open_runs(COMMITTED)))
    assert not rows.duplicated(["model", "engine", "routing", "phase", "context", "mode"]).any()
    assert {"decode", "hit"} <= set(rows["phase"])
    assert rows["rounds"].ge(4).all()


def test_a_run_without_a_verdict_is_passed_over(tmp_path):
    shutil.copytree(COMMITTED / "vllm-gpt-oss-20b-isolated", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "empty")
    record = json.loads((tmp_path / "empty" / "provenance.json").read_text())
    (tmp_path / "empty" / "provenance.json").write_text(json.dumps({**record, "verdicts": []}))
    for table in ("samples", "verdicts", "telemetry"):
        (tmp_path / "empty" / f"{table}.parquet").unlink(missing_ok=True)
    (tmp_path / "notes").mkdir()
    assert [run.path.name for run in evidence.open_runs(tmp_path)] == ["whole"]
    assert evidence.open_runs(tmp_path / "absent") == []


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A small sweep with kernels: two top-k, one share of zeros."""
    import kvlab

    out = tmp_path_factory.mktemp("runs") / "sweep"

    def load(topk):
        return kvlab.load_engine("tiny-dsa", "reference", topk=topk, num_kv_blocks=64)

    axes = {"contexts": [64], "phases": ["decode"], "batch": [1], "topk": [8, 16], "zero_fractions": [0.5]}
    with kvlab.sweep(load, **axes, arms=["random", "constant(0.01)"], rounds=2, explain=True, out=out) as run:
        return run


def test_parts_of_a_gap_are_those_of_its_kernels(profiled: Run):
    parts = evidence.sparsity_gaps([profiled], "topk")
    assert sorted(parts.loc[parts["part"] == evidence.WHOLE, "topk"]) == [8, 16]
    case = "decode-b1-k64-topk8"
    table = kernel_gap_table(profiled.kernels[profiled.kernels["case"] == case], by="role").set_index("role")
    of_case = parts[(parts["case"] == case) & (parts["part"] != evidence.WHOLE)]
    assert of_case["gap"].sum() == pytest.approx(table["of_step"].iloc[-1])
    shares = evidence.sparsity_gaps([profiled], "zero_fraction")
    assert set(shares["zero_fraction"]) == {0.0, 0.5}
    assert set(shares["arm"]) == {"random", "random(zero_fraction=0.5)"}
    others = evidence.other_arms([profiled])
    assert others["arm"].tolist() == ["random", "constant(0.01)"] * 2
    assert evidence.other_arms([open_run(COMMITTED / "vllm-llama-3.1-8b-sustained")]).empty


def test_the_profiled_case_of_a_model_has_its_largest_gap(profiled: Run):
    ((run, case, mode),) = evidence.profiled_cases([profiled])
    gaps = run.gaps[run.gaps["arm"] == "random"].set_index("case")["gap"].abs()
    assert (case, mode) == (gaps.idxmax(), "isolated")
    assert evidence.profiled_cases([open_run(COMMITTED / "vllm-gpt-oss-20b-isolated")]) == []
    assert set(evidence.readings([(run, case, mode)])["arm"]) == {"zeros", "random"}
    assert power_limit([run.provenance]) is None
    assert power_limit(run.provenance for run in evidence.open_runs(COMMITTED)) == 700


def test_a_stored_cause_speaks_for_the_step_in_other_runs_too(profiled: Run):
    rows = evidence.gap_rows([profiled])
    rows = rows[rows["arm"] == "random"]
    causes = evidence.find_causes([profiled], rows)
    key = evidence.step_key(rows.iloc[0].to_dict())
    assert causes[key] == profiled.verdict_of(rows["case"].iloc[0], "isolated")["cause"]
    llama = evidence.open_runs(COMMITTED, lambda run: run.study["model"] == "llama-3.1-8b")
    found = evidence.find_causes(llama, claims := evidence.claim_gaps(evidence.gap_rows(llama)))
    hit = claims[(claims["phase"] == "hit") & (claims["context"] == 100000) & (claims["mode"] == "isolated")]
    assert evidence.cause_clause(found[evidence.step_key(hit.iloc[0].to_dict())]).startswith("attention +")


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (None, "not looked for"),
        ({"kind": "none"}, "within the noise"),
        ({"kind": "clocks", "mhz": [1845, 1620], "watts": [591, 692]}, "clock 1,845 to 1,620 MHz, 591 to 692 W"),
        ({"kind": "routing", "routing": 0.83}, "83 % of the tokens go to other experts"),
        (
            {"kind": "selection", "selection": {"us": -24.0}, "roles": {"top-k": -24.0, "gather/remap": 2.0}},
            f"top-k {MINUS}24.0 µs",
        ),
        ({"kind": "selection", "selection": {"us": -24.0}, "roles": {}}, f"the indexer's contents {MINUS}24.0 µs"),
        (
            {"kind": "cancelling", "roles": {"top-k": -6400.0, "attention": 1700.0}, "mhz": [1980, 1748]},
            f"top-k {MINUS}6.40 ms against attention +1.70 ms, clock 1,980 to 1,748 MHz",
        ),
        ({"kind": "kernels", "roles": {"attention": 35.0, "GEMM": -1.0}}, "attention +35.0 µs"),
        ({"kind": "unknown", "mhz": [1980, 1980]}, "kernels not profiled"),
    ],
)
def test_a_cause_in_a_clause(cause, said):
    assert evidence.cause_clause(cause) == said


def test_no_runs_have_the_columns_of_some_and_every_table_of_them_is_empty():
    none, some = evidence.gap_rows([]), evidence.gap_rows(evidence.open_runs(COMMITTED)[:2])
    assert none.dtypes.to_dict() == some.dtypes.to_dict()
    assert none.empty
    for pick in (evidence.claim_gaps, evidence.context_gaps, pace.drawn, lab_tables.with_places):
        assert pick(none).empty
    assert evidence.other_arms([]).empty
    assert evidence.profiled_cases([]) == []
    read = evidence.readings([])
    assert read.empty
    assert set(TABLES["samples"].columns) <= set(read)
    assert evidence.find_causes([], none) == {}
    for axis in ("topk", "zero_fraction"):
        assert evidence.sparsity_gaps([], axis).empty
    assert lab_tables.claim_table(none).empty
    for table in (lab_tables.cause_table([]), lab_tables.routing_table([]), lab_tables.context_table(none)):
        assert table.data.empty
    assert lab_tables.selection_table([]) is None


def test_runs_of_another_engine_alone_have_no_sparsity_and_no_causes():
    reference = evidence.open_runs(COMMITTED, lambda run: run.study["engine"] == "reference")[:1]
    for axis in ("topk", "zero_fraction"):
        assert evidence.sparsity_gaps(reference, axis).empty
