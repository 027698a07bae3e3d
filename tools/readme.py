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
from kvlab.run import Run, concat, open_run
from kvlab.verdict_table import verdict_table

ROOT = Path(__file__).resolve().parent.parent
H200 = ROOT / "data" / "h200"


def reference_table() -> str:
    """The reference engine's families on the H200, isolated: gap and 90 % interval by case."""
    runs = [open_run(folder) for folder in sorted(H200.glob("reference-*-isolated"))]
    rows = concat(runs, "verdicts")
    rows["cell"] = [percent(row.gap, row.ci90_lo, row.ci90_hi) for row in rows.itertuples()]
    table = rows.pivot(index="case", columns="model", values="cell").loc[list(dict.fromkeys(rows["case"]))]
    return markdown(table.reset_index())


def vllm_runs(mode: str) -> list[Run]:
    """The committed runs of vLLM models in a mode."""
    return [open_run(folder) for folder in sorted(H200.glob(f"vllm-*-{mode}"))]


def vllm_table() -> str:
    """vLLM's models on the H200, each step alone: time, gap, noise floor, clocks and watts, verdict."""
    lines = []
    for run in vllm_runs("isolated"):
        clocks = run.samples.groupby(["case", "arm"])[["sm_mhz", "watts"]].median()
        for row in run.verdicts.itertuples():
            zeros, random = clocks.loc[row.case, "zeros"], clocks.loc[row.case, "random"]
            lines.append(
                {
                    "model": row.model + (" (real routing)" if row.routing == "real" else ""),
                    "case": f"`{row.text}`",
                    "zeros, ms": f"{row.median_us_zeros / 1e3:.2f}",
                    "gap of random, %": percent(row.gap, row.ci90_lo, row.ci90_hi),
                    "zeros again, %": percent(row.aa_gap, row.aa_ci90_lo, row.aa_ci90_hi),
                    "MHz": f"{zeros.sm_mhz:.0f} to {random.sm_mhz:.0f}",
                    "W": f"{zeros.watts:.0f} to {random.watts:.0f}",
                    "verdict at 3 %": row.verdict,
                }
            )
    return markdown(pd.DataFrame(lines))


def percent(gap: float, low: float, high: float) -> str:
    """A gap with its interval, in percent."""
    return f"{100 * gap:+.2f} ({100 * low:+.2f} .. {100 * high:+.2f})"


def verify_sentence(pattern: str) -> str:
    """What `kvlab verify` found in the files that match."""
    lines = [line for path in sorted(H200.glob(pattern)) for line in path.read_text().splitlines()]
    rows = pd.DataFrame(map(json.loads, lines))
    return (
        f"`kvlab verify` on the same card: {len(rows)} steps of {rows['model'].nunique()} models,"
        f" {int(rows['bytes_written'].sum()):,} bytes written, {int(rows['bytes_outside'].sum())} outside the touched"
        f" views."
    )


def bench_table() -> str:
    """Medians of vLLM's own benchmark and of kvlab's zeros arm, same process, same case."""
    rows = [row for path in sorted(H200.glob("vllm-*-bench.json")) for row in json.loads(path.read_text())]
    return markdown(
        pd.DataFrame(
            {
                "model": row["model"],
                "case": f"`{row['case']}`",
                "vllm bench forward, µs": f"{row['bench_median_us']:.1f}",
                "kvlab, zeros, µs": f"{row['kvlab_median_us']:.1f}",
                "ratio": f"{row['ratio']:.4f}",
            }
            for row in rows
        )
    )


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown."""
    lines = [
        "| " + " | ".join(map(str, row)) + " |" for row in [table.columns, ["---"] * table.shape[1], *table.to_numpy()]
    ]
    return "\n".join(lines)


def check_table() -> str:
    """What `make check` printed on the machine of its committed run."""
    run = open_run(ROOT / "data" / "cpu" / "make-check")
    table = verdict_table([run.verdict_of(row.case, row.mode) for row in run.verdicts.itertuples()])
    return "\n".join(["```", *table.splitlines()[: 1 + len(run.verdicts)], "```"])


SECTIONS = {
    "check-table": check_table,
    "vllm-table": vllm_table,
    "vllm-verify": lambda: verify_sentence("vllm-*-verify.jsonl"),
    "bench-table": bench_table,
    "reference-table": reference_table,
    "reference-verify": lambda: verify_sentence("reference-verify.jsonl"),
}


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
    figures = ROOT / "data" / "figures"
    verdicts = concat(vllm_runs("isolated"), "verdicts")
    # With real routing the gap is about experts: in the table, not in the picture of the claim.
    fig, _ = plot_gaps(verdicts[verdicts["routing"] != "real"], title="Random against zero KV in vLLM 0.33, one H200")
    fig.savefig(figures / "vllm-gaps.png", dpi=150)


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
