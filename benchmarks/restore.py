#!/usr/bin/env python3
"""Restoring the touched views inside a CUDA graph: kvlab's snapshot beside one copy a view, and the memory's limit.

    python benchmarks/restore.py        # 256 requests x 61 layers, about 2 GB; needs a GPU

Each way is captured as a CUDA graph and replayed; medians of 20 replays by CUDA events, all in one process.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from kvlab.kv.snapshot import Snapshot, distinct_views


def touched_views(requests: int, layers: int, blocks: int) -> list[torch.Tensor]:
    """The last `blocks` blocks of each request in each layer of a latent cache, all layers in one buffer."""
    page, per_request = 64 * 656, blocks + 5
    num_blocks = 1 + requests * per_request
    buffer = torch.zeros(layers * num_blocks * page, dtype=torch.uint8, device="cuda")
    caches = [buffer[i * num_blocks * page :][: num_blocks * page].view(num_blocks, 64, 656) for i in range(layers)]
    ends = [1 + (r + 1) * per_request for r in range(requests)]
    return [cache[end - blocks : end] for cache in caches for end in ends]


def replay_ms(work: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    times = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--blocks", type=int, default=3)
    args = parser.parse_args()
    views = touched_views(args.requests, args.layers, args.blocks)
    num_bytes = sum(v.numel() for v in views)
    copies = [v.clone() for v in distinct_views(views)]
    snapshot = Snapshot(views)
    snapshot.save()
    flat, other = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))

    def one_copy_a_view() -> None:
        for view, saved in zip(views, copies, strict=True):
            view.copy_(saved)

    ways: dict[str, Callable[[], object]] = {
        "one copy a view": one_copy_a_view,
        "torch._foreach_copy_": lambda: torch._foreach_copy_(views, copies),
        f"kvlab ({snapshot.method})": snapshot.restore,
        "one contiguous copy": lambda: flat.copy_(other),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(views)} views, {num_bytes / 1e9:.2f} GB")
    times = {name: replay_ms(work) for name, work in ways.items()}
    slowest = times["one copy a view"]
    for name, ms in times.items():
        print(f"{name:22s} {ms:8.2f} ms  {2 * num_bytes / ms / 1e9:6.2f} TB/s read and written  {slowest / ms:6.1f} x")


if __name__ == "__main__":
    main()
