#!/usr/bin/env python3
"""Does reading the card beside the replays change what they take? The same step with and without the sampler.

Each round times the step three times in a fresh random order: without the sampler, without it again (the A/A floor),
and with it. Medians of the replays per round; the gaps' 90 % intervals over rounds.

    python benchmarks/telemetry_disturbance.py                  # NVML on a GPU; on a CPU a stand-in that takes as long
    python benchmarks/telemetry_disturbance.py --period 0.005   # six times as often as kvlab reads

Under a minute on an H200. Also printed: what one reading takes, and what the host adds to a replay.
"""

import argparse
import math
import statistics
import time

import pandas as pd
import torch

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.estimates import Estimate, estimate, round_ratios
from kvlab.measure.sampler import PERIOD_S, Sampler
from kvlab.measure.schedule import round_order
from kvlab.measure.telemetry import NoTelemetry, Reading, Telemetry, make_telemetry
from kvlab.measure.timer import Timer, make_timer

WITHOUT, AGAIN, WITH = "without", "without again", "with"


class SleepingTelemetry(Telemetry):
    """Stands in for NVML: a reading waits outside the interpreter for as long as one of the card takes."""

    def __init__(self, seconds: float) -> None:
        self.source = f"a stand-in that sleeps {seconds * 1e3:g} ms"
        self._seconds = seconds

    def read(self) -> Reading:
        time.sleep(self._seconds)
        return Reading(sm_mhz=1000.0, watts=100.0)


def time_arm(timer: Timer, telemetry: Telemetry, period: float, replays: int) -> tuple[list[float], int]:
    """Microseconds of replays beside a sampler, and how many readings it took."""
    timer.time(2)
    with Sampler(telemetry, period) as sampler:
        times = timer.time(replays)
    return times, len(sampler.readings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-dense", help="preset of the embedded engine")
    parser.add_argument("--case", default="decode=4*1@4096")
    parser.add_argument("--mode", default="isolated", choices=("isolated", "sustained"))
    parser.add_argument("--period", type=float, default=PERIOD_S, help="seconds between two readings")
    parser.add_argument("--reading", type=float, default=0.002, help="seconds that the stand-in's reading takes")
    parser.add_argument("--seconds", type=float, default=40.0, help="of measuring")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()

    engine = load_engine(args.model)
    step = engine.prepare(parse_case(args.case))
    step.fill("random", 0)
    timer = make_timer(step, args.mode)
    telemetry = make_telemetry(engine.device)
    if isinstance(telemetry, NoTelemetry):
        telemetry = SleepingTelemetry(args.reading)
    nothing = NoTelemetry("benchmark")
    sources = {WITHOUT: nothing, AGAIN: nothing, WITH: telemetry}

    readings = []
    for _ in range(20):
        begin = time.perf_counter()
        telemetry.read()
        readings.append(time.perf_counter() - begin)
    timer.settle(0.5)
    begin = time.perf_counter()
    inside = sum(timer.time(20)) / 20
    each = (time.perf_counter() - begin) / 20
    # Long enough for several readings, in the time that was given.
    replays = max(5, math.ceil(args.seconds / args.rounds / len(sources) / each) - 2)
    rows, seen = [], 0
    for index in range(args.rounds):
        for arm in round_order(list(sources), index, 0):
            times, count = time_arm(timer, sources[arm], args.period, replays)
            seen += count
            rows += [{"round": index, "arm": arm, "us": us} for us in times]
    samples = pd.DataFrame(rows)
    gaps: dict[str, Estimate] = {arm: estimate(round_ratios(samples, arm, WITHOUT)) for arm in (AGAIN, WITH)}

    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else "CPU"
    print(f"{device}, torch {torch.__version__}, {args.model} {args.case}, {args.mode}; telemetry: {telemetry.source}")
    took, slowest = statistics.median(readings) * 1e3, max(readings) * 1e3
    print(f"a reading takes {took:.2f} ms (slowest of 20: {slowest:.2f} ms), one every {args.period * 1e3:g} ms")
    print(f"a replay takes {inside:.0f} us timed, {each * 1e6:.0f} us with its restore, its launch and the wait for it")
    print(f"{args.rounds} rounds of {replays} replays an arm, {seen} readings")
    print(f"without again  {gaps[AGAIN]}")
    print(f"with           {gaps[WITH]}")


if __name__ == "__main__":
    main()
