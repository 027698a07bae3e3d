"""Layer 3: what the card did meanwhile: clocks, power, temperature, throttling; read through NVML."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

# A replay whose SM clock was below this share of the highest seen is flagged (and kept).
CLOCK_FLOOR = 0.75


@dataclass(frozen=True)
class Reading:
    """One look at the card; None where it cannot be read.

    Attributes:
        sm_mhz, mem_mhz: clocks.
        watts: board power.
        celsius: GPU temperature.
        throttled: a power cap, heat or a hardware slowdown holds the clock down.
    """

    sm_mhz: float | None = None
    mem_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    throttled: bool | None = None


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
    """Readings through `pynvml` (package nvidia-ml-py) for one CUDA device."""

    source = "nvml"

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._limits = (
            pynvml.nvmlClocksThrottleReasonSwPowerCap
            | pynvml.nvmlClocksThrottleReasonHwSlowdown
            | getattr(pynvml, "nvmlClocksThrottleReasonSwThermalSlowdown", 0)
            | getattr(pynvml, "nvmlClocksThrottleReasonHwThermalSlowdown", 0)
            | getattr(pynvml, "nvmlClocksThrottleReasonHwPowerBrakeSlowdown", 0)
        )

    def read(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        return Reading(
            sm_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            mem_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            throttled=bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & self._limits),
        )


def make_telemetry(device: torch.device) -> Telemetry:
    """NVML for a CUDA device where it answers; elsewhere `NoTelemetry`, which says why."""
    if device.type != "cuda":
        return NoTelemetry(f"device {device.type}")
    try:
        telemetry = NvmlTelemetry(device)
        telemetry.read()
    except ImportError:
        return NoTelemetry("nvidia-ml-py is not installed")
    except Exception as error:  # NVML raises a family of its own, absent when the import failed
        return NoTelemetry(f"NVML: {error}")
    return telemetry
