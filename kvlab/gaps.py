"""Layer 4: the gaps of a run as one table: one row per case, mode and compared arm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from kvlab.cases import Case, parse_case
from kvlab.tables import IDENTITY

# What a verdict says of its case; older ones say some of it in the case's text alone.
AXES = ("context", "batch", "query", "topk")
_COLUMNS = ("case", "text", "mode", "arm", "margin", "phase", "gap", "ci90_lo", "ci90_hi", "verdict")


def case_axes(case: Case) -> dict[str, int]:
    """`context`: tokens of the longest KV; `batch`: requests; `query`: most tokens that one of them computes."""
    return {
        "context": max(request.kv_len for request in case.requests),
        "batch": len(case.requests),
        "query": max(request.query_len for request in case.requests),
    }


def gap_table(verdicts: Iterable[tuple[str, str, Mapping[str, Any]]], identity: Mapping[str, Any]) -> pd.DataFrame:
    """The table; a case without times has one row, whose gap is NaN.

    Args:
        verdicts: (case, mode, verdict as the run stores it).
        identity: of the run, a value for each of `kvlab.tables.IDENTITY`.

    Returns:
        Columns: case, text, mode, arm, margin, phase, gap, ci90_lo, ci90_hi, verdict, context, batch, query (tokens),
        topk (NaN where attention is not sparse), then the identity.
    """
    rows = []
    for case, mode, verdict in verdicts:
        text = verdict.get("text")
        axes = case_axes(parse_case(text)) if text else {}
        head = {
            "case": case,
            "text": text,
            "mode": mode,
            "margin": verdict.get("margin"),
            "phase": verdict.get("phase"),
            **{axis: verdict.get(axis, axes.get(axis)) for axis in AXES},
            **{**identity, "routing": verdict.get("routing") or identity.get("routing")},
        }
        # Without a list of arms, the verdict is of its one.
        arms = verdict.get("arms") or {verdict.get("arm", "random"): verdict}
        for arm, found in arms.items():
            lo, hi = found.get("ci90") or (None, None)
            gap = {"gap": found.get("gap"), "ci90_lo": lo, "ci90_hi": hi, "verdict": found.get("verdict")}
            rows.append({**head, "arm": arm, **gap})
    columns = [*_COLUMNS, *AXES, *IDENTITY]
    types = dict.fromkeys(["margin", "gap", "ci90_lo", "ci90_hi", *AXES], "float64")
    if not rows:  # no values that would tell the types of the others
        types = {**dict.fromkeys(columns, "str"), **types, "seed": "int64"}
    return pd.DataFrame(rows, columns=columns).astype(types)
