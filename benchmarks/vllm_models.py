#!/usr/bin/env python3
"""One model in vLLM on this machine's GPU: verify, check in both modes, and vLLM's own forward benchmark beside it.

    python benchmarks/vllm_models.py MODEL OUT [--routing balanced] [--batch 8] [--query 2048] [--long 100000]

MODEL is a folder with a config.json. OUT gets a run folder a mode (`vllm-MODEL-MODE`), `vllm-MODEL-verify.jsonl`, and
`vllm-MODEL-bench.json`: medians of `vllm bench forward`'s own replays and of the zeros arm, same process, same case.
"""

import argparse
import json
import time
from pathlib import Path

from kvlab.cases import parse_case
from kvlab.engines.vllm.engine import VllmEngine, load_vllm
from kvlab.study import check
from kvlab.verification import verify


def bench_forward(engine: VllmEngine, case) -> dict:
    """vLLM's own measurement of the case, zero KV, as `vllm bench forward` makes it."""
    import numpy as np
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--routing", default="auto")
    parser.add_argument("--batch", type=int, default=8, help="decode requests at the long context")
    parser.add_argument("--query", type=int, default=2048, help="query tokens of a hit")
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--utilization", type=float, default=0.45, help="verify copies the caches once")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--sustained-rounds", type=int, default=8)
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--engine-arg", default="{}", help="JSON object of further EngineArgs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name, begin = Path(args.model).name, time.perf_counter()

    def say(what: str) -> None:
        print(f"[{name} {time.perf_counter() - begin:6.1f} s] {what}", flush=True)

    short, long = (
        [f"decode{k}={n}*1@{kv}", f"hit{k}={args.query}@{kv}"]
        for k, n, kv in (("8k", 32, 8192), ("100k", args.batch, args.long))
    )
    cases = [parse_case(text) for text in [*short, *long, f"prefill={args.query}"]]
    engine = load_vllm(
        args.model,
        cases=cases,
        routing=args.routing,
        kv_cache_dtype=args.kv_cache_dtype,
        gpu_memory_utilization=args.utilization,
        **json.loads(args.engine_arg),
    )
    say(f"loaded: {json.dumps(engine.provenance()['geometry'])}, routing {engine.routing}")
    checked = [cases[i] for i in (0, 1, 2, 3)]
    failed = []
    with (args.out / f"vllm-{name}-verify.jsonl").open("w") as lines:
        for case in (cases[2], cases[3], cases[4]):
            try:
                (result,) = verify(engine, [case])
            except Exception as error:
                failed.append(f"verify {case}: {type(error).__name__}: {error}")
                continue
            lines.write(json.dumps(result.as_dict()) + "\n")
            say(f"verify {case.name}: outside {result.bytes_outside}, written {result.bytes_written}, {result.outside}")
    medians = {}
    for mode, rounds, wanted in (
        ("isolated", args.rounds, checked),
        ("sustained", args.sustained_rounds, checked[2:]),
    ):
        with check(engine, wanted, mode=mode, rounds=rounds, out=args.out / f"vllm-{name}-{mode}") as run:
            columns = ["case", "gap", "ci90_lo", "ci90_hi", "aa_ci90_lo", "aa_ci90_hi", "median_us_zeros", "verdict"]
            table = run.verdicts
            say(f"{mode}\n" + table[[c for c in columns if c in table]].to_string(index=False))
            for case in wanted:
                verdict = run.verdict_of(case.name, mode)
                medians[case.name, mode] = verdict["median_us"].get("zeros")
                if verdict["verdict"] == "invalid":
                    failed.append(f"{mode} {case}: {verdict['reasons']}")
    bench = []
    for case in (checked[2], checked[3]):
        try:
            row = bench_forward(engine, case)
        except Exception as error:
            failed.append(f"bench {case}: {type(error).__name__}: {error}")
            continue
        ours = medians[case.name, "isolated"]
        row |= {"model": name, "kvlab_median_us": ours, "ratio": ours / row["bench_median_us"] if ours else None}
        bench.append(row)
        say(f"bench forward {row}")
    (args.out / f"vllm-{name}-bench.json").write_text(json.dumps(bench, indent=1))
    for line in failed:
        say(f"FAILED {line}")
    engine.close()
    say("closed")


if __name__ == "__main__":
    main()
