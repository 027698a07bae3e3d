"""Layer 4: what restarts of the process add to an interval; pure.

Rounds of one process share its addresses, its captured graph and its autotuning, so a gap can differ from process to
process by more than its rounds show: many rounds of two processes are two draws of that, not many. The interval is that
of random effects: within a process the rounds' own, between processes the variance of DerSimonian & Laird (1986,
doi:10.1016/0197-2456(86)90046-2), and a Student quantile of both (Satterthwaite 1946). Where the processes agree
as well as their rounds do, nothing is added. With two or three processes that is often so by chance: where processes
differ by half to twice of what their rounds do, the nominal 90 % interval covers 78 to 88 % of the time for two of
them, 85 to 88 % for three, 90 % from five on. Restart more often rather than time more rounds.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvlab.intervals import Floats, block_variance, bootstrap_interval, checked, hodges_lehmann, student_quantile

_LEVEL = 0.90


def clustered_interval(x: ArrayLike, processes: ArrayLike) -> tuple[float, float, float]:
    """90 % interval for the Hodges-Lehmann estimate of `x` [rounds], and its degrees of freedom.

    Args:
        x: log ratios in round order.
        processes: of each round, which process timed it.

    Raises:
        StudyError: for no values, or any that is not finite.
    """
    values = checked(x)
    _, cluster = np.unique(np.asarray(processes), return_inverse=True)
    n = len(values)
    lo, hi = bootstrap_interval(values, _LEVEL)
    df = block_variance(n)[1] if n > 1 else 1.0
    between = between_variance(values, cluster)
    if not between:
        return lo, hi, df
    centre = hodges_lehmann(values)
    levels = np.array([hodges_lehmann(values[cluster == k]) for k in range(cluster.max() + 1)])
    # Each process's rounds about its own level: what lies between the levels is counted once, below.
    inner = bootstrap_interval(values - levels[cluster], _LEVEL)
    within = ((inner[1] - inner[0]) / 2 / student_quantile((1 - _LEVEL) / 2, df)) ** 2
    added = between * float(np.sum((np.bincount(cluster) / n) ** 2))
    df = (within + added) ** 2 / (within**2 / df + added**2 / cluster.max())
    half = student_quantile((1 - _LEVEL) / 2, df) * math.sqrt(within + added)
    return min(lo, centre - half), max(hi, centre + half), df


def between_variance(x: Floats, cluster: NDArray[np.intp]) -> float:
    """Variance of the clusters' levels beyond what their rounds explain; 0 for one cluster, or one round in each.

    Args:
        cluster: of each value of `x`, counted from 0 without gaps.
    """
    count = np.bincount(cluster)
    spare = len(x) - len(count)
    if len(count) < 2 or not spare:
        return 0.0
    mean = np.bincount(cluster, weights=x) / count
    within = float(np.sum((x - mean[cluster]) ** 2)) / spare
    centre = float(x.mean())
    # With one variance within, the weights are the counts; in units of it, Q expects clusters - 1 if there is no more.
    excess = float(count @ (mean - centre) ** 2) - within * (len(count) - 1)
    return max(0.0, excess / (len(x) - float(count @ count) / len(x)))
