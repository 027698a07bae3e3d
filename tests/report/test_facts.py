"""What a report reads of a run is what the run holds."""

from __future__ import annotations

import pytest
from made_runs import make_run

from kvlab.report.facts import read_run, read_runs
from kvlab.report.origin import origin_of
from kvlab.run import open_run
from kvlab.stats import p_different, round_ratios


def test_rows_repeat_the_verdicts_and_p_is_of_the_samples(tmp_path):
    run = make_run(tmp_path / "run", {"a": ("a=1@9", 0.0), "b": ("b=1@9", 0.08)}, clock=1800.0)
    facts = read_run(run)
    for row, (_, verdict) in zip(facts.rows, run.verdicts.iterrows(), strict=True):
        assert (row.case, row.verdict, row.gap, row.rounds) == tuple(verdict[["case", "verdict", "gap", "rounds"]])
        assert row.ci90 == (verdict["ci90_lo"], verdict["ci90_hi"])
        assert row.p == p_different(round_ratios(run.samples_of(row.case, "isolated"), "random"), 0.03)
        assert (row.mhz, row.watts) == ((1980.0, 1800.0), (500.0, 600.0))
    equivalent, different = facts.rows
    assert equivalent.cycles_gap is None
    assert different.cycles_gap == pytest.approx(1.08 * 1800 / 1980 - 1, abs=0.002)
    assert "1,800 instead of 1,980 MHz" in different.cause


@pytest.mark.parametrize("clock", [None, 1800.0])
def test_the_replays_own_clock_goes_before_readings_beside_them(tmp_path, clock):
    run = make_run(tmp_path / "run", {"a": ("a=1@9", 0.08)}, close=False, clock=clock)
    readings = [
        {"case": "a", "mode": "isolated", "arm": arm, "round": number, "t_s": 0.1, "sm_mhz": mhz, "watts": 650.0}
        for arm, mhz in (("zeros", 1980.0), ("random", 1500.0))
        for number in range(20)
    ]
    run.add_telemetry(readings)
    (row,) = read_run(run).rows
    run.close()
    assert row.mhz == (1980.0, clock or 1500.0)
    assert row.watts == (500.0, 600.0)


def test_a_stored_cause_is_kept_as_it_is(tmp_path):
    for number, cause in enumerate(("because of a", {"kind": "clocks", "sentence": "because of a"})):
        run = make_run(tmp_path / f"run{number}", {"a": ("a=1@9", 0.08)}, cause=cause)
        assert read_run(run).rows[0].cause == "because of a"


def test_an_export_reads_like_the_run(tmp_path):
    run = make_run(tmp_path / "run", {"a": ("a=1@9", 0.01), "b": ("b=1@9", 0.0, 7), "c": ("c=1@9", 0.0, 0)})
    run.export(tmp_path / "export")
    assert read_run(open_run(tmp_path / "export"), "run").rows == read_run(run).rows


def test_correction_is_over_all_runs_of_a_report(tmp_path):
    runs = [make_run(tmp_path / name, {"a": ("a=1@9", 0.033)}, rounds=8) for name in ("one", "two", "three")]
    alone = [read_run(run).rows[0] for run in runs]
    facts, missing = read_runs(runs)
    assert not missing
    # The same samples three times over: Holm takes three times the p of each.
    assert 0 < alone[0].p < 1 / 3
    assert all(row.p_holm == row.p == alone[0].p for row in alone)
    assert [each.rows[0].p_holm for each in facts] == pytest.approx([3 * alone[0].p] * 3)


def test_an_origin_names_what_it_has_and_leaves_out_the_rest(tmp_path):
    run = make_run(tmp_path / "run", {"a": ("a=1@9", 0.0)}, rounds=8, provenance={"commit": None, "notes": ["eager"]})
    origin = origin_of(read_run(run))
    facts = dict(origin.facts)
    assert facts["GPU"] == "NVIDIA H200 (143771 MiB)"
    assert facts["versions"] == "kvlab 0.1.0, torch 2.13.0"
    assert "commit" not in facts
    assert origin.notes == ("eager",)
    assert origin.line.startswith("GPU NVIDIA H200 (143771 MiB); driver 580.1; versions")
    assert not any("None" in value for value in facts.values())
