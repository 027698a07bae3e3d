"""Layer 3: timing replays of one step: by CUDA events inside a captured graph, or by the CPU's clock.

Every replay first restores the touched views, outside the timed interval. On CUDA the restore, the first event, the
forward and the second event are one graph, so that neither the restore nor launch gaps are timed (the arrangement of
`vllm/benchmarks/forward/capture.py`), with a mark of the SMs' clock on either side (`kvlab.measure.clock`). An eager
forward is never timed against a captured one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvlab.engines.base import Step
from kvlab.errors import EngineError
from kvlab.measure.clock import ClockCounter, make_counter, megahertz

MODES = ("isolated", "sustained")
COUNTED = "counted"
# More replays than any settling takes.
_MANY = 10**9


class Replay(NamedTuple):
    """One timed replay.

    Attributes:
        us: microseconds.
        marks: of the SMs' clock before and after it, see `kvlab.measure.clock`; None where nothing counts.
    """

    us: float
    marks: NDArray[np.int64] | None = None

    @property
    def mhz(self) -> float | None:
        """Mean SM clock meanwhile; None where it was not counted. As slow as a short step, so asked for afterwards."""
        return None if self.marks is None else megahertz(self.marks)


class Timer(ABC):
    """Times replays of one prepared and filled step.

    Attributes:
        kind: `cuda_graph_events` or `cpu_clock`, stored with the run.
        mode: `isolated` or `sustained`; a clock that knows no difference is `isolated`.
        rest: pause after each replay of an isolated CUDA step, as a multiple of the replay's time; outside all times.
        paced_s: seconds that a replay took when the timer settled last, its restore and launch included; 0 before.
        busy: where there were rests, the spans of `time.perf_counter` in which the last `time` had the card work.
        clock: `COUNTED` where replays have marks; else why they have none.
    """

    kind: str
    mode = "isolated"
    rest = 0.0
    paced_s = 0.0
    busy: Sequence[tuple[float, float]] = ()
    clock = "not counted on a CPU"

    @abstractmethod
    def time(self, count: int) -> list[float]:
        """Microseconds of `count` replays."""

    def replay(self, count: int) -> list[Replay]:
        """`count` replays as `time` has them, each with its clock."""
        return [Replay(us) for us in self.time(count)]

    @abstractmethod
    def output(self) -> torch.Tensor:
        """Hidden states of the last replay: [num_tokens, hidden]."""

    def settle(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Replay for a while, or `until` it is enough, without keeping times: caches, clocks and power reach their
        steady state."""
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline and not until():
            self.time(1)

    def close(self) -> None:  # noqa: B027
        """Drop graphs and events."""


class CpuTimer(Timer):
    """Eager forwards by `perf_counter_ns`; a CPU has no launch queue, so both modes are one."""

    kind = "cpu_clock"

    def __init__(self, step: Step) -> None:
        self._step = step
        self._output: torch.Tensor | None = None

    def time(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            self._step.restore()
            begin = time.perf_counter_ns()
            self._output = self._step.forward()
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return times

    def output(self) -> torch.Tensor:
        if self._output is None:
            self.time(1)
        assert self._output is not None
        return self._output


class _Lane:
    """One captured graph with its own pair of events, and its own marks of the clock where the card counts it.

    Attributes:
        marks: of the last replay that was waited for, see `kvlab.measure.clock.megahertz`; None where nothing counts.
    """

    marks: NDArray[np.int64] | None = None

    def __init__(self, step: Step, stream: torch.cuda.Stream, counter: ClockCounter | None) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        self._done = torch.cuda.Event(external=True) if counter else self.end
        self.graph, self._counter = torch.cuda.CUDAGraph(), counter
        with torch.cuda.graph(self.graph, stream=stream):
            step.restore()
            if counter:
                counter.mark(0)
            self.start.record()
            self.output = step.forward()
            self.end.record()
            if counter:
                counter.mark(1)
                self._done.record()

    def elapsed_us(self) -> float:
        self._done.synchronize()
        if self._counter:
            self.marks = self._counter.take()
        return self.start.elapsed_time(self.end) * 1e3


class GraphTimer(Timer):
    """CUDA graph replays.

    `isolated` waits for each replay before it launches the next, and rests in between where `rest` says so.
    `sustained` keeps one replay queued behind the one that runs: two graphs of the same step, each with its own events,
    take turns, so the GPU never idles.

    Attributes:
        graph_vs_eager: relative RMS distance of the captured from the eager output; kept with the run.
        eager_repeat: the same between two eager forwards, the floor for the former.
    """

    kind = "cuda_graph_events"

    def __init__(self, step: Step, mode: str) -> None:
        self.mode = mode
        device = step.engine.device
        with torch.cuda.device(device), step.capturing() as given:
            stream = given or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Some kernels set themselves up on first use in a stream, which a capture would refuse.
                step.restore()
                first = step.forward().clone()
                step.restore()
                eager = step.forward().clone()
                stream.synchronize()
            counters = [make_counter(device) for _ in range(2 if mode == "sustained" else 1)]
            self.clock = next((why for counter, why in counters if counter is None), COUNTED)
            self._lanes = [_Lane(step, stream, counter) for counter, _ in counters]
        self.eager_repeat = relative_rms(first, eager)
        self.time(1)
        self.graph_vs_eager = relative_rms(self.output(), eager)

    def time(self, count: int) -> list[float]:
        return self._time(count)

    def replay(self, count: int) -> list[Replay]:
        marks: list[NDArray[np.int64] | None] = []
        times = self._time(count, marks=marks)
        return [Replay(us, each) for us, each in zip(times, marks, strict=True)]

    def settle(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        begin = time.perf_counter()
        # In one call, so that the GPU never idles in sustained mode; by the clock, as a step may be shorter than its
        # own restore and launch.
        times = self._time(_MANY, lambda: time.perf_counter() - begin >= seconds or until())
        self.paced_s = (time.perf_counter() - begin) / len(times)

    def _time(
        self,
        count: int,
        until: Callable[[], bool] = lambda: False,
        marks: list[NDArray[np.int64] | None] | None = None,
    ) -> list[float]:
        """Microseconds of so many replays, or of fewer: `until` is asked after each; their marks go into `marks`."""
        times: list[float] = []
        if len(self._lanes) == 1:
            (lane,), busy = self._lanes, []
            while len(times) < count and not (times and until()):
                begin = time.perf_counter()
                lane.graph.replay()
                times.append(lane.elapsed_us())
                if marks is not None:
                    marks.append(lane.marks)
                if self.rest:
                    busy.append((begin, time.perf_counter()))
                    time.sleep(self.rest * times[-1] / 1e6)
            self.busy = busy
            return times
        self._lanes[0].graph.replay()
        queued, enough = 1, False
        while len(times) < queued:
            # The next one is queued behind the one that runs, until it is known that no more are needed.
            if queued < count and not enough:
                self._lanes[queued % 2].graph.replay()
                queued += 1
            lane = self._lanes[len(times) % 2]
            times.append(lane.elapsed_us())
            if marks is not None:
                marks.append(lane.marks)
            enough = enough or until()
        self._last = self._lanes[(queued - 1) % 2]
        return times

    def output(self) -> torch.Tensor:
        return (self._lanes[0] if len(self._lanes) == 1 else self._last).output

    def close(self) -> None:
        self._lanes.clear()


def make_timer(step: Step, mode: str) -> Timer:
    """The timer for a filled step on its engine's device.

    Raises:
        EngineError: for an unknown mode, or a device that is neither CPU nor CUDA.
    """
    if mode not in MODES:
        raise EngineError(f"mode {mode!r} is unknown; give {' or '.join(MODES)}")
    device = step.engine.device
    if device.type == "cuda":
        return GraphTimer(step, mode)
    if device.type == "cpu":
        return CpuTimer(step)
    raise EngineError(f"no timer for device {device}; steps are timed on cpu and cuda")


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over the RMS of `expected`; 0 where both are zero."""
    scale = expected.float().square().mean().sqrt().clamp(min=1e-12)
    return float((actual.float() - expected.float()).square().mean().sqrt() / scale)
