"""Layer 4: a cause in one plain sentence; every number in it is one of `kvlab.causes.Cause`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvlab.kernel_names import SELECTION

if TYPE_CHECKING:
    from kvlab.causes import Cause

# Of the gap: what explains this much is the cause; what explains the second much is named beside it.
MAIN, BESIDE = 0.5, 0.2
# Of the clock: more than one step of NVIDIA's clocks (15 of 1,980 MHz).
CLOCK_MOVED = 0.01


def cause_sentence(
    cause: Cause,
    kind: str,
    movers: Mapping[str, float],
    *,
    arm: str,
    baseline: str,
    step: float,
    floor: float,
    routing: str,
) -> str:
    """The sentence for a kind of cause.

    Args:
        movers: microseconds by which `selection` and the other roles moved.
        step: the baseline's microseconds.
        floor: of the A/A, in log ratios.
        routing: of the samples: `real`, `balanced`, `none`.
    """
    gap = percent(cause.gap.gap)
    gap_us = step * cause.gap.gap
    who = "Random KV" if arm == "random" else f"KV of {arm}"
    than = "" if baseline == "zeros" else f" than {baseline}"
    pace = f"{who} is {gap.lstrip('+-')} {'slower' if gap_us > 0 else 'faster'}{than}"
    # The roles that carry the gap, the largest first.
    carried = {role: us for role, us in cause.roles.items() if us * gap_us > 0 and abs(us) >= 0.05 * abs(gap_us)}
    carried = dict(sorted(carried.items(), key=lambda item: -abs(item[1])))
    if kind == "none":
        return _no_gap(cause, gap, floor)
    if kind == "cancelling":
        text = _cancelling(cause, movers, gap)
    elif kind == "routing":
        moe = f", MoE {duration(cause.roles['MoE'])} of {duration(gap_us)}" if "MoE" in cause.roles else ""
        moved = f"{100 * (cause.routing or 0):.0f} %"
        text = f"{pace}: {moved} of the tokens went to other experts{moe}, so the cause is the routing and not the KV"
    elif kind == "clocks":
        lead = next((f"{role} {duration(us)} of {duration(gap_us)}, " for role, us in carried.items()), "")
        text = f"{pace}: {lead}{_clocks(cause)}; {_in_cycles(cause)}"
    elif kind == "selection":
        parts = ", ".join(f"{role} {duration(us)}" for role, us in carried.items() if role in SELECTION)
        text = f"{pace}: {parts} of {duration(gap_us)}, so the cause is which tokens the indexer's scores select"
        if cause.clocks and abs(cause.clocks.us) >= BESIDE * abs(gap_us):
            text += f"; the clock adds {duration(cause.clocks.us)}, {_clocks(cause)}"
    elif kind == "kernels":
        role, us = max(movers.items(), key=lambda item: item[1] * gap_us)
        cycles = f", in cycles {percent(cause.cycles.gap)}" if cause.cycles else ""
        text = f"{pace}: {role} {duration(us)} of {duration(gap_us)}{cycles}, so their work depends on the contents"
    else:
        text = f"{pace}{_aside(cause)}, and the cause is not known: {_missing(cause, routing)}"
    return f"{text}{_effects(cause)}."


def _no_gap(cause: Cause, gap: str, floor: float) -> str:
    if abs(cause.gap.log_gap) <= floor:
        return f"No cause to look for: the gap of {gap} is within the A/A floor of {percent(math.expm1(floor))[1:]}."
    if cause.gap.n == 1:
        return f"No cause to look for: one round cannot tell a gap of {gap} from 0."
    lo, hi = map(percent, cause.gap.ci90)
    return f"No cause to look for: the gap of {gap} is not told from 0 (90 % interval {lo} to {hi})."


def _cancelling(cause: Cause, movers: Mapping[str, float], gap: str) -> str:
    order = sorted(movers, key=lambda name: -abs(movers[name]))
    first = order[0]
    other = next(name for name in order if movers[name] * movers[first] < 0)
    names = [name if name == "selection" or not _by_power(cause, movers[name]) else "power" for name in (first, other)]
    much = "" if abs(sum(movers.values())) <= MAIN * abs(movers[first]) else " in part"
    parts = ", ".join(f"{role} {duration(us)}" for role, us in (_leading(cause, n, movers[n]) for n in (first, other)))
    clock = f", {_clocks(cause)}" if "power" in names else ""
    head = f"{names[0][0].upper()}{names[0][1:]} and {names[1]} cancel{much}"
    return f"{head}: {parts}{clock}; the whole step {gap}"


def _by_power(cause: Cause, us: float) -> bool:
    """A kernel slower at a lower clock, or faster at a higher one: power, where power is what holds the clock down."""
    return cause.mhz is not None and bool(cause.clocks and cause.clocks.us) and (cause.mhz[0] - cause.mhz[1]) * us > 0


def _leading(cause: Cause, name: str, us: float) -> tuple[str, float]:
    """The role to name, and its microseconds: of selection the one that moved most its way."""
    if name != "selection":
        return name, us
    roles = {role: cause.roles.get(role, 0.0) for role in SELECTION}
    role = max(roles, key=lambda role: roles[role] * us)
    return role, roles[role]


def _clocks(cause: Cause) -> str:
    assert cause.mhz is not None
    watts = f" ({cause.watts[1]:.0f} instead of {cause.watts[0]:.0f} W)" if cause.watts else ""
    return f"at {cause.mhz[1]:,.0f} instead of {cause.mhz[0]:,.0f} MHz{watts}"


def _aside(cause: Cause) -> str:
    """The clocks, where they are not the cause."""
    if cause.mhz is None:
        return ""
    same = abs(cause.mhz[1] / cause.mhz[0] - 1) < CLOCK_MOVED
    return f" at the same clock ({cause.mhz[0]:,.0f} MHz)" if same else f" {_clocks(cause)}"


def _missing(cause: Cause, routing: str) -> str:
    if cause.roles:
        return "no kind of kernel moved enough to explain it"
    if routing == "real" and cause.routing is None:
        return "routing was real, but neither the experts' loads nor the kernels were looked at"
    return "its kernels were not profiled"


def _in_cycles(cause: Cause) -> str:
    assert cause.mhz is not None
    cycles = cause.cycles
    if cycles is None or cycles.log_gap * cause.gap.log_gap >= 0 or abs(cycles.log_gap) <= abs(cause.gap.log_gap):
        found = f"in cycles the gap is {percent(cycles.gap)}, so " if cycles else ""
        return f"{found}the cause is the clock"
    # Fewer cycles at the lower clock: the step waits for something that has a clock of its own.
    could = percent(cause.mhz[0] / cause.mhz[1] - 1)
    return f"that change alone could make {could}, so the cause is the clock, for which the step waits only in part"


def _effects(cause: Cause) -> str:
    if cause.indexer is None or cause.kv is None:
        return ""
    return f"; the indexer's contents make {percent(cause.indexer.gap)}, the rest's {percent(cause.kv.gap)}"


def percent(share: float) -> str:
    """Signed, with one digit from 1 % on and two below: +13.1 %, -0.05 %."""
    value = 100 * share
    return f"{value:+.1f} %" if abs(value) >= 0.995 else f"{value:+.2f} %"


def duration(us: float) -> str:
    """Signed microseconds, or milliseconds from 1,000 us on: +250 us, -6.6 ms."""
    if abs(us) >= 999.5:
        return f"{us / 1e3:+,.1f} ms"
    return f"{us:+.0f} us" if abs(us) >= 9.95 else f"{us:+.1f} us"
