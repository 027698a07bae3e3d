"""Layer 6: verdicts and their explanations as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvlab.kernel_gaps import kernel_gap_table
from kvlab.pilot import RoundPlan

# Kernels that are printed one by one, the largest gaps first.
_KERNELS = 12


def verdict_table(verdicts: Sequence[dict[str, Any]]) -> str:
    """A row a case and mode, then the reasons, a line each."""
    rows = [
        {
            "case": v["case"],
            "phase": v["phase"],
            "mode": v["mode"],
            "zeros us": "-" if not v["median_us"] else f"{v['median_us']['zeros']:.1f}",
            f"{v['arm']} us": "-" if not v["median_us"] else f"{v['median_us'][v['arm']]:.1f}",
            "gap": _percent(v["gap"]),
            "90 % interval": _interval(v["ci90"]),
            "A/A 90 %": _interval(v["aa"]["ci90"]),
            "MDE": "-" if v["mde"] is None else f"{v['mde']:.2%}",
            "rounds": v["rounds"],
            "verdict": f"{v['verdict']} at {v['margin']:.3g}",
        }
        for v in verdicts
    ]
    lines = [pd.DataFrame(rows).to_string(index=False)]
    for v in verdicts:
        lines += [f"  {v['case']}, {v['mode']}: {told}" for told in (*_planned(v), *v["reasons"], *_clocks(v))]
    return "\n".join(lines)


def explanation(verdict: dict[str, Any], kernels: pd.DataFrame) -> str:
    """What an explained case and mode show: the cause, the selected tokens, and the kernels that make the gap.

    Args:
        kernels: `Run.kernels`, of this case and mode at least.
    """
    arm, cause = verdict["arm"], verdict["cause"]
    lines = [f"{verdict['case']}, {verdict['mode']}: {cause['sentence']}"]
    effects = [(name, cause[name]) for name in ("indexer", "kv", "interaction") if name in cause]
    if effects:
        told = ", ".join(f"{name} {_percent(e['gap'])} ({_interval(e['ci90'])})" for name, e in effects)
        lines.append(f"  by role of the cache: {told}")
    for name, picked in (verdict.get("selection") or {}).items():
        if picked["neighbours"] is not None:
            lines.append(
                f"  selected under {name}: {picked['neighbours']:.1%} neighbours, {picked['pages']:.1f} pages a query,"
                f" {picked['shared_with_zeros']:.1%} as under zeros"
            )
    table = kernel_gap_table(kernels, arm).drop(columns=["lo_us", "hi_us", "of_step"])
    head, tail = table.iloc[:-2], table.iloc[-2:]
    if len(head) > _KERNELS:
        left = head.iloc[_KERNELS:]
        sums = left[["baseline_us", "arm_us", "gap_us", "share"]].sum()
        others = pd.DataFrame([{"role": "", "kernel": f"({len(left)} others)", **sums}])
        head = pd.concat([head.iloc[:_KERNELS], others])
    shown = pd.concat([head, tail]).rename(
        columns={"baseline_us": "zeros us", "arm_us": f"{arm} us", "gap_us": "gap us"}
    )
    shown["share"] = shown["share"].map("{:.0%}".format)
    lines.append(shown.to_string(index=False, float_format="{:,.1f}".format))
    for name in ("zeros", arm):
        profile = verdict["profiles"][name]
        closes = "" if profile["closes"] else ", which does not close: the rest is shown"
        lines.append(f"  under {name} the kernels add up to {profile['closure']:.1%} of the timed step{closes}")
    return "\n".join(lines)


def _planned(verdict: dict[str, Any]) -> list[str]:
    """How many rounds a pilot decided on, and why."""
    plan = verdict.get("plan") or {"limit": "given"}
    return [] if plan["limit"] == "given" else [str(RoundPlan(**plan))]


def _clocks(verdict: dict[str, Any]) -> list[str]:
    """Clocks and power of the arms, and the gap in cycles, where there are sensors."""
    clocks = verdict.get("clocks") or {}
    parts = [
        f"{name} {', '.join(f'{value:,.0f} {unit}' for unit, value in of.items() if value is not None)}"
        for name, of in clocks.items()
        if name in ("zeros", verdict["arm"])
    ]
    cycles = verdict.get("cycles")
    told = f"; gap in cycles {_percent(cycles['gap'])} ({_interval(cycles['ci90'])})" if cycles else ""
    return [f"{'; '.join(parts)}{told}"] if parts else []


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2%}"


def _interval(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:+.2%} .. {pair[1]:+.2%}"
