#!/usr/bin/env python3
"""Is the clock that kvlab counts the card's, and do the marks around the timed interval change what it takes?

    python benchmarks/clock_marks.py                       # on a GPU; under a minute on an H200

Printed: the counted clock of kernels on all SMs and on one, with the spread over the SMs; the same beside NVML's
readings over a busy second; the step of `%globaltimer`; and a step with and without marks, in rounds of random order
with a second timer without marks as the floor.
"""

import argparse
import statistics
import time

import numpy as np
import pandas as pd
import torch

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.estimates import estimate, round_ratios
from kvlab.measure import timer as timers
from kvlab.measure.clock import make_counter, megahertz
from kvlab.measure.sampler import Sampler
from kvlab.measure.schedule import round_order
from kvlab.measure.telemetry import make_telemetry

WITHOUT, AGAIN, WITH = "without", "without again", "with"


def spread(marks: np.ndarray) -> str:
    """The clock between marks, and how far the SMs are apart."""
    begin, end = marks
    both = (begin > 0).all(axis=1) & (end > begin).all(axis=1)
    cycles, ns = (end - begin)[both].T.astype(float)
    low, high = np.percentile(1e3 * cycles / ns, (5, 95)) if both.any() else (np.nan, np.nan)
    told = megahertz(marks)
    clock = "not told" if told is None else f"{told:.1f} MHz"
    return f"{clock} (5 to 95 % of {both.sum()} SMs: {low:.1f} to {high:.1f}; {np.median(ns) / 1e3:,.1f} us)"


def without_marks(step, mode: str) -> timers.Timer:
    """A timer as it is where nothing can count."""
    made, timers.make_counter = timers.make_counter, lambda device: (None, "switched off")
    try:
        return timers.make_timer(step, mode)
    finally:
        timers.make_counter = made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-dense", help="preset of the embedded engine")
    parser.add_argument("--cases", nargs="+", default=["decode=4*1@4096", "hit=64@2048"])
    parser.add_argument("--rounds", type=int, default=16)
    args = parser.parse_args()
    device = torch.device("cuda")
    telemetry = make_telemetry(device)
    counter, why = make_counter(device)
    if counter is None:
        parser.exit(2, f"no clock to look at: {why}\n")

    def counted(work) -> np.ndarray:
        counter.mark(0)
        work()
        counter.mark(1)
        torch.cuda.synchronize()
        return counter.take()

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for what, work in {
        "one SM spins, 1 ms": lambda: torch.cuda._sleep(2_000_000),
        "one SM spins, 50 ms": lambda: torch.cuda._sleep(100_000_000),
        "a matrix product": lambda: a @ a,
        "20 matrix products": lambda: [a @ a for _ in range(20)],
    }.items():
        counted(work)
        print(f"{what}: {spread(counted(work))}")
    clocks, begin = [], time.perf_counter()
    with Sampler(telemetry) as sampler:
        while time.perf_counter() - begin < 1.5:
            clocks.append(megahertz(counted(lambda: [a @ a for _ in range(20)])))
    read = [r.sm_mhz for r in sampler.readings[len(sampler.readings) // 3 :] if r.sm_mhz is not None]
    told = [mhz for mhz in clocks[len(clocks) // 3 :] if mhz is not None]
    of = f"{len(told)} of {len(clocks) - len(clocks) // 3} intervals, {min(told):.0f} to {max(told):.0f} MHz"
    print(f"over a busy second: counted {statistics.fmean(told):.1f} MHz ({of}), NVML {statistics.fmean(read):.1f} MHz")
    stamps = np.unique([int(counted(lambda: None)[0, :, 1].max()) for _ in range(200)])
    print(f"%globaltimer moves by multiples of {np.gcd.reduce(np.diff(stamps))} ns")

    engine = load_engine(args.model, device="cuda")
    for case in map(parse_case, args.cases):
        for mode in timers.MODES:
            step = engine.prepare(case)
            step.fill("random", 1)
            of_arm = {
                WITHOUT: without_marks(step, mode),
                AGAIN: without_marks(step, mode),
                WITH: timers.make_timer(step, mode),
            }
            rows = []
            for index in range(args.rounds):
                for arm in round_order(list(of_arm), index, 0):
                    of_arm[arm].time(20)
                    rows += [{"round": index, "arm": arm, "us": us} for us in of_arm[arm].time(50)]
            samples = pd.DataFrame(rows)
            inside = samples.loc[samples["arm"] == WITHOUT, "us"].median()
            print(f"{args.model} {case}, {mode}: {inside:.1f} us; clock {of_arm[WITH].clock}")
            for arm in (AGAIN, WITH):
                print(f"  {arm:14} {estimate(round_ratios(samples, arm, WITHOUT))}")
            for timer in of_arm.values():
                timer.close()
            step.close()


if __name__ == "__main__":
    main()
