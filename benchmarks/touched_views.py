"""How long it takes to say which KV views a step may write: kvlab beside vLLM 0.33's own `touched_kv_views`.

    python benchmarks/touched_views.py                       # kvlab, and vLLM if it is installed
    python benchmarks/touched_views.py --vllm-source DIR     # DIR holds an unpacked vLLM wheel; nothing to install

Both sides get the same caches, groups and case in one process; repetitions alternate between the sides, and their
views are compared one by one first. The caches are meta tensors, so no memory is needed for them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tools")]

from vllm_source import VllmForward, load_vllm  # noqa: E402

from kvlab import build_batch, parse_case, touched_block_ranges, touched_kv_views  # noqa: E402

BLOCK_SIZE = 64
HOW_TO_GET_VLLM = """\
vLLM's side is missing ({reason}).
  pip install 'vllm>=0.33,<0.34'     or, without installing it or its needs:
  pip download --no-deps 'vllm>=0.33,<0.34' && unzip vllm-*.whl 'vllm/*' -d vllm-source
  python benchmarks/touched_views.py --vllm-source vllm-source"""


class MLAAttentionSpec(SimpleNamespace):
    """Stand-in where vLLM's own spec is absent."""

    prefix_replay_tokens = 0


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """Stand-in, as above."""

    prefix_replay_tokens = 0


@dataclass(frozen=True)
class Setup:
    """One layout: caches by layer name, and one group of all layers."""

    name: str
    kv_caches: dict[str, torch.Tensor]
    group: Any


def make_specs(vllm: VllmForward | None, layers: int, uniform: bool) -> Any:
    arguments: dict[str, Any] = {"block_size": BLOCK_SIZE, "dcp_sharded": False}
    if vllm is None:
        spec, wrapper = MLAAttentionSpec(**arguments), UniformTypeKVCacheSpecs
    else:
        sizes = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
        spec, wrapper = vllm.interface.MLAAttentionSpec(**arguments, **sizes), vllm.interface.UniformTypeKVCacheSpecs
    if not uniform:
        return spec
    return wrapper(block_size=BLOCK_SIZE, kv_cache_specs={f"layer.{i}": spec for i in range(layers)})


def make_setups(vllm: VllmForward | None, layers: int, num_blocks: int) -> list[Setup]:
    names = [f"layer.{i}" for i in range(layers)]

    def group(uniform: bool = False) -> Any:
        return SimpleNamespace(kv_cache_group_id=0, layer_names=names, kv_cache_spec=make_specs(vllm, layers, uniform))

    def dense() -> dict[str, torch.Tensor]:
        return {n: torch.empty(num_blocks, BLOCK_SIZE, 576, dtype=torch.bfloat16, device="meta") for n in names}

    # Blocks of all layers side by side in one buffer.
    page = BLOCK_SIZE * 576
    buffer = torch.empty(num_blocks * layers * page, dtype=torch.bfloat16, device="meta")
    strided = {
        name: buffer.as_strided((num_blocks, BLOCK_SIZE, 576), (layers * page, 576, 1), i * page)
        for i, name in enumerate(names)
    }
    return [
        Setup("dense", dense(), group()),
        Setup("uniform", dense(), group(uniform=True)),
        Setup("strided", strided, group()),
    ]


def seconds(run: Callable[[], Any]) -> float:
    # A collection in the middle of one side's run would be charged to it alone.
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    finally:
        gc.enable()


def same_views(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        (a.storage_offset(), a.shape, a.stride(), a.dtype, a.untyped_storage()._cdata)
        == (b.storage_offset(), b.shape, b.stride(), b.dtype, b.untyped_storage()._cdata)
        for a, b in zip(ours, theirs, strict=True)
    )


def compare(setup: Setup, batch: Any, num_blocks: int, vllm: VllmForward | None, repeats: int) -> dict[str, float]:
    """Median seconds by side."""
    sides: dict[str, Callable[[], Any]] = {
        "ranges": lambda: touched_block_ranges([setup.group], batch),
        "views": lambda: touched_kv_views(setup.kv_caches, [setup.group], batch, num_blocks),
    }
    if vllm is not None:
        context = {name: SimpleNamespace(kv_cache=cache) for name, cache in setup.kv_caches.items()}
        theirs = vllm.kv_init.touched_kv_views
        sides["vllm"] = lambda: theirs(context, [setup.group], batch, num_blocks, 1, 0)
        assert same_views(sides["views"](), sides["vllm"]()), f"{setup.name}: the views differ"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats + 1):
        for name, run in sides.items():
            taken = seconds(run)
            if i:  # the first is a warm-up
                times[name].append(taken)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--kv-len", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--vllm-source", type=Path, help="folder that holds vllm/ of an unpacked wheel")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        vllm, missing = load_vllm(arguments.vllm_source), ""
    except ImportError as error:
        vllm, missing = None, str(error)

    case = parse_case(f"decode={arguments.requests}*1@{arguments.kv_len}")
    num_blocks = 1 + arguments.requests * -(-arguments.kv_len // BLOCK_SIZE)
    beside = f"vLLM {vllm.version}" if vllm else "no vLLM"
    print(
        f"{arguments.layers} layers x {arguments.requests} requests = {arguments.layers * arguments.requests} views;"
        f" median of {arguments.repeats}; torch {torch.__version__}; {beside}"
    )
    theirs = f"{'vLLM ms':>11}{'vLLM/ranges':>13}{'vLLM/views':>12}" if vllm else ""
    print(f"{'layout':<10}{'ranges ms':>11}{'views ms':>11}{theirs}")
    for setup in make_setups(vllm, arguments.layers, num_blocks):
        batch = build_batch(case, [setup.group], num_blocks, 1000, np.random.default_rng(0))
        found = compare(setup, batch, num_blocks, vllm, arguments.repeats)
        row = f"{setup.name:<10}{found['ranges'] * 1e3:>11.3f}{found['views'] * 1e3:>11.1f}"
        if vllm:
            row += f"{found['vllm'] * 1e3:>11.1f}{found['vllm'] / found['ranges']:>13.0f}"
            row += f"{found['vllm'] / found['views']:>12.2f}"
        print(row)
    if vllm is None:
        print(HOW_TO_GET_VLLM.format(reason=missing))


if __name__ == "__main__":
    main()
