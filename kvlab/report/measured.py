"""Layer 6: what the stored rows of one case in one mode answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from kvlab.causes import arm_medians, find_cause, gap_in_cycles
from kvlab.errors import KvlabError
from kvlab.stats import BASELINE, Estimate, arm_estimate, p_different

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """What was measured of a case in a mode; each question has the answer None where the rows cannot give one."""

    samples: pd.DataFrame
    kernels: pd.DataFrame
    telemetry: pd.DataFrame

    def estimate(self, arm: str) -> Estimate | None:
        """The gap of an arm; None while no round holds both arms."""
        try:
            return arm_estimate(self.samples, arm)
        except KvlabError:
            return None

    def p(self, arm: str, margin: float) -> float | None:
        """Of "the gap is within the margin"."""
        try:
            return p_different(arm_estimate(self.samples, arm), margin)
        except KvlabError:
            return None

    def cause(self, arm: str, routing_moved: float | None = None) -> str | None:
        """A sentence on the gap's cause; `routing_moved` as the verdict has it of the arm."""
        rows = self.samples, self.kernels, arm
        try:
            return find_cause(*rows, telemetry=self.telemetry, routing_moved=routing_moved).sentence
        except KvlabError:
            return None

    def cycles(self, arm: str) -> dict[str, Any]:
        """`cycles_gap` and `cycles_ci90`."""
        try:
            found = gap_in_cycles(self.samples, arm, telemetry=self.telemetry)
        except KvlabError:
            return {}
        return {"cycles_gap": found.gap, "cycles_ci90": finite(found.ci90)} if found else {}

    def medians(self, column: str, arm: str) -> Interval | None:
        """Of a sensor, under zeros and under the arm."""
        return arm_medians(column, arm, BASELINE, self.samples, self.telemetry)


def finite(pair: Interval) -> Interval | None:
    """The pair, or None where either is not a number."""
    return pair if all(map(math.isfinite, pair)) else None
