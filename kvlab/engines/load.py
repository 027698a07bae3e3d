"""Layer 2: engines by name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvlab.engines.base import Engine
from kvlab.engines.presets import find_model, merged, vllm_presets
from kvlab.errors import EngineError

ENGINES = ("reference", "vllm")
_ONLY_VLLM = ("cases", "routing", "kv_cache_dtype", "load_format", "hf_overrides")


def load_engine(model: str, engine: str = "reference", **options: Any) -> Engine:
    """Load a model on an engine.

    Args:
        model: a name from `kvlab models`; for vLLM also a folder with a `config.json`, or a hub name `ORG/NAME`.
        engine: `reference`, the embedded one, or `vllm`.
        options: `num_kv_blocks`, `max_model_len`, `topk`, `seed`, and the engine's own: of `load_reference` or of
            `load_vllm` (`cases`, `routing`, `kv_cache_dtype`, `load_format`, `hf_overrides`, fields of `EngineArgs`).

    Raises:
        EngineError: for an unknown engine or model, options that it does not take, or a model that cannot be loaded.
    """
    if engine not in ENGINES:
        raise EngineError(f"engine {engine!r} is unknown; known are {', '.join(ENGINES)}")
    begin = time.perf_counter()
    loaded = _load_reference(model, options) if engine == "reference" else _load_vllm(model, options)
    loaded.load_s = time.perf_counter() - begin
    return loaded


def longest_context(model: str, engine: str, options: Mapping[str, Any]) -> int | None:
    """Tokens of KV that the model will take, where that is known before it is loaded.

    Raises:
        EngineError: for a model that cannot be found.
    """
    if engine != "vllm":
        return None
    known = [find_model(model).overridden(options.get("hf_overrides")).longest_context, options.get("max_model_len")]
    return min((length for length in known if length), default=None)


def _load_reference(model: str, options: Mapping[str, Any]) -> Engine:
    from kvlab.engines.reference.engine import load_reference
    from kvlab.engines.reference.presets import PRESETS

    for name in _ONLY_VLLM:
        if name in options:
            raise EngineError(f"{name} is an option of engine 'vllm'; drop it, or load the model there")
    if model not in PRESETS and model in vllm_presets():
        raise EngineError(f"model {model!r} is for engine 'vllm'; the reference engine has {', '.join(PRESETS)}")
    return load_reference(model, **options)


def _load_vllm(model: str, options: Mapping[str, Any]) -> Engine:
    from kvlab.engines.vllm.admission import admit
    from kvlab.engines.vllm.flavour import installed_flavour

    if "device" in options:
        raise EngineError(
            "device is an option of engine 'reference': vLLM runs on the device it was built for; drop it"
        )
    source = find_model(model)
    given = dict(options)
    topk = given.pop("topk", None)
    if topk is not None:
        given["hf_overrides"] = merged(given.get("hf_overrides") or {}, source.topk_override(topk))
    admit(source.overridden(given.get("hf_overrides")), installed_flavour(), given)
    from kvlab.engines.vllm.loading import load_vllm

    return load_vllm(source.location, **given)
