#!/usr/bin/env python3
"""Write the README's answer, tables and figures from the runs under data/h200.

python tools/readme.py            # rewrite README.md between its markers, and data/figures
python tools/readme.py --check    # exit 1 and name what README.md and data/figures do not say as the runs say it

--data, --readme and --figures take other places, e.g. to look at runs before they are committed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from kvlab import evidence, lab_tables, pace, plots
from kvlab.kernel_gaps import kernel_gap_table
from kvlab.kv.fills import SCORES
from kvlab.measure.settling import MORE_S, SETTLE_CAPPED_S, TIMED_CAPPED_S
from kvlab.plots.style import microseconds, percent, tokens
from kvlab.provenance import power_limit
from kvlab.report.content import estimate_text
from kvlab.run import Run, open_run
from kvlab.verdict_table import verdict_table

ROOT = Path(__file__).resolve().parent.parent
# A picture says of which numbers it is; its bytes depend on the machine that drew it.
DIGEST = "Description"
PHASES = {"decode": "Decode", "hit": "Prefill after a prefix-cache hit"}
NO_BREAK = "\N{NO-BREAK SPACE}"
NOT_YET = "Not measured on this card yet."


@dataclass(frozen=True)
class Picture:
    """A figure of some rows, and the sentence that says what it shows."""

    name: str
    caption: str
    rows: pd.DataFrame
    draw: Callable[[pd.DataFrame], Figure]

    @property
    def digest(self) -> str:
        columns = ["model", "phase", "context", "topk", "mode", "arm", "part", "gap", "ci90_lo", "ci90_hi", "verdict"]
        columns += ["visit", "fill", "t_s", "us"]
        rows = self.rows[[column for column in columns if column in self.rows]].reset_index(drop=True)
        return hashlib.sha256(rows.to_csv(float_format="%.7g").encode()).hexdigest()


class Page:
    """What the runs of a folder say in the README."""

    def __init__(self, data: Path, figures: str) -> None:
        """`figures`: where the README finds the pictures."""
        self.data = data
        self.figures = figures

    @cached_property
    def runs(self) -> list[Run]:
        return evidence.open_runs(self.data, lambda run: run.study["engine"] == "vllm")

    @cached_property
    def claim(self) -> pd.DataFrame:
        """Routed tokens of made-up gates follow the KV: those gaps come last, and in no picture."""
        rows = evidence.claim_gaps(evidence.gap_rows(self.runs))
        return pd.concat([rows[rows["routing"] != "real"], rows[rows["routing"] == "real"]], ignore_index=True)

    @cached_property
    def causes(self) -> dict[tuple[object, ...], dict[str, object]]:
        return evidence.find_causes(self.runs, self.claim, evidence.records(self.data, "loads"))

    @cached_property
    def pictures(self) -> dict[str, Picture]:
        """Those that the runs have numbers for."""
        fixed = self.claim[self.claim["routing"] != "real"]
        gaps, others = evidence.gap_rows(self.runs), evidence.other_arms(self.runs)
        found = [
            Picture(
                "claim",
                "Gap by model and step with the 90 % interval, in both modes, against the margin",
                lab_tables.with_places(pace.drawn(fixed[fixed["gap"].notna()])),
                lambda rows: plots.plot_claim(rows, title=f"Random against zero KV, {self.card}")[0],
            ),
            Picture(
                "contexts",
                "Gap against context length, by model and phase",
                pace.drawn(evidence.context_gaps(gaps[gaps["routing"] != "real"])),
                lambda rows: plots.plot_context_panels(rows)[0],
            ),
            Picture(
                "topk",
                "Gap against top-k: the whole step, and what its kernels add",
                pace.drawn(evidence.sparsity_gaps(self.runs, "topk")),
                lambda rows: plots.plot_topk_panels(rows)[0],
            ),
            Picture(
                "zeros",
                "Gap against the share of zero tokens",
                pace.drawn(evidence.sparsity_gaps(self.runs, "zero_fraction")),
                lambda rows: plots.plot_zero_panels(rows)[0],
            ),
            Picture(
                "contents",
                "Gaps of random KV, of what the model itself writes, and of shapes of the indexer's scores",
                lab_tables.with_places(pace.drawn(others)),
                lambda rows: plots.plot_claim(rows, group="place", label="arm", title="Random and other contents")[0],
            ),
        ]
        settling = self.recorded("replays")
        found.append(
            Picture(
                "settling",
                "Step time, clock and power of a busy card by seconds since the contents changed",
                settling,
                lambda rows: plots.plot_settling(
                    rows,
                    self.recorded("readings"),
                    timed=(SETTLE_CAPPED_S, SETTLE_CAPPED_S + MORE_S + TIMED_CAPPED_S),
                    power_limit_watts=power_limit(run.provenance for run in self.runs),
                    title=f"{self.settled_step}, replays back to back, after the contents of its KV cache change",
                )[0],
            )
        )
        return {picture.name: picture for picture in found if len(picture.rows)}

    def recorded(self, table: str) -> pd.DataFrame:
        """What `benchmarks/cap_settling.py` wrote on the card; without rows where it did not."""
        path = self.recording / f"{table}.parquet"
        return pd.read_parquet(path) if path.exists() else pd.DataFrame()

    @property
    def recording(self) -> Path:
        return self.data.parent / "benchmarks" / "cap_settling"

    @cached_property
    def settled_step(self) -> str:
        record = json.loads((self.recording / "provenance.json").read_text())
        return f"{record['model']}, {record['case']}"

    def settling(self) -> str:
        """The picture, and the step under random contents: alone, and on a busy card early and late."""
        if "settling" not in self.pictures:
            return NOT_YET
        replays = self.pictures["settling"].rows
        replays = replays.assign(ms=replays["us"] / 1e3)
        random, zeros = (replays[replays["fill"] == fill] for fill in ("random", "zeros"))
        first = random.groupby("visit")["ms"].first()
        swung = random.loc[random["t_s"].between(0.2, 3), "ms"]
        steady = random.loc[random["t_s"] > SETTLE_CAPPED_S, "ms"]
        # The first few of a visit still have the clock of the one before.
        gap = percent(steady.mean() / zeros.groupby("visit")["ms"].apply(lambda of: of[5:].mean()).mean() - 1, 1)
        return (
            f"{self.image('settling')}\n\n{self.settled_step}: the first step under random contents takes"
            f" {first.mean():.1f} ms, before the cap has noticed; those of the next seconds"
            f" {swung.min():.1f} to {swung.max():.1f} ms, and from {SETTLE_CAPPED_S:g} s on {steady.mean():.2f} ms,"
            f" {gap} off zeros, which the cap leaves alone."
        )

    @property
    def card(self) -> str:
        gpus, versions = (", ".join(dict.fromkeys(self.claim[name])) for name in ("gpu", "vllm"))
        return f"one {gpus}, vLLM {versions}"

    def image(self, name: str) -> str:
        picture = self.pictures.get(name)
        return f"![{picture.caption}]({self.figures}/{picture.name}.png)" if picture else NOT_YET

    def answer(self) -> str:
        """One sentence per phase, the table, the picture."""
        if self.claim.empty:
            return NOT_YET
        margin = f"{100 * self.claim['margin'].max():g} %"
        lines = [f"On {self.card}, dummy weights, at a margin of {margin}:", ""]
        fixed = self.claim[self.claim["routing"] != "real"]
        lines += [f"- {self.of_phase(phase, rows)}" for phase, rows in fixed.groupby("phase", sort=False)]
        real = self.claim[self.claim["routing"] == "real"]
        if len(real):
            models = ", ".join(dict.fromkeys(real["model"]))
            most = percent(real["gap"].max(), 1)
            lines.append(
                f"- {models} with real routing over made-up gates: up to {most}. Which experts run then follows the KV,"
                " so these gaps are not about KV alone; they are below, but not counted above."
            )
        table = [markdown(self.table())]
        if self.claim["off_pace"].any():
            table += ["", f"{pace.OFF_PACE_MARK.strip()} {pace.OTHER_PACE_WORDS} (below)."]
        return "\n".join([*lines, "", *table, "", self.image("claim")])

    def of_phase(self, phase: str, rows: pd.DataFrame) -> str:
        """Does the claim hold, how many gaps say so, and of each model that it does not hold for the largest gap."""
        slowed = int(rows["off_pace"].sum())
        rows = rows[~rows["off_pace"].astype(bool)]
        if rows.empty:
            return f"**{PHASES.get(phase, phase)}: not decided.** All {slowed} gaps were timed at another pace."
        counts = rows["verdict"].value_counts()
        if counts.get("different"):
            what = "not in general"
        elif counts.get("equivalent"):
            what = "the claim holds" + ("" if counts["equivalent"] == len(rows) else " where it was decided")
        else:
            what = "not decided"
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in plots.VERDICT_STYLE if verdict in counts)
        span = f"{percent(rows['gap'].min(), 1)} to {percent(rows['gap'].max(), 1)}"
        apart = rows[rows["verdict"] == "different"].sort_values("gap", key=abs, ascending=False)
        largest = [
            f"{row['model']} {percent(row['gap'], 1)} at {tokens(row['context'])}, {row['mode']},"
            f" {evidence.cause_clause(self.causes.get(evidence.step_key(row)))}"
            for row in apart.drop_duplicates("model").to_dict("records")
        ]
        said = f"**{PHASES.get(phase, phase)}: {what}.** Of {len(rows)} gaps {told} ({span})."
        said += f" The largest that differ: {'; '.join(largest)}." if largest else ""
        return said + (f" Not counted: {slowed} timed at another pace ({pace.OFF_PACE_MARK.strip()})." * (slowed > 0))

    def table(self) -> pd.DataFrame:
        """Cells that do not break, but for the cause: a gap and its interval are read as one."""
        table = lab_tables.claim_table(self.claim, self.causes)
        whole = [name for name in table if name != "why"]
        return table.assign(**{name: table[name].str.replace(" ", NO_BREAK) for name in whole})

    def contexts(self) -> str:
        return self.image("contexts")

    def sparsity(self) -> str:
        said = {"zeros": [self.zeros_sentence], "contents": [self.prefill_sentence, self.scores_sentence]}
        found = [
            "\n\n".join(filter(None, [self.image(name), *(say() for say in said.get(name, ()))]))
            for name in ("topk", "zeros", "contents")
            if name in self.pictures
        ]
        return "\n\n".join(found) or NOT_YET

    def zeros_sentence(self) -> str:
        """Each model's gap with no zero token and with the most of them that is not all."""
        rows = self.pictures["zeros"].rows
        told = []
        rows = rows[(rows["part"] == evidence.WHOLE) & (rows["phase"] == "hit") & (rows["mode"] == "isolated")]
        for _, of in rows.groupby(["model", "phase", "context", "mode"], sort=False):
            of = of.sort_values("zero_fraction")
            few, most = of.iloc[0], of.iloc[-1]
            told.append(
                f"{few['model']} at {tokens(few['context'])} {percent(few['gap'], 1)} and"
                f" {percent(most['gap'], 1)}{' (both invalid: noise)' * (most['verdict'] == 'invalid')}"
            )
        ends = " and with ".join(f"{100 * each['zero_fraction']:.0f} %" for each in (few, most)) if told else ""
        return f"Hits, isolated, with {ends} of the tokens zero: {'; '.join(told)}."

    def prefill_sentence(self) -> str:
        """What the KV that the model itself wrote makes of a gap, beside random KV of the same run."""
        gaps = evidence.gap_rows([run for run in self.runs if (run.gaps["arm"] == "prefill").any()])
        if gaps.empty:
            return ""
        place = ["model", "phase", "context", "mode"]
        gaps = gaps[gaps["gap"].notna()].sort_values(["model", "rounds", "utc"], kind="stable")
        pairs = gaps.pivot_table(index=place, columns="arm", values="gap", aggfunc="last", sort=False)
        pairs = pairs.dropna(subset=["prefill", "random"])
        told = [
            f"{model}, {phase} of one request at {tokens(context)}: {percent(row['prefill'], 1)}, beside"
            f" {percent(row['random'], 1)} with random KV"
            for (model, phase, context, _), row in pairs.iterrows()
        ]
        return f"`prefill` is the KV that the model itself wrote for random tokens. {'; '.join(told)}."

    def scores_sentence(self) -> str:
        """The shapes of the indexer's scores that move a step most either way, and what top-k makes of it."""
        shapes, told = [fill.kind for fill in SCORES], []
        for run in self.runs:
            rows = run.gaps[run.gaps["arm"].isin(shapes) & run.gaps["gap"].notna()]
            for (case, mode), of in rows.groupby(["case", "mode"], sort=False):
                kernels = run.kernels[(run.kernels["case"] == case) & (run.kernels["mode"] == mode)]
                ends = []
                for row in (of.loc[of["gap"].idxmin()], of.loc[of["gap"].idxmax()]):
                    why = f"`{row['arm']}`"
                    if {row["arm"], "zeros"} <= set(kernels["arm"]):
                        roles = kernel_gap_table(kernels, row["arm"], by="role").set_index("role")
                        us = float(roles["gap_us"].get("top-k", 0.0))
                        why += f", top-k {'+' * (us > 0)}{microseconds(us)}"
                    ends.append(f"{percent(row['gap'], 1)} ({why})")
                told.append(f"{row['model']}, {lab_tables.place_words(row.to_dict())}: {' to '.join(ends)}")
        return f"The shapes of the indexer's scores that move a step most: {'; '.join(told)}." if told else ""

    def verify_sentence(self, pattern: str) -> str:
        """What `kvlab verify` found in the files that match."""
        lines = [line for path in sorted(self.data.glob(pattern)) for line in path.read_text().splitlines()]
        if not lines:
            return NOT_YET
        rows = pd.DataFrame(map(json.loads, lines))
        return (
            f"`kvlab verify` on the same card: {len(rows)} steps of {rows['model'].nunique()} models,"
            f" {int(rows['bytes_written'].sum()):,} bytes written, {int(rows['bytes_outside'].sum())} outside the"
            f" touched views."
        )

    def bench_table(self) -> str:
        """Medians of vLLM's own benchmark, twice, and of kvlab's zeros arm in between; and the claim by the former."""
        lines = []
        for row in evidence.records(self.data, "bench"):
            first, again, random = (row[name] for name in ("bench", "bench_again", "bench_random"))
            us = {name: each["median_us"] for name, each in (("first", first), ("again", again), ("random", random))}
            lines.append(
                {
                    "model": row["model"],
                    "case": f"`{row['case']}`",
                    "vllm bench forward, µs": f"{us['first']:.1f}, {us['again']:.1f}",
                    "kvlab, zeros, µs": f"{row['kvlab']['median_us']:.1f}",
                    "ratio": f"{row['ratio']:.4f}",
                    "its zeros again": f"{us['again'] / us['first'] - 1:+.2%}",
                    "its random": f"{us['random'] / us['again'] - 1:+.2%}" + ", capped" * bool(random["throttled"]),
                }
            )
        return markdown(pd.DataFrame(lines)) if lines else NOT_YET

    def reference_table(self) -> str:
        """The reference engine's families, isolated: gap and 90 % interval by case."""
        runs = evidence.open_runs(self.data, lambda run: run.study["engine"] == "reference")
        rows = evidence.gap_rows(runs)
        rows = rows[(rows["mode"] == "isolated") & (rows["arm"] == "random")]
        if rows.empty:
            return NOT_YET
        rows = rows.assign(
            cell=[estimate_text(row["gap"], (row["ci90_lo"], row["ci90_hi"])) for row in rows.to_dict("records")]
        )
        table = rows.pivot(index="case", columns="model", values="cell").loc[list(dict.fromkeys(rows["case"]))]
        return markdown(table.reset_index())

    def sections(self) -> dict[str, str]:
        return {
            "answer": self.answer(),
            "contexts": self.contexts(),
            "sparsity": self.sparsity(),
            "check-table": check_table(),
            "vllm-verify": self.verify_sentence("vllm-*-verify.jsonl"),
            "bench-table": self.bench_table(),
            "reference-table": self.reference_table(),
            "reference-verify": self.verify_sentence("reference-verify.jsonl"),
            "aa-table": benchmark_output("aa_simulation"),
            "aa-machine": benchmark_output("aa_machine"),
            "settling": self.settling(),
        }


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown."""
    lines = [
        "| " + " | ".join(map(str, row)) + " |" for row in [table.columns, ["---"] * table.shape[1], *table.to_numpy()]
    ]
    return "\n".join(lines)


def benchmark_output(name: str) -> str:
    """What a script under `benchmarks/` printed, the command first."""
    return "\n".join(["```", (ROOT / "data" / "benchmarks" / f"{name}.txt").read_text().rstrip(), "```"])


def check_table() -> str:
    """What `make check` printed on the machine of its committed run."""
    run = open_run(ROOT / "data" / "cpu" / "make-check")
    table = verdict_table([run.verdict_of(row.case, row.mode) for row in run.verdicts.itertuples()])
    return "\n".join(["```", *table.splitlines()[: 1 + len(run.verdicts)], "```"])


def render(text: str, page: Page) -> str:
    """The README with each `<!-- NAME -->...<!-- /NAME -->` filled anew.

    Raises:
        SystemExit: for a section that the README has no place for.
    """
    for name, said in page.sections().items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"the README has no section {name!r}")
        text = pattern.sub(lambda found, said=said: found[1] + said + "\n" + found[2], text)
    return text


def draw(page: Page, figures: Path) -> None:
    """The README's figures; those of a former day that no longer have numbers go."""
    figures.mkdir(parents=True, exist_ok=True)
    for old in figures.glob("*.png"):
        if old.stem not in page.pictures:
            old.unlink()
    for picture in page.pictures.values():
        fig = picture.draw(picture.rows)
        fig.savefig(figures / f"{picture.name}.png", dpi=150, metadata={DIGEST: picture.digest})


def stale(page: Page, readme: Path, figures: Path) -> list[str]:
    """Names of what does not say what the runs say."""
    found = [] if render(readme.read_text(), page) == readme.read_text() else [readme.name]
    for picture in page.pictures.values():
        path = figures / f"{picture.name}.png"
        if not path.exists() or Image.open(path).info.get(DIGEST) != picture.digest:
            found.append(path.name)
    return found + [path.name for path in sorted(figures.glob("*.png")) if path.stem not in page.pictures]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "h200", help="folder of runs")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="to rewrite between its markers")
    parser.add_argument("--figures", type=Path, default=ROOT / "data" / "figures", help="where the pictures go")
    args = parser.parse_args(arguments)
    page = Page(args.data, Path(os.path.relpath(args.figures, args.readme.parent)).as_posix())
    if args.check:
        old = stale(page, args.readme, args.figures)
        if old:
            print(f"not what the runs say: {', '.join(old)}; run python tools/readme.py", file=sys.stderr)
        return int(bool(old))
    args.readme.write_text(render(args.readme.read_text(), page))
    draw(page, args.figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
