#!/usr/bin/env python3
"""One model in vLLM on this machine's GPU, part by part, each written as it goes so that a time limit costs no result.

    python benchmarks/vllm_models.py MODEL OUT [--parts verify,check,bench] [--routing balanced] [--batch 8] [--prefill]

MODEL is a preset or a folder with a config.json. OUT gets, of the parts asked for:

    verify      vllm-MODEL-verify.jsonl     which bytes each step writes, and what it reads without a token
    check       vllm-MODEL-isolated, -sustained: runs, zero against random KV
    bench       vllm-MODEL-bench.json       medians of `vllm bench forward`'s own replays and of the zeros arm
    explain     vllm-MODEL-explain          a run in both modes with kernels, clocks, selection and the 2x2 of roles
    sweep       sweep-MODEL-contexts, -zeros: runs, the gap against context length and against the zero fraction
    prefill     vllm-MODEL-prefill          a run with the arm `prefill`: one request at the long context
    loads       vllm-MODEL-loads.json       how far the experts' loads move between arms (with --routing real)
    selection   vllm-MODEL-selection.json   share of neighbours among the tokens that sparse attention chooses, by layer
    probe       vllm-MODEL-probe.json       where the bytes lie that a step reads without a token
"""

import argparse
import json
import statistics
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.engines.loads import loads_moved
from kvlab.explain import context_lengths
from kvlab.grid import Grid, sweep
from kvlab.measure.timer import make_timer
from kvlab.selection import describe_selection
from kvlab.study import check
from kvlab.verification import REGIONS, reads_unwritten, verify

PARTS = ("verify", "check", "bench", "explain", "sweep", "prefill", "loads", "selection", "probe")
ROLES = ("mix(kv=random, indexer=zeros)", "mix(kv=zeros, indexer=random)")
ARMS = ("zeros", "random")


def bench_forward(engine, case) -> dict:
    """vLLM's own measurement of the case, zero KV, as `vllm bench forward` makes it."""
    import torch
    from vllm.benchmarks.forward.batch import build_batch
    from vllm.benchmarks.forward.capture import ForwardBench
    from vllm.benchmarks.forward.kv_init import touched_kv_views, zero_kv_blocks
    from vllm.benchmarks.forward.routing import install_routing
    from vllm.benchmarks.forward.shapes import parse_case as parse
    from vllm.config import set_current_vllm_config

    runner = engine.runner
    context = runner.vllm_config.compilation_config.static_forward_context
    config = runner.kv_cache_config
    groups, blocks = config.kv_cache_groups, config.num_blocks
    with torch.inference_mode(), set_current_vllm_config(runner.vllm_config):
        rng = np.random.default_rng(0)
        batch = build_batch(parse(str(case)), groups, blocks, runner.model_config.get_vocab_size(), rng)
        zero_kv_blocks(context, groups, batch, blocks)
        views = touched_kv_views(context, groups, batch, blocks, 1)
        bench = ForwardBench(runner, batch, 20, 5, views, case.name, include_drafter=False)
        routing = "balanced" if engine.routing == "balanced" else "real"
        _, fixture = install_routing(runner, routing, True, batch.num_tokens, 0)
        try:
            latency = bench.run()["latency_us"]
        finally:
            runner.execute_model(batch.finish())
            if fixture is not None:
                fixture.remove()
    return {"case": str(case), "bench_median_us": latency["median"], "bench_spread_pct": latency["sample_spread_pct"]}


def zeros_median(engine, case) -> float:
    """The same in kvlab: as many replays of one captured step under zero KV."""
    step = engine.prepare(case)
    try:
        step.fill("zeros")
        timer = make_timer(step, "isolated")
        try:
            timer.settle(1.0)
            return statistics.median(timer.time(100))
        finally:
            timer.close()
    finally:
        step.close()


def of_arms(engine, case, ask) -> dict:
    """What `ask(step)` says under each arm."""
    step = engine.prepare(case)
    try:
        told = {}
        for arm in ARMS:
            step.fill(arm)
            told[arm] = ask(step)
        return told
    finally:
        step.close()


def loads_row(engine, case) -> dict:
    loads = of_arms(engine, case, lambda step: step.expert_loads())
    most = {
        arm: max((float(n.max() / n.float().mean()) for n in layers.values()), default=None)
        for arm, layers in loads.items()
    }
    moved = loads_moved(*loads.values())
    lists = {arm: {layer: n.tolist() for layer, n in layers.items()} for arm, layers in loads.items()}
    return {"case": str(case), "routing": engine.routing, "moved": moved, "most_over_mean": most, "loads": lists}


def selection_row(engine, case) -> dict:
    def describe(step) -> dict:
        lengths = context_lengths(step)
        return {name: asdict(describe_selection(picks.cpu(), lengths)) for name, picks in step.selection().items()}

    return {"case": str(case), "arms": of_arms(engine, case, describe)}


def probe_row(engine, case) -> dict:
    step = engine.prepare(case)
    try:
        return {"case": str(case), **{region: reads_unwritten(step, region=region) for region in REGIONS}}
    finally:
        step.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", default="verify,check,bench", help=f"of {','.join(PARTS)} (default %(default)s)")
    parser.add_argument("--prefill", action="store_true", help="also the part prefill")
    parser.add_argument("--routing", default="auto")
    parser.add_argument("--batch", type=int, default=8, help="decode requests at the long context")
    parser.add_argument("--query", type=int, default=2048, help="query tokens of a hit")
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument(
        "--utilization", type=float, default=0.45, help="verify and prefill keep copies beside the pool"
    )
    parser.add_argument(
        "--blocks", type=int, help="of the pool, in place of --utilization: probe copies it two and a half times"
    )
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--sustained-rounds", type=int, default=8)
    parser.add_argument(
        "--budget", type=float, default=15.0, help="seconds of rounds a case and mode of explain and sweep"
    )
    parser.add_argument("--contexts", default="1024,8192,32768,100000", help="of the sweep")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--engine-arg", default="{}", help="JSON object of further EngineArgs")
    args = parser.parse_args()
    parts = [*args.parts.split(","), *["prefill"] * args.prefill]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"part {sorted(unknown)[0]!r} is unknown; give {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    name, begin, failed = Path(args.model).name, time.perf_counter(), []

    def say(what: str) -> None:
        print(f"[{name} {time.perf_counter() - begin:6.1f} s] {what}", flush=True)

    def attempt(part: str, case, ask):
        """None where it fails: the other cases and parts go on."""
        try:
            return ask()
        except Exception as error:
            failed.append(f"{part} {case}: {type(error).__name__}: {' '.join(str(error).split())}")
            traceback.print_exc()
            return None

    def rows(part: str, cases, ask, shown=lambda row: row) -> None:
        path, found = args.out / f"vllm-{name}-{part}.json", []
        for case in cases:
            row = attempt(part, case, lambda case=case: {"model": name, **ask(engine, case)})
            if row is not None:
                found.append(row)
                path.write_text(json.dumps(found, indent=1))
                say(f"{part} {json.dumps(shown(row))}")

    def bench_row(engine, case) -> dict:
        row, ours = bench_forward(engine, case), zeros_median(engine, case)
        return row | {"kvlab_median_us": ours, "ratio": ours / row["bench_median_us"]}

    def run(suffix: str, cases, **how) -> None:
        with check(engine, cases, out=args.out / f"vllm-{name}-{suffix}", **how) as made:
            columns = ["case", "gap", "ci90_lo", "ci90_hi", "aa_ci90_lo", "aa_ci90_hi", "median_us_zeros", "verdict"]
            say(f"{suffix}\n" + made.verdicts[[c for c in columns if c in made.verdicts]].to_string(index=False))
            for case, mode in zip(made.verdicts["case"], made.verdicts["mode"], strict=True):
                verdict = made.verdict_of(case, mode)
                told = [*verdict["reasons"], verdict.get("cause", {}).get("sentence", "")]
                say(f"{suffix} {case} {mode}: {json.dumps(verdict.get('arms'))} {' '.join(told)}")

    def swept(suffix: str, **axes) -> None:
        with sweep(engine, out=args.out / f"sweep-{name}-{suffix}", budget=args.budget, **axes) as made:
            columns = ["case", "mode", "arm", "gap", "ci90_lo", "ci90_hi", "verdict"]
            say(f"sweep {suffix}\n{made.gaps[columns].to_string(index=False)}")

    short, long = (
        [f"decode{k}={n}*1@{kv}", f"hit{k}={args.query}@{kv}"]
        for k, n, kv in (("8k", 32, 8192), ("100k", args.batch, args.long))
    )
    alone = [parse_case(f"decode1=1@{args.long}"), parse_case(f"hit1={args.query}@{args.long}")]
    cases = [parse_case(text) for text in [*short, *long, f"prefill={args.query}"]]
    options = {"num_kv_blocks": args.blocks, "kv_cache_dtype": args.kv_cache_dtype}
    engine = load_engine(
        args.model,
        "vllm",
        cases=[*cases, *alone, *Grid(tuple(map(int, args.contexts.split(","))), batch=(args.batch,)).cases()],
        routing=args.routing,
        gpu_memory_utilization=args.utilization,
        **{key: value for key, value in options.items() if value is not None},
        **json.loads(args.engine_arg),
    )
    say(f"loaded: {json.dumps(engine.provenance()['geometry'])}, routing {engine.routing} {engine.routing_note}")
    try:
        if "verify" in parts:
            with (args.out / f"vllm-{name}-verify.jsonl").open("w") as lines:
                for case in cases[2:]:
                    if found := attempt("verify", case, lambda case=case: verify(engine, [case])):
                        lines.write(json.dumps(found[0].as_dict()) + "\n")
                        lines.flush()
                        say(f"verify {json.dumps(found[0].as_dict())}")
        if "bench" in parts:
            rows("bench", cases[2:4], bench_row)
        if "selection" in parts:
            rows("selection", cases[:4], selection_row, lambda row: {**row, "arms": list(row["arms"])})
        if "loads" in parts:
            rows("loads", cases[:4], loads_row, lambda row: {k: v for k, v in row.items() if k != "loads"})
        if "probe" in parts:
            rows("probe", [cases[2], cases[3]], probe_row)
        if "check" in parts:
            attempt("isolated", "", lambda: run("isolated", cases[:4], mode="isolated", rounds=args.rounds))
            attempt(
                "sustained", "", lambda: run("sustained", cases[2:4], mode="sustained", rounds=args.sustained_rounds)
            )
        if "explain" in parts:
            arms = ["random", *(ROLES if engine.topk else ())]
            how = {"arms": arms, "mode": "both", "budget": args.budget, "explain": True}
            attempt("explain", "", lambda: run("explain", cases[2:4], **how))
        if "sweep" in parts:
            contexts = tuple(map(int, args.contexts.split(",")))
            attempt("sweep", "contexts", lambda: swept("contexts", contexts=contexts, batch=(args.batch,), mode="both"))
            shares = (0.25, 0.5, 0.75)
            axes = {"contexts": contexts[-1:], "phases": ("hit",), "batch": (1,), "zero_fractions": shares}
            attempt("sweep", "zeros", lambda: swept("zeros", **axes))
        if "prefill" in parts:
            arms = ["random", "prefill"]
            attempt("prefill", "", lambda: run("prefill", alone, arms=arms, mode="isolated", rounds=args.rounds))
    finally:
        for line in failed:
            say(f"FAILED {line}")
        engine.close()
        import torch

        say(f"closed; {torch.cuda.memory_allocated() / 2**30:.2f} GiB of the GPU still allocated")


if __name__ == "__main__":
    main()
