"""Is a verdict right on a clock whose truth is known? The same step against itself, and a planted gap, simulated.

Each check simulates rounds of `zeros`, `zeros_again` and `random` in fresh random orders on one disturbed clock, and
decides as a study does. Nothing separates the arms, so any `different` is false, the non-zero flag should come up 10 %
of the time and the 90 % intervals (of both the gap and the A/A) should hold 0; then twice the margin is added to
`random`. `replay t` is what a t-test over replays at the same nominal 10 % would flag.

The first rows plan their rounds by a pilot as a study does (`kvlab.pilot`), the last ones are given a number.

It shows: no false `different` in 4,000 checks; the flag at 7.5 to 9.5 % and the intervals at 89 to 92 %, where the
t-test is between 4.5 % (drift swells its variance) and 26 % (AR(1)). With the rounds that the pilot plans at least 98 %
of the studies end `equivalent`, and at least 99 % find a gap of twice the margin. What a disturbed clock costs is
power: at 12 rounds of everything at once 14 % end `invalid`, because the A/A interval is too wide for half the margin.

    python benchmarks/aa_simulation.py               # the verdicts, about 10 minutes on two cores
    python benchmarks/aa_simulation.py --coverage    # the table in kvlab/intervals.py, about 10 minutes
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvlab.estimates import round_ratios
from kvlab.intervals import bootstrap_interval
from kvlab.pilot import PILOT_ROUNDS, plan_rounds
from kvlab.stats import decide, judge

ARMS = ("zeros", "zeros_again", "random")
MARGIN = 0.03
REPLAYS = 5
# The budget of a planned study, in rounds: 60 s of the half second that a round of a 30 ms step takes.
SECONDS_PER_ROUND, MOST_ROUNDS = 0.5, 120
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Clock:
    """What disturbs log times, in the order of replays; sizes in log units, 0.01 being 1 %.

    Attributes:
        noise, df: independent noise of each replay: its scale, and Student's degrees of freedom (inf: normal).
        drift: linear over the run, and as much again as a warm-up that decays over its first fifth.
        phi, wander: AR(1) between replays, and its standard deviation.
        burst: height of a burst; one starts with probability 1 % a replay and lasts 10 on average.
    """

    noise: float = 0.005
    df: float = math.inf
    drift: float = 0.0
    phi: float = 0.0
    wander: float = 0.0
    burst: float = 0.0

    def log_times(self, checks: int, replays: int, rng: np.random.Generator) -> Floats:
        """Disturbances [checks, replays]."""
        shape = (checks, replays)
        y = self.noise * (rng.standard_normal(shape) if math.isinf(self.df) else rng.standard_t(self.df, shape))
        t = np.linspace(0, 1, replays)
        y += self.drift * (t + np.exp(-5 * t))
        state = rng.standard_normal(checks) * self.wander
        bursting = np.zeros(checks, bool)
        for k in range(replays):
            state = self.phi * state + self.wander * math.sqrt(1 - self.phi**2) * rng.standard_normal(checks)
            draw = rng.random(checks)
            bursting = np.where(bursting, draw > 0.1, draw < 0.01)
            y[:, k] += state + self.burst * bursting
        return y


CLOCKS = {
    "quiet": Clock(),
    "drift 5 % + warm-up": Clock(drift=0.05),
    "AR(1) 0.5, fast": Clock(noise=0.002, phi=0.5, wander=0.01),
    "AR(1) 0.98, slow": Clock(noise=0.003, phi=0.98, wander=0.015),
    "bursts of 5 %": Clock(burst=0.05),
    "heavy tails, t3": Clock(df=3),
    "all of these": Clock(noise=0.004, df=3, drift=0.05, phi=0.5, wander=0.006, burst=0.05),
}


def simulate(clock: Clock, rounds: int, checks: int, seed: int) -> list[pd.DataFrame]:
    """Samples of `checks` studies of one step against itself: columns round, position, arm, us."""
    rng = np.random.default_rng(seed)
    us = 1000 * np.exp(clock.log_times(checks, rounds * len(ARMS) * REPLAYS, rng))
    number, position = (g.repeat(REPLAYS) for g in np.divmod(np.arange(rounds * len(ARMS)), len(ARMS)))
    tables = []
    for times in us:
        orders = rng.permuted(np.tile(np.arange(len(ARMS)), (rounds, 1)), axis=1)
        arm = np.array(ARMS)[orders.ravel().repeat(REPLAYS)]
        tables.append(pd.DataFrame({"round": number, "position": position, "arm": arm, "us": times}))
    return tables


def replay_t(samples: pd.DataFrame) -> bool:
    """What not to do: a t-test that takes replays for independent samples."""
    a, b = (np.log(samples.loc[samples["arm"] == arm, "us"].to_numpy()) for arm in ("random", "zeros"))
    return bool(abs(a.mean() - b.mean()) > 1.645 * math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)))


def planned(samples: pd.DataFrame) -> pd.DataFrame:
    """As many of the rounds as the pilot plans, as a study without `--rounds` does."""
    pilot = samples[samples["round"] < PILOT_ROUNDS]
    aa, arm = (round_ratios(pilot, name) for name in ("zeros_again", "random"))
    plan = plan_rounds(aa, SECONDS_PER_ROUND, MARGIN, SECONDS_PER_ROUND * MOST_ROUNDS, [arm])
    return samples[samples["round"] < plan.rounds]


def row(name: str, rounds: int | None, checks: int) -> dict[str, object]:
    """One line of the table, in per cent of the checks; the pilot decides where `rounds` is None."""
    tables = simulate(CLOCKS[name], rounds or MOST_ROUNDS, checks, seed=rounds or 1)
    if rounds is None:
        tables = [planned(samples) for samples in tables]
    decisions = [decide(samples, margin=MARGIN) for samples in tables]
    shift = math.log1p(2 * MARGIN)
    planted = []
    for d in decisions:
        # The estimate and its interval move with the log ratios, so the bootstrap need not be repeated.
        lo, hi = (math.expm1(v + shift) for v in d.gap.log_ci90)
        theta = d.gap.log_gap + shift
        planted.append(judge(replace(d.gap, log_gap=theta, gap=math.expm1(theta), ci90=(lo, hi)), d.aa, MARGIN)[0])
    verdicts = [d.verdict for d in decisions]
    held = [not e.nonzero for d in decisions for e in (d.gap, d.aa)]
    shares = {
        "replay t": [replay_t(samples) for samples in tables],
        "nonzero": [d.nonzero for d in decisions],
        "coverage": held,
        "different": [v == "different" for v in verdicts],
        "invalid": [v == "invalid" for v in verdicts],
        "equivalent": [v == "equivalent" for v in verdicts],
        "different at 2x": [v == "different" for v in planted],
    }
    width = float(np.median([d.gap.half_width for d in decisions]))
    numbers = {k: f"{100 * np.mean(v):.1f}" for k, v in shares.items()}
    median = f"{np.median([d.gap.n for d in decisions]):.0f} planned" if rounds is None else f"{rounds} given"
    return {"clock": name, "rounds": median, **numbers, "half-width": f"{100 * width:.2f}"}


def coverage(rounds: int, data_sets: int) -> dict[str, object]:
    """How often the nominal 90 % interval holds 0, in per cent, under noise of the log ratios themselves."""
    rng = np.random.default_rng(rounds)
    normal = rng.standard_normal((data_sets, rounds + 30))
    autoregressive = normal.copy()
    for k in range(1, rounds + 30):
        autoregressive[:, k] += 0.3 * autoregressive[:, k - 1]
    noises = {
        "normal": normal[:, 30:],
        "Student t3": rng.standard_t(3, (data_sets, rounds)),
        "AR(1) 0.3": autoregressive[:, 30:],
    }
    held = {k: np.mean([lo <= 0 <= hi for lo, hi in map(bootstrap_interval, x)]) for k, x in noises.items()}
    return {"rounds": rounds, **{k: f"{100 * v:.1f}" for k, v in held.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Verdicts and intervals on simulated clocks.")
    parser.add_argument("--checks", type=int, default=400, help="simulated studies a line")
    parser.add_argument(
        "--coverage", action="store_true", help="the intervals' coverage instead, 2,000 data sets a cell"
    )
    args = parser.parse_args()
    if args.coverage:
        table = [coverage(rounds, 2000) for rounds in (8, 12, 16, 20, 40, 60)]
    else:
        table = [row(name, None, args.checks) for name in CLOCKS]
        table += [row("all of these", rounds, args.checks) for rounds in (12, 20, 40)]
    print(pd.DataFrame(table).to_string(index=False))


if __name__ == "__main__":
    main()
