"""Layer 4: a cause in one plain sentence; every number in it is one of `kvlab.causes.Cause`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvlab.kernel_names import SELECTION
from kvlab.stats import MIN_ROUNDS

if TYPE_CHECKING:
    from kvlab.causes import Cause, Part
    from kvlab.estimates import Estimate

# Of the gap: what explains this much is the cause; what explains the second much is named beside it.
MAIN, BESIDE = 0.5, 0.2


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
    pace = f"{who} is {gap.lstrip('+-')} {'slower' if gap_us > 0 else 'faster'}{than} ({_size(gap_us)})"
    # The roles that carry the gap, the largest first.
    carried = {role: us for role, us in cause.roles.items() if us * gap_us > 0 and abs(us) >= 0.05 * abs(gap_us)}
    carried = dict(sorted(carried.items(), key=lambda item: -abs(item[1])))
    if kind == "none":
        return _no_gap(cause, gap, floor)
    if kind == "cancelling":
        text = _cancelling(cause, movers, gap)
    elif kind == "routing":
        moe = f" and {_takes(cause, ['MoE'])}" if "MoE" in cause.roles else ""
        moved = f"at least {100 * (cause.routing or 0):.0f} %"
        so = "so the cause is" if cause.roles else "so the cause may be (its kernels were not profiled)"
        text = f"{pace}: {moved} of the tokens went to other experts{moe}, {so} the routing and not the KV"
        text += _clock_beside(cause, gap_us)
    elif kind == "clocks":
        lead = f"{_takes(cause, [next(iter(carried))])}, " if carried else ""
        text = f"{pace}: {lead}{_clocks(cause)}; {_in_cycles(cause)}"
        if cause.selection and abs(cause.selection.us) >= BESIDE * abs(gap_us):
            text += f"; selection takes {_part(cause.selection)}"
    elif kind == "selection":
        parts = _takes(cause, [role for role in carried if role in SELECTION])
        if not cause.roles and cause.indexer_cycles:
            parts = f"the indexer's contents make {_estimate(cause.indexer_cycles)} in cycles"
        text = f"{pace}: {parts}, so the cause is the selection of tokens by the indexer's scores"
        if cause.clocks and abs(cause.clocks.us) >= BESIDE * abs(gap_us):
            text += f"; {_clocks(cause)} {_all_else(cause)}"
    elif kind == "kernels":
        role, _ = max(movers.items(), key=lambda item: item[1] * gap_us)
        text = f"{pace}: {_takes(cause, [role])}; {_work_or_clock(cause)}{_clock_beside(cause, gap_us)}"
    else:
        text = f"{pace}{_aside(cause)}, and the cause is not known: {_missing(cause, routing)}"
    return f"{text}{_effects(cause)}."


def _takes(cause: Cause, roles: Sequence[str]) -> str:
    """What kernels of some roles take more or less: `top-k takes 24 ± 1 us less (90 %, 3 profiled replays)`."""
    told: list[str] = []
    for role in roles:
        us, half = _gap(cause, role)
        told.append(f"{role} {'' if told else 'takes '}{_size(us, half)} {_way(us)}")
    over = f" (90 %, {cause.profiled})" if any("±" in each for each in told) else ""
    return ", ".join(told) + over


def _part(part: Part) -> str:
    """`5.1 ms more (4.5 to 8.0)`."""
    said = f"{_size(part.us)} {_way(part.us)}"
    if part.ci90 is None:
        return said
    # Both ends as the part is signed; what is left of 0 is then a minus.
    ends = sorted(math.copysign(1, part.us) * end for end in part.ci90)
    scale, digits, _ = _unit(part.us)
    return f"{said} (90 %: {' to '.join(f'{end / scale:,.{digits}f}' for end in ends)})"


def _all_else(cause: Cause) -> str:
    """What is left of the gap without the selection, and how much of that the clock can make, where not all."""
    assert cause.clocks is not None
    other = cause.other.us if cause.other else 0.0
    if abs(other) < BESIDE * abs(cause.clocks.us):
        return f"all else takes {_part(cause.clocks)}"
    rest = cause.clocks.us + other
    return f"all else takes {_size(rest)} {_way(rest)}, of which the clock can make {_part(cause.clocks)}"


def _estimate(found: Estimate) -> str:
    interval = f" (90 %: {' to '.join(map(percent, found.ci90))})" if found.n > 1 else ""
    return f"{percent(found.gap)}{interval}"


def _size(us: float, half: float = 0.0) -> str:
    """Without a sign, and with the half-width of its interval where that shows: `24 ± 1 us`."""
    scale, digits, unit = _unit(us)
    # One digit more of milliseconds where the interval shows then.
    digits += bool(unit == "ms" and 0.005 <= half / scale < 0.05)
    number, width = (f"{abs(value) / scale:,.{digits}f}" for value in (us, half))
    return f"{number} ± {width} {unit}" if float(width.replace(",", "")) else f"{number} {unit}"


def _way(us: float) -> str:
    return "more" if us > 0 else "less"


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
    head = f"{names[0][0].upper()}{names[0][1:]} and {names[1]} cancel{much}"
    if sorted(names) == ["power", "selection"] and cause.clocks:
        chosen, powered = (movers["selection"], movers[other if first == "selection" else first])
        slowed = [name for name in order if name != "selection" and movers[name] * powered > 0][:2]
        most = ", of it ".join(("", " and ".join(f"{name} {_size(*_gap(cause, name))}" for name in slowed)))
        told = {
            "selection": _takes(cause, [_leading(cause, "selection", chosen)]),
            "power": f"{_clocks(cause)} {_all_else(cause)}{most}",
        }
        return f"{head}: {told[names[0]]}; {told[names[1]]}; the whole step {_estimate(cause.gap)}"
    parts = _takes(cause, [_leading(cause, name, movers[name]) for name in (first, other)])
    clock = f", {_clocks(cause)}" if "power" in names else ""
    return f"{head}: {parts}{clock}; the whole step {gap}"


def _gap(cause: Cause, role: str) -> tuple[float, float]:
    """Of a role, and half the width of its interval; 0 where there is none."""
    lo, hi = cause.role_ci90.get(role, (0.0, 0.0))
    return cause.roles[role], (hi - lo) / 2


def _by_power(cause: Cause, us: float) -> bool:
    """A kernel slower at a lower clock, or faster at a higher one: power, where power is what holds the clock down."""
    if cause.mhz is None or cause.clocks is None or (cause.mhz[0] - cause.mhz[1]) * us <= 0:
        return False
    return abs(cause.clocks.us) >= MAIN * abs(us)


def _leading(cause: Cause, name: str, us: float) -> str:
    """The role to name: of selection the one that moved most its way."""
    return max(SELECTION, key=lambda role: cause.roles.get(role, 0.0) * us) if name == "selection" else name


def _clocks(cause: Cause) -> str:
    assert cause.mhz is not None
    watts = f" ({cause.watts[1]:.0f} instead of {cause.watts[0]:.0f} W)" if cause.watts else ""
    return f"at {cause.mhz[1]:,.0f} instead of {cause.mhz[0]:,.0f} MHz{watts}"


def _aside(cause: Cause) -> str:
    """The clocks, where they are not the cause."""
    if cause.mhz is None:
        return ""
    return f" {_clocks(cause)}" if cause.clock_moved else f" at the same clock ({cause.mhz[0]:,.0f} MHz)"


def _missing(cause: Cause, routing: str) -> str:
    if cause.roles:
        return "no kind of kernel moved enough to explain it"
    if routing == "real" and cause.routing is None:
        return "routing was real, but neither the experts' loads nor the kernels were looked at"
    return "its kernels were not profiled"


def _clock_beside(cause: Cause, gap_us: float) -> str:
    """What of the gap the clock can make, where that is worth a word."""
    if not cause.clocks or abs(cause.clocks.us) < BESIDE * abs(gap_us):
        return ""
    return f"; {_clocks(cause)}, which can make {_size(abs(cause.clocks.us))} of it"


def clock_is_likely(cause: Cause) -> bool:
    """Of a gap that the clock makes: whether the gap in cycles leaves room for more, or was read in too few rounds."""
    cycles = cause.cycles
    if cycles is None or cycles.n < MIN_ROUNDS:
        return True
    return not _waits(cause, cycles) and max(_ends(cause, cycles)) >= MAIN * abs(cause.gap.gap)


def _ends(cause: Cause, cycles: Estimate) -> tuple[float, ...]:
    """Of the gap in cycles, positive the way that the gap in time goes."""
    return tuple(end * math.copysign(1, cause.gap.gap) for end in cycles.ci90)


def _waits(cause: Cause, cycles: Estimate) -> bool:
    """Fewer cycles at the lower clock: the step waits for something that has a clock of its own."""
    return cycles.log_gap * cause.gap.log_gap < 0 and abs(cycles.log_gap) > abs(cause.gap.log_gap)


def _in_cycles(cause: Cause) -> str:
    assert cause.mhz is not None
    cycles = cause.cycles
    if cycles is None:
        return "likely the clock, but no round has one under both"
    told = f"in cycles the gap is {_estimate(cycles)}"
    if cycles.n < MIN_ROUNDS:
        return f"{told}: likely the clock, but {'one round' if cycles.n == 1 else f'{cycles.n} rounds'} only had one"
    if _waits(cause, cycles):
        could = percent(cause.mhz[0] / cause.mhz[1] - 1)
        return f"that change alone could make {could}, so the cause is the clock, for which the step waits only in part"
    if clock_is_likely(cause):
        return f"{told}: likely the clock, but the interval leaves room for more"
    if min(_ends(cause, cycles)) >= BESIDE * abs(cause.gap.gap):
        return f"{told}, so the clock makes the larger part of it, and not all"
    return f"{told}, so the cause is the clock"


def _work_or_clock(cause: Cause) -> str:
    """Of kernels that moved while the clock did not, or too little: a driver's readings miss dips within a kernel."""
    cycles = cause.cycles
    if cycles is None:
        return "as no clock was read, by their work or by the clock"
    told = f"in cycles{'' if cause.counted else ' of the clock that was read'} the gap is {_estimate(cycles)}"
    if cycles.n > 1 and min(_ends(cause, cycles)) <= 0:
        return f"{told}, which does not tell their work from the clock"
    missed = "" if cause.counted else ", or by dips of the clock that are too short to be read"
    return f"{told}, so by their work{missed}"


def _effects(cause: Cause) -> str:
    if cause.indexer is None or cause.kv is None:
        return ""
    cycles = ""
    if cause.indexer_cycles and cause.kv_cycles and cause.clocks and cause.clocks.us:
        cycles = f" (in cycles {percent(cause.indexer_cycles.gap)} and {percent(cause.kv_cycles.gap)})"
    return f"; the indexer's contents make {percent(cause.indexer.gap)}, the KV's {percent(cause.kv.gap)}{cycles}"


def percent(share: float) -> str:
    """Signed, with one digit from 1 % on and two below: +13.1 %, -0.05 %."""
    value = 100 * share
    return f"{value:+.1f} %" if abs(value) >= 0.995 else f"{value:+.2f} %"


def _unit(us: float) -> tuple[float, int, str]:
    """Divisor, digits after the point and name of the unit that a duration is told in."""
    if abs(us) >= 999.5:
        return 1e3, 1, "ms"
    return 1.0, 0 if abs(us) >= 9.95 else 1, "us"
