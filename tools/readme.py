#!/usr/bin/env python3
"""Write the README's tables and figures from the committed runs.

python tools/readme.py            # rewrite README.md between its markers, and data/figures
python tools/readme.py --check    # exit 1 when README.md does not say what the data say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pandas as pd

from kvlab.plots import plot_gaps
from kvlab.run import concat, open_run

ROOT = Path(__file__).resolve().parent.parent
H200 = ROOT / "data" / "h200"


def reference_table() -> str:
    """The reference engine's families on the H200, isolated: gap and 90 % interval by case."""
    runs = [open_run(folder) for folder in sorted(H200.glob("reference-*-isolated"))]
    rows = concat(runs, "verdicts")
    rows["cell"] = [
        f"{100 * row.gap:+.2f} ({100 * row.ci90_lo:+.2f} .. {100 * row.ci90_hi:+.2f})" for row in rows.itertuples()
    ]
    table = rows.pivot(index="case", columns="model", values="cell").loc[list(dict.fromkeys(rows["case"]))]
    return markdown(table.reset_index())


def verify_sentence() -> str:
    """What `kvlab verify` found for the same families and cases."""
    rows = pd.DataFrame(map(json.loads, (H200 / "reference-verify.jsonl").read_text().splitlines()))
    return (
        f"`kvlab verify` on the same card: {len(rows)} steps, {int(rows['bytes_written'].sum()):,} bytes written,"
        f" {int(rows['bytes_outside'].sum())} outside the touched views"
        f" ({int(rows['bytes_touched'].sum()):,} of {int(rows['bytes_cache'].sum()):,} bytes)."
    )


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown."""
    lines = [
        "| " + " | ".join(map(str, row)) + " |" for row in [table.columns, ["---"] * table.shape[1], *table.to_numpy()]
    ]
    return "\n".join(lines)


SECTIONS = {"reference-table": reference_table, "verify": verify_sentence}


def render(text: str) -> str:
    """The README with each `<!-- NAME -->...<!-- /NAME -->` filled anew."""
    for name, write in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no section {name!r}")
        text = pattern.sub(lambda found, write=write: found[1] + write() + "\n" + found[2], text)
    return text


def draw() -> None:
    """The README's figures."""
    run = open_run(H200 / "reference-tiny-dsa-isolated")
    fig, _ = plot_gaps(run.verdicts)
    fig.savefig(ROOT / "data" / "figures" / "reference-tiny-dsa.png", dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    path = ROOT / "README.md"
    text = path.read_text()
    rendered = render(text)
    if parser.parse_args().check:
        return int(rendered != text)
    path.write_text(rendered)
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
