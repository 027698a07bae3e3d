#!/usr/bin/env python3
"""How long does a busy card take to come to its pace under new contents? Zeros and random in turn, back to back.

    python benchmarks/cap_settling.py deepseek-v3.2-6l --engine-arg '{"kv_cache_dtype": "fp8_ds_mla"}' --out OUT

Every replay's time and what the card's sensors read beside them, by seconds since the contents changed. Printed: what
a visit says of the step, by when it begins, beside the late replays (from --late seconds on), which are taken as the
truth: by the median of a second's replays, and by the mean of two seconds'. --recorded prints it again from OUT,
without a card. OUT gets replays.parquet, readings.parquet and provenance.json, which `kvlab.plots.plot_settling` draws
and tests/measure/test_settling.py plays back to kvlab's own settling.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.measure.sampler import Sampler
from kvlab.measure.telemetry import make_telemetry
from kvlab.measure.timer import make_timer
from kvlab.provenance import machine

FILLS = ("zeros", "random")


def visits_table(replays: pd.DataFrame, late: float, seconds: float, how: str) -> pd.DataFrame:
    """The step by a visit that begins so many seconds after the change, percent off the late replays' mean.

    Args:
        seconds: of replays.
        how: they are put together: `median` or `mean`.
    """
    rows = []
    for begin in (0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0):
        row: dict[str, object] = {"begins, s": begin}
        for (fill, visit), of in replays.groupby(["fill", "visit"]):
            truth = of.loc[of["t_s"] > late, "us"].mean() if (of["t_s"] > late).any() else of["us"].iloc[5:].mean()
            whole = of["t_s"].max() >= begin + seconds
            seen = of.loc[of["t_s"].between(begin, begin + seconds) & whole, "us"]
            row[f"{fill}, visit {visit}"] = 100 * (seen.agg(how) / truth - 1) if len(seen) else float("nan")
        rows.append(row)
    return pd.DataFrame(rows)


def told(replays: pd.DataFrame, late: float) -> str:
    """Both tables."""
    return "\n".join(
        f"{how} of {seconds:g} s\n{visits_table(replays, late, seconds, how).round(2).to_string(index=False)}"
        for how, seconds in (("median", 1.0), ("mean", 2.0))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--engine-arg", default="{}", help="JSON object of EngineArgs")
    parser.add_argument("--case", default="hit100k=2048@100000")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a visit to random; zeros get a third of it")
    parser.add_argument("--late", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recorded", type=Path, metavar="OUT", help="of an earlier call: print its tables again")
    args = parser.parse_args()
    if args.recorded:
        print(told(pd.read_parquet(args.recorded / "replays.parquet"), args.late))
        return
    if not args.model:
        parser.error("name a model, or a folder with --recorded")
    case = parse_case(args.case)
    engine = load_engine(args.model, args.engine, cases=[case], **json.loads(args.engine_arg))
    step = engine.prepare(case)
    step.fill("zeros", 0)
    timer = make_timer(step, "sustained")
    timer.settle(0.5)
    replays, readings = [], []
    for visit in range(len(FILLS) * args.turns):
        fill = FILLS[visit % len(FILLS)]
        count = max(10, round((args.seconds if fill == "random" else args.seconds / 3) / timer.paced_s))
        step.fill(fill, 0)
        with Sampler(make_telemetry(engine.device), 0.02) as sampler:
            times = timer.time(count)
        ends = pd.Series(times).cumsum() / 1e6
        replays += [{"visit": visit, "fill": fill, "t_s": t, "us": us} for t, us in zip(ends, times, strict=True)]
        begin = sampler.readings[0].t_s if sampler.readings else 0.0
        for reading in map(asdict, sampler.readings):
            readings.append({"visit": visit, "fill": fill, **reading, "t_s": reading["t_s"] - begin})
    table = pd.DataFrame(replays)
    print(f"{args.model} {case}, sustained, on {engine.device}; percent off the late replays")
    print(told(table, args.late))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        table.to_parquet(args.out / "replays.parquet", index=False)
        pd.DataFrame(readings).to_parquet(args.out / "readings.parquet", index=False)
        (args.out / "provenance.json").write_text(
            json.dumps({"model": Path(args.model).name, "case": str(case), **machine()}, indent=1)
        )
    engine.close()


if __name__ == "__main__":
    main()
