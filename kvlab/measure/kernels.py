"""Layer 3: where a step's time goes, kernel by kernel, under the contents that the cache holds now.

On CUDA the timer's own graphs are replayed under CUPTI: kernels, addresses and order are those that were timed. It is
assumed that CUPTI stamps kernels on the GPU, so that their durations are what they are without the profiler; what lies
between them (launches, stamps, a programmatic overlap that profiling prevents) is not. The sum of the kernels is
therefore held against the time that the timer takes without the profiler, and the difference is a row of its own.

On a CPU the eager forward runs under the operator profiler, whose cost of a microsecond or two an operator is in the
times. An operator's time is its own, without the operators that it calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torch.profiler import ProfilerActivity, record_function

from kvlab.engines.base import Step
from kvlab.errors import EngineError
from kvlab.kernel_names import CLOSE, REST, role_of, short_name
from kvlab.measure.clock import MARK
from kvlab.measure.settling import PACE_S, SETTLE_CAPPED_S, SETTLE_S, TIMED_CAPPED_S, visit
from kvlab.measure.timer import CpuTimer, GraphTimer, Timer
from kvlab.measure.trace import busy_us, device_trace, record, split_replays, timed_region_is_clean, without_restore

# The row of what the kernels leave of the step.
BETWEEN = "(rest: gaps between kernels)"
# Replays whose median is the total to close on; and how many are profiled of a swing's period, at most.
_TIMED, _MOST = 5, 64
_FORWARD, _RESTORE = "kvlab forward", "kvlab restore"


@dataclass(frozen=True)
class KernelProfile:
    """A step's time by kernel; times in microseconds of one step.

    Attributes:
        rows: one row per kernel, the longest first: `kernel` (short name), `role`, `us` (mean over replays), `calls`
            (per step), `us_each` (by replay); last the row `BETWEEN`, so that all rows add to `timed_us`.
        total_us: all kernels, without the rest.
        busy_us: time with at least one kernel running; less than `total_us` where streams overlap.
        timed_us: of the timer's own replays, without the profiler: the median, the mean where a cap may hold them.
        profiled_us: the same of replays under the profiler.
        restore_us: the restore that comes before the timed region of each replay.
        restore_outside: seen in the trace: no fill, restore or copy of kvlab lies within the timed region.
        replays: that were profiled.
        source: `cupti` or `operators`.
    """

    rows: tuple[dict[str, Any], ...]
    total_us: float
    busy_us: float
    timed_us: float
    profiled_us: float
    restore_us: float
    restore_outside: bool
    replays: int
    source: str

    @property
    def closure(self) -> float:
        """Sum of the kernels over the timed total."""
        return self.total_us / self.timed_us

    @property
    def closes(self) -> bool:
        """The kernels explain the timed total within `CLOSE`; the row `BETWEEN` says what they leave in any case."""
        return abs(self.closure - 1) <= CLOSE

    @property
    def rest_us(self) -> float:
        """What the kernels leave of the timed total: gaps between them; negative where they overlap."""
        return self.timed_us - self.total_us

    @property
    def overlap_us(self) -> float:
        """Kernel time that ran beside other kernels."""
        return max(0.0, self.total_us - self.busy_us)

    def facts(self) -> dict[str, Any]:
        """All but the rows, for a run's record of the case."""
        names = ("total_us", "busy_us", "overlap_us", "timed_us", "profiled_us", "rest_us", "restore_us", "closure")
        numbers = {name: round(getattr(self, name), 4) for name in names}
        said = {"closes": self.closes, "restore_outside": self.restore_outside}
        return {**numbers, **said, "replays": self.replays, "source": self.source}


def profile_kernels(step: Step, timer: Timer, replays: int = 3, capped: bool = False) -> KernelProfile:
    """Profile the step under the contents that the cache holds now, at the pace at which rounds time it.

    Args:
        step: filled.
        timer: of the same step.
        replays: to profile, at least; one more is run and left out.
        capped: a power cap holds the clock of sustained replays, or may. They are then settled and timed as
            `kvlab.measure.settling` has it, and a period of the clock's swing is profiled.

    Raises:
        EngineError: for a timer without kernels to profile, when the profiler sees none, or when the restore cannot
            be told from the forward.
    """
    if replays < 1:
        raise EngineError(f"cannot profile {replays} replays; give 1 or more")
    if isinstance(timer, GraphTimer):
        return _profile_graph(step, timer, replays, capped and timer.mode == "sustained")
    if isinstance(timer, CpuTimer):
        return _profile_operators(step, timer, replays)
    raise EngineError(f"timer {timer.kind!r} runs no kernels that could be profiled; use make_timer's")


def _profile_graph(step: Step, timer: GraphTimer, replays: int, capped: bool) -> KernelProfile:
    device = step.engine.device
    restore = [event.name for event in device_trace(step.restore, device)]
    forward = [event.name for event in device_trace(step.forward, device)]

    def settle() -> None:
        # One replay at least, which also undoes what the eager forward wrote.
        timer.time(1)
        timer.settle(PACE_S if timer.mode == "isolated" else SETTLE_CAPPED_S if capped else SETTLE_S)

    settle()
    # What a busy card takes is a mean, see `kvlab.estimates.round_table`.
    middle = fmean if capped else median
    timed = middle(replay.us for replay in visit(timer, max(replays, _TIMED), 1, capped))
    if capped and timer.paced_s:
        replays = max(replays, min(_MOST, round(TIMED_CAPPED_S / 2 / timer.paced_s)))
    profiled: list[float] = []
    events = device_trace(lambda: profiled.extend(timer.time(replays + 1)), device, before=settle)
    events = [event for event in events if short_name(event.name) != MARK]
    # The first replay begins where the trace does, and after a pause.
    kept = split_replays(events, replays + 1)[-replays:]
    parts = [without_restore(replay, restore) for replay in kept]
    restores = [replay[: len(restore)] for replay in kept]
    return _profile(
        [_by_name((event.name, event.us) for event in part) for part in parts],
        busy=fmean(busy_us(part) for part in parts),
        timed=timed,
        profiled=middle(profiled[1:]),
        restore=fmean(busy_us(part) for part in restores),
        outside=all(timed_region_is_clean(replay, restore, forward) for replay in kept),
        source="cupti",
    )


def _profile_operators(step: Step, timer: CpuTimer, replays: int) -> KernelProfile:
    def run() -> None:
        for _ in range(replays):
            with record_function(_RESTORE):
                step.restore()
            with record_function(_FORWARD):
                step.forward()

    timer.time(1)
    timed = median(timer.time(max(replays, _TIMED)))
    events = record(run, ProfilerActivity.CPU, before=lambda: timer.time(1))
    forwards = [event for event in events if event.name == _FORWARD]
    restores = [event for event in events if event.name == _RESTORE]
    parts = [_below(forward) for forward in forwards]
    if len(forwards) != replays or not all(parts):
        raise EngineError(f"the profiler saw {len(forwards)} forwards of {replays}; profile again")
    harness = {event.name for restore in restores for event in restore.cpu_children}
    apart = all(r.time_range.end <= f.time_range.start for r, f in zip(restores, forwards, strict=True))
    tables = [_by_name((event.name, float(event.self_cpu_time_total)) for event in part) for part in parts]
    return _profile(
        tables,
        busy=fmean(sum(sum(times) for times in table.values()) for table in tables),
        timed=timed,
        profiled=median(event.time_range.elapsed_us() for event in forwards),
        restore=fmean(event.time_range.elapsed_us() for event in restores),
        outside=apart and not any(event.name in harness for part in parts for event in part),
        source="operators",
    )


def _below(event: Any) -> list[Any]:
    """All operators that an operator or a range called, directly or not."""
    found, waiting = [], list(event.cpu_children)
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].cpu_children
    return found


def _by_name(timed: Iterable[tuple[str, float]]) -> dict[tuple[str, str], list[float]]:
    """Times of each kernel by (short name, role)."""
    table: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, us in timed:
        table[short_name(name), role_of(name)].append(us)
    return table


def _profile(
    tables: Sequence[Mapping[tuple[str, str], Sequence[float]]],
    *,
    busy: float,
    timed: float,
    profiled: float,
    restore: float,
    outside: bool,
    source: str,
) -> KernelProfile:
    count = len(tables)
    calls = Counter({key: sum(len(table.get(key, ())) for table in tables) for table in tables for key in table})
    rows: list[dict[str, Any]] = []
    for (kernel, role), number in calls.items():
        each = [round(sum(table.get((kernel, role), ())), 3) for table in tables]
        per_step = number // count if number % count == 0 else number / count
        rows.append({"kernel": kernel, "role": role, "us": fmean(each), "calls": per_step, "us_each": each})
    rows.sort(key=lambda row: -row["us"])
    total = sum(row["us"] for row in rows)
    rows.append({"kernel": BETWEEN, "role": REST, "us": timed - total, "calls": 0, "us_each": []})
    return KernelProfile(tuple(rows), total, busy, timed, profiled, restore, outside, count, source)
