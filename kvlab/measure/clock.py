"""Layer 3: the SM clock during a replay, counted by the card itself: cycles over nanoseconds between two marks.

A driver looks at the clock ten times a second (NVML on an H200), so that a lone step of tens of milliseconds that rests
in between is never read, and a swing within a replay is missed. Each SM counts its cycles (`%clock64`) and the card its
nanoseconds (`%globaltimer`, PTX ISA, special registers); a kernel of one warp an SM notes both before the timed
interval and after it, outside of it. Their quotient is the mean clock of exactly that replay, however short.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# The kernel's name, by which a profile knows it.
MARK = "mark_clock"
# SMs whose counters are that far apart do not run at one clock, or some stood still: nobody's clock is told then.
_AGREE = 0.01
# Nanoseconds by which `%globaltimer` may be late: it moves in steps, of about 1 us on some cards.
_STEP_NS = 1000.0


class ClockCounter:
    """Marks around one interval of a stream, and the clock between them.

    Marks are written by the card to pinned memory of the host, so that reading them waits for nothing that was queued
    behind. Both are plain launches, to be captured in a CUDA graph.

    Raises:
        Exception: whatever compiling or running the kernel on this device raises.
    """

    def __init__(self, device: torch.device) -> None:
        from kvlab.measure.clock_kernel import mark_clock

        self._kernel: Any = mark_clock
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._marks = torch.zeros((2, self._sms, 2), dtype=torch.int64, device="cpu", pin_memory=True)
        self._seen = self._marks.numpy()
        # Compiled now, as a capture would refuse it.
        self.mark(0)
        self.mark(1)
        torch.cuda.synchronize(device)
        self.take()

    def mark(self, end: int) -> None:
        """Launch the kernel on the current stream: 0 where the interval begins, 1 where it ends."""
        self._kernel[(self._sms,)](self._marks[end], SLOTS=self._sms, num_warps=1)

    def take(self) -> NDArray[np.int64]:
        """The marks of the last interval, and a clean sheet for the next.

        Returns:
            [2, SMs, 2]: begin and end; cycles and nanoseconds; 0 for an SM that noted nothing.
        """
        taken = self._seen.copy()
        self._seen[:] = 0
        return taken


def make_counter(device: torch.device) -> tuple[ClockCounter | None, str]:
    """A counter for a CUDA device; None where it cannot count, and why."""
    if torch.version.cuda is None or find_spec("triton") is None:
        return None, "the card's count of them is read by a Triton kernel, and Triton is not installed"
    try:
        return ClockCounter(device), ""
    except Exception as error:  # Triton and the driver raise families of their own; a replay can do without
        return None, f"the card's count of them cannot be read ({type(error).__name__}: {error})"


def megahertz(marks: NDArray[np.int64]) -> float | None:
    """Mean SM clock between two marks: the median over the SMs that noted both.

    None where none did, or where the middle half of them do not agree.

    Args:
        marks: of `ClockCounter.take`.
    """
    begin, end = marks
    cycles, ns = (end - begin)[(begin > 0).all(axis=1) & (end > begin).all(axis=1)].T.astype(float)
    if not cycles.size:
        return None
    low, mhz, high = np.percentile(1e3 * cycles / ns, (25, 50, 75))
    if high - low > mhz * (_AGREE + _STEP_NS / float(np.median(ns))):
        return None
    return float(mhz)
