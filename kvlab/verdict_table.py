"""Layer 6: verdicts and their explanations as text for a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvlab.kernel_gaps import TOTAL, kernel_gap_table, profiled_samples
from kvlab.kernel_names import CLOSE, REST
from kvlab.pilot import RoundPlan
from kvlab.stats import ALPHA, BASELINE, all_within, holm

# Kernels that are printed one by one, the largest gaps first.
_KERNELS = 12


def verdict_table(verdicts: Sequence[dict[str, Any]]) -> str:
    """One row per case and mode, then the reasons, a line each."""
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
        said = (*_planned(v), *v["reasons"], *_other_arms(v), *_clocks(v))
        lines += [f"  {v['case']}, {v['mode']}: {told}" for told in said]
    if len(verdicts) > 1:
        lines += [_joint(verdicts), *_after_holm(verdicts)]
    if unseen := list(dict.fromkeys(v["case"] for v in verdicts if v["rounds"] and v.get("outside_writes", 0) is None)):
        lines.append(
            f"Whether {', '.join(unseen)} wrote outside the touched views was not looked at; `kvlab verify` does."
        )
    return "\n".join(lines)


def _joint(verdicts: Sequence[dict[str, Any]]) -> str:
    margins = sorted({v["margin"] for v in verdicts})
    within = f"within {100 * margins[0]:g} %" if len(margins) == 1 else "within its margin"
    if all_within(v["verdict"] for v in verdicts):
        return f"All {len(verdicts)}: every gap is {within}, each at the 5 % level and so all of them together."
    said = ", ".join(f"{n} {verdict}" for verdict, n in Counter(v["verdict"] for v in verdicts).most_common())
    return f"All {len(verdicts)}: not shown that every gap is {within} ({said})."


def _after_holm(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """Which gaps differ when it is taken into account that several were looked at."""
    judged = [v for v in verdicts if v.get("p") is not None and v["verdict"] != "invalid"]
    if len(judged) < 2 or all(v["verdict"] != "different" for v in judged):
        return []
    held: dict[bool, list[str]] = {True: [], False: []}
    for v, p in zip(judged, holm([v["p"] for v in judged]), strict=True):
        if v["verdict"] == "different":
            held[bool(p <= ALPHA)].append(f"{v['case']} {v['mode']}")
    over = f"Holm's correction over {len(judged)} gaps (family-wise error {100 * ALPHA:g} %)"
    words = {True: f"Different after {over} too", False: f"Different by its own interval, but not after {over}"}
    return [f"{words[after]}: {', '.join(names)}." for after, names in held.items() if names]


def kernel_records(verdict: dict[str, Any], kernels: pd.DataFrame) -> dict[str, Any]:
    """For JSON, of an explained verdict: `kernels`, arm -> rows of `kernel_gap_table` against zeros; else nothing.

    Args:
        kernels: `Run.kernels`.
    """
    here = kernels[(kernels["case"] == verdict["case"]) & (kernels["mode"] == verdict["mode"])]
    if "cause" not in verdict or here.empty:
        return {}
    tables = {arm: kernel_gap_table(here, arm) for arm in here["arm"].unique() if arm != BASELINE}
    return {"kernels": {arm: json.loads(table.to_json(orient="records")) for arm, table in tables.items()}}


def explanation(verdict: dict[str, Any], kernels: pd.DataFrame) -> str:
    """What an explained case and mode show: the cause, the selected tokens, and the kernels that make the gap.

    Args:
        kernels: `Run.kernels`, of this case and mode at least.
    """
    arm, cause = verdict["arm"], verdict["cause"]
    hint = " (No more than a hint, as the verdict is invalid.)" if verdict["verdict"] == "invalid" else ""
    lines = [f"{verdict['case']}, {verdict['mode']}: {cause['sentence']}{hint}"]
    for name, what in (
        ("indexer", "the indexer's contents"),
        ("kv", "the KV's"),
        ("interaction", "both beyond the sum"),
    ):
        if effect := cause.get(name):
            cycles = cause.get(f"{name}_cycles")
            apart = cycles and abs(cycles["gap"] - effect["gap"]) >= 5e-4
            told = f"; in cycles {_percent(cycles['gap'])} ({_interval(cycles['ci90'])})" if apart else ""
            lines.append(f"  {what}: {_percent(effect['gap'])} ({_interval(effect['ci90'])}){told}")
    lines += [f"  {told}" for told in parts_told(cause)]
    for name, picked in (verdict.get("selection") or {}).items():
        if picked["neighbours"] is not None:
            lines.append(
                f"  selected under {name}: {picked['neighbours']:.1%} neighbours, {picked['pages']:.1f} pages a query,"
                f" {picked['shared_with_zeros']:.1%} as under zeros"
            )
    lines.append(_kernel_rows(verdict, kernel_gap_table(kernels, arm)))
    if over := profiled_samples(kernels, arm):
        lines.append(f"  +-: 90 %, over {over} that share their moment: how steady a kernel was, not how it repeats")
    lines += [f"  {told}" for told in closing(verdict["profiles"], arm)]
    zeros, other = (verdict["profiles"][name]["timed_us"] for name in ("zeros", arm))
    lines.append(
        f"  the profile's replays were {_percent(other / zeros - 1)} apart, the rounds' {_percent(verdict['gap'])}"
        f" ({_interval(verdict['ci90'])})"
    )
    return "\n".join(lines)


def parts_told(cause: dict[str, Any]) -> list[str]:
    """Selection and clock, in microseconds and of the step, with their intervals; of a stored cause."""
    told = []
    for name, what in (("selection", "selection"), ("clocks", "clock"), ("other", "neither")):
        part = cause.get(name)
        if part and (part["us"] or name == "other"):
            interval = f" ({' .. '.join(f'{end:+,.0f}' for end in part['ci90'])})" if part.get("ci90") else ""
            told.append(f"{what} {part['us']:+,.0f} us{interval}, {part['of_step']:+.2%} of the step")
    return ["of the gap: " + "; ".join(told)] if len(told) > 1 else []


def closing(profiles: dict[str, Any], arm: str) -> list[str]:
    """How the kernels of zeros and of an arm add up to the timed step, and of others where they do not: a sentence
    each, of a verdict's `profiles`."""
    lines = []
    for name in dict.fromkeys(("zeros", arm, *profiles)):
        profile = profiles[name]
        if profile["closes"] and name not in ("zeros", arm):
            continue
        line = f"under {name} the kernels add up to {profile['closure']:.1%} of the timed step"
        if not profile["closes"]:
            line += f", which does not close within {100 * CLOSE:g} %"
        busy = profile["busy_us"] / profile["timed_us"]
        if abs(busy - profile["closure"]) >= 0.01:
            line += f": {profile['overlap_us']:,.0f} us ran beside other kernels; counted once, it is {busy:.1%}"
        outside = "left out" if profile["restore_outside"] else "NOT told apart from the step"
        lines.append(f"{line}; the restore ({profile['restore_us']:,.0f} us) is {outside}")
    return lines


def _kernel_rows(verdict: dict[str, Any], table: pd.DataFrame) -> str:
    """The largest gaps, all other kernels as one row, and two that reconcile the sum with the timed step."""
    arm, numbers = verdict["arm"], ["baseline_us", "arm_us", "gap_us"]
    kernels, total = table[~table["role"].isin((REST, TOTAL))], table[table["role"] == TOTAL]
    shown, left = kernels.iloc[:_KERNELS], kernels.iloc[_KERNELS:]
    rows = [shown]
    if len(left):
        rows.append(pd.DataFrame([{"role": "", "kernel": f"({len(left)} others)", **left[numbers].sum()}]))
    profiles = [verdict["profiles"][name] for name in ("zeros", arm)]
    overlap = [-profile["overlap_us"] for profile in profiles]
    between = [profile["timed_us"] - profile["busy_us"] for profile in profiles]
    for kernel, (zeros, other) in (
        ("(counted twice: side by side)", overlap),
        ("(rest: gaps, drift of the profile)", between),
    ):
        values = zip(numbers, (zeros, other, other - zeros), strict=True)
        rows.append(pd.DataFrame([{"role": REST, "kernel": kernel, **dict(values)}]))
    found = pd.concat([*rows, total], ignore_index=True)
    half = (found["hi_us"] - found["lo_us"]) / 2
    columns = {
        "role": found["role"],
        "kernel": found["kernel"],
        "zeros us": found["baseline_us"].map("{:,.1f}".format),
        f"{arm} us": found["arm_us"].map("{:,.1f}".format),
        "gap us": found["gap_us"].map("{:+,.1f}".format),
        "+-": half.map(lambda us: "" if pd.isna(us) else f"{us:,.1f}"),
        "of the step": (found["gap_us"] / total["baseline_us"].iloc[0]).map("{:+.2%}".format),
    }
    # Of a gap that is not told from 0, or that is a small difference of large parts, shares say nothing.
    told = verdict["ci90"] and verdict["ci90"][0] * verdict["ci90"][1] > 0
    if told and verdict["cause"].get("kind") != "cancelling":
        gap_us = verdict["gap"] * verdict["median_us"]["zeros"]
        columns["of the gap"] = (found["gap_us"] / gap_us).map("{:.0%}".format)
    return pd.DataFrame(columns).to_string(index=False)


def _planned(verdict: dict[str, Any]) -> list[str]:
    """How many rounds a pilot decided on, and why."""
    plan = verdict.get("plan") or {"limit": "given"}
    return [] if plan["limit"] == "given" else [str(RoundPlan(**plan))]


def _other_arms(verdict: dict[str, Any]) -> list[str]:
    """The gaps of the arms that the row is not about."""
    return [
        f"{name} is {_percent(of['gap'])} ({_interval(of['ci90'])}) off zeros, {of['verdict']}."
        for name, of in (verdict.get("arms") or {}).items()
        if name != verdict["arm"]
    ]


def _clocks(verdict: dict[str, Any]) -> list[str]:
    """Clocks and power of the arms, and the gap in cycles, where there are sensors."""
    clocks = verdict.get("clocks") or {}
    parts = [
        f"{name} {', '.join(f'{value:,.0f} {unit}' for unit, value in of.items() if value is not None)}"
        for name, of in clocks.items()
    ]
    cycles = verdict.get("cycles")
    told = ""
    if cycles:
        few = f", of {cycles['rounds']} rounds" if cycles.get("rounds", verdict["rounds"]) < verdict["rounds"] else ""
        told = f"; gap in cycles {_percent(cycles['gap'])} ({_interval(cycles['ci90'])}{few})"
    return [f"{'; '.join(parts)}{told}"] if parts else []


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2%}"


def _interval(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:+.2%} .. {pair[1]:+.2%}"
