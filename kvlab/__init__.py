"""kvlab: does it matter what is in the KV cache? Time LLM forward steps under chosen KV contents, with a verdict.

Names are loaded on first use, so that importing the package costs no PyTorch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.cases import Case, Request, jitter_kv_lens, load_cases, parse_case
    from kvlab.engines.base import Engine, Step
    from kvlab.engines.load import load_engine
    from kvlab.errors import KvlabError
    from kvlab.grid import sweep
    from kvlab.kv.batch import Batch, build_batch
    from kvlab.kv.fills import Fill, fill_kv_blocks, parse_fill, zero_kv_blocks
    from kvlab.kv.views import touched_block_ranges, touched_kv_views
    from kvlab.run import Run, concat, open_run
    from kvlab.study import check
    from kvlab.touched import touched_blocks, touched_table
    from kvlab.verification import verify

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Case",
    "Engine",
    "Fill",
    "KvlabError",
    "Request",
    "Run",
    "Step",
    "build_batch",
    "check",
    "concat",
    "fill_kv_blocks",
    "jitter_kv_lens",
    "load_cases",
    "load_engine",
    "open_run",
    "parse_case",
    "parse_fill",
    "sweep",
    "touched_block_ranges",
    "touched_blocks",
    "touched_kv_views",
    "touched_table",
    "verify",
    "zero_kv_blocks",
]

_HOMES = {
    "kvlab.cases": ("Case", "Request", "jitter_kv_lens", "load_cases", "parse_case"),
    "kvlab.engines.base": ("Engine", "Step"),
    "kvlab.engines.load": ("load_engine",),
    "kvlab.errors": ("KvlabError",),
    "kvlab.kv.batch": ("Batch", "build_batch"),
    "kvlab.kv.fills": ("Fill", "fill_kv_blocks", "parse_fill", "zero_kv_blocks"),
    "kvlab.kv.views": ("touched_block_ranges", "touched_kv_views"),
    "kvlab.run": ("Run", "concat", "open_run"),
    "kvlab.study": ("check",),
    "kvlab.grid": ("sweep",),
    "kvlab.touched": ("touched_blocks", "touched_table"),
    "kvlab.verification": ("verify",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
