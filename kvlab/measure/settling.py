"""Layer 3: how a busy card comes to its pace under new contents, and for how long it is then timed.

Where a power cap holds the clock, that takes seconds: the cap's controller overshoots, and on an H200 the step swings
by 4 % of its time with a period of about a second, after a change of contents much alike each time, until the swing has
died away (`benchmarks/cap_settling.py`). Replays taken earlier are wrong alike, which no number of rounds shows: a gap
of -0.9 % was read as -0.4 % and as +1.1 %, by when in the swing its replays lay. What is left of it, a percent from
replay to replay, cancels in the mean over whole periods: over two, begun 4.5 s after the change or later, that lay
within 0.1 % of the truth, where the median over one was up to 0.5 % off.
"""

from __future__ import annotations

import time

from kvlab.measure.sampler import Sampler
from kvlab.measure.timer import Replay, Timer

# Seconds of discarded replays, at least, before those of an isolated arm on a GPU: the fill and the host's work before
# it leave the card at another pace (seen: decodes 3 to 5 % slow for some tens of milliseconds).
PACE_S = 0.1
# Seconds of replays by which a cap that will hold the clock does: 0.16 to 0.19 s at 100 W above it, later when nearer.
# A card without a capped reading for as long counts as free of it.
SETTLE_S = 0.8
# And under a cap, or where nothing tells whether there is one: so long, and by chance up to so much more, so that
# visits meet what is left of the swing in more than one phase.
SETTLE_CAPPED_S, MORE_S = 4.5, 0.5
# Under a cap replays are timed for this long, two periods of the swing; of short ones so many are kept, evenly spread.
TIMED_CAPPED_S = 2.0
KEPT = 64
# Readings of the last so many seconds of settling are the pace's as well: the card has long woken from the fill.
SETTLED_S = 0.5


def settle(timer: Timer, sampler: Sampler, more: float = 0.0) -> bool:
    """Replay until the step's pace under the present contents is steady; whether a cap holds the clock then, as it may
    where no sensor tells.

    A cap that comes and goes by turns of a second or more is met in one of its states.

    Args:
        sampler: at work. The card is never left idle to be looked at, as that would set the swing off again.
        more: seconds under a cap beyond `SETTLE_CAPPED_S`, drawn for this visit from 0 to `MORE_S`.
    """
    begin = time.perf_counter()

    def capped() -> bool:
        since = max(begin, time.perf_counter() - SETTLE_S)
        told = [r.throttled for r in list(sampler.readings) if r.t_s >= since and r.throttled is not None]
        return not told or any(told)

    timer.settle(SETTLE_CAPPED_S + more, until=lambda: time.perf_counter() - begin >= SETTLE_S and not capped())
    return capped()


def visit(timer: Timer, replays: int, discard: int, capped: bool) -> list[Replay]:
    """The replays of a settled card that count.

    Args:
        replays: that count, at least; under a cap as many as take `TIMED_CAPPED_S`, `KEPT` at most of them kept.
        discard: that come before them in the same call, so that the card does not idle in between.
    """
    if not capped or not timer.paced_s:
        return timer.replay(discard + replays)[discard:]
    count = max(replays, round(TIMED_CAPPED_S / timer.paced_s))
    return spread(timer.replay(discard + count)[discard:], max(replays, KEPT))


def spread(replays: list[Replay], most: int) -> list[Replay]:
    """At most so many of them, in order and evenly spread."""
    if len(replays) <= most:
        return replays
    return [replays[i * len(replays) // most] for i in range(most)]
