"""Layer 2: the reference engine: small real decoders in pure PyTorch, on CPU or CUDA, over vLLM's cache layouts."""

from kvlab.engines.reference.engine import ReferenceEngine, ReferenceStep, load_reference
from kvlab.engines.reference.presets import PRESETS, ReferenceConfig

__all__ = ["PRESETS", "ReferenceConfig", "ReferenceEngine", "ReferenceStep", "load_reference"]
