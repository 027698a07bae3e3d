"""Layer 2: a model loaded in vLLM, or nothing left of the attempt.

Relies on `vllm/entrypoints/llm.py` (LLM.from_engine_args) and `vllm/engine/arg_utils.py` (EngineArgs).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvlab.cases import Case
from kvlab.engines.vllm.amx import without_amx_attention
from kvlab.engines.vllm.arguments import engine_arguments, set_environment
from kvlab.engines.vllm.engine import VllmEngine, clean_up
from kvlab.engines.vllm.failures import load_failure
from kvlab.engines.vllm.flavour import installed_flavour
from kvlab.engines.vllm.leftovers import release_frames
from kvlab.engines.vllm.pool import sized_by


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
        num_kv_blocks: blocks of the pool; by default what a GPU's memory holds, or on a CPU what the cases need.
        arguments: any further `EngineArgs` fields.

    Raises:
        EngineError: for an unsupported vLLM, architecture or argument.
        CapacityError: for a model or cases that do not fit.
        FormatError, GeometryError: for a cache that kvlab does not know.
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

    name = Path(model).name if Path(model).is_dir() else model
    # A GPU's pool is its memory, as in serving; a CPU's would be whole GiB that nothing uses.
    by_cases = flavour.device == "cpu" and cases and num_kv_blocks is None
    llm = None
    try:
        args = EngineArgs(**wanted)
        if flavour.device == "cuda":
            args.compilation_config.mode = CompilationMode.NONE
            args.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        with ExitStack() as loading:
            notes = loading.enter_context(without_amx_attention()) if flavour.device == "cpu" else []
            if by_cases:
                loading.enter_context(sized_by(cases))
            llm = LLM.from_engine_args(args) if hasattr(LLM, "from_engine_args") else LLM(**wanted)
        return VllmEngine(llm, name, flavour, wanted, routing, notes)
    except BaseException as error:  # whatever vLLM's parts raise, and an interrupt: a notebook keeps either
        failure = load_failure(name, error, wanted) if isinstance(error, Exception) else error
        release_frames(error)
        # What ended the load is what is told, not what its remains then raise.
        if llm is not None:
            with suppress(Exception):
                llm.llm_engine.engine_core.shutdown()
        del llm
        with suppress(Exception):
            clean_up()
        if failure is error:
            raise
        raise failure from error
