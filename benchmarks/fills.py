#!/usr/bin/env python3
"""Filling the blocks of a case with random values: kvlab beside the plain way, PyTorch's generator and the memory.

    python benchmarks/fills.py        # a GPU: 61 layers x 256 requests, 32 GB a format; a CPU: 4 x 8, 16 MB

Two groups of layers lie over one buffer and share one pool, as in vLLM, so that no two requests' blocks of a group are
adjacent. The plain way draws and encodes values layer by layer and request by request; `zero_` and `normal_` write as
many bytes in one piece. kvlab repeats a fill that it has planned, as a study's step does; `without a plan` each call
works it out anew. Times are whole calls, from the host's first line until the device is done; medians.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvlab.cases import Case, Request
from kvlab.kv.batch import Batch, build_batch
from kvlab.kv.draws import draw_method
from kvlab.kv.fills import FillPlans, fill_kv_blocks
from kvlab.kv.formats import DeepseekV4Format, Format, Fp8DsMlaFormat, Fp8Format, IndexerFormat, RawFormat
from kvlab.kv.views import layer_tensors

TOKENS = 64


@dataclass
class FullAttentionSpec:
    """kvlab reads the class name."""

    block_size: int = TOKENS


@dataclass
class Group:
    kv_cache_group_id: int
    layer_names: list[str]
    kv_cache_spec: FullAttentionSpec


# Format -> (type of the cache, its elements a token).
LAYOUTS: dict[str, tuple[Format, torch.dtype, int]] = {
    "bf16": (RawFormat(torch.bfloat16), torch.bfloat16, 576),
    "fp8 a tensor": (Fp8Format(), torch.float8_e4m3fn, 576),
    "fp8_ds_mla (656)": (Fp8DsMlaFormat(), torch.uint8, 656),
    "deepseek_v4 (584)": (DeepseekV4Format(), torch.uint8, 584),
    "indexer (132)": (IndexerFormat(), torch.uint8, 132),
}
# Those that are also filled with a quarter of the tokens zero, and with zeros.
MASKED = ("bf16", "fp8_ds_mla (656)")


@dataclass
class World:
    """Caches of one format, and a case over them."""

    fmt: Format
    kv_caches: dict[str, torch.Tensor]
    groups: list[Group]
    batch: Batch
    num_blocks: int

    @classmethod
    def build(cls, layout: str, layers: int, requests: int, num_bytes: int, device: torch.device) -> "World":
        fmt, dtype, width = LAYOUTS[layout]
        page = TOKENS * width * dtype.itemsize
        blocks = max(1, round(num_bytes / (2 * layers * requests * page)))
        groups = [Group(g, [f"{g}.{i}" for i in range(layers)], FullAttentionSpec()) for g in range(2)]
        num_blocks = 1 + 2 * requests * blocks
        case = Case("fill", (Request(1, blocks * TOKENS),) * requests)
        batch = build_batch(case, groups, num_blocks, 100, np.random.default_rng(0))
        buffer = torch.zeros(layers * num_blocks * page, dtype=torch.int8, device=device)
        rows = buffer.view(dtype).view(layers, num_blocks, TOKENS, width)
        caches = {f"{g}.{i}": rows[i] for g in range(2) for i in range(layers)}
        return cls(fmt, caches, groups, batch, num_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes that a fill writes."""
        block = next(iter(self.kv_caches.values()))[0]
        owned = sum(end - begin for ranges in self.batch.group_block_ranges for begin, end in ranges)
        return owned * len(self.groups[0].layer_names) * block.numel() * block.element_size()

    def fill(self, text: str, plans: FillPlans | None = None) -> None:
        formats = dict.fromkeys(self.kv_caches, self.fmt)
        fill_kv_blocks(self.kv_caches, self.groups, self.batch, self.num_blocks, text, formats=formats, plans=plans)

    def plain(self) -> None:
        for layer in layer_tensors(self.kv_caches, self.groups, self.num_blocks, 0):
            for begin, end in self.batch.group_block_ranges[layer.group_id]:
                view = layer.token_major(begin, end)
                shape = (*view.shape[:-1], self.fmt.width_of(view.shape[-1]))
                self.fmt.encode(torch.randn(shape, device=view.device), view)


def milliseconds(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Median of some calls after a first one, which compiles; a single call is not repeated."""
    taken = []
    for _ in range(times + (times > 1)):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken[-times:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--gigabytes", type=float)
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    layers, requests = args.layers or (61 if gpu else 4), args.requests or (256 if gpu else 8)
    num_bytes = int(1e9 * (args.gigabytes or (32 if gpu else 0.016)))
    name = torch.cuda.get_device_name(device) if gpu else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{device.type} ({name}), torch {torch.__version__}: {layers} layers in 2 groups, {requests} requests")
    print(f"kvlab draws by {draw_method(device)}")

    def show(what: str, work: Callable[[], object], size: int, values: int, times: int = 5) -> None:
        ms = milliseconds(work, device, times)
        speed = f"{size / ms / 1e9:6.2f} TB/s" if gpu else f"{size / ms / 1e6:6.3f} GB/s"
        print(f"{what:52s} {ms:9.2f} ms {speed} written {values / ms / 1e3:9.0f} M values/s")

    flat = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
    show("tensor.zero_()", flat.zero_, num_bytes, len(flat))
    show("tensor.normal_(), bf16", flat.normal_, num_bytes, len(flat))
    del flat
    for layout in LAYOUTS:
        world = World.build(layout, layers, requests, num_bytes, device)
        size = world.num_bytes
        token = size // (world.fmt.num_bytes if hasattr(world.fmt, "num_bytes") else LAYOUTS[layout][1].itemsize)
        values = token * (world.fmt.width if hasattr(world.fmt, "width") else 1)
        show(f"{layout}: values, then encode", world.plain, size, values, 1)
        for text in ("random", "random(zero_fraction=0.25)", "zeros") if layout in MASKED else ("random",):
            show(f"{layout}: kvlab {text}", partial(world.fill, text, FillPlans()), size, values)
        show(f"{layout}: kvlab random, without a plan", partial(world.fill, "random"), size, values)
        del world


if __name__ == "__main__":
    main()
