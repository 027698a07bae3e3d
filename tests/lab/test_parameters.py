"""Notebooks by their parameters: the short version, measuring here, and what is wrong said in a sentence."""

from __future__ import annotations

import pytest

from labserver import NOTEBOOKS, pictures_of, texts_of

nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed: make test-lab")
papermill = pytest.importorskip("papermill", reason="papermill is not installed: make test-lab")

pytestmark = pytest.mark.lab

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py") if path.stem != "00_lab")


@pytest.mark.parametrize("name", NAMES)
def test_smoke_and_live(name, execute):
    # A small pool of blocks: the embedded engine's own has room for 100K tokens, which take a while to check.
    others = {
        "01_touched_views": {},
        "02_zero_vs_random": {"options": {"num_kv_blocks": 256}},
        "03_context_sweep": {"source": "live", "options": {"num_kv_blocks": 256}, "phases": ["decode"]},
    }
    book = execute(name, smoke=True, **others.get(name, {"source": "live", "options": {"num_kv_blocks": 256}}))
    assert pictures_of(book)
    assert "live" in texts_of(book)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("02_zero_vs_random", {"margin": 3.0}, "margin 3.0 is out of range"),
        ("02_zero_vs_random", {"engine": "vllm", "model": "llama-3.1-8b"}, "vLLM"),
        ("03_context_sweep", {"source": "runs/nowhere"}, "no run at"),
        ("01_touched_views", {"models": ["tiny-tiny"]}, "tiny-tiny"),
    ],
)
def test_bad_input_is_a_sentence_where_it_was_asked_for(name, parameters, said, execute, tmp_path):
    with pytest.raises(papermill.PapermillExecutionError):
        execute(name, **parameters)
    book = nbformat.read(tmp_path / f"{name}-done.ipynb", as_version=4)
    (error,) = [o for cell in book.cells for o in cell.get("outputs", ()) if o["output_type"] == "error"]
    assert len(error["traceback"]) == 1
    assert said in error["traceback"][0]
    assert "\n" not in error["traceback"][0]
