"""Every notebook runs from top to bottom, as it is and by its parameters, and says what is wrong in a sentence."""

from __future__ import annotations

import importlib.util
import re
import shutil

import pytest

from labserver import NOTEBOOKS, ROOT, quiet_environment

nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed: make test-lab")
papermill = pytest.importorskip("papermill", reason="papermill is not installed: make test-lab")
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


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run a copy of a notebook: `execute(name, **parameters)` gives the notebook with its outputs."""
    for key, value in quiet_environment(tmp_path / "jupyter").items():
        monkeypatch.setenv(key, value)

    def run(name, **parameters):
        copy = shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path)
        done = tmp_path / f"{name}-done.ipynb"
        how = {"cwd": tmp_path, "kernel_name": "python3", "progress_bar": False, "execution_timeout": 240}
        try:
            papermill.execute_notebook(copy, done, parameters, **how)
        finally:
            book = nbformat.read(done, as_version=4)
        return book

    return run


def texts_of(book):
    """All that the outputs say as text or HTML."""
    said = []
    for output in (output for cell in book.cells for output in cell.get("outputs", ())):
        data = output.get("data", {})
        said += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
        said += output.get("traceback", [])
    return "\n".join("".join(part) for part in said)


def pictures_of(book):
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


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


@pytest.mark.parametrize("name", WITH_SMOKE)
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
