"""Runs on disk with made-up times and real verdicts, for reports."""

from __future__ import annotations

import numpy as np

from kvlab.run import Run
from kvlab.stats import decide

from handmade_runs import PROVENANCE, STUDY


def make_run(path, cases, *, rounds=20, replays=5, arms=("zeros", "zeros_again", "random"), close=True, **more):
    """A run of `cases`: name -> (text in the grammar, gap of random), or (text, gap, rounds done) if unfinished.

    `study`, `provenance`, `clock` (MHz under random), `cause`, `profiles` and `plan` add to what is stored.
    """
    study = {**STUDY, "arms": list(arms), **more.get("study", {})}
    command = {"command": "kvlab check tiny --case 'a=4*1@4096'", "driver": "580.1"}
    run = Run.create(path, study, {**PROVENANCE, **command, **more.get("provenance", {})})
    rng = np.random.default_rng(len(cases))
    for name, (text, gap, *done) in cases.items():
        facts = {"plan_isolated": {"rounds": rounds}} if more.get("plan", True) else {}
        run.add_case(name, text, "decode", [[1, 4096]], **facts)
        for number in range(done[0] if done else rounds):
            run.add_round(name, "isolated", number, _round(rng, number, arms, gap, replays, more.get("clock", 1980.0)))
        if not done:
            found = _verdict(run.samples_of(name, "isolated"), [arm for arm in arms if not arm.startswith("zeros")])
            head = {"text": text, "margin": 0.03, "phase": "decode", "plan": {"rounds": rounds}}
            explained = {key: more[key] for key in ("cause", "profiles") if key in more}
            run.add_verdict(name, "isolated", {**head, **found, **explained})
    if close:
        run.close()
    return run


def _verdict(samples, arms):
    """As a check stores it."""
    found = {arm: decide(samples, arm, 0.03) for arm in arms}
    claim = found["random"]
    ends = {arm: {"gap": d.gap.gap, "ci90": list(d.gap.ci90), "verdict": d.verdict} for arm, d in found.items()}
    return {
        **ends["random"],
        "aa": {"gap": claim.aa.gap, "ci90": list(claim.aa.ci90)},
        "median_us": samples.groupby("arm")["us"].median().to_dict(),
        "rounds": claim.gap.n,
        "mde": claim.mde,
        "arm": "random",
        "reasons": list(claim.reasons),
        "also": {f"{margin:g}": verdict for margin, verdict in claim.also.items()},
        "arms": ends,
    }


def _round(rng, number, arms, gap, replays, clock):
    """A round's rows; an arm that mixes in zeros has a part of the gap."""
    rows = []
    for position, arm in enumerate(rng.permutation(list(arms))):
        share = 0.0 if arm.startswith("zeros") else 0.5 if "0.5" in arm else 1.0
        for replay in range(replays):
            us = 1000.0 * (1 + share * gap) * (1 + 0.002 * rng.standard_normal())
            sensed = {"sm_mhz": clock if share else 1980.0, "watts": 500.0 + 100 * share}
            row = {"position": position, "arm": str(arm), "fill": str(arm), "seed": number % 4, "replay": replay}
            rows.append({**row, "us": us, **sensed})
    return rows


def grid(count, gap=lambda i: 0.0):
    """So many cases over contexts, in the grammar, with their gaps."""
    return {f"c{i}": (f"c{i}={1 + i % 7}*1@{1024 * (1 + i)}", gap(i)) for i in range(count)}
