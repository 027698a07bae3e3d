"""Exports: Parquet files that open like the run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from kvlab.errors import RunError
from kvlab.export import run_files
from kvlab.run import Run, open_run
from kvlab.tables import TABLES

from handmade_runs import PROVENANCE, STUDY, add_case, rows, verdict


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", STUDY, PROVENANCE) as run:
        add_case(run)
        run.case_facts("decode", timer="graph")
        for number in range(5):
            run.add_round("decode", "isolated", number, rows(number, watts=300.5, throttled=number > 2))
        run.add_verdict("decode", "isolated", verdict())
        run.add_verdict("decode", "sustained", verdict(gap=None, ci90=None, verdict="invalid", nonzero=True))
        run.add_telemetry(
            [
                {"case": "decode", "mode": "isolated", "arm": "zeros", "t": 1, "on": True, "what": "text"},
                {"case": "decode", "mode": "isolated", "arm": "zeros", "t": 2.5, "what": 3},
            ]
        )
    return run


@pytest.mark.parametrize("folder", ["export", "topk=512", "ü x"])
def test_an_export_opens_like_the_run(run, tmp_path, folder):
    files = run.export(tmp_path / folder)
    names = [file.name for file in files]
    assert names == ["cases.parquet", "samples.parquet", "verdicts.parquet", "telemetry.parquet", "provenance.json"]
    exported = open_run(tmp_path / folder)
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(exported, name), getattr(run, name))
    assert exported.provenance == run.provenance
    assert exported.study == run.study
    assert exported.verdict_of("decode", "isolated") == verdict()
    assert exported.verdict_of("decode", "other") is None
    with pytest.raises(RunError, match="is an export, for reading"):
        exported.add_verdict("decode", "isolated", verdict())


def test_an_export_is_the_same_bytes_each_time_and_of_an_export(run, tmp_path):
    first = run.export(tmp_path / "a")
    again = run.export(tmp_path / "b")
    of_export = open_run(tmp_path / "a").export(tmp_path / "c")
    for one, two, three in zip(first, again, of_export, strict=True):
        assert one.read_bytes() == two.read_bytes() == three.read_bytes()


def test_an_earlier_export_is_replaced_whole(run, tmp_path):
    run.export(tmp_path / "out")
    with Run.create(tmp_path / "bare", STUDY, PROVENANCE) as bare:
        add_case(bare)
    bare.export(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"cases.parquet", "provenance.json"}
    assert open_run(tmp_path / "out").samples.empty


def test_other_files_are_left_alone(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"out holds other files \(notes.txt\)"):
        run.export(tmp_path / "out")
    with pytest.raises(RunError, match=r"run holds other files \(run.sqlite\)"):
        run.export(run.path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="while exporting"):
        run.export(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": "x"}', "\xff"])
def test_a_record_that_is_none_is_said_so(tmp_path, text):
    (tmp_path / "provenance.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match="is not the record of an export; export the run again"):
        open_run(tmp_path)


def test_damaged_and_newer_exports_are_refused(run, tmp_path):
    run.export(tmp_path / "out")
    (tmp_path / "out" / "samples.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(RunError, match=r"samples.parquet is not a readable Parquet file"):
        _ = open_run(tmp_path / "out").samples
    record = tmp_path / "out" / "provenance.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 99}))
    with pytest.raises(RunError, match="table format 99, this kvlab knows 1; upgrade kvlab"):
        open_run(tmp_path / "out")


@pytest.mark.parametrize("name", ["cases", "samples", "verdicts", "telemetry"])
def test_a_table_that_was_lost_or_swapped_is_not_an_empty_one(run, tmp_path, name):
    run.export(tmp_path / "out")
    file = tmp_path / "out" / f"{name}.parquet"
    pd.concat([pd.read_parquet(file)] * 2).to_parquet(file)
    with pytest.raises(RunError, match=rf"{name}.parquet has \d+ rows where its export wrote \d+; export"):
        getattr(open_run(tmp_path / "out"), name)
    file.unlink()
    with pytest.raises(RunError, match=rf"{name}.parquet is missing, with \d+ rows; copy the export whole"):
        getattr(open_run(tmp_path / "out"), name)
    assert open_run(tmp_path / "out").kernels.empty  # it had none


def test_every_committed_export_counts_its_rows():
    files = (Path(__file__).parents[1] / "data").glob("*/*/provenance.json")
    records = {file.parent.name: json.loads(file.read_text()) for file in files}
    exports = {name: record for name, record in records.items() if "study" in record}
    assert exports
    assert [name for name, record in exports.items() if "tables" not in record] == []


def test_a_table_of_one_row_and_many_columns_is_small(tmp_path):
    """What Parquet can say of a column is a multiple of what one row holds there."""
    with Run.create(tmp_path / "run", STUDY, PROVENANCE) as run:
        add_case(run)
        run.add_verdict("decode", "isolated", verdict(**{f"fact{number}": number / 7 for number in range(300)}))
    (file,) = [file for file in run.export(tmp_path / "out") if file.stem == "verdicts"]
    assert file.stat().st_size < 250 * run.verdicts.shape[1]
    pd.testing.assert_frame_equal(open_run(tmp_path / "out").verdicts, run.verdicts)


def test_the_committed_runs_of_a_model_stay_under_a_megabyte():
    folder = Path(__file__).parents[1] / "data" / "h200"
    sizes = Counter()
    for record in folder.glob("*/provenance.json"):
        size = sum(file.stat().st_size for file in record.parent.iterdir())
        sizes[json.loads(record.read_text())["study"]["model"]] += size
    assert len(sizes) >= 5
    assert max(sizes.values()) < 1e6, sizes


def test_a_folder_has_the_files_of_a_run_where_it_opens_as_one(run, tmp_path):
    run.export(tmp_path / "export")
    (tmp_path / "export").joinpath("notes.txt").touch()
    for name, inner in (("empty", None), ("folders", "run.sqlite"), ("more", "provenance.json")):
        (tmp_path / name / (inner or "")).mkdir(parents=True)
    (tmp_path / "file").touch()
    found = {place.name: [file.name for file in run_files(place)] for place in tmp_path.iterdir()}
    assert {name: files for name, files in found.items() if files} == {
        "run": ["run.sqlite"],
        "export": ["provenance.json"],
    }
    for name, files in found.items():
        if files:
            open_run(tmp_path / name)
        else:
            with pytest.raises(RunError):
                open_run(tmp_path / name)
