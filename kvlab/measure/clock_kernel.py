"""Layer 3: a CUDA kernel that notes what the SMs' counters say; imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"


@triton.jit
def mark_clock(marks, SLOTS: tl.constexpr):
    """Cycles and nanoseconds so far of the SM that a program runs on, in that SM's row.

    Args:
        marks: [SLOTS, 2] int64, in memory of the card or pinned memory of the host. SMs beyond SLOTS note nothing.
    """
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    ns = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(marks + 2 * sm, cycles, mask=sm < SLOTS)
    tl.store(marks + 2 * sm + 1, ns, mask=sm < SLOTS)
