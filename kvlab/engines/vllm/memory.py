"""Layer 2: how much memory a model's weights need, and how much there is.

The model is built on the meta device by `transformers`, which allocates nothing; vLLM stores the same parameters.
Relies on `current_platform` (`vllm/platforms/interface.py`), which asks a GPU without starting CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.engines.presets import ModelSource

# Bytes of a parameter under a quantisation; the least where a name stands for several.
_QUANTISED = {"fp8": 1.0, "compressed-tensors": 0.5, "mxfp4": 0.5, "awq": 0.5, "gptq": 0.5, "modelopt": 0.5}
_CGROUP = Path("/sys/fs/cgroup")


def weight_bytes(source: ModelSource, options: Mapping[str, Any]) -> int | None:
    """Bytes of the weights, at least; None for a model that `transformers` does not know.

    Args:
        source: the model, its configuration as it will be loaded.
        options: as of `load_vllm`; `dtype` and `quantization` count.
    """
    count = parameter_count(source.config)
    return None if count is None else int(count * _bytes_each(source, options))


def parameter_count(config: Mapping[str, Any]) -> int | None:
    """Parameters of a model; None for one that `transformers` does not know, or does not build from this alone."""
    if "model_type" not in config or "vision_config" in config:
        return None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    except Exception:  # an estimate only: vLLM will say what is wrong with the model, where something is
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def free_bytes(device: str) -> int:
    """Memory that this process can take: all of the GPU's, or what the machine (or its container) has left."""
    if device == "cuda":
        from vllm.platforms import current_platform

        return int(current_platform.get_device_total_memory())
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available
    return min(available, limit - used)


def _bytes_each(source: ModelSource, options: Mapping[str, Any]) -> float:
    method = options.get("quantization") or (source.config.get("quantization_config") or {}).get("quant_method")
    if method:
        return 0.5 if "expert_dtype" in str(source.config.get("quantization_config")) else _QUANTISED.get(method, 0.5)
    dtype = options.get("dtype")
    if dtype in ("float32", "float"):
        return 4.0
    return 2.0
