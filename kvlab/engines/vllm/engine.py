"""Layer 2: the vLLM engine: a model loaded once, and steps that are vLLM's own forwards.

Relies on the model runner of `vllm/entrypoints/llm.py` (LLM) and, for MoE models, on
`vllm/benchmarks/forward/routing.py` (install_routing; vLLM 0.33).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

from kvlab.cases import Case
from kvlab.engines.base import Engine, Step
from kvlab.engines.prefill import Prefilled
from kvlab.engines.vllm.arguments import forget_launch
from kvlab.engines.vllm.caches import (
    attention_groups,
    is_scaled,
    layer_caches,
    layer_formats,
    layer_scales,
    scale_notes,
)
from kvlab.engines.vllm.experts import counted_experts
from kvlab.engines.vllm.failures import forward_failure
from kvlab.engines.vllm.finite import first_nonfinite_module
from kvlab.engines.vllm.flavour import Flavour
from kvlab.engines.vllm.forward import CaughtForward
from kvlab.engines.vllm.leftovers import ReleasedFrames, drop_leftovers, release_frames
from kvlab.engines.vllm.routing import Routing, install_routing, routing_note
from kvlab.engines.vllm.selection import watched_selection
from kvlab.errors import CaseError, EngineError
from kvlab.kv.batch import Batch
from kvlab.kv.fills import Fill, FillPlans, zero_kv_blocks
from kvlab.kv.snapshot import Snapshot

# A longer chunk of a prefill fills a GPU no better and needs more memory for activations.
_PREFILL_TOKENS = 8192


class VllmEngine(Engine):
    """A model in vLLM; see `kvlab.engines.vllm.loading.load_vllm`."""

    name = "vllm"

    def __init__(
        self, llm: Any, model: str, flavour: Flavour, arguments: dict[str, Any], routing: str, notes: Sequence[str]
    ) -> None:
        self._llm = llm  # the runner is torn down with it
        self._runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._prefills: WeakSet[Prefilled] = WeakSet()
        self.model = model
        self.flavour = flavour
        self.arguments = arguments
        self.device = self.runner.device
        config = self.runner.kv_cache_config
        self.kv_cache_groups = config.kv_cache_groups
        self.num_blocks = config.num_blocks
        self.vocab_size = self.runner.model_config.get_vocab_size()
        self.max_model_len = self.runner.model_config.max_model_len
        self.topk = getattr(self.runner.model_config.hf_text_config, "index_topk", None)
        self.dcp_size = self.runner.parallel_config.decode_context_parallel_size
        self.kv_caches = layer_caches(self.runner)
        self.attn_groups = attention_groups(self.runner, self.kv_caches)
        cache_dtype = self.runner.cache_config.cache_dtype
        scales = layer_scales(self.runner)
        self.formats = layer_formats(self.attn_groups, self.kv_caches, cache_dtype, scales)
        self.scales = {name: scales[name] for name, fmt in self.formats.items() if is_scaled(fmt) and name in scales}
        self.notes = (*notes, *scale_notes(self.scales))
        # `create_kv_cache_views` (`vllm/v1/kv_cache_interface.py`) puts blocks first, whatever the strides.
        self.block_dims = dict.fromkeys(self.kv_caches, 0)
        self.routing = Routing.resolve(routing, self.runner.model, flavour, arguments["load_format"] == "dummy")
        self.routing_note = routing_note(self.routing, self.runner.model)
        self.prefill_tokens = min(self.runner.max_num_tokens, _PREFILL_TOKENS)

    @property
    def runner(self) -> Any:
        """vLLM's model runner.

        Raises:
            EngineError: after `close`.
        """
        if self._runner is None:
            raise EngineError(f"model {self.model!r} was closed; load it again (load_engine)")
        return self._runner

    def refuse_second_step(self, case: Case) -> None:
        super().refuse_second_step(case)
        _ = self.runner

    def prepare(self, case: Case, seed: int = 0) -> VllmStep:
        self.refuse_second_step(case)
        drafts = max(request.num_draft_tokens for request in case.requests)
        steps = getattr(self.runner, "num_speculative_steps", drafts)
        if drafts > steps:
            raise CaseError(
                f"case {case.name!r} verifies {drafts} drafts, but the model was loaded for {steps}; load it with"
                f' --engine-arg \'speculative_config={{"method": "ngram", "num_speculative_tokens": {drafts}}}\''
            )
        with ReleasedFrames():
            step = VllmStep(self, case, self.build(case, seed), seed)
        # Kept alive until it is closed: its requests stay in the runner, and its routing in the model.
        self._open_step = lambda: step
        return step

    def prefill(self, case: Case, seed: int = 0) -> Prefilled:
        with ReleasedFrames():
            prefilled = super().prefill(case, seed)
        self._prefills.add(prefilled)
        return prefilled

    def compute(self, batches: Iterable[Batch], seed: int = 0) -> None:
        routing = install_routing(self.runner, self.routing, self.prefill_tokens, seed)
        try:
            for batch in batches:
                CaughtForward(self.runner, batch, self.flavour).finish()
        except Exception as error:  # whatever the model or a kernel raises
            raise forward_failure("a prefill", error) from error
        finally:
            routing.remove()

    def provenance(self) -> dict[str, Any]:
        config = self.runner.model_config.hf_config
        return {
            "geometry": {
                "architectures": getattr(config, "architectures", None),
                "reduced": getattr(config, "kvlab_reduced", None),
                "kv_cache_dtype": self.runner.cache_config.cache_dtype,
                "num_blocks": self.num_blocks,
                "groups": [
                    {
                        "spec": type(group.kv_cache_spec).__name__,
                        "block_size": group.kv_cache_spec.block_size,
                        "layers": len(group.layer_names),
                    }
                    for group in self.kv_cache_groups
                ],
                "formats": sorted({fmt.name for fmt in self.formats.values()}),
                **self._told_scales(),
                "backends": sorted({group.backend for group in self.attn_groups}),
                # Another top-k, depth or weights is another study, which must not be resumed as this one.
                "hf_overrides": self.arguments.get("hf_overrides"),
                "load_format": self.arguments["load_format"],
            },
            "routing_note": self.routing_note,
            # Of a model that drafts, too: `vllm bench forward` adds the drafter's.
            "timing_scope": "target model's forward",
            **({"notes": list(self.notes)} if self.notes else {}),
            "runner": f"{self.flavour.distribution} {self.flavour.runner}",
            "engine_arguments": {key: value for key, value in self.arguments.items() if key != "model"},
        }

    def _told_scales(self) -> dict[str, Any]:
        """Least and largest scale of fp8 caches, K's and V's; nothing where all are 1."""
        pairs = self.scales.values()
        if all(pair == (1.0, 1.0) for pair in pairs):
            return {}
        return {f"{part}_scales": [min(of), max(of)] for part, of in zip("kv", zip(*pairs, strict=True), strict=True)}

    def close(self) -> None:
        """Give back memory, the distributed groups and their port; harmless when called twice.

        The engine, its steps and its prefills may be kept: they hold nothing of the model any more.
        """
        if self._llm is None:
            return
        step = self._open_step() if self._open_step else None
        if step is not None:
            with suppress(Exception):  # after a failed kernel no call succeeds, but the memory must go
                step.close()
        self._open_step = None
        for prefilled in self._prefills:
            prefilled.drop()  # whoever keeps it would keep the caches
        self.kv_caches, self.attn_groups, self.kv_cache_groups = {}, [], []
        core = self._llm.llm_engine.engine_core
        self._llm = self._runner = None
        try:
            core.shutdown()
        finally:
            del core
            clean_up()


class VllmStep(Step):
    """One batch as vLLM's runner prepared it; `forward` repeats its model call."""

    engine: VllmEngine

    def __init__(self, engine: VllmEngine, case: Case, batch: Batch, seed: int) -> None:
        super().__init__(engine, case, batch)
        with ExitStack() as undo:
            undo.callback(self._let_go)
            zero_kv_blocks(engine.kv_caches, engine.attn_groups, batch, engine.num_blocks, block_dims=engine.block_dims)
            routing = install_routing(engine.runner, engine.routing, batch.num_tokens, seed)
            undo.callback(routing.remove)
            try:
                self._forward = CaughtForward(engine.runner, batch, engine.flavour)
            except Exception as error:  # whatever the model or a kernel raises
                raise forward_failure(f"case {case.name!r}", error) from error
            undo.callback(self._forward.finish)
            routing.check_applied()
            self._undo = undo.pop_all()

    def fill(self, fill: Fill | str, seed: int = 0) -> None:
        self._refuse_closed()
        with ReleasedFrames():
            super().fill(fill, seed)

    def restore(self) -> None:
        self._refuse_closed()
        super().restore()

    def forward(self) -> torch.Tensor:
        self._refuse_closed()
        try:
            return self._forward()
        except Exception as error:  # whatever the model or a kernel raises
            release_frames(error)
            raise forward_failure(f"case {self.case.name!r}", error) from error

    def first_nonfinite(self) -> str | None:
        self.restore()
        with ReleasedFrames():
            return first_nonfinite_module(self.engine.runner.model, self.forward)

    def selection(self) -> dict[str, torch.Tensor]:
        self.restore()
        with ReleasedFrames(), watched_selection(self.engine.runner.model, self.batch.num_tokens) as chosen:
            self.forward()
        order = self._forward.order().to(self.engine.device)
        return {name: positions.index_select(0, order) for name, positions in chosen.items()}

    def expert_loads(self) -> dict[str, torch.Tensor]:
        self.restore()
        with ReleasedFrames(), counted_experts(self.engine.runner.model) as loads:
            self.forward()
        return loads

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.Stream | None]:
        from vllm.distributed.parallel_state import graph_capture

        with graph_capture(self.engine.device) as context:
            yield context.stream

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._undo.close()

    def _refuse_closed(self) -> None:
        if self.closed:
            raise EngineError(f"case {self.case.name!r}: the step is closed; prepare it again")

    def _let_go(self) -> None:
        """Drop every view of the caches: one of them keeps them all."""
        self.touched, self._snapshot, self._plans, self._prefilled = [], Snapshot([]), FillPlans(), None


def clean_up() -> None:
    """Free what no longer has an owner, and the distributed groups with their port."""
    from vllm.distributed import cleanup_dist_env_and_memory

    drop_leftovers()
    cleanup_dist_env_and_memory()
    forget_launch()
