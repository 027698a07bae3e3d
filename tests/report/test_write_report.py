"""Reports: one file, self-contained and escaped, that says what runs show however far they have come."""

from __future__ import annotations

import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import grid, make_run
from markupsafe import Markup

from kvlab.errors import KvlabError, RunError
from kvlab.report import write_report
from kvlab.run import Run, open_run

from handmade_runs import PROVENANCE, STUDY

H200 = Path(__file__).parents[2] / "data" / "h200"
EVIL = "<script>alert(1)</script> & \"quoted\" 'x' $y$ --> {{ 7 * 7 }}"


class Page(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, and the text outside of them."""

    VOID = ("meta", "img", "br", "hr", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.cells, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)
            if self.cells and ("td" in self.open or "th" in self.open):
                self.cells[-1][-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def no_pictures(monkeypatch):
    """For what is not about figures: rendering them takes most of a report's time."""
    monkeypatch.setattr("kvlab.report.html._picture", lambda figure, caption: Markup("<svg></svg>"))


def page_of(runs, folder, **how):
    file = write_report(runs, folder / "report.html", **how)
    text = file.read_text(encoding="utf-8")
    return Page(text), text


def self_contained(page, text):
    for tag, attrs in page.elements:
        assert tag not in ("script", "link", "iframe", "object")
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("data:image/", "#"))
    ids = {attrs["id"] for _, attrs in page.elements if "id" in attrs}
    used = {attrs["xlink:href"][1:] for _, attrs in page.elements if attrs.get("xlink:href", "").startswith("#")}
    used |= set(re.findall(r"url\(#([^)]*)\)", text))
    assert used <= ids


def test_a_finished_run_is_answered_first(tmp_path):
    make_run(tmp_path / "run", {"a": ("a=4*1@4096", 0.0), "b": ("b=1@8192", 0.08), "c": ("c=1@100", 0.03)})
    page, text = page_of([tmp_path / "run"], tmp_path)
    self_contained(page, text)
    run = open_run(tmp_path / "run")
    verdicts = run.verdicts.set_index("case")
    assert list(verdicts["verdict"]) == ["equivalent", "different", "inconclusive"]
    assert page.text.index("Yes, in 1 of 3 cases") < page.text.index("a=4*1@4096")
    rows = {row[1]: row for row in page.cells if len(row) > 5}
    assert list(rows)[1:4] == ["b=1@8192", "c=1@100", "a=4*1@4096"]  # worst first
    shown = rows["b=1@8192"][3].replace("\N{MINUS SIGN}", "-")
    numbers = [float(n) for n in re.findall(r"[-+][\d.]+", shown)]
    assert numbers == pytest.approx([100 * verdicts.loc["b", k] for k in ("gap", "ci90_lo", "ci90_hi")], abs=0.005)
    for said in ("after Holm's correction over 3 comparisons", "580.1", "kvlab check tiny --case 'a=4*1@4096'"):
        assert said in page.text
    assert "across the margin" in page.text  # why the third is not decided
    assert "<svg" in text


@pytest.mark.usefixtures("no_pictures")
def test_all_equivalent_is_a_joint_statement(tmp_path):
    make_run(tmp_path / "run", grid(4))
    page, _ = page_of([tmp_path / "run"], tmp_path)
    assert "No, not beyond 3 %: in all 4 cases" in page.text
    assert "intersection-union test" in page.text


def test_names_and_provenance_cannot_break_out(tmp_path):
    cases = {EVIL: ("x=1@4096", 0.08)}
    provenance = {"command": EVIL, "notes": [EVIL], "environment": {"VLLM_X": EVIL}}
    run = make_run(tmp_path / "run", cases, study={"model": EVIL}, provenance=provenance, cause=EVIL)
    page, text = page_of([run], tmp_path, title=EVIL)
    self_contained(page, text)
    assert page.text.count(EVIL) >= 8
    assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|\b49\b", page.text)


def test_a_run_that_is_being_written_is_shown_as_far_as_it_is(tmp_path):
    cases = {"a": ("a=4*1@4096", 0.0), "b": ("b=1@8192", 0.05, 7), "c": ("c=1@100", 0.0, 1), "d": ("d=1@200", 0.0, 0)}
    run = make_run(tmp_path / "run", cases, close=False)
    page, text = page_of([tmp_path / "run"], tmp_path)
    self_contained(page, text)
    for said in ("It has 7 of 20 rounds", "It has 1 of 20 rounds", "No round of it is stored."):
        assert said in page.text
    rounds = {row[1]: row[-3] for row in page.cells if len(row) > 6}
    assert rounds == {"case": "rounds", "a=4*1@4096": "20", "b=1@8192": "7 of 20", "c=1@100": "1 of 20", "d=1@200": "0"}
    assert "Not settled: of 4 cases, 1 equivalent, 3 unfinished." in page.text
    run.close()
    make_run(tmp_path / "given", {"b": ("b=1@8192", 0.05, 7)}, plan=False)
    page, _ = page_of([tmp_path / "given"], tmp_path)
    assert "It has 7 rounds" in page.text
    assert "Nothing is decided yet" in page.text


@pytest.mark.usefixtures("no_pictures")
def test_a_run_without_a_case_is_a_sentence(tmp_path):
    Run.create(tmp_path / "run", STUDY, PROVENANCE).close()
    page, _ = page_of([tmp_path / "run"], tmp_path)
    assert "Nothing is decided yet" in page.text
    assert "The run holds no case yet." in page.text
    assert "does not say which command" in page.text


@pytest.mark.usefixtures("no_pictures")
def test_a_case_that_failed_says_why(tmp_path):
    run = make_run(tmp_path / "run", grid(1), close=False)
    run.add_case("bad", "bad=1@9", "decode", [[1, 9]])
    failed = {"verdict": "invalid", "gap": None, "ci90": None, "aa": {"gap": None, "ci90": None}, "rounds": 0}
    run.add_verdict("bad", "isolated", {**failed, "margin": 0.03, "reasons": ["no room for it"], "median_us": {}})
    page, _ = page_of([run], tmp_path)
    assert "bad , invalid: no room for it" in page.text
    run.close()


@pytest.mark.usefixtures("no_pictures")
def test_runs_that_cannot_be_read_are_named_and_none_at_all_is_an_error(tmp_path):
    make_run(tmp_path / "run", grid(1))
    page, _ = page_of([tmp_path / "run", tmp_path / "absent"], tmp_path)
    assert f"Not in this report: no run at {tmp_path / 'absent'}" in page.text
    for runs in ([tmp_path / "absent"], []):
        with pytest.raises(RunError, match="no run"):
            write_report(runs, tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()
    with pytest.raises(RunError, match="while writing the report"):
        write_report([tmp_path / "run"], tmp_path / "run" / "run.sqlite" / "report.html")


@pytest.mark.usefixtures("no_pictures")
def test_runs_of_one_name_are_told_apart_and_one_named_twice_counts_once(tmp_path):
    make_run(tmp_path / "old" / "run", grid(2), provenance={"vllm": "0.33.0"})
    make_run(tmp_path / "new" / "run", grid(2, lambda i: 0.1), provenance={"vllm": "0.34.0"})
    runs = [tmp_path / "old" / "run", tmp_path / "new" / "run", str(tmp_path / "old" / "run" / "run.sqlite")]
    page, _ = page_of(runs, tmp_path)
    assert {"old/run", "new/run"} <= {row[0] for row in page.cells if row}
    assert "vllm 0.33.0 against vllm 0.34.0" in page.text
    assert "2 of 4" in page.text


def test_sweeps_and_other_contents_are_drawn_where_there_are_more_than_two_values(tmp_path):
    arms = ("zeros", "zeros_again", "random", "random(zero_fraction=0.5)")
    make_run(tmp_path / "run", grid(3, lambda i: 0.05), arms=arms, clock=1800.0)
    page, _ = page_of([tmp_path / "run"], tmp_path)
    for said in ("Gap by context length", "Gap by the share of zero tokens", "Other contents", "gap in cycles, %"):
        assert said in page.text
    others = [row for row in page.cells if "random(zero_fraction=0.5)" in row]
    assert len(others) == 3
    assert "1,800 instead of 1,980 MHz" in page.text
    make_run(tmp_path / "few", grid(2))
    page, _ = page_of([tmp_path / "few"], tmp_path)
    assert "Gap by" not in page.text
    assert "Other contents" not in page.text


def two_kernels(arms):
    return [
        {"case": "a", "mode": "isolated", "arm": arm, "kernel": kernel, "role": role, "us": us}
        for arm, more in arms.items()
        for kernel, role, us in (("topk", "top-k", 100.0 + more), ("gemm", "GEMM", 900.0))
    ]


def profile(total, busy, timed, replays=3):
    return {
        "total_us": total,
        "busy_us": busy,
        "overlap_us": total - busy,
        "timed_us": timed,
        "closure": total / timed,
        "closes": abs(total / timed - 1) <= 0.03,
        "replays": replays,
    }


def test_a_profile_that_does_not_close_says_so_under_its_figures(tmp_path):
    profiles = {"zeros": profile(1100.0, 990.0, 1000.0), "random": profile(1085.0, 1080.0, 1080.0)}
    run = make_run(tmp_path / "run", {"a": ("a=1@4096", 0.08)}, close=False, profiles=profiles)
    run.add_kernels(two_kernels({"zeros": 0.0, "random": 80.0}))
    page, _ = page_of([run], tmp_path)
    told = "do NOT add up to the timed step within 3 %: 110.0% under zeros (99.0% with kernels that ran side by side"
    assert page.text.count(told) == 2  # by role, and by kernel
    assert "100.5% under random." in page.text
    assert "The total gap of the profile is +8.00 %, of the rounds" in page.text
    run.close()
    closing = {"zeros": profile(1000.0, 995.0, 1000.0), "random": profile(1080.0, 1080.0, 1080.0)}
    run = make_run(tmp_path / "closes", {"a": ("a=1@4096", 0.08)}, close=False, profiles=closing)
    run.add_kernels(two_kernels({"zeros": 0.0, "random": 80.0}))
    page, _ = page_of([run], tmp_path)
    assert "add up to 100.0% under zeros, 100.0% under random of the timed step" in page.text
    assert "NOT" not in page.text
    run.close()


def test_kernels_of_one_arm_alone_are_no_figure(tmp_path):
    run = make_run(tmp_path / "run", {"a": ("a=1@4096", 0.08)}, close=False)
    run.add_kernels(two_kernels({"zeros": 0.0}))
    page, _ = page_of([run], tmp_path)
    assert "where a step's time goes" not in page.text
    assert "Not drawn" not in page.text
    run.close()


def test_the_parts_of_a_gap_are_a_table_with_intervals(tmp_path):
    effect = {"gap": -0.1, "ci90": [-0.11, -0.09]}
    cause = {
        "kind": "cancelling",
        "sentence": "Selection and power cancel.",
        "selection": {"us": -97.7, "of_step": -0.0977, "ci90": [-99.4, -96.0]},
        "clocks": {"us": 78.7, "of_step": 0.0787, "ci90": [68.6, 123.1]},
        "other": {"us": 1.3, "of_step": 0.0013},
        **{"indexer": effect, "indexer_cycles": effect, "kv": effect},
    }
    page, _ = page_of([make_run(tmp_path / "run", {"a": ("a=1@4096", 0.08)}, cause=cause)], tmp_path)
    text = page.text.replace("\N{MINUS SIGN}", "-")
    for part in ("-9.77 (-9.94 .. -9.60)", "+7.87 (+6.86 .. +12.31)", "+0.13", "-10.00 (-11.00 .. -9.00)"):
        assert part in text
    assert "in cycles (time x SM clock) the KV's contents have no effect" in text


def test_kernels_are_drawn_where_they_were_profiled(tmp_path):
    run = make_run(tmp_path / "run", {"a": ("a=1@4096", 0.08)}, close=False)
    run.add_kernels(two_kernels({"zeros": 0.0, "random": 80.0}))
    page, _ = page_of([run], tmp_path)
    assert "where a step's time goes" in page.text
    assert "the kernels that add most to the gap" in page.text
    assert "top-k" in page.text  # the cause, found in what is stored
    run.close()


@pytest.mark.parametrize("name", ["vllm-llama-3.1-8b-sustained", "reference-tiny-dsa-sustained"])
def test_committed_runs_are_reported(name, tmp_path):
    page, text = page_of([H200 / name], tmp_path)
    self_contained(page, text)
    for text in open_run(H200 / name).verdicts["text"]:
        assert text in page.text
    assert "NVIDIA H200" in page.text


def test_a_pdf_says_the_same(tmp_path):
    pytest.importorskip("reportlab")
    arms = ("zeros", "zeros_again", "random", "random(zero_fraction=0.5)")
    cases = {EVIL: ("x=1@4096", 0.08), "b": ("b=" + ",".join(f"{n}@{n}" for n in range(1, 60)), 0.0, 3)}
    make_run(tmp_path / "run", cases, arms=arms, provenance={"command": EVIL + "y" * 300, "notes": [EVIL]}, cause=EVIL)
    file = write_report([tmp_path / "run"], tmp_path / "s.pdf")
    assert file == tmp_path / "s.pdf"
    assert file.read_bytes().startswith(b"%PDF-")
    assert b"%%EOF" in file.read_bytes()[-10:]


def test_a_pdf_without_its_library_is_one_sentence(tmp_path, monkeypatch):
    make_run(tmp_path / "run", grid(1))
    for name in [name for name in sys.modules if name.split(".")[0] == "reportlab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reportlab", None)
    with pytest.raises(KvlabError, match=r"pip install 'kvlab\[pdf\]'"):
        write_report([tmp_path / "run"], tmp_path / "r.pdf")


@pytest.mark.slow
def test_fifty_cases_are_a_small_file_soon(tmp_path):
    run = make_run(tmp_path / "run", grid(50, lambda i: 0.05 * (i % 3 == 0)))
    assert len(run.samples) == 50 * 20 * 3 * 5
    begin = time.process_time()  # of this process: whoever shares the cores does not count
    file = write_report([tmp_path / "run"], tmp_path / "report.html")
    seconds = time.process_time() - begin
    print(f"{file.stat().st_size} bytes, {seconds:.1f} s")
    assert file.stat().st_size < 5 * 2**20
    assert seconds < 20


@pytest.mark.parametrize("name", ["report.docx", "report", "report.html.gz"])
def test_a_name_that_says_another_kind_is_refused(tmp_path, name):
    with pytest.raises(RunError, match=r"HTML or PDF"):
        write_report([H200 / "reference-tiny-dense-isolated"], tmp_path / name)
    assert not (tmp_path / name).exists()
