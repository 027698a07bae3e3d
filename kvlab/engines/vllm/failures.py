"""Layer 2: what vLLM raised, as one line: what is wrong, by how much, and the mend.

Relies on the words of `_check_enough_kv_cache_memory` (`vllm/v1/core/kv_cache_utils.py` in 0.32,
`kv_cache_planning.py` in 0.33), of `request_memory` (`vllm/v1/worker/utils.py`) and of PyTorch's allocator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from kvlab.errors import CapacityError, EngineError, KvlabError

_NO_CACHE = "No available memory for the cache blocks"
_SHORT_CACHE = re.compile(
    r"max seq len\s+\((\d+)\), \(?([\d.]+) GiB KV cache is needed.*?memory \(([\d.]+) GiB\)", re.S
)
_FEW_TOKENS = re.compile(r"max seq len \((\d+)\) is larger than the maximum number of tokens.*?\((\d+)\)", re.S)
_LONGEST = re.compile(r"maximum model length is (\d+)")
_TAKEN = re.compile(
    r"Free memory on device (\S+) \(([\d./]+) GiB\) on startup is less than.*?\(([\d.]+), ([\d.]+) GiB\)", re.S
)
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"of which ([\d.]+ \w+) is free")


def load_failure(model: str, error: Exception, arguments: Mapping[str, Any]) -> KvlabError:
    """Why a model could not be loaded.

    Args:
        arguments: of vLLM's engine, as given.
    """
    if isinstance(error, KvlabError):
        return error
    said = str(error)
    share = arguments.get("gpu_memory_utilization", "vLLM's default")
    if is_out_of_memory(error):
        return CapacityError(
            f"model {model!r} does not fit: {_allocation(said)}; reduce num_hidden_layers or experts (--hf-overrides),"
            " or the query tokens of the cases"
        )
    if _NO_CACHE in said:
        return CapacityError(
            f"model {model!r}: weights and activations leave no memory for KV blocks; raise gpu_memory_utilization (now"
            f" {share}), reduce num_hidden_layers or experts (--hf-overrides), or the query tokens of the cases"
        )
    if found := _SHORT_CACHE.search(said):
        return _short_cache(model, f"{found[2]} GiB of KV", f"{found[3]} GiB are", found[1], said, arguments)
    if found := _FEW_TOKENS.search(said):
        return _short_cache(model, f"{found[1]} tokens of KV", f"{found[2]} tokens are", found[1], said, arguments)
    if found := _TAKEN.search(said):
        return CapacityError(
            f"model {model!r}: device {found[1]} has {found[2]} GiB free, but gpu_memory_utilization {found[3]} takes"
            f" {found[4]} GiB; end the other process, or lower it (--engine-arg gpu_memory_utilization=0.5)"
        )
    return EngineError(f"vLLM could not load model {model!r}: {one_line(error)}")


def forward_failure(where: str, error: Exception) -> KvlabError:
    """Why a step could not be run; the engine's other cases may still run."""
    if isinstance(error, KvlabError):
        return error
    if is_out_of_memory(error):
        return EngineError(
            f"{where}: no memory is left for the forward: {_allocation(str(error))}; take fewer requests or query"
            " tokens, or lower gpu_memory_utilization"
        )
    return EngineError(f"{where}: vLLM failed inside the forward: {one_line(error)}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is PyTorch's, on whatever device."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def one_line(error: BaseException) -> str:
    """An exception as one line: pydantic's say what is wrong in their second and third."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if hasattr(error, "errors") and len(lines) > 2:
        lines = [f"{lines[1]}: {lines[2].partition(' [type=')[0]}"]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _short_cache(
    model: str, needed: str, there: str, longest: str, said: str, arguments: Mapping[str, Any]
) -> CapacityError:
    fits = _LONGEST.search(said)
    shorten = f"shorten K to at most {fits[1]} tokens" if fits else "shorten K"
    if arguments.get("num_gpu_blocks_override"):
        mend = f"enlarge --num-kv-blocks (now {arguments['num_gpu_blocks_override']}), or {shorten}"
    else:
        mend = f"{shorten}, or raise gpu_memory_utilization"
    return CapacityError(
        f"model {model!r}: one request of {longest} tokens needs {needed}, {there} there for it; {mend}"
    )


def _allocation(said: str) -> str:
    wanted, free = _WANTED.search(said), _FREE.search(said)
    if wanted is None:
        return one_line(RuntimeError(said))
    return f"an allocation of {wanted[1]} failed" + (f" with {free[1]} free" if free else "")
