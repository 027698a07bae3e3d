"""Layer 3: what the card did meanwhile: clocks, power, temperature, throttling; read through NVML.

`Telemetry.read` is one look; `kvlab.measure.sampler` looks again and again while replays run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# A replay whose SM clock was below this share of the highest seen is flagged (and kept).
CLOCK_FLOOR = 0.75

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """One look at the card; None where it cannot be read.

    Attributes:
        sm_mhz, mem_mhz: clocks.
        watts: board power: the present one where the card tells, else NVML's average over a second.
        celsius: GPU temperature.
        throttled: a power cap, heat or a hardware slowdown holds the clock down.
        reasons: what holds the clock down, NVML's words joined by commas; empty for nothing.
        joules: energy that the board has used since its driver was loaded.
    """

    sm_mhz: float | None = None
    mem_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    throttled: bool | None = None
    reasons: str | None = None
    joules: float | None = None


class Telemetry(ABC):
    """A source of readings.

    Attributes:
        source: where they come from, stored with the run.
    """

    source: str

    @abstractmethod
    def read(self) -> Reading:
        """The card's state now."""


class NoTelemetry(Telemetry):
    """Stands in where no card or no NVML is present."""

    def __init__(self, why: str) -> None:
        self.source = f"none ({why})"

    def read(self) -> Reading:
        return Reading()


class NvmlTelemetry(Telemetry):
    """Readings through `pynvml` (package nvidia-ml-py) for one CUDA device.

    A value that this card, driver or pynvml does not give is None, is not asked for again, and is named in `source`;
    one that NVML fails to give once is None in that reading.
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._absent: list[str] = []

    @property
    def source(self) -> str:  # type: ignore[override]
        """`nvml`, and what it does not give."""
        return f"nvml (without {', '.join(self._absent)})" if self._absent else "nvml"

    def read(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        # The name that all drivers know; newer ones call them event reasons too.
        reasons = self._ask("reasons", lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        return Reading(
            sm_mhz=self._ask("sm_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            mem_mhz=self._ask("mem_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
            watts=self._watts(),
            celsius=self._ask(
                "celsius", lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            throttled=None if reasons is None else bool(reasons & _LIMITS),
            reasons=None if reasons is None else ",".join(word for bit, word in _REASONS.items() if reasons & bit),
            joules=self._ask("joules", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
        )

    def _watts(self) -> float | None:
        # From Ampere on `nvmlDeviceGetPowerUsage` is an average over a second, which is longer than an arm's replays.
        instant = self._ask("present watts", self._instant_watts)
        if instant is not None:
            return instant
        return self._ask("watts", lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)

    def _instant_watts(self) -> float:
        (field,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])
        if field.nvmlReturn != 0 or not field.value.uiVal:
            raise AttributeError("the card does not tell its present power")
        return float(field.value.uiVal / 1e3)

    def _ask(self, what: str, read: Callable[[], T]) -> T | None:
        if what in self._absent:
            return None
        try:
            return read()
        except Exception as error:  # NVML raises a family of its own; an older pynvml lacks names
            if isinstance(error, AttributeError) or type(error).__name__ in _LASTING:
                self._absent.append(what)
            return None


# Errors of pynvml after which asking again is in vain.
_LASTING = {f"NVMLError_{kind}" for kind in ("NotSupported", "FunctionNotFound", "NoPermission", "InvalidArgument")}
# Bits of `nvmlClocksEventReasons` (nvml.h).
_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_LIMITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def make_telemetry(device: torch.device) -> Telemetry:
    """NVML for a CUDA device where it answers; elsewhere `NoTelemetry`, which says why."""
    if device.type != "cuda":
        return NoTelemetry(f"device {device.type}")
    try:
        telemetry = NvmlTelemetry(device)
    except ImportError:
        return NoTelemetry("nvidia-ml-py is not installed")
    except Exception as error:  # NVML raises a family of its own, absent when the import failed
        return NoTelemetry(f"NVML: {error}")
    if telemetry.read() == Reading():
        return NoTelemetry("NVML: this device gives no clock, power or temperature")
    return telemetry
