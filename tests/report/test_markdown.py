"""The block for a pull request is Markdown that says what the run says and nothing that its names would make of it."""

from __future__ import annotations

import re

from made_runs import grid, make_run

from kvlab.report import markdown_summary
from kvlab.run import Run

from handmade_runs import PROVENANCE, STUDY


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_claim_table_provenance_and_command(tmp_path):
    run = make_run(tmp_path / "run", {"a": ("a=4*1@4096", 0.0), "b": ("b=1@8192", 0.08)})
    text = markdown_summary(run)
    assert text.startswith("**Does it matter what is in the KV cache?** Yes, in 1 of 2 cases")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [cells(line)[:2] for line in table] == [
        ["verdict", "case"],
        ["---", "---"],
        ["different", "`b=1@8192`"],
        ["equivalent", "`a=4*1@4096`"],
    ]
    assert "\N{MINUS SIGN}" not in text
    assert "GPU NVIDIA H200" in text
    assert "driver 580.1" in text
    assert text.endswith("```\nkvlab check tiny --case 'a=4*1@4096'\n```\n")
    assert markdown_summary(tmp_path / "run") == text


def test_names_stay_text(tmp_path):
    case = "a|b`c`*d*_e_[x](y)<z>#@user"
    command = {"command": "kvlab ```` x", "notes": ["| note |"]}
    cases = {case: (f"{case}=1@9", 0.08), "b": ("b=1@9", 0.0)}
    run = make_run(tmp_path / "run", cases, rounds=8, provenance=command)
    text = markdown_summary(run)
    widths = {len(cells(line)) for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    outside = re.sub(r"(`+) ?.+? ?\1(?!`)", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)(@user|<z>|\[x\]|_e_)", outside)
    assert "`````\nkvlab ```` x\n`````" in text


def test_an_empty_run_is_a_sentence(tmp_path):
    with Run.create(tmp_path / "run", STUDY, PROVENANCE) as run:
        text = markdown_summary(run)
    assert "Nothing is decided yet" in text
    assert "|" not in text
    make_run(tmp_path / "more", grid(1))
    assert "| equivalent | `c0=1*1@1024` |" in markdown_summary(tmp_path / "more")
