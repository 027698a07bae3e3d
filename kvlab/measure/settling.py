"""Layer 3: how a busy card comes to its pace under new contents, and for how long it is then timed.

Where a power cap holds the clock, that takes seconds: the cap's controller overshoots, and on an H200 the step swings
by 4 % of its time with a period of about a second, after a change of contents much alike each time, until the swing has
died away (`benchmarks/cap_settling.py`). Replays taken earlier are wrong alike, which no number of rounds shows: a gap
of -0.9 % was read as -0.4 % and as +1.1 %, by when in the swing its replays lay.
"""

from __future__ import annotations

import time

from kvlab.measure.sampler import Sampler
from kvlab.measure.timer import Timer

# Seconds of replays until a cap that will hold the clock does; it was seen to bite after 0.16 to 0.19 s.
SETTLE_S = 0.3
# And under a cap. Contents that draw less are free of it sooner: once no reading of so many seconds tells of it.
SETTLE_CAPPED_S, _FREE_S = 5.0, 0.3
# Under a cap replays are timed for a period of its swing; of short ones so many are kept, evenly spread.
_VISIT_S, KEPT = 1.0, 20


def settle(timer: Timer, sampler: Sampler) -> bool:
    """Replay until the step's pace under the present contents is steady; whether a cap holds the clock then.

    Args:
        sampler: at work. The card is never left idle to be looked at, as that would set the swing off again.
    """
    begin = time.perf_counter()

    def capped() -> bool:
        since = max(begin, time.perf_counter() - _FREE_S)
        return any(reading.throttled for reading in list(sampler.readings) if reading.t_s >= since)

    timer.settle(SETTLE_CAPPED_S, until=lambda: time.perf_counter() - begin >= SETTLE_S and not capped())
    return capped()


def visit(timer: Timer, replays: int, discard: int, capped: bool) -> list[float]:
    """Microseconds of the replays of a settled card that count.

    Args:
        replays: that count, at least; under a cap as many as fill a period of its swing, `KEPT` at most of them kept.
        discard: that come before them in the same call, so that the card does not idle in between.
    """
    if not capped or not timer.paced_s:
        return timer.time(discard + replays)[discard:]
    count = max(replays, round(_VISIT_S / timer.paced_s))
    return spread(timer.time(discard + count)[discard:], max(replays, KEPT))


def spread(times: list[float], most: int) -> list[float]:
    """At most so many of them, in order and evenly spread."""
    if len(times) <= most:
        return times
    return [times[i * len(times) // most] for i in range(most)]
