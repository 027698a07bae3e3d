"""Layer 4: what each role of the cache does to the time, from the 2x2 of arms that fill one, the other, or both."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from kvlab.estimates import BASELINE, Estimate, estimate


def role_effects(
    table: pd.DataFrame, arm: str, baseline: str = BASELINE, processes: pd.Series | None = None
) -> tuple[Estimate, Estimate, Estimate] | tuple[None, None, None]:
    """Main effects of the indexer's and of the KV's contents, and by how much both do more than each alone.

    Args:
        table: one row per round, one column per arm: microseconds (`kvlab.estimates.round_table`), or cycles.
        processes: of `kvlab.estimates.round_processes`, by which the intervals are clustered.

    Returns:
        Of per-round log ratios, over the rounds that hold all four arms; None three times without such rounds.
    """
    kv_alone, indexer_alone = (_mix(table.columns, *pair) for pair in ((arm, baseline), (baseline, arm)))
    if kv_alone is None or indexer_alone is None or kv_alone == indexer_alone:
        return None, None, None
    whole = table[[baseline, arm, kv_alone, indexer_alone]].dropna()
    if whole.empty:
        return None, None, None
    logs = np.log(whole.to_numpy(float).T)
    both, kv, indexer = logs[1:] - logs[0]
    process = None if processes is None else processes[whole.index]
    effects = (indexer + both - kv) / 2, (kv + both - indexer) / 2, both - kv - indexer
    of_indexer, of_kv, interaction = (estimate(effect, process) for effect in effects)
    return of_indexer, of_kv, interaction


def _mix(arms: Iterable[str], kv: str, indexer: str) -> str | None:
    """The arm `mix(kv=..., indexer=...)` among others."""
    wanted = {f"kv={kv}", f"indexer={indexer}"}
    for arm in arms:
        # A comma within brackets belongs to a part, as in random(std=0.5, zero_fraction=0.1).
        if match := re.fullmatch(r"mix\((.*)\)", arm.replace(" ", "")):
            parts = re.split(r",(?![^(]*\))", match[1])
            if set(parts) == {part.replace(" ", "") for part in wanted}:
                return arm
    return None
