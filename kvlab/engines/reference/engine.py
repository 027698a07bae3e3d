"""Layer 2: the embedded engine: small decoders in pure PyTorch over caches laid out as vLLM's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from kvlab.cases import Case
from kvlab.engines.base import Engine, Step
from kvlab.engines.reference.attention import Observer
from kvlab.engines.reference.caches import attention_groups, build_caches, kv_cache_groups
from kvlab.engines.reference.model import Model, cache_pages, init_weights
from kvlab.engines.reference.plan import Plan, build_plan
from kvlab.engines.reference.presets import ReferenceConfig, find_config
from kvlab.engines.reference.selection import Chosen
from kvlab.errors import EngineError
from kvlab.kv.batch import Batch
from kvlab.kv.specs import is_recurrent

# The default pool: four requests of 8,192 tokens.
_POOL_REQUESTS, _POOL_TOKENS = 4, 8192


class ReferenceEngine(Engine):
    """A reference model with its caches.

    Args:
        config: the model.
        device: where it runs.
        num_kv_blocks: allocator blocks of the pool, the null block included; None for four requests of 8,192 tokens.
        dtype: of weights and activations; caches keep their own.
        seed: of the weights.
    """

    name = "reference"

    def __init__(
        self,
        config: ReferenceConfig,
        device: torch.device,
        num_kv_blocks: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        groups = kv_cache_groups(config)
        if num_kv_blocks is None:
            num_kv_blocks = 1 + _POOL_REQUESTS * sum(
                1 if is_recurrent(g.kv_cache_spec) else -(-_POOL_TOKENS // g.kv_cache_spec.block_size) for g in groups
            )
        if num_kv_blocks < 2:
            raise EngineError(f"num_kv_blocks is {num_kv_blocks}; give at least 2, the null block and one more")
        self.config, self.model, self.device, self.dtype, self.seed = config, config.name, device, dtype, seed
        self.num_blocks = num_kv_blocks
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_model_len
        self.topk = config.topk if "dsa" in config.pattern else None
        self.caches = build_caches(groups, num_kv_blocks, device)
        self.kv_caches = self.caches.tensors
        self.kv_cache_groups = self.caches.groups
        self.attn_groups = attention_groups(self.caches.groups)
        self.formats = {}
        self.block_dims = dict.fromkeys(self.kv_caches, 0)
        with torch.inference_mode():
            self.network = Model(config, self.caches)
            init_weights(self.network, seed)
            self.network.to(device=device, dtype=dtype)
        self._pages = [
            None if is_recurrent(group.kv_cache_spec) else cache_pages(self.caches, g, group.layer_names[0])
            for g, group in enumerate(self.caches.groups)
        ]

    def prepare(self, case: Case, seed: int = 0) -> ReferenceStep:
        self.refuse_second_step(case)
        step = ReferenceStep(self, case, self.build(case, seed))
        # A step holds nothing but memory: one that was dropped is as good as closed.
        self._open_step = weakref.ref(step)
        return step

    @torch.inference_mode()
    def compute(self, batches: Iterable[Batch], seed: int = 0) -> None:
        for batch in batches:
            self.network(self.plan(batch))

    def plan(self, batch: Batch) -> Plan:
        """The batch as index tensors."""
        rope = (self.config.rope_width, self.config.rope_theta)
        return build_plan(batch, self.caches.groups, self._pages, *rope, self.device)

    def provenance(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "model": self.model,
            "geometry": asdict(self.config),
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "weight_seed": self.seed,
            "device": str(self.device),
            "num_kv_blocks": self.num_blocks,
            "kv_buffer_bytes": self.caches.buffer.numel(),
            "kv_block_stride_bytes": self.caches.block_stride,
            "kv_cache_groups": [
                {
                    "spec": type(group.kv_cache_spec).__name__,
                    "layers": list(group.layer_names),
                    "block_size": group.kv_cache_spec.block_size,
                    "page_bytes": group.kv_cache_spec.page_size_bytes,
                }
                for group in self.kv_cache_groups
            ],
        }


class ReferenceStep(Step):
    """One batch, its index tensors on the device.

    Args:
        batch: from `build_batch` over the engine's groups, or a later step over the same blocks.
    """

    engine: ReferenceEngine

    def __init__(self, engine: ReferenceEngine, case: Case, batch: Batch) -> None:
        super().__init__(engine, case, batch)
        self._plan: Plan | None = engine.plan(batch)

    def forward(self) -> torch.Tensor:
        return self.observe(None)

    @torch.inference_mode()
    def observe(self, observer: Observer | None) -> torch.Tensor:
        """`forward`, with `observer` called on what each layer produces; see `Model.forward`.

        Raises:
            EngineError: when the step is closed.
        """
        if self._plan is None:
            raise EngineError(f"case {self.case.name!r}: the step is closed; prepare it again")
        return self.engine.network(self._plan, observer)

    def selection(self) -> dict[str, torch.Tensor]:
        chosen = Chosen(self.engine.config.topk)
        self.restore()
        self.observe(chosen.observe)
        assert self._plan is not None
        return chosen.by_layer(self._plan)

    def first_nonfinite(self) -> str | None:
        found: list[str] = []

        def check(name: str, tensor: torch.Tensor) -> None:
            if not found and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                found.append(name)

        self.restore()
        self.observe(check)
        return found[0] if found else None

    def close(self) -> None:
        super().close()
        self._plan = None


def load_reference(
    model: str,
    *,
    device: str | torch.device | None = None,
    num_kv_blocks: int | None = None,
    topk: int | None = None,
    max_model_len: int | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    **overrides: Any,
) -> ReferenceEngine:
    """Load a preset with seeded random weights.

    Args:
        model: `tiny-dense`, `tiny-swa`, `tiny-mla`, `tiny-dsa` or `tiny-hybrid`.
        device: the current CUDA device where there is one, else the CPU.
        num_kv_blocks: allocator blocks of the pool; enough for four requests of 8,192 tokens unless given.
        topk: tokens that a sparse query attends to.
        max_model_len: longest context, tokens.
        dtype: of weights and activations, e.g. `bfloat16`; float32 on a CPU, bfloat16 on CUDA unless given.
        seed: of the weights.
        overrides: any other field of `ReferenceConfig`, e.g. `num_layers=32, hidden_size=4096`.

    Raises:
        EngineError: for an unknown preset, field, dtype or device, with those that exist.
        CapacityError: when the caches do not fit.
    """
    given = {"topk": topk, "max_model_len": max_model_len}
    config = find_config(model, **{k: v for k, v in given.items() if v is not None}, **overrides)
    place = _device(device)
    kind = _dtype(dtype) if dtype is not None else torch.bfloat16 if place.type == "cuda" else torch.float32
    return ReferenceEngine(config, place, num_kv_blocks, kind, seed)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise EngineError(f"device {device!r} is unknown; give cpu or cuda") from None
    if place.type not in ("cpu", "cuda"):
        raise EngineError(f"device {device!r}: the reference engine runs on cpu and cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device {device!r}: PyTorch sees no CUDA device here; give device='cpu'")
    return place


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize >= 2):
        raise EngineError(f"dtype {dtype!r} is unknown; give float32, bfloat16 or float16")
    return found
