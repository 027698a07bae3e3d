"""Layer 2: what speaks against loading a model, said in one line before minutes are spent on it.

Relies on the registry (`vllm/model_executor/models/registry.py`) and on `EngineArgs` (`vllm/engine/arg_utils.py`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvlab.cases import Case
from kvlab.engines.presets import ModelSource
from kvlab.engines.vllm.arguments import set_environment
from kvlab.engines.vllm.flavour import Flavour
from kvlab.engines.vllm.memory import free_bytes, weight_bytes
from kvlab.engines.vllm.routing import ROUTINGS
from kvlab.errors import CapacityError, CaseError, EngineError

# vLLM's `kv_cache_dtype` words whose formats are in `kvlab/kv/formats.py`; the others only vLLM's writers can make.
KV_CACHE_DTYPES = (
    *("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    *("fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head"),
)
_GIB = 2**30
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_PARALLEL = tuple(
    f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context")
)
_OTHER_STEPS = {
    "enable_prefix_caching": "a case's prefix hits need none, and a hybrid would look for its states elsewhere",
    "use_replayssm": "it keeps state outside the KV caches, which no restore between replays reaches",
}
# What kvlab takes besides vLLM's engine arguments.
_OWN_OPTIONS = ("cases", "routing", "num_kv_blocks")


def admit(source: ModelSource, flavour: Flavour, options: Mapping[str, Any]) -> None:
    """Refuse what is known to fail.

    Args:
        source: the model, its configuration as it will be loaded.
        options: as of `load_vllm`.

    Raises:
        EngineError: for sparse attention on a CPU, an architecture that this vLLM has not, or an unknown option.
        CaseError: for a case longer than the model's context.
        CapacityError: for weights that do not fit the memory.
    """
    refuse_sparse_on_cpu(source, flavour)
    refuse_routing(source, flavour, options.get("routing", "auto"))
    refuse_unknown_format(options.get("kv_cache_dtype"))
    refuse_long_cases(source, options.get("cases") or ())
    refuse_several_ranks(options, os.environ)
    refuse_other_steps(options)
    set_environment(flavour, source.location)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry

    refuse_unknown_options(options, (field.name for field in fields(EngineArgs)))
    if options.get("model_impl") != "transformers":
        refuse_unknown_architecture(source, flavour, ModelRegistry.get_supported_archs())
    refuse_without_memory(source, flavour, options)


def refuse_sparse_on_cpu(source: ModelSource, flavour: Flavour) -> None:
    """EngineError for a model with a top-k indexer on a CPU, which has no kernels for it."""
    if flavour.device == "cpu" and source.index_topk is not None:
        raise EngineError(
            f"model {source.name!r} has sparse attention (index_topk {source.index_topk}), which {flavour.distribution}"
            " has no CPU kernels for; run it on a GPU, or take tiny-dsa of --engine reference"
        )


def refuse_routing(source: ModelSource, flavour: Flavour, routing: str) -> None:
    """EngineError for an unknown word, or balanced routing where vLLM has no fixture for it."""
    if routing not in ROUTINGS:
        raise EngineError(f"routing {routing!r} is unknown; give {', '.join(ROUTINGS)}")
    if routing == "balanced" and flavour.runner == "v1" and _experts(source):
        raise EngineError(
            f"{flavour.distribution} {flavour.series} has no balanced routing fixture; use real, which the run records"
        )


def refuse_unknown_format(kv_cache_dtype: str | None) -> None:
    """EngineError for a cache whose bytes kvlab cannot make up."""
    if kv_cache_dtype is not None and kv_cache_dtype not in KV_CACHE_DTYPES:
        raise EngineError(
            f"kv_cache_dtype {kv_cache_dtype!r} is no byte format that kvlab can fill; it knows"
            f" {', '.join(KV_CACHE_DTYPES)}"
        )


def refuse_long_cases(source: ModelSource, cases: Sequence[Case]) -> None:
    """CaseError for a request with more KV than the model takes."""
    limit = source.longest_context
    for case in cases:
        for request in case.requests:
            if limit is not None and request.kv_len > limit:
                raise CaseError(
                    f"case {case.name!r}: request {request} holds {request.kv_len} tokens of KV, but model"
                    f" {source.name!r} takes {limit}; shorten K"
                )


def refuse_several_ranks(options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """EngineError for a model over several processes: a study here has one, and ranks must agree on each replay."""
    for name in _PARALLEL:
        if (size := options.get(name)) is not None and int(size) != 1:
            raise EngineError(f"{name} is {size}, but kvlab times one rank; cut the model to one GPU's size")
    if int(environment.get("WORLD_SIZE") or 1) != 1:
        raise EngineError(
            f"a launcher started {environment['WORLD_SIZE']} ranks (WORLD_SIZE), but kvlab times one; start it alone"
        )


def refuse_other_steps(options: Mapping[str, Any]) -> None:
    """EngineError for engine arguments with which a step would not be the case's, or no two replays the same."""
    for name, why in _OTHER_STEPS.items():
        if options.get(name):
            raise EngineError(f"{name}: {why}; leave it out")


def refuse_unknown_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """EngineError for an option that neither kvlab nor vLLM has, with the nearest that they have."""
    known = {*known, *_OWN_OPTIONS}
    for name in options:
        if name == "model" or name not in known:
            near = difflib.get_close_matches(name, known - {"model"}, n=1)
            mend = f"did you mean {near[0]!r}?" if near else "see `vllm serve --help` for what it has"
            raise EngineError(f"vLLM has no engine argument {name!r} that can be given here; {mend}")


def refuse_unknown_architecture(source: ModelSource, flavour: Flavour, supported: Iterable[str]) -> None:
    """EngineError for a model class that vLLM has not; a configuration without one is left to vLLM."""
    supported = set(supported)
    if source.architectures and not supported & set(source.architectures):
        name = source.architectures[0]
        near = difflib.get_close_matches(name, supported, n=1, cutoff=0.75)
        raise EngineError(
            f"model {source.name!r}: architecture {name!r} is none of {flavour.distribution} {flavour.series}'s"
            + (f"; the nearest is {near[0]!r}" if near else "")
            + "; set `architectures` to one that it has (--hf-overrides), or take another model"
        )


def refuse_without_memory(source: ModelSource, flavour: Flavour, options: Mapping[str, Any]) -> None:
    """CapacityError when the weights alone are more than the memory that is free; says by how much, and the mend."""
    needed = weight_bytes(source, options)
    if needed is None:
        return
    share = float(options.get("gpu_memory_utilization") or 0.85) if flavour.device == "cuda" else 1.0
    free = free_bytes(flavour.device) * share
    if needed <= free:
        return
    layers = source.text_config.get("num_hidden_layers")
    fitting = int(layers * free / needed * 0.9) if isinstance(layers, int) else 0
    experts = _experts(source)
    raise CapacityError(
        f"model {source.name!r} does not fit: its weights need {needed / _GIB:.1f} GiB"
        f", the {flavour.device} has {free / _GIB:.1f} GiB for them; reduce "
        + (f"num_hidden_layers (now {layers}; about {fitting} fit)" if fitting else "its layers or widths")
        + (f" or {experts} (now {source.text_config[experts]})" if experts else "")
        + " in a copy of its config.json"
    )


def _experts(source: ModelSource) -> str:
    """The field that counts the model's experts; empty where it has none."""
    return next((key for key in _EXPERTS if source.text_config.get(key)), "")
