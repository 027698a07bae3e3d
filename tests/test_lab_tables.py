"""Tables for people: the numbers of runs as texts."""

from __future__ import annotations

import pandas as pd
import pytest

import kvlab
from kvlab import evidence, lab_tables
from kvlab.lab import COMMITTED


@pytest.fixture(scope="module")
def claims():
    runs = evidence.open_runs(COMMITTED, lambda run: run.study["engine"] == "vllm")
    return evidence.claim_gaps(evidence.gap_rows(runs))


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "check"
    engine = kvlab.load_engine("tiny-dsa", "reference", num_kv_blocks=64)
    with kvlab.check(engine, ["hit=8@256"], rounds=2, explain=True, out=out) as run:
        return run


def test_the_claim_has_a_row_a_step_with_both_modes(claims):
    table = lab_tables.claim_table(claims)
    assert len(table) == len(claims.drop_duplicates(["model", "routing", "phase", "context"]))
    assert list(table) == ["model", "step", "isolated, %", "sustained, %", "verdict"]
    (hit,) = table[(table["model"] == "llama-3.1-8b") & (table["step"] == "hit of 2,048 at 100k")].index
    assert table.loc[hit, "isolated, %"].startswith("+10.36 (")
    assert "different" in table.loc[hit, "verdict"]
    assert "gpt-oss-20b (real routing)" in set(table["model"])
    causes = lab_tables.claim_table(claims, {})
    assert set(causes["why"]) == {"not looked for"}


def test_a_cause_says_whose_mode_it_is_of_where_the_other_has_another(claims):
    step = claims[(claims["model"] == "llama-3.1-8b") & (claims["phase"] == "hit") & (claims["context"] == 100_000)]
    keys = {row["mode"]: evidence.step_key(row) for row in step.to_dict("records")}
    clock = {"kind": "clocks", "mhz": (1860.0, 1620.0)}
    attention = {"kind": "kernels", "roles": {"attention": 19_000.0}}
    (why,) = lab_tables.claim_table(step, {keys["isolated"]: attention, keys["sustained"]: clock})["why"]
    assert why == "sustained: clock 1,860 to 1,620 MHz"
    (why,) = lab_tables.claim_table(step, dict.fromkeys(keys.values(), clock))["why"]
    assert why == "clock 1,860 to 1,620 MHz"


def test_contexts_are_columns_and_what_is_not_equivalent_is_shaded(claims):
    style = lab_tables.context_table(evidence.context_gaps(claims))
    assert {"8k tokens", "100k tokens"} <= set(style.data)
    html = style.to_html()
    assert "#F6CDB5" in html
    assert style.data.map(lambda cell: "nan" in cell).sum().sum() == 0


def test_why_a_step_has_its_gap_and_its_kernels(explained):
    table = lab_tables.cause_table([explained]).data
    assert table["step"].tolist() == ["hit of 8 at 256"]
    assert table["why"].iloc[0].endswith(".")
    kernels = lab_tables.kernel_table(explained.kernels, most=3).data
    assert len(kernels) == 5
    assert kernels["kernel"].iloc[-1] == "all"
    assert kernels["kernel"].iloc[-2].endswith(" others")
    total = explained.kernels.groupby("arm")["us"].sum()
    assert float(kernels["zeros, µs"].iloc[-1].replace(",", "")) == pytest.approx(total["zeros"], abs=1)


def test_selection_of_a_run_and_of_records(explained):
    cases = [(explained, "hit", "isolated")]
    (told,) = lab_tables.selection_table(cases).data.to_dict("records")
    assert told["case"] == "hit=8@256"
    assert " → " in told["neighbours"]
    layer = {"picks": 16, "neighbours": 1.0, "pages": 2.0, "spread": 1.0}
    arms = {"zeros": {"a": layer, "b": {**layer, "neighbours": 0.5}}, "random": {"a": layer, "b": layer}}
    rows = [{"model": "tiny-dsa", "case": "hit=8@256", "arms": arms}]
    (told,) = lab_tables.selection_table(cases, rows).data.to_dict("records")
    assert told["layers"] == "2"
    assert told["neighbours"] == "75 % (50 to 100) → 100 %"
    assert lab_tables.selection_table([]) is None


def test_routing_of_runs_and_of_counted_loads(explained):
    loads = {
        "model": "m",
        "case": "c",
        "routing": "real",
        "moved": 0.83,
        "most_over_mean": {"zeros": 32.0, "random": 9.0},
    }
    table = lab_tables.routing_table([explained], [loads]).data
    assert table["routing"].tolist() == ["none", "real"]
    assert table["to other experts"].tolist()[1] == "83 %"
    assert table["busiest expert, x mean"].tolist()[1] == "32.0 to 9.0"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"phase": "decode", "batch": 8.0, "query": 1.0, "context": 100000.0}, "decode of 8 at 100k"),
        ({"phase": "hit", "batch": 1.0, "query": 2048.0, "context": 8192.0}, "hit of 2,048 at 8k"),
        ({"phase": "hit", "batch": 8.0, "query": 256.0, "context": 8192.0}, "hit of 8 x 256 at 8k"),
    ],
)
def test_steps_in_words(row, said):
    assert lab_tables.place_words(row) == said
    assert lab_tables.with_places(pd.DataFrame([{**row, "model": "m"}]))["place"].tolist() == [f"m: {said}"]
