"""Layer 2: engines by name."""

from __future__ import annotations

from typing import Any

from kvlab.engines.base import Engine
from kvlab.errors import EngineError

ENGINES = ("reference",)


def load_engine(model: str, engine: str = "reference", **options: Any) -> Engine:
    """Load a model on an engine.

    Args:
        model: a name from `kvlab models`.
        engine: `reference`, the embedded one.
        options: the engine's own: `device`, `num_kv_blocks`, `max_model_len`, `topk`, ...

    Raises:
        EngineError: for an unknown engine or model, or options that it does not take.
    """
    if engine == "reference":
        from kvlab.engines.reference.engine import load_reference

        return load_reference(model, **options)
    raise EngineError(f"engine {engine!r} is unknown; known are {', '.join(ENGINES)}")
