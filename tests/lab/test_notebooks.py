"""Every notebook says what its source says, is thin, and runs from top to bottom as it is."""

from __future__ import annotations

import importlib.util
import re

import pytest

from labserver import NOTEBOOKS, ROOT, pictures_of, texts_of

nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed: make test-lab")
pytest.importorskip("jupytext", reason="jupytext is not installed: make test-lab")

pytestmark = pytest.mark.lab

SOURCES = sorted(NOTEBOOKS.glob("*.py"))
NAMES = [source.stem for source in SOURCES]
WITH_SMOKE = [name for name in NAMES if name != "00_lab"]


def load_tool():
    spec = importlib.util.spec_from_file_location("notebooks_tool", ROOT / "tools" / "notebooks.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_a_notebook_says_what_its_source_says_and_holds_no_output(source):
    tool = load_tool()
    text = source.with_suffix(".ipynb").read_text()
    assert text == tool.as_text(tool.from_source(source)), "run python tools/notebooks.py"
    for cell in nbformat.reads(text, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_a_notebook_is_thin_and_has_one_cell_of_literals(source):
    import ast

    book = load_tool().from_source(source)
    assert not re.search(r"^\s*(def|class) |plt\.|\.show\(\)", source.read_text(), re.MULTILINE)
    tagged = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == (source.stem in WITH_SMOKE)
    for cell in tagged:
        for statement in ast.parse(cell.source).body:
            assert isinstance(statement, ast.Assign)
            ast.literal_eval(statement.value)


@pytest.mark.parametrize("name", NAMES)
def test_restart_and_run_all(name, execute):
    book = execute(name)
    said = texts_of(book)
    assert "kvlab" in said
    assert "this machine" in said, "no watermark"
    if name not in ("00_lab",):
        assert pictures_of(book)
    if name == "01_touched_views":
        assert pictures_of(book) == 5
    if name == "03_context_sweep":
        assert "committed" in said
        assert "NVIDIA H200" in said
    if name == "05_recheck_a_model":
        assert "Does it matter what is in the KV cache?" in said
