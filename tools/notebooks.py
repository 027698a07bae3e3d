#!/usr/bin/env python3
"""Write each notebook (NAME.ipynb) from its reviewed source beside it (NAME.py), without outputs.

python tools/notebooks.py            # rewrite notebooks/*.ipynb
python tools/notebooks.py --check    # exit 1 and name those that do not say what their source says
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
# Without jupytext's `formats`: where that is installed, JupyterLab refuses a pair whose file times are a checkout's.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def from_source(source: Path) -> NotebookNode:
    """The notebook of a percent script: no outputs, and cell IDs by place, so that a rewrite changes nothing else."""
    book = jupytext.read(source)
    book.metadata = nbformat.from_dict(METADATA)
    book.nbformat_minor = 5
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02d}"
    nbformat.validate(book)
    return book


def as_text(book: NotebookNode) -> str:
    return nbformat.writes(book) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for source in sorted(FOLDER.glob("*.py")):
        target, text = source.with_suffix(".ipynb"), as_text(from_source(source))
        if target.exists() and target.read_text() == text:
            continue
        stale.append(target.name)
        if not check:
            target.write_text(text)
    if check and stale:
        print(f"not what their sources say: {', '.join(stale)}; run python tools/notebooks.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
