"""Layer 2: vLLM's engine arguments for timing one exact batch.

Relies on `vllm/engine/arg_utils.py` (EngineArgs) and on the environment that `vllm/benchmarks/forward/main.py` sets:
one process, no scheduler, no CUDA graphs or compilation of vLLM's own.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvlab.cases import Case
from kvlab.engines.presets import find_model
from kvlab.engines.vllm.flavour import Flavour

# A prefix hit may recompute a window more than its query; no window of a supported model is longer.
_REPLAY_ROOM = 1024
_LEAST_BATCHED_TOKENS = 8192
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Marks the variables above as set by kvlab, not by a launcher, and by which process: a child takes a port of its own.
_OWN_LAUNCH = "KVLAB_LAUNCH"
# Behind the longest request, for what a drafter writes.
_CONTEXT_ROOM = 16


def set_environment(flavour: Flavour, model: str) -> None:
    """What vLLM reads at import; it must run in this process, under one runner, without a launcher."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if flavour.runner == "v2" else "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Standard output is for results; what is an error to kvlab is raised, not logged.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    # Each case's first forward compiles exactly the shapes it needs.
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if flavour.device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    elif "RANK" not in os.environ or os.environ.get(_OWN_LAUNCH, me := str(os.getpid())) != me:
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(port.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ[_OWN_LAUNCH] = str(os.getpid())


def forget_launch() -> None:
    """Let the next model take a port of its own; a launcher's environment stays."""
    if os.environ.pop(_OWN_LAUNCH, None):
        for name in _LAUNCH:
            os.environ.pop(name, None)


def engine_arguments(
    flavour: Flavour, model: str, cases: Sequence[Case], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs`.

    Args:
        model: a folder with a `config.json`, or a hub name.
        cases: what will be run; they size the batch and, unless given, the longest context.
        overrides: any further `EngineArgs` fields, which win.

    Raises:
        EngineError: for a model without a readable configuration.
    """
    source = find_model(model).overridden(overrides.get("hf_overrides"))
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max((len(case.requests) for case in cases), default=64),
        "max_num_batched_tokens": max(
            [_LEAST_BATCHED_TOKENS]
            + [c.num_tokens + _REPLAY_ROOM * sum(r.prefix_hit for r in c.requests) for c in cases]
        ),
    }
    if cases:
        longest = max(r.kv_len for case in cases for r in case.requests) + _CONTEXT_ROOM
        arguments["max_model_len"] = min(longest, source.longest_context or longest)
    if "vision_config" in source.config:
        # Of no kind, or vLLM hands the model embeddings of tokens that are not the case's.
        arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0, "audio": 0}
    if flavour.device == "cpu":
        arguments |= {"enforce_eager": True, "async_scheduling": False}
    else:
        arguments |= {"distributed_executor_backend": "external_launcher", "gpu_memory_utilization": 0.85}
        if not find_spec("flashinfer"):
            # vLLM's default prefill of gated delta nets needs it.
            arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    return arguments | dict(overrides)
