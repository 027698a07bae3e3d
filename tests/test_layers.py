"""Imports point down, each module says its layer, and importing kvlab is cheap."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab

ROOT = Path(kvlab.__file__).parent
# The package's own __init__ first: it names every layer and is none.
MODULES = [ROOT / "__init__.py", *sorted(set(ROOT.rglob("*.py")) - {ROOT / "__init__.py"})]


def layer_of(path: Path) -> int:
    said = re.match(r"Layer (\d):", ast.get_docstring(ast.parse(path.read_text())) or "")
    assert said, f"{path.relative_to(ROOT)} does not begin with 'Layer N:'"
    return int(said[1])


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports anywhere, type-checking blocks and functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def file_of(module: str) -> Path | None:
    stem = ROOT.parent.joinpath(*module.split("."))
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)


@pytest.mark.parametrize("path", MODULES[1:], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down_or_sideways(path):
    own = layer_of(path)
    for name in imports_of(path):
        target = file_of(name) if name.startswith("kvlab.") else None
        if target and target != ROOT / "__init__.py":
            assert layer_of(target) <= own, f"{path.name} (layer {own}) imports {name} (layer {layer_of(target)})"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_vllm_and_widgets_stay_where_they_belong(path):
    roots = {name.split(".")[0] for name in imports_of(path)}
    if "vllm" not in path.relative_to(ROOT).parts:
        assert "vllm" not in roots
    if path.name != "widgets.py":
        assert not roots & {"ipywidgets", "IPython", "jupyterlab"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_stay_short(path):
    assert len(path.read_text().splitlines()) <= 330


def test_importing_kvlab_is_quick_and_loads_no_heavy_package():
    code = (
        "import sys, time; begin = time.perf_counter(); import kvlab; seconds = time.perf_counter() - begin;"
        "heavy = {'torch', 'vllm', 'pandas', 'matplotlib', 'ipywidgets', 'IPython'} & set(sys.modules);"
        "assert not heavy, heavy; assert seconds < 1, seconds"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_documented():
    for name in kvlab.__all__:
        assert getattr(kvlab, name).__doc__, name
    assert set(kvlab._HOME_OF) == set(kvlab.__all__)
    # A module of the same name would take a function's place as soon as anything imports it.
    assert not set(kvlab.__all__) & {path.stem for path in ROOT.iterdir()}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvlab.nothing  # noqa: B018
