"""Layer 2: the vLLM engine: a model loaded once, and steps that are vLLM's own forwards.

Relies on `vllm/entrypoints/llm.py` (LLM.from_engine_args) and, for MoE models, on
`vllm/benchmarks/forward/routing.py` (install_routing; vLLM 0.33).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvlab.cases import Case
from kvlab.engines.base import Engine, Step
from kvlab.engines.vllm.arguments import engine_arguments, set_environment
from kvlab.engines.vllm.caches import attention_groups, layer_caches, layer_formats
from kvlab.engines.vllm.finite import first_nonfinite_module
from kvlab.engines.vllm.flavour import Flavour, installed_flavour
from kvlab.engines.vllm.forward import CaughtForward
from kvlab.engines.vllm.routing import Routing, install_routing
from kvlab.errors import CaseError, EngineError
from kvlab.kv.batch import Batch
from kvlab.kv.fills import zero_kv_blocks


class VllmEngine(Engine):
    """A model in vLLM; see `load_vllm`."""

    name = "vllm"

    def __init__(self, llm: Any, model: str, flavour: Flavour, arguments: dict[str, Any], routing: str) -> None:
        self._llm = llm  # the runner is torn down with it
        self.runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model = model
        self.flavour = flavour
        self.arguments = arguments
        self.device = self.runner.device
        config = self.runner.kv_cache_config
        self.kv_cache_groups = config.kv_cache_groups
        self.num_blocks = config.num_blocks
        self.vocab_size = self.runner.model_config.get_vocab_size()
        self.max_model_len = self.runner.model_config.max_model_len
        self.dcp_size = self.runner.parallel_config.decode_context_parallel_size
        self.kv_caches = layer_caches(self.runner)
        self.attn_groups = attention_groups(self.runner, self.kv_caches)
        cache_dtype = self.runner.cache_config.cache_dtype
        self.formats = layer_formats(self.attn_groups, self.kv_caches, cache_dtype)
        # `create_kv_cache_views` (`vllm/v1/kv_cache_interface.py`) puts blocks first, whatever the strides.
        self.block_dims = dict.fromkeys(self.kv_caches, 0)
        self.routing = Routing.resolve(routing, self.runner.model, flavour, arguments["load_format"] == "dummy")

    def prepare(self, case: Case, seed: int = 0) -> VllmStep:
        drafts = max(request.num_draft_tokens for request in case.requests)
        steps = getattr(self.runner, "num_speculative_steps", drafts)
        if drafts > steps:
            raise CaseError(
                f"case {case.name!r} verifies {drafts} drafts, but the model was loaded for {steps}; load it with"
                f' --engine-arg \'speculative_config={{"method": "ngram", "num_speculative_tokens": {drafts}}}\''
            )
        return VllmStep(self, case, self.build(case, seed), seed)

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
                "backends": sorted({group.backend for group in self.attn_groups}),
                # Another top-k, depth or weights is another study, which must not be resumed as this one.
                "hf_overrides": self.arguments.get("hf_overrides"),
                "load_format": self.arguments["load_format"],
            },
            "runner": f"{self.flavour.distribution} {self.flavour.runner}",
            "engine_arguments": {key: value for key, value in self.arguments.items() if key != "model"},
        }

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.kv_caches, self.attn_groups, self.kv_cache_groups = {}, [], []
        del self.runner, self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


class VllmStep(Step):
    """One batch as vLLM's runner prepared it; `forward` repeats its model call."""

    engine: VllmEngine

    def __init__(self, engine: VllmEngine, case: Case, batch: Batch, seed: int) -> None:
        super().__init__(engine, case, batch)
        zero_kv_blocks(engine.kv_caches, engine.attn_groups, batch, engine.num_blocks, block_dims=engine.block_dims)
        self._routing = install_routing(engine.runner, engine.routing, batch.num_tokens, seed)
        try:
            self._forward = CaughtForward(engine.runner, batch, engine.flavour)
            self._routing.check_applied()
        except EngineError:
            self._routing.remove()
            raise
        except Exception as error:  # whatever the model or a kernel raises
            self._routing.remove()
            raise EngineError(f"case {case.name!r}: vLLM failed inside the forward: {_last_line(error)}") from error

    def forward(self) -> torch.Tensor:
        return self._forward()

    def first_nonfinite(self) -> str | None:
        self.restore()
        return first_nonfinite_module(self.engine.runner.model, self._forward)

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.Stream | None]:
        from vllm.distributed.parallel_state import graph_capture

        with graph_capture(self.engine.device) as context:
            yield context.stream

    def close(self) -> None:
        self._routing.remove()
        self._forward.finish()


def load_vllm(
    model: str,
    *,
    cases: Sequence[Case] = (),
    routing: str = "auto",
    num_kv_blocks: int | None = None,
    max_model_len: int | None = None,
    kv_cache_dtype: str | None = None,
    load_format: str = "dummy",
    hf_overrides: dict[str, Any] | None = None,
    seed: int = 0,
    **arguments: Any,
) -> VllmEngine:
    """Load a model in this process.

    Args:
        model: a folder with a `config.json`, or a hub name where there is network.
        cases: what will be run; they size batch and context.
        routing: of MoE models, `balanced`, `real`, or `auto`: balanced with dummy weights where vLLM's fixture
            takes the model.
        num_kv_blocks: blocks of the pool; by default what the memory holds.
        arguments: any further `EngineArgs` fields.

    Raises:
        EngineError: for an unsupported vLLM, architecture or argument, or a model that does not fit.
    """
    flavour = installed_flavour()
    set_environment(flavour, model)
    given = {
        "num_gpu_blocks_override": num_kv_blocks,
        "max_model_len": max_model_len,
        "kv_cache_dtype": kv_cache_dtype,
        "load_format": load_format,
        "hf_overrides": hf_overrides,
        "seed": seed,
        **arguments,
    }
    wanted = engine_arguments(flavour, model, cases, {k: v for k, v in given.items() if v is not None})
    from vllm import LLM
    from vllm.config.compilation import CompilationMode, CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    try:
        args = EngineArgs(**wanted)
        if flavour.device == "cuda":
            args.compilation_config.mode = CompilationMode.NONE
            args.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        llm = LLM.from_engine_args(args) if hasattr(LLM, "from_engine_args") else LLM(**wanted)
    except torch.cuda.OutOfMemoryError as error:
        raise EngineError(f"model {model!r} does not fit: {_last_line(error)}; reduce layers or experts") from error
    except Exception as error:  # vLLM raises whatever its parts raise
        raise EngineError(f"vLLM could not load model {model!r}: {_last_line(error)}") from error
    return VllmEngine(llm, str(Path(model).name) if Path(model).is_dir() else model, flavour, wanted, routing)


def _last_line(error: BaseException) -> str:
    """An exception as one line: pydantic's say what is wrong in their second and third."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if hasattr(error, "errors") and len(lines) > 2:
        lines = [f"{lines[1]}: {lines[2].partition(' [type=')[0]}"]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
