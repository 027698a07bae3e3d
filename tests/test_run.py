"""Runs: what is stored comes back, half of it never; what is not the run's is refused."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import RunError
from kvlab.run import Run, open_run
from kvlab.tables import IDENTITY, TABLES

from handmade_runs import ARMS, PROVENANCE, STUDY, add_case, drawn_rows, rows, verdict


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", STUDY, PROVENANCE) as run:
        add_case(run)
        yield run


def assert_one_line(caught):
    assert "\n" not in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(rounds=st.lists(drawn_rows(), min_size=1, max_size=3))
def test_samples_come_back_as_they_were_given(rounds):
    with tempfile.TemporaryDirectory() as folder:
        with Run.create(Path(folder) / "r", STUDY, PROVENANCE) as run:
            add_case(run)
            for number, given_rows in enumerate(rounds):
                run.add_round("decode", "isolated", number, given_rows)
            while_writing = run.samples
        opened = open_run(Path(folder) / "r")
        opened.export(Path(folder) / "export")
        exported = open_run(Path(folder) / "export").samples
        samples = opened.samples
    pd.testing.assert_frame_equal(while_writing, samples)
    pd.testing.assert_frame_equal(exported, samples)
    wanted = [
        {"round": number, **row}
        for number, given_rows in enumerate(rounds)
        for row in sorted(given_rows, key=lambda row: (row["position"], row["replay"]))
    ]
    assert len(samples) == len(wanted)
    for found, row in zip(samples.to_dict("records"), wanted, strict=True):
        for key, value in {"flagged": False, "routing": "none", **row}.items():
            if value is None:
                assert key not in found or pd.isna(found[key])
            else:
                assert found[key] == value, key
    unsaid = {"sm_mhz", "watts", "throttled"} - {k for row in wanted for k, v in row.items() if v is not None}
    assert not unsaid & set(samples)


def test_every_row_of_every_table_carries_its_identity(run):
    run.add_round("decode", "isolated", 0, rows())
    run.add_verdict("decode", "isolated", verdict())
    run.add_kernels([{"case": "decode", "mode": "isolated", "arm": "zeros", "kernel": "gemm", "us": 3.0}])
    run.add_telemetry([{"case": "decode", "mode": "isolated", "arm": "zeros", "watts": 300.0}])
    for name in TABLES:
        table = getattr(run, name)
        assert len(table), name
        assert list(table.columns[-len(IDENTITY) :]) == list(IDENTITY)
        assert not table[list(IDENTITY)].isna().any(axis=None)
        assert set(table["run"]) == {"run"}
        assert set(table["model"]) == {"tiny"}
        assert set(table["gpu"]) == {"NVIDIA H200"}
        assert set(table["vllm"]) == {"none"}
    assert set(run.verdicts["seed"]) == {7}, "a verdict is of the study's seed"
    assert set(run.samples["seed"]) == {0}, "a sample is of its own seed"


@pytest.mark.parametrize("key", ["position", "arm", "fill", "seed", "replay", "us"])
@pytest.mark.parametrize("how", ["absent", "none"])
def test_a_row_without_its_identity_is_refused_and_the_round_with_it(run, key, how):
    bad = rows()
    if how == "absent":
        del bad[3][key]
    else:
        bad[3][key] = None
    with pytest.raises(RunError, match=rf"round 0 of case 'decode' \(isolated\), row 3 says no '{key}'") as caught:
        run.add_round("decode", "isolated", 0, bad)
    assert_one_line(caught)
    assert run.finished_rounds("decode", "isolated") == []
    assert run.samples.empty


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": math.nan}, "says no 'us'"),
        ({"us": math.inf}, "took inf us"),
        ({"us": 0.0}, "took 0.0 us"),
        ({"us": -3.0}, "took -3.0 us"),
        ({"us": "3"}, "us = '3', which is not of type float64"),
        ({"seed": 2**63}, "seed = 9223372036854775808"),
        ({"arm": ""}, "says no 'arm'"),
        ({"wats": 3.0}, "unknown key 'wats'"),
        ({"throttled": "yes"}, "throttled = 'yes'"),
    ],
)
def test_a_row_that_says_nonsense_is_refused(run, change, message):
    bad = rows()
    bad[-1].update(change)
    with pytest.raises(RunError, match=message) as caught:
        run.add_round("decode", "isolated", 0, bad)
    assert_one_line(caught)
    assert run.samples.empty


def test_rows_without_routing_are_refused_unless_the_study_says_it(tmp_path):
    study = {key: value for key, value in STUDY.items() if key != "routing"}
    with Run.create(tmp_path / "r", study, PROVENANCE) as run:
        add_case(run)
        with pytest.raises(RunError, match="says no 'routing', nor does the study"):
            run.add_round("decode", "isolated", 0, rows())
        run.add_round("decode", "isolated", 0, rows(routing="balanced"))
        assert set(run.samples["routing"]) == {"balanced"}


def test_numpy_values_are_as_good_as_python_ones(run):
    given_rows = [
        {
            "position": np.int64(i),
            "arm": np.str_(arm),
            "fill": arm,
            "seed": np.uint8(3),
            "replay": np.int32(0),
            "us": np.float32(2.5),
            "throttled": np.bool_(True),
        }
        for i, arm in enumerate(ARMS)
    ]
    run.add_round("decode", "isolated", np.int64(0), given_rows)
    run.add_verdict("decode", "isolated", verdict(gap=np.float64(0.5), ci90=np.array([0.25, 0.75])))
    assert run.samples["us"].tolist() == [2.5] * 3
    assert run.samples["throttled"].dtype == bool
    assert run.verdict_of("decode", "isolated")["ci90"] == [0.25, 0.75]


def test_every_sample_throttled_is_kept_flagged_and_without_gaps(run):
    for number in range(3):
        run.add_round("decode", "isolated", number, rows(number, throttled=True, flagged=True, sm_mhz=345.0))
    samples = run.samples
    assert len(samples) == 18
    assert samples["flagged"].all()
    assert samples["throttled"].all()
    assert not samples.isna().any(axis=None)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, GeneratorExit])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_is_raised_while_rows_come_leaves_no_half_round(run, error, after):
    run.add_round("decode", "isolated", 0, rows())

    def breaking():
        yield from rows(1)[:after]
        raise error

    with pytest.raises(error):
        run.add_round("decode", "isolated", 1, breaking())
    assert run.finished_rounds("decode", "isolated") == [0]
    assert len(run.samples) == 6
    run.add_round("decode", "isolated", 1, rows(1))
    assert run.finished_rounds("decode", "isolated") == [0, 1]


def test_an_interrupt_between_the_statements_of_a_round_leaves_no_half_round(run, monkeypatch):
    from kvlab import run as module

    def cut(*args):
        original(*args)
        raise KeyboardInterrupt

    original = module.write_round
    monkeypatch.setattr(module, "write_round", cut)
    with pytest.raises(KeyboardInterrupt):
        run.add_round("decode", "isolated", 0, rows())
    monkeypatch.undo()
    assert open_run(run.path).samples.empty
    run.add_round("decode", "isolated", 0, rows())
    assert len(open_run(run.path).samples) == 6


def test_a_round_is_stored_once_and_after_its_case(run):
    run.add_round("decode", "isolated", 0, rows())
    with pytest.raises(RunError, match=r"round 0 of case 'decode' \(isolated\) is stored already"):
        run.add_round("decode", "isolated", 0, rows())
    run.add_round("decode", "sustained", 0, rows())
    with pytest.raises(RunError, match=r"call add_case\('hit'"):
        run.add_round("hit", "isolated", 0, rows())
    with pytest.raises(RunError, match="has no rows"):
        run.add_round("decode", "isolated", 1, [])
    with pytest.raises(RunError, match="a replay of a position twice"):
        run.add_round("decode", "isolated", 1, rows() + rows())
    assert len(run.samples) == 12


def test_cases_keep_their_order_and_gather_facts(run):
    run.add_case("a", "a=8", "prefill", [[8, 8]], timer="graph")
    run.case_facts("a", timer="events", outside_writes=0, nested={"x": [1, 2]})
    run.add_case("a", "a=8", "prefill", [[8, 8]], verified=True)
    cases = run.cases
    assert cases["case"].tolist() == ["decode", "a"]
    fact = cases.iloc[1]
    assert (fact["timer"], fact["outside_writes"], fact["nested_x"], fact["verified"]) == ("events", 0, "[1, 2]", True)
    assert json.loads(fact["requests"]) == [[8, 8]]
    with pytest.raises(RunError, match=r"case 'a' is 'a=8' in this run, not 'a=9'"):
        run.add_case("a", "a=9", "prefill", [[9, 9]])
    with pytest.raises(RunError, match="before its case"):
        run.case_facts("b", x=1)
    with pytest.raises(RunError, match="cannot store a value"):
        run.case_facts("a", x=object())


def test_a_verdict_is_flat_in_the_table_whole_in_verdict_of_and_replaced(run):
    assert run.verdict_of("decode", "isolated") is None
    run.add_verdict("decode", "isolated", verdict(verdict="inconclusive"))
    run.add_verdict("decode", "sustained", verdict(gap=None, ci90=None, verdict="invalid", run="/elsewhere"))
    run.add_verdict("decode", "isolated", verdict(gap=0.002, reasons=["slow"]))
    assert run.verdict_of("decode", "isolated") == verdict(gap=0.002, reasons=["slow"])
    table = run.verdicts.set_index("mode")
    assert table.index.tolist() == ["isolated", "sustained"]
    row = table.loc["isolated"]
    assert (row["gap"], row["ci90_lo"], row["ci90_hi"], row["verdict"]) == (0.002, -0.002, 0.004, "equivalent")
    assert (row["aa_gap"], row["aa_ci90_lo"], row["aa_ci90_hi"]) == (0.0, -0.001, 0.001)
    assert (row["median_us_zeros"], row["median_us_random"], row["rounds"], row["mde"]) == (1000.0, 1001.0, 20, 0.004)
    assert (row["phase"], row["margin"], row["reasons"]) == ("decode", 0.03, '["slow"]')
    invalid = table.loc["sustained"]
    assert math.isnan(invalid["gap"])
    assert math.isnan(invalid["ci90_lo"])
    assert invalid["run"] == "run"
    assert "ci90" not in table
    with pytest.raises(RunError, match="says no 'verdict'"):
        run.add_verdict("decode", "isolated", {"gap": 0.1})
    with pytest.raises(RunError, match="gap = 'small'"):
        run.add_verdict("decode", "isolated", verdict(gap="small"))


def test_kernels_of_an_arm_are_replaced_and_telemetry_gathers(run):
    def kernels(arm, *us):
        return [
            {"case": "decode", "mode": "isolated", "arm": arm, "kernel": f"k{i}", "us": t, "role": "topk"}
            for i, t in enumerate(us)
        ]

    run.add_kernels(kernels("zeros", 1.0, 2.0) + kernels("random", 3.0))
    run.add_kernels(pd.DataFrame(kernels("zeros", 5.0)))
    found = run.kernels
    assert sorted(zip(found["arm"], found["us"], found["role"], strict=True)) == [
        ("random", 3.0, "topk"),
        ("zeros", 5.0, "topk"),
    ]
    for _ in range(2):
        run.add_telemetry([{"case": "decode", "mode": "isolated", "arm": "zeros", "t": 0.5, "throttled": True}])
    assert run.telemetry["throttled"].tolist() == [True, True]
    with pytest.raises(RunError, match="kernels row 0 says no 'kernel'"):
        run.add_kernels([{"case": "decode", "mode": "isolated", "arm": "zeros", "us": 1.0}])


def test_empty_tables_have_their_columns_and_no_rows(tmp_path):
    with Run.create(tmp_path, STUDY, PROVENANCE) as run:
        for name, table in TABLES.items():
            found = getattr(run, name)
            assert found.empty
            assert set(found.columns) == {*table.columns, *IDENTITY}
        assert run.samples["us"].dtype == "float64"
        assert run.samples["flagged"].dtype == bool


def test_the_same_study_resumes_and_each_process_is_recorded(tmp_path):
    for process in range(3):
        with Run.create(tmp_path, STUDY, {**PROVENANCE, "utc": f"{process}"}) as run:
            add_case(run)
            assert run.finished_rounds("decode", "isolated") == list(range(process))
            run.add_round("decode", "isolated", process, rows(process))
    run = open_run(tmp_path)
    assert run.samples.groupby("round")["process"].first().tolist() == [0, 1, 2]
    assert run.provenance == {
        **PROVENANCE,
        "utc": "0",
        "resumed": [{**PROVENANCE, "utc": "1"}, {**PROVENANCE, "utc": "2"}],
    }
    assert run.study == STUDY


@pytest.mark.parametrize(
    ("study", "provenance", "message"),
    [
        ({"margin": 0.01}, {}, r"margin = 0.03, not 0.01"),
        ({"arms": ["zeros", "zeros_again", "constant"]}, {}, r'arms.2 = "random", not "constant"'),
        ({"geometry": {"layers": 2, "block_size": 32}}, {}, r"geometry.block_size = 16, not 32"),
        ({"extra": 1}, {}, r"extra = absent, not 1"),
        ({}, {"torch": "2.14.0"}, r'torch = "2.13.0", not "2.14.0"'),
        ({}, {"gpus": [{"name": "NVIDIA B200"}]}, r'gpu = "NVIDIA H200", not "NVIDIA B200"'),
        ({}, {"vllm": "0.33.0"}, r'vllm = "none", not "0.33.0"'),
    ],
)
def test_another_study_is_refused_by_its_first_difference(tmp_path, study, provenance, message):
    with Run.create(tmp_path, STUDY, PROVENANCE) as run:
        add_case(run)
    with pytest.raises(RunError, match=message + r"; choose another --out, or remove the folder") as caught:
        Run.create(tmp_path, {**STUDY, **study}, {**PROVENANCE, **provenance})
    assert_one_line(caught)
    Run.create(tmp_path, STUDY, PROVENANCE).close()


def test_a_run_that_could_not_say_what_it_is_of_is_not_begun(tmp_path):
    with pytest.raises(RunError, match="neither study nor provenance says model, torch"):
        Run.create(tmp_path / "r", {"engine": "reference"}, {**PROVENANCE, "torch": None})
    assert not (tmp_path / "r").exists()


def test_a_study_may_name_the_device_itself(tmp_path):
    with Run.create(tmp_path, {**STUDY, "gpu": "cpu", "versions": {"torch": "9"}}, PROVENANCE) as run:
        add_case(run)
        assert run.cases.loc[0, ["gpu", "torch", "kvlab"]].tolist() == ["cpu", "9", "0.1.0"]


def test_a_run_is_not_written_for_reading_or_after_closing(tmp_path):
    with Run.create(tmp_path, STUDY, PROVENANCE) as run:
        add_case(run)
        run.add_round("decode", "isolated", 0, rows())
    assert len(run.samples) == 6, "a closed run can still be read"
    with pytest.raises(RunError, match=r"is closed; Run.create opens it again"):
        run.add_round("decode", "isolated", 1, rows())
    with pytest.raises(RunError, match="is open for reading"):
        open_run(tmp_path).add_round("decode", "isolated", 1, rows())
    run.close()


def test_the_folder_the_file_and_the_export_open_alike(run, tmp_path):
    run.add_round("decode", "isolated", 0, rows())
    run.export(tmp_path / "export")
    for place in ("run", "run/run.sqlite", "export", "export/provenance.json"):
        opened = open_run(tmp_path / place)
        assert opened.path == tmp_path / place.split("/")[0]
        pd.testing.assert_frame_equal(opened.samples, run.samples)
        assert opened.verdicts.empty
        assert opened.finished_rounds("decode", "isolated") == [0]


@pytest.mark.parametrize("place", ["nothing", "folder", "folder/nothing.sqlite"])
def test_no_run_is_said_so(tmp_path, place):
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=f"no run at .*{place}; name the --out folder") as caught:
        open_run(tmp_path / place)
    assert_one_line(caught)


def test_storing_a_round_takes_about_a_millisecond(run):
    given_rows = rows(replays=20)
    seconds = []
    for number in range(30):
        begin = time.process_time()
        run.add_round("decode", "isolated", number, given_rows)
        seconds.append(time.process_time() - begin)
    assert np.median(seconds) < 0.005


def test_the_samples_of_one_case_and_mode_are_those_of_all(tmp_path):
    run = Run.create(tmp_path / "run", STUDY, PROVENANCE)
    for case, mode in (("a", "isolated"), ("b", "isolated"), ("a", "sustained")):
        add_case(run, case)
        run.add_round(case, mode, 0, rows())
    run.export(tmp_path / "export")
    for opened in (run, open_run(tmp_path / "export")):
        of_all = opened.samples
        for case, mode in (("a", "isolated"), ("a", "sustained"), ("b", "isolated"), ("b", "sustained")):
            kept = of_all[(of_all["case"] == case) & (of_all["mode"] == mode)].reset_index(drop=True)
            assert len(kept) == (0 if (case, mode) == ("b", "sustained") else len(rows()))
            assert opened.samples_of(case, mode)["us"].tolist() == kept["us"].tolist()


@pytest.mark.parametrize("name", ["README.md", "rows.json", "empty"])
def test_a_file_of_another_kind_is_named_and_nothing_is_to_be_removed(tmp_path, name):
    (tmp_path / name).write_text("words" * (name != "empty"))
    with pytest.raises(RunError) as told:
        open_run(tmp_path / name)
    assert f"{name} is neither a run nor an export" in str(told.value)
    assert "remove" not in str(told.value)
