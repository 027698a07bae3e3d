#!/usr/bin/env python3
"""The reference engine's five families on this machine's GPU as CUDA graphs: verify, then check in both modes.

    python benchmarks/reference_families.py OUT        (about 3 minutes on an H200)

OUT gets a run folder for each model and mode, and `verify.jsonl` with one line per case.
"""

import argparse
import json
import time
from pathlib import Path

from kvlab.engines.load import load_engine
from kvlab.study import check
from kvlab.verification import verify

MODELS = ("tiny-dense", "tiny-swa", "tiny-mla", "tiny-dsa", "tiny-hybrid")
PHASES = ("decode=4*1@4096", "verify=4*4@4096:3", "prefill=512", "chunk=256@2048c", "hit=64@2048")
LONG = ("decode100k=1@100000", "hit100k=64@100000")
# Sustained rounds wait for the power to settle under each arm, so they are fewer and of fewer cases.
PLANS = {"isolated": (PHASES + LONG, 20), "sustained": (PHASES[:1] + LONG, 10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="*", default=MODELS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        begin = time.perf_counter()
        engine = load_engine(model, device=args.device, num_kv_blocks=8192)
        with (args.out / "verify.jsonl").open("a") as lines:
            for result in verify(engine, PHASES + LONG):
                lines.write(json.dumps(result.as_dict()) + "\n")
        for mode, (cases, rounds) in PLANS.items():
            with check(engine, cases, mode=mode, rounds=rounds, out=args.out / f"reference-{model}-{mode}") as run:
                columns = ["case", "gap", "ci90_lo", "ci90_hi", "aa_ci90_lo", "aa_ci90_hi", "verdict"]
                print(model, mode, run.verdicts[columns].to_string(index=False), sep="\n", flush=True)
        print(f"{model}: {time.perf_counter() - begin:.0f} s", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
