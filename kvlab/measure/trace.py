"""Layer 3: what the profiler saw of a step: kernels with their times, cut into replays, the restore told apart.

`device_trace` records (CUPTI through `torch.profiler`); everything else here is arithmetic on the events.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from kvlab.errors import EngineError
from kvlab.kernel_names import short_name

# What kvlab itself launches on a GPU, in short names: saves and restores, fills, the copies of codecs.
_HARNESS = re.compile(r"copy_runs|fill_runs|fill_packed|Memcpy|Memset|Fill|distribution|CopyFunctor|direct_copy")
_NO_KERNELS = {"gpu_user_annotation", "user_annotation", "cuda_sync", "cuda_event", "overhead"}


@dataclass(frozen=True)
class Event:
    """One kernel, copy or memset on a device.

    Attributes:
        name: as the profiler gives it.
        start_us, end_us: microseconds from the beginning of the trace.
        launch: correlation ID; all nodes of one graph launch share it.
        stream: CUDA stream.
    """

    name: str
    start_us: float
    end_us: float
    launch: int = 0
    stream: int = 0

    @property
    def us(self) -> float:
        """Duration."""
        return self.end_us - self.start_us


def device_trace(
    work: Callable[[], object], device: torch.device, before: Callable[[], object] | None = None
) -> list[Event]:
    """What `work` ran on a CUDA device, in order of start.

    Args:
        before: run first with the profiler already on, and not recorded: starting the profiler takes long enough for
            a GPU to cool down, in clocks and in power.
    """
    found = record(work, ProfilerActivity.CUDA, before, lambda: torch.cuda.synchronize(device))
    index = device.index if device.index is not None else torch.cuda.current_device()
    events = [
        Event(
            event.name,
            event.time_range.start,
            event.time_range.end,
            int(event.id),
            int(getattr(event, "device_resource_id", 0) or 0),
        )
        for event in found
        if event.device_type == torch.autograd.DeviceType.CUDA
        and event.device_index == index
        and not getattr(event, "is_user_annotation", False)
        and getattr(event, "activity_type", None) not in _NO_KERNELS
    ]
    return sorted(events, key=lambda event: (event.start_us, event.end_us))


def record(
    work: Callable[[], object],
    activity: ProfilerActivity,
    before: Callable[[], object] | None = None,
    synchronize: Callable[[], object] = lambda: None,
) -> list[Any]:
    """The profiler's events of `work`: `torch.autograd.profiler_util.FunctionEvent`s; see `device_trace`."""
    # libkineto reads this once and would write two lines a profile to the user's terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[activity], schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as profiler:
        if before is not None:
            before()
        synchronize()
        profiler.step()
        work()
        synchronize()
    return list(profiler.events() or [])


def split_replays(events: Sequence[Event], count: int) -> list[list[Event]]:
    """The events of each of `count` graph replays, in order; a replay of which the profiler lost some is left out.

    Nodes of one launch share a correlation ID; where the profiler gives none, the events are cut into equal parts.

    Raises:
        EngineError: when replays that should be the same do not hold the same kernels.
    """
    ordered = sorted(events, key=lambda event: (event.start_us, event.end_us))
    if not ordered:
        raise EngineError(
            "the profiler saw no kernels of the captured step; let CUPTI trace on this machine, or do without a profile"
        )
    launches: dict[int, list[Event]] = defaultdict(list)
    for event in ordered:
        launches[event.launch].append(event)
    size, odd = divmod(len(ordered), count)
    equal = [] if odd else [ordered[i * size : (i + 1) * size] for i in range(count)]
    for parts in (list(launches.values()), equal):
        names = [frozenset(Counter(event.name for event in part).items()) for part in parts]
        usual, times = Counter(names).most_common(1)[0] if parts else (frozenset(), 0)
        # One may have lost its first kernels to the start of the trace.
        if len(parts) == count and times >= max(1, count - 1):
            return [part for part, held in zip(parts, names, strict=True) if held == usual]
    raise EngineError(
        f"the profiler saw {len(ordered)} kernels in {count} replays of one graph, which do not hold the same ones;"
        " profile again, on a GPU that no other process uses"
    )


def without_restore(replay: Sequence[Event], restore: Sequence[str]) -> list[Event]:
    """A replay's events after its restore.

    Args:
        replay: in order of start; the graph begins with the restore.
        restore: names of what the restore runs by itself.

    Raises:
        EngineError: when the first events are not those of the restore.
    """
    head = Counter(event.name for event in replay[: len(restore)])
    if head != Counter(restore):
        missing = next(iter(Counter(restore) - head), "nothing")
        raise EngineError(
            f"the first {len(restore)} kernels of a replay are not those of the restore (no {short_name(missing)!r}"
            " among them): what is timed cannot be told from what is not"
        )
    return list(replay[len(restore) :])


def timed_region_is_clean(
    replay: Sequence[Event], restore: Sequence[str] = (), forward: Sequence[str] | None = None
) -> bool:
    """No fill, restore or copy of kvlab lies between the first and the last kernel of a replay's forward.

    Forwards have copies and memsets of their own, which are told from kvlab's by their number: the timed region may
    hold no more of any such kernel than the forward alone runs.

    Args:
        replay: one replay's events.
        restore: names of what the restore runs by itself; it must have ended before the forward begins.
        forward: names of what the forward runs by itself; none of kvlab's kinds where it is not known.
    """
    ordered = sorted(replay, key=lambda event: (event.start_us, event.end_us))
    try:
        timed = without_restore(ordered, restore)
    except EngineError:
        return False
    if restore and timed and max(event.end_us for event in ordered[: len(restore)]) > timed[0].start_us:
        return False
    extra = Counter(event.name for event in timed) - Counter(forward or ())
    return not any(name in restore or _HARNESS.search(short_name(name)) for name in extra)


def busy_us(events: Sequence[Event]) -> float:
    """Microseconds in which at least one of the events ran: the union of their intervals."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        total += max(0.0, event.end_us - max(event.start_us, reached))
        reached = max(reached, event.end_us)
    return total
