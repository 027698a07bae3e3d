"""Layer 1: one CUDA kernel that copies many byte runs; imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_runs(target, source, target_start, source_start, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy words `source[source_start[i] + j]` to `target[target_start[i] + j]` for j < count[i], a program a run.

    Args:
        target, source: integer words of 1, 2, 4 or 8 bytes.
        target_start, source_start: int64, in words.
        count: int32, at most BLOCK.
    """
    run = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < tl.load(count + run)
    words = tl.load(source + tl.load(source_start + run) + offsets, mask=inside)
    tl.store(target + tl.load(target_start + run) + offsets, words, mask=inside)
