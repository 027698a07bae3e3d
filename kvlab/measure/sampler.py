"""Layer 3: readings of the card beside the replays, in a thread of their own.

An arm's watts and MHz are then those of its replays, not of the moment after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, TypeVar

from kvlab.measure.telemetry import NoTelemetry, Reading, Telemetry

# Seconds between two readings: clocks and power change within 10 to 100 ms, and a reading takes about a millisecond.
PERIOD_S = 0.03
# And while a card works and rests in turn: many fall into the rests.
RESTING_PERIOD_S = 0.01
# A reading can be this stale: an H200's driver looks at the clock every tenth of a second.
READING_S = 0.1
# The energy counter is seen to move up to one period late, at either end: at most 10 % over this many periods.
_ENERGY_PERIODS = 20

T = TypeVar("T")


@dataclass(frozen=True)
class TimedReading(Reading):
    """A reading, and when it was finished.

    Attributes:
        t_s: seconds of `time.perf_counter`; comparable within one process.
    """

    t_s: float = 0.0


@dataclass(frozen=True)
class Summary:
    """What a sampler's readings say together; None where nothing could be read.

    Attributes:
        sm_mhz, mem_mhz: medians.
        watts: mean power: energy over time where the counter moved often enough, else the mean of the readings.
        watts_source: `energy`, `readings` or None.
        celsius: the highest.
        throttled: whether any reading was.
        readings: how many.
        seconds: from the first to the last.
    """

    sm_mhz: float | None = None
    mem_mhz: float | None = None
    watts: float | None = None
    watts_source: str | None = None
    celsius: float | None = None
    throttled: bool | None = None
    readings: int = 0
    seconds: float = 0.0


class Sampler:
    """Reads a card every `period_s` seconds from its entry to its exit, once at either end.

    The thread sleeps between readings and NVML's calls release the interpreter, so replays go on undisturbed
    (`benchmarks/telemetry_disturbance.py` measures it). With `NoTelemetry` no thread is started.

        with Sampler(telemetry) as sampler:
            times = timer.time(5)
        sampler.summary().watts

    Attributes:
        readings: in order of time; complete after the exit.
        failure: why readings ended early; None where they did not.
    """

    def __init__(self, telemetry: Telemetry, period_s: float = PERIOD_S) -> None:
        self.readings: list[TimedReading] = []
        self.failure: str | None = None
        self._telemetry = telemetry
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        if not isinstance(self._telemetry, NoTelemetry):
            self._stop.clear()
            self._thread = threading.Thread(target=self._sample, name="kvlab telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def during(self, busy: Sequence[tuple[float, float]]) -> list[TimedReading]:
        """The readings taken while the card worked.

        Args:
            busy: spans of `time.perf_counter`, where it rested in between; none where it never did.
        """
        if not busy:
            return self.readings
        return [r for r in self.readings if any(begin + READING_S <= r.t_s <= end for begin, end in busy)]

    def summary(self, busy: Sequence[tuple[float, float]] = (), since: float = 0.0) -> Summary:
        """The readings in one line, those since a `time.perf_counter`; with `busy` those of `during`, whose watts are
        the sensor's."""
        readings = [reading for reading in self.during(busy) if reading.t_s >= since]
        if busy:
            # The energy between two of them is the rests' too.
            readings = [replace(reading, joules=None) for reading in readings]
        return summarise(readings, self._period_s)

    def _sample(self) -> None:
        try:
            last = False
            while True:
                reading = self._telemetry.read()
                self.readings.append(TimedReading(**asdict(reading), t_s=time.perf_counter()))
                if last:
                    return
                last = self._stop.wait(self._period_s)
        except Exception as error:  # a sensor that fails must not end the measurement that it watches
            self.failure = f"{type(error).__name__}: {error}"


def summarise(readings: Sequence[TimedReading], period_s: float = PERIOD_S) -> Summary:
    """What readings say together.

    Args:
        readings: in order of time.
        period_s: seconds between two of them; decides whether the energy counter was watched for long enough.
    """
    if not readings:
        return Summary()

    def known(name: str) -> list[Any]:
        return [value for reading in readings if (value := getattr(reading, name)) is not None]

    sensor = known("watts")
    metered = _energy_watts(readings, period_s)
    watts = metered if metered is not None else fmean(sensor) if sensor else None
    return Summary(
        sm_mhz=_apply(median, known("sm_mhz")),
        mem_mhz=_apply(median, known("mem_mhz")),
        watts=watts,
        watts_source=None if watts is None else "readings" if metered is None else "energy",
        celsius=_apply(max, known("celsius")),
        throttled=_apply(any, known("throttled")),
        readings=len(readings),
        seconds=readings[-1].t_s - readings[0].t_s,
    )


def _apply(function: Callable[[list[Any]], T], values: list[Any]) -> T | None:
    return function(values) if values else None


def _energy_watts(readings: Sequence[TimedReading], period_s: float) -> float | None:
    """Energy over time between two readings that each found the counter moved on; None for too short a while.

    The counter moves in steps of its own (every 20 to 100 ms), so only a reading right after a step tells when the
    energy that it counts had been used.
    """
    metered = [(reading.t_s, reading.joules) for reading in readings if reading.joules is not None]
    moved = [now for before, now in pairwise(metered) if now[1] > before[1]]
    if len(moved) < 2:
        return None
    (start, first), (end, last) = moved[0], moved[-1]
    return (last - first) / (end - start) if end - start >= _ENERGY_PERIODS * period_s else None
