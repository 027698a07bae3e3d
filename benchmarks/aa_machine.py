"""Does this machine's clock make verdicts err? The same step against itself, checked many times for real.

Every arm holds zeros, so a `different` is false, the non-zero flag should come up 10 % of the time, and the 90 %
intervals should hold 0. Each check prepares (and, on CUDA, captures) the step anew, in fresh random orders.

    python benchmarks/aa_machine.py tiny-dense --case decode=4*1@512
    python benchmarks/aa_machine.py deepseek-v4.1-flash --engine vllm --case decode=8*1@100000 --mode sustained

With --run FOLDER a stopped benchmark goes on where it was; --seconds begins no check after so long, and the table says
how many there were. --recorded FOLDER prints the table of a run, or of an export of one, again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pandas as pd

from kvlab.cases import Case, parse_case
from kvlab.engines.load import load_engine
from kvlab.kv.fills import Zeros
from kvlab.plan import AGAIN, BASELINE, Arm, Plan
from kvlab.provenance import device_name, identity
from kvlab.run import Run, open_run
from kvlab.stats import position_bias
from kvlab.study import Study


def told(run: Run) -> str:
    """How the checks ended, how often an interval leaves out 0, and whether a place in the round is slower."""
    gaps, verdicts, samples = run.gaps, run.verdicts, run.samples
    flags = [(row.ci90_lo > 0) or (row.ci90_hi < 0) for row in gaps.itertuples()]
    flags += [(row.aa_ci90_lo > 0) or (row.aa_ci90_hi < 0) for row in verdicts.itertuples()]
    table = {
        "checks": len(verdicts),
        "rounds": int(verdicts["rounds"].median()),
        **{
            name: int((verdicts["verdict"] == name).sum())
            for name in ("equivalent", "different", "inconclusive", "invalid")
        },
        "nonzero": f"{sum(flags)} of {len(flags)}",
        "half-width, %": f"{50 * (gaps['ci90_hi'] - gaps['ci90_lo']).median():.3f}",
        "largest gap, %": f"{100 * gaps['gap'].abs().max():.3f}",
    }
    rounds = samples.assign(round=samples["case"] + " " + samples["round"].astype(str))
    bias = position_bias(rounds.drop(columns="case"))
    who = identity(run.provenance)
    device = f"{device_name(who['gpu'])}, torch {who['torch']}"
    step, mode = verdicts["text"].iloc[0].partition("=")[2], verdicts["mode"].iloc[0]
    return "\n".join(
        (
            f"# {run.study['model']}, {run.study['engine']} engine, {step}, {mode}; {device}",
            pd.DataFrame([table]).to_string(index=False),
            "by position in the round, %: "
            + "; ".join(f"{100 * b.bias:+.3f} ({100 * b.lo:+.3f} .. {100 * b.hi:+.3f})" for b in bias.itertuples()),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The same step against itself, many times.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--engine", default="reference")
    parser.add_argument("--case", default="decode=4*1@512")
    parser.add_argument("--mode", default="isolated")
    parser.add_argument("--checks", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--run", type=Path, help="folder of the run (by default one that is not kept)")
    parser.add_argument("--out", type=Path, help="folder of an export of the run")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.recorded:
        print(told(open_run(args.recorded)))
        return
    if not args.model:
        parser.error("name a model, or a folder with --recorded")
    case = parse_case(args.case)
    options = {"cases": [case]} if args.engine == "vllm" else {}
    engine = load_engine(args.model, args.engine, **options)
    arms = tuple(Arm(name, Zeros()) for name in (BASELINE, AGAIN, "random"))
    plan = Plan(arms, 0.03, (args.mode,), args.rounds, 60.0, args.replays, 2, 0)
    begin = time.perf_counter()
    with nullcontext(args.run) if args.run else tempfile.TemporaryDirectory() as folder:
        study = Study(engine, plan, Path(folder) / "aa", args.checks)
        for number in range(args.checks):
            if time.perf_counter() - begin > args.seconds:
                break
            study.check_case(engine, Case(f"aa{number:02d}", case.requests))
        print(told(study.run))
        if args.out:
            study.run.export(args.out)
        study.run.close()
    engine.close()


if __name__ == "__main__":
    main()
