"""Load vLLM's forward benchmark: from an installed vLLM, or from its Python sources alone.

The sources are a wheel unpacked anywhere (`unzip vllm-*.whl 'vllm/*'`). Only the benchmark's own modules, the KV cache
interface and their pure-Python neighbours are then imported; what would need compiled code is a stand-in that holds its
arguments. The functions under comparison are vLLM's own, unchanged.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class VllmForward:
    """vLLM's modules of the same job: `batch`, `kv_init`, `shapes`, and the specs' `interface`."""

    version: str
    batch: ModuleType
    kv_init: ModuleType
    shapes: ModuleType
    interface: ModuleType


def load_vllm(source: str | Path | None = None) -> VllmForward:
    """Import from `source`, a folder that holds `vllm/`, or else the installed vLLM.

    Raises:
        ImportError: where there is no vLLM, or one without `vllm.benchmarks.forward` (it came with 0.33).
    """
    version = import_module("vllm").__version__ if source is None else _prepare_stubs(Path(source))
    return VllmForward(
        version,
        import_module("vllm.benchmarks.forward.batch"),
        import_module("vllm.benchmarks.forward.kv_init"),
        import_module("vllm.benchmarks.forward.shapes"),
        import_module("vllm.v1.kv_cache_interface"),
    )


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _Arguments(SimpleNamespace):
    """A constructor's keyword arguments as attributes."""


@dataclass
class _SchedulerOutput:
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0

    @classmethod
    def make_empty(cls) -> _SchedulerOutput:
        return cls()


def _dtype_size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def _prepare_stubs(source: Path) -> str:
    root = source / "vllm"
    if not (root / "benchmarks" / "forward" / "batch.py").is_file():
        raise ImportError(f"{source} holds no vllm/benchmarks/forward; unpack a vLLM wheel of 0.33 or later there")
    if "vllm" in sys.modules:
        raise ImportError("a vllm is imported already; load the sources in a process of their own")
    # A package without its __init__, which would import the whole engine.
    package = ModuleType("vllm")
    package.__path__ = [str(root)]
    sys.modules["vllm"] = package
    stubs = {
        "vllm.logger": {"init_logger": lambda name: _Silent()},
        "vllm.sampling_params": {"SamplingParams": _Arguments},
        "vllm.utils.torch_utils": {"get_dtype_size": _dtype_size},
        "vllm.v1.attention.backends.registry": {"MambaAttentionBackendEnum": SimpleNamespace(MAMBA2="mamba2")},
        "vllm.v1.core.sched.output": {"NewRequestData": _Arguments, "SchedulerOutput": _SchedulerOutput},
    }
    for name, attributes in stubs.items():
        stub = ModuleType(name)
        vars(stub).update(attributes)
        sys.modules[name] = stub
    try:
        import_module("regex")
    except ImportError:
        sys.modules["regex"] = import_module("re")
    package.__version__ = import_module("vllm._version").__version__  # type: ignore[attr-defined]
    return str(package.__version__)
