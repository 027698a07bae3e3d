#!/usr/bin/env python3
"""Every verdict of an exported run again, from its own samples, as this kvlab decides. Nothing is measured.

    python tools/redecide.py data/h200/NAME ...           # rewrite them
    python tools/redecide.py --check data/h200/NAME ...   # say what would change; exit status 1 where anything would

After a change of the method the evidence moves with it, and a test sees that no stored verdict is other than its
samples say. A case whose rounds are whole but whose process was stopped before it decided gets its verdict here. What
was looked at beside the clock (finite outputs, writes, routing, the profile) is taken as stored.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from kvlab import Run, open_run
from kvlab.cases import parse_case
from kvlab.causes import find_cause
from kvlab.engines.loads import loads_moved
from kvlab.examination import Examination
from kvlab.explain import cause_record
from kvlab.export import write_export
from kvlab.gaps import case_axes
from kvlab.plan import BASELINE, Plan
from kvlab.stats import MIN_ROUNDS
from kvlab.tables import TABLES, frame, plain
from kvlab.verdict import case_verdict

# Of the numbers: above what versions of NumPy differ by.
_SAME = 1e-9


def redecided(run: Run, case: str, mode: str) -> dict[str, Any] | None:
    """The verdict that the run's samples of a case in a mode support; None for fewer rounds than a verdict needs."""
    samples = run.samples_of(case, mode)
    if samples["round"].nunique() < MIN_ROUNDS:
        return run.verdict_of(case, mode)
    plan = Plan.of(run.study["arms"], mode=mode, **{name: run.study[name] for name in ("margin", "replays", "seed")})
    facts = run.cases.set_index("case").loc[case].dropna()
    old = run.verdict_of(case, mode) or {**_head(run, facts, mode), "plan": _of(facts, f"plan_{mode}_")}
    # A list that a case's table holds as text: an arm's name may be part of another's.
    nonfinite = json.loads(facts.get(f"nonfinite_{mode}", "[]"))
    finite = old.get("finite") or {arm.name: arm.name not in nonfinite for arm in plan.arms}
    moved = old.get("routing_moved") or _routing_moved(facts, plan)
    outside = None if math.isnan(facts.get("outside_writes", math.nan)) else int(facts["outside_writes"])
    found = Examination(finite, outside_writes=old.get("outside_writes", outside), routing_moved=moved)
    new = old | case_verdict(samples, plan, found)
    new["reasons"] += old.get("added", ())
    if "cause" in old:
        cause = find_cause(
            samples,
            run.kernels,
            plan.claim.name,
            telemetry=run.telemetry,
            routing_moved=moved.get(plan.claim.name),
        )
        new["cause"] = cause_record(cause)
    return plain(new)


def _head(run: Run, facts: Any, mode: str) -> dict[str, Any]:
    case = parse_case(facts["text"])
    return {
        "case": case.name,
        "text": facts["text"],
        "model": run.study["model"],
        "engine": run.study["engine"],
        "routing": run.study["routing"],
        "phase": case.phase,
        "mode": mode,
        "margin": run.study["margin"],
        "run": str(run.path),
        **case_axes(case),
        "topk": None if math.isnan(facts.get("topk", math.nan)) else int(facts["topk"]),
    }


def _of(facts: Any, prefix: str) -> dict[str, Any]:
    """A nested fact of a case, which its table has flat."""
    return {name.removeprefix(prefix): value for name, value in facts.items() if str(name).startswith(prefix)}


def _routing_moved(facts: Any, plan: Plan) -> dict[str, float]:
    stored = json.loads(facts.get("expert_loads", "{}"))
    loads = {arm: {layer: torch.tensor(n) for layer, n in layers.items()} for arm, layers in stored.items()}
    # Arms that moved nothing are not stored.
    return {a.name: loads_moved(loads[BASELINE], loads.get(a.name, loads[BASELINE])) for a in plan.arms if loads}


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Where two verdicts differ, one line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{where}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{where}[{i}]")]
    if isinstance(old, int | float) and isinstance(new, int | float) and math.isclose(old, new, rel_tol=_SAME):
        return []
    return [] if old == new else [f"{where.lstrip('.')}: {old} -> {new}"]


def verdicts_again(run: Run) -> list[tuple[str, str, dict[str, Any]]]:
    """(case, mode, verdict) of every case that has one or has the rounds for one."""
    stored = [(case, mode) for case, mode, _ in run._verdicts()]
    rounds = run.samples[["case", "mode"]].drop_duplicates().itertuples(index=False, name=None)
    again = [(*key, redecided(run, *key)) for key in dict.fromkeys([*stored, *rounds])]
    return [(case, mode, verdict) for case, mode, verdict in again if verdict]


def rewrite(folder: Path) -> list[str]:
    """Put the verdicts of an export in place of those it has; what changed."""
    run = open_run(folder)
    again = verdicts_again(run)
    changed = [
        f"{folder.name} {case} {mode} {line}"
        for case, mode, verdict in again
        for line in differences(run.verdict_of(case, mode), verdict)
    ]
    if changed:
        frames = run._frames(*TABLES)
        records = [{**verdict, "case": case, "mode": mode} for case, mode, verdict in again]
        frames["verdicts"] = frame(TABLES["verdicts"], records, run._identity)
        write_export(folder, {**run._record, "verdicts": [list(each) for each in again]}, frames)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folder of an export")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    changed = []
    for folder in args.runs:
        if args.check:
            run = open_run(folder)
            for case, mode, verdict in verdicts_again(run):
                changed += [
                    f"{folder.name} {case} {mode} {line}" for line in differences(run.verdict_of(case, mode), verdict)
                ]
        else:
            changed += rewrite(folder)
    print("\n".join(changed) or "every verdict is what its samples say")
    if args.check and changed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
