"""Layer 5: the command that does on the command line what a job's spec does, for the provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# Options of `load_engine` that the command line has by name; others go by --engine-arg.
_NAMED = ("device", "num_kv_blocks", "max_model_len", "topk", "routing", "kv_cache_dtype", "load_format", "seed")
_STUDY = ("margin", "mode", "rounds", "budget", "replays")


def command_of(spec: Mapping[str, Any]) -> list[str]:
    """`["kvlab", "sweep", MODEL, ...]`, without the folder.

    Args:
        spec: of `kvlab.background.start`.
    """
    return ["kvlab", str(spec["command"]), str(spec["model"]), *map(str, _arguments(spec))]


def _arguments(spec: Mapping[str, Any]) -> Iterator[Any]:
    if spec.get("engine"):
        yield from ("--engine", spec["engine"])
    options = dict(spec.get("engine_options") or {})
    if "seed" in spec:  # the command line has one for the model and for the study
        options["seed"] = spec["seed"]
    for name, value in options.items():
        if name in _NAMED:
            yield from (f"--{name.replace('_', '-')}", value)
        elif name == "hf_overrides":
            yield from ("--hf-overrides", json.dumps(value))
        else:
            yield from ("--engine-arg", f"{name}={json.dumps(value)}")
    for case in spec.get("cases") or ():
        yield from ("--case", case)
    grid = spec.get("sweep") or {}
    for option, name in (("contexts", "contexts"), ("phase", "phases"), ("batch", "batch"), ("topk", "topk")):
        if grid.get(name):
            yield from (f"--{option}", ",".join(map(str, grid[name])))
    if grid.get("zero_fractions"):
        yield from ("--zero-fraction", ",".join(map(str, grid["zero_fractions"])))
    if grid.get("query") is not None:
        yield from ("--query", grid["query"])
    for arm in spec.get("arms") or ():
        yield from ("--arm", arm)
    for name in _STUDY:
        if spec.get(name) is not None:
            yield from (f"--{name}", spec[name])
    if spec.get("explain"):
        yield "--explain"
