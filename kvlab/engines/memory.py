"""Layer 2: memory of the device that the caches are on."""

from __future__ import annotations

import math

import torch

GIB = 2**30


def free_bytes(device: torch.device) -> float:
    """Bytes that can still be allocated; infinity on a CPU, which has swap and its own way to say no."""
    if device.type != "cuda":
        return math.inf
    # The allocator's cached blocks are as good as free.
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info(device)[0])
