#!/usr/bin/env python3
"""One model in vLLM on this machine's GPU, part by part, each written as it goes so that a time limit costs no result.

    python benchmarks/vllm_models.py MODEL OUT [--parts verify,bench,claim] [--routing balanced] [--batch 8]

MODEL is a preset or a folder with a config.json. OUT gets, of the parts asked for:

    verify      vllm-MODEL-verify.jsonl     which bytes each step writes, and what it reads without a token
    bench       vllm-MODEL-bench.json       medians of `vllm bench forward`'s own replays and of kvlab's; and the claim
                                            by that command's own means, random KV against zero KV
    claim       vllm-MODEL-claim            a run: decode and hit at 8K and at --long tokens, both modes, with kernels,
                                            clocks, selection and, for sparse attention, the 2x2 of roles
    decode, hit sweep-MODEL-decode, -hit    runs: the gap against context length
    zeros       sweep-MODEL-zeros           a run: the gap against the zero fraction, of a hit
    scores      vllm-MODEL-scores           a run with an arm a shape of the indexer's scores, and kernels
    prefill     vllm-MODEL-prefill          a run with the arm `prefill`: one request at --long tokens
    loads       vllm-MODEL-loads.json       how far the experts' loads move between arms (with --routing real)
    selection   vllm-MODEL-selection.json   share of neighbours among the tokens that sparse attention chooses, by layer
    probe       vllm-MODEL-probe.json       where the bytes lie that a step reads without a token
"""

import argparse
import gc
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
from kvlab.measure.sampler import Sampler
from kvlab.measure.telemetry import make_telemetry
from kvlab.measure.timer import make_timer
from kvlab.selection import describe_selection
from kvlab.study import check
from kvlab.verification import REGIONS, reads_unwritten, verify

PARTS = ("verify", "bench", "selection", "loads", "probe", "claim", "decode", "hit", "zeros", "scores", "prefill")
ROLES = ("mix(kv=random, indexer=zeros)", "mix(kv=zeros, indexer=random)")
SCORES = ("constant(1)", "levels", "pow2", "cluster", "tiny", "huge", "ramp", "iid", "hot_contiguous", "hot_scattered")
ARMS = ("zeros", "random")


def bench_forward(engine, case, arm: str, replays: int) -> dict:
    """vLLM's own measurement of the case, as `vllm bench forward` makes it; `random` changes the contents alone."""
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
    if arm != "zeros":
        # The blocks of the case are the same there, and keep what they hold.
        step = engine.prepare(case)
        step.fill(arm)
        step.close()
    with torch.inference_mode(), set_current_vllm_config(runner.vllm_config):
        rng = np.random.default_rng(0)
        batch = build_batch(parse(str(case)), groups, blocks, runner.model_config.get_vocab_size(), rng)
        if arm == "zeros":
            zero_kv_blocks(context, groups, batch, blocks)
        views = touched_kv_views(context, groups, batch, blocks, 1)
        bench = ForwardBench(runner, batch, replays // 5, 5, views, case.name, include_drafter=False)
        routing = "balanced" if engine.routing == "balanced" else "real"
        _, fixture = install_routing(runner, routing, True, batch.num_tokens, 0)
        time_graph, sampler = bench._time, Sampler(make_telemetry(engine.device))

        def watched(graph):
            with sampler:
                return time_graph(graph)

        bench._time = watched
        try:
            latency = bench.run()["latency_us"]
        finally:
            runner.execute_model(batch.finish())
            if fixture is not None:
                fixture.remove()
    return {"median_us": latency["median"], "spread_pct": latency["sample_spread_pct"], **clocks(sampler)}


def clocks(sampler: Sampler) -> dict:
    seen = sampler.summary()
    return {"sm_mhz": seen.sm_mhz, "watts": seen.watts, "throttled": seen.throttled}


def kvlab_forward(engine, case, replays: int) -> dict:
    """The same in kvlab: as many replays of one captured step under zero KV, one right after the other."""
    step = engine.prepare(case)
    try:
        step.fill("zeros")
        timer = make_timer(step, "isolated")
        try:
            timer.time(5)
            with Sampler(make_telemetry(engine.device)) as sampler:
                times = timer.time(replays)
            return {"median_us": statistics.median(times), **clocks(sampler)}
        finally:
            timer.close()
    finally:
        step.close()


def bench_row(engine, case) -> dict:
    replays = 100 if case.phase == "decode" else 25
    bench = bench_forward(engine, case, "zeros", replays)
    random_first = bench_forward(engine, case, "random", replays)
    ours = kvlab_forward(engine, case, replays)
    random = bench_forward(engine, case, "random", replays)
    again = bench_forward(engine, case, "zeros", replays)
    zeros_us, random_us = (
        statistics.mean(each["median_us"] for each in pair) for pair in ((bench, again), (random_first, random))
    )
    return {
        "case": str(case),
        "bench": bench,
        "kvlab": ours,
        "bench_again": again,
        "bench_random_first": random_first,
        "bench_random": random,
        "ratio": ours["median_us"] / zeros_us,
        "random_over_zeros": random_us / zeros_us,
    }


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


def left_behind() -> str:
    """What of the GPU's memory is still taken in this process, and by which tensors."""
    import torch

    taken = torch.cuda.memory_allocated() / 2**20
    # By type: fake tensors of the compiler's say that they are on the GPU, and do not know their size.
    live = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.is_cuda]
    largest = sorted(live, key=lambda t: -t.untyped_storage().nbytes())[:6]
    named = ", ".join(f"{list(t.shape)} {t.dtype} {t.untyped_storage().nbytes() / 2**20:.0f} MiB" for t in largest)
    return f"{taken:.0f} MiB of the GPU still allocated: {named}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--parts", default="verify,bench,claim", help=f"of {','.join(PARTS)}, in their order (default %(default)s)"
    )
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
    parser.add_argument("--rounds", type=int, default=12, help="of scores and prefill")
    parser.add_argument(
        "--replays", type=int, default=3, help="timed, per arm and round; as long steps take many rounds"
    )
    parser.add_argument(
        "--budget", type=float, default=15.0, help="seconds of rounds a case and mode of claim and zeros"
    )
    parser.add_argument("--sweep-budget", type=float, default=8.0, help="the same of decode and hit")
    parser.add_argument(
        "--cases", default="decode8k,hit8k,decode100k,hit100k", help="of claim and scores, those to run (default all)"
    )
    parser.add_argument("--no-roles", action="store_true", help="claim without the 2x2 of roles: more rounds a budget")
    parser.add_argument("--contexts", default="1024,8192,32768,100000", help="of decode")
    parser.add_argument("--hit-contexts", default="1024,32768", help="of hit; claim holds 8192 and --long")
    parser.add_argument("--zeros-context", type=int, help="of zeros; --long by default")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--engine-arg", default="{}", help="JSON object of further EngineArgs")
    args = parser.parse_args()
    parts = args.parts.split(",")
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

    once = {"replays": args.replays, "discard": 1}

    def run(suffix: str, cases, **how) -> None:
        with check(engine, cases, out=args.out / f"vllm-{name}-{suffix}", **once, **how) as made:
            columns = ["case", "gap", "ci90_lo", "ci90_hi", "aa_ci90_lo", "aa_ci90_hi", "median_us_zeros", "verdict"]
            say(f"{suffix}\n" + made.verdicts[[c for c in columns if c in made.verdicts]].to_string(index=False))
            for case, mode in zip(made.verdicts["case"], made.verdicts["mode"], strict=True):
                verdict = made.verdict_of(case, mode)
                told = [*verdict["reasons"], verdict.get("cause", {}).get("sentence", "")]
                say(f"{suffix} {case} {mode}: {json.dumps(verdict.get('arms'))} {' '.join(told)}")

    def swept(suffix: str, **axes) -> None:
        with sweep(engine, out=args.out / f"sweep-{name}-{suffix}", replays=args.replays, **axes) as made:
            columns = ["case", "mode", "arm", "gap", "ci90_lo", "ci90_hi", "verdict"]
            say(f"sweep {suffix}\n{made.gaps[columns].to_string(index=False)}")

    short, long = (
        [f"decode{k}={n}*1@{kv}", f"hit{k}={args.query}@{kv}"]
        for k, n, kv in (("8k", 32, 8192), ("100k", args.batch, args.long))
    )
    alone = [parse_case(f"decode1=1@{args.long}"), parse_case(f"hit1={args.query}@{args.long}")]
    cases = [parse_case(text) for text in [*short, *long, f"prefill={args.query}"]]
    contexts, hit_contexts = (tuple(map(int, text.split(","))) for text in (args.contexts, args.hit_contexts))
    options = {"num_kv_blocks": args.blocks, "kv_cache_dtype": args.kv_cache_dtype}
    engine = load_engine(
        args.model,
        "vllm",
        cases=[*cases, *alone, *Grid(contexts, batch=(args.batch,)).cases()],
        routing=args.routing,
        gpu_memory_utilization=args.utilization,
        **{key: value for key, value in options.items() if value is not None},
        **json.loads(args.engine_arg),
    )
    say(f"loaded: {json.dumps(engine.provenance()['geometry'])}, routing {engine.routing} {engine.routing_note}")

    def verified() -> None:
        with (args.out / f"vllm-{name}-verify.jsonl").open("w") as lines:
            for case in cases[2:]:
                if found := attempt("verify", case, lambda case=case: verify(engine, [case])):
                    lines.write(json.dumps(found[0].as_dict()) + "\n")
                    lines.flush()
                    say(f"verify {json.dumps(found[0].as_dict())}")

    def claimed() -> None:
        arms = ["random", *(ROLES if engine.topk and not args.no_roles else ())]
        chosen = [case for case in cases[:4] if case.name in args.cases.split(",")]
        run("claim", chosen, arms=arms, mode="both", budget=args.budget, explain=True)

    def by_context(phase: str, batch: int, listed, query) -> None:
        axes = {"contexts": listed, "phases": (phase,), "batch": (batch,), "query": query}
        swept(phase, mode="both", budget=args.sweep_budget, **axes)

    def by_zeros() -> None:
        axes = {"contexts": (args.zeros_context or args.long,), "phases": ("hit",), "batch": (1,)}
        swept("zeros", query=args.query, zero_fractions=(0.25, 0.5, 0.75), budget=args.budget, explain=True, **axes)

    def scored() -> None:
        chosen = [case for case in cases[2:4] if case.name in args.cases.split(",")]
        run("scores", chosen, arms=["random", *SCORES], mode="isolated", rounds=args.rounds, explain=True)

    def prefilled() -> None:
        run("prefill", alone, arms=["random", "prefill"], mode="isolated", rounds=args.rounds)

    do = {
        "verify": verified,
        "bench": lambda: rows("bench", cases[2:4], bench_row),
        "selection": lambda: rows(
            "selection", cases[:4], selection_row, lambda row: {**row, "arms": list(row["arms"])}
        ),
        "loads": lambda: rows(
            "loads", cases[:4], loads_row, lambda row: {k: v for k, v in row.items() if k != "loads"}
        ),
        "probe": lambda: rows("probe", cases[2:4], probe_row),
        "claim": claimed,
        "decode": lambda: by_context("decode", args.batch, contexts, None),
        "hit": lambda: by_context("hit", 1, hit_contexts, args.query),
        "zeros": by_zeros,
        "scores": scored,
        "prefill": prefilled,
    }
    try:
        for part in parts:
            attempt(part, "", do[part])
            say(f"done: {part}")
    finally:
        for line in failed:
            say(f"FAILED {line}")
        engine.close()
        say(f"closed; {left_behind()}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
