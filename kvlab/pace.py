"""Layer 6: which gaps were timed at the pace that their mode means: alone on a cool card, or busy and settled.

Where the power cap held the clock, two rules came later than some runs that are kept: isolated replays rest in between
(`kvlab.rest`), and sustained arms are replayed until the cap's swing has died away (`kvlab.measure.settling`).
"""

from __future__ import annotations

import pandas as pd

from kvlab.plots.style import OTHER_PACE
from kvlab.run import Run

# Facts of a case that tell of such a pace: mode -> column of `Run.cases`.
_PACED = {"isolated": "rest_isolated_share", "sustained": "settle_capped_s"}
_SLOWED = 0.1  # of a case's samples: fewer throttled ones do not tell of a step that the power cap slows
# Behind the gap in a table; and what it means.
OFF_PACE_MARK = " †"
OTHER_PACE_WORDS = (
    "timed at another pace than the mode means, where the power cap held the clock, by an earlier kvlab: isolated"
    " replays did not rest in between, or sustained ones were timed while the cap's controller still swung"
)


def paces(run: Run) -> pd.DataFrame:
    """One row per case and mode that has a verdict: `case`, `mode`, `rounds`, `off_pace` (not at its mode's pace)."""
    steps = run.verdicts.reindex(columns=["case", "mode", "rounds", "flagged"])
    steps = steps.merge(run.cases, on="case", how="left", suffixes=("", "_of"))
    steps["off_pace"] = False
    for mode, fact in _PACED.items():
        unknown = steps[fact].isna() if fact in steps else True
        steps["off_pace"] |= unknown & (steps["mode"] == mode) & (steps["flagged"] > _SLOWED)
    return steps[["case", "mode", "rounds", "off_pace"]]


def drawn(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of gaps as a figure shows them: `off_pace` ones stand apart from every verdict."""
    decided = rows["verdict"].notna() & (rows["verdict"] != "")
    return rows.assign(verdict=rows["verdict"].mask(rows["off_pace"].astype(bool) & decided, OTHER_PACE))
