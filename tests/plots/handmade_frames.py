"""Tables like a run's, made by hand, hypothesis strategies for them, and what makes a figure legible."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

IDENTITY = {
    "run": "r",
    "model": "tiny-dsa",
    "engine": "reference",
    "gpu": "NVIDIA H200",
    "kvlab": "0.1.0",
    "torch": "2.11.0",
    "vllm": "0.33.0",
    "routing": "none",
    "seed": 0,
}
LONG = "some-organisation/an-extremely-long-model-name-with-suffixes-v12.7-instruct-fp8-dynamic"
VERDICTS = ("equivalent", "different", "inconclusive", "invalid")


def legible(fig, overlap=0.15):
    """Draw the figure; every text lies within it and covers no other by more than a share of the smaller one.

    Returns:
        The texts that are drawn.
    """
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    width, height = canvas.get_width_height()
    spare = _spare_labels(fig)
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in fig.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in spare
    ]
    for said, box in boxes:
        inside = box.x0 >= -1.5 and box.y0 >= -1.5 and box.x1 <= width + 1.5 and box.y1 <= height + 1.5
        assert inside, f"{said!r} is cut: {box} of {width} x {height}"
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        wide = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        high = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        if wide > 1 and high > 1:
            smaller = min(box_a.width * box_a.height, box_b.width * box_b.height)
            assert wide * high <= overlap * smaller, f"{a!r} covers {b!r}"
    return [said for said, _ in boxes]


def _spare_labels(fig):
    """Labels of ticks beyond an axis' ends, and those switched off: Matplotlib keeps them and does not draw them."""
    spare = set()
    for ax in fig.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not (tick.get_visible() and low <= tick.get_loc() <= high):
                    spare |= {tick.label1, tick.label2}
    return spare


def verdicts(count, **more):
    """`Run.verdicts` of so many cases, all kinds of verdict."""
    rng = np.random.default_rng(count)
    rows = []
    for i in range(count):
        gap, half = rng.normal(0, 0.02), abs(rng.normal(0, 0.008)) + 0.001
        rows.append(
            {
                **IDENTITY,
                "case": f"case{i}",
                "phase": "decode",
                "mode": "isolated",
                "margin": 0.03,
                "verdict": VERDICTS[i % 4],
                "gap": gap,
                "ci90_lo": gap - half,
                "ci90_hi": gap + half,
                "aa_gap": 0.001,
                "aa_ci90_lo": -0.004,
                "aa_ci90_hi": 0.005,
                "mde": 0.01,
                "rounds": 20,
                **more,
            }
        )
    return pd.DataFrame(rows)


def gaps(
    models=("m",),
    phases=("decode", "hit"),
    contexts=(1024, 8192, 32768, 100000),
    topks=(math.nan,),
    modes=("isolated",),
    arms=("random",),
):
    """`Run.gaps` of a full grid."""
    rng = np.random.default_rng(1)
    rows = []
    for model, phase, topk, mode, arm, context in itertools.product(models, phases, topks, modes, arms, contexts):
        gap = (0.002 if phase == "decode" else 0.01) * math.log2(context / 512) + rng.normal(0, 0.001)
        verdict = "equivalent" if gap + 0.004 < 0.03 else "different" if gap - 0.004 > 0.03 else "inconclusive"
        rows.append(
            {
                **IDENTITY,
                "model": model,
                "case": f"{phase}-{context}",
                "text": f"{phase}-{context}=8*1@{context}",
                "mode": mode,
                "arm": arm,
                "margin": 0.03,
                "phase": phase,
                "gap": gap,
                "ci90_lo": gap - 0.004,
                "ci90_hi": gap + 0.004,
                "verdict": verdict,
                "context": float(context),
                "batch": 8.0,
                "query": 1.0 if phase == "decode" else 2048.0,
                "topk": topk,
            }
        )
    return pd.DataFrame(rows)


def samples(arms=("zeros", "zeros_again", "random"), rounds=10, modes=("isolated",), clock=True, case="c"):
    """`Run.samples` of a case, five replays an arm and round."""
    rng = np.random.default_rng(2)
    rows = []
    for mode, number, (position, arm), replay in itertools.product(modes, range(rounds), enumerate(arms), range(5)):
        sensed = {"sm_mhz": 1980.0 - 100 * position, "watts": 500.0 + 20 * position} if clock else {}
        times = {"us": 1000.0 + 5 * position + rng.normal(), "flagged": number == 3}
        row = {"case": case, "mode": mode, "round": number, "process": 0, "position": position, "arm": arm}
        rows.append({**IDENTITY, **row, "fill": arm, "replay": replay, **times, **sensed})
    return pd.DataFrame(rows)


def kernels(**more):
    """`Run.kernels` of a case with three arms; a rest below zero, a kernel of one arm only, long names."""
    table = [
        ("void topk<at::Half, 2048, 1024, (anonymous namespace)::Policy<8>>::run(int, int)", "top-k", 3060, 1120),
        ("fmha_sparse_fwd", "attention", 7100, 7700),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NTN", "GEMM", 20000, 20100),
        ("only_random", "top-k", 0, 30),
        ("no_role", None, 600, 601),
        *((f"small_{i}", f"role {i % 6}", 10 + i, 10.5 + i) for i in range(20)),
        ("(rest: gaps between kernels)", "rest", -40, -35),
    ]
    rows = []
    for kernel, role, zeros, random in table:
        for arm, us in (("zeros", zeros), ("zeros_again", zeros), ("random", random)):
            if us:
                rows.append({"kernel": kernel, "role": role, "arm": arm, "us": float(us), "calls": 4})
    return pd.DataFrame(rows).assign(case="hit100k", mode="isolated", **IDENTITY, **more)


def blocks(requests=32, written=False):
    """`touched_blocks` of a model with attention, a window and a state."""
    rows = []
    for kind, owned, touched in (("attention", 512, 3), ("window", 9, 3), ("state", 1, 1)):
        for request in range(requests):
            begin = 1 + request * owned
            end = begin + owned
            row = {"group": kind, "kind": kind, "request": request, "begin": begin, "end": end, "layers": 4}
            row |= {"touched_begin": end - touched, "touched_end": end, "block_size": 16, "tokens": 8192}
            if written:
                row["written"] = [0.0] * (owned - touched) + [0.25] * touched
            rows.append(row)
    return pd.DataFrame(rows)


# What a case or a model may be called: any printable text.
names = st.text(st.characters(codec="latin-1", categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=60)
_number = st.floats(-0.9, 50) | st.just(math.nan)


@st.composite
def any_gaps(draw):
    """A table for both `plot_gaps` and the sweeps, as odd as a run can hold."""
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        gap = draw(_number)
        ends = (
            [math.nan, math.nan] if draw(st.booleans()) else sorted([draw(st.floats(-1, 60)), draw(st.floats(-1, 60))])
        )
        row = {
            **IDENTITY,
            "model": draw(names),
            "case": draw(names),
            "text": "",
            "mode": draw(st.sampled_from(["isolated", "sustained"])),
            "arm": "random",
            "margin": draw(st.sampled_from([0.01, 0.03, 0.05])),
            "phase": draw(st.sampled_from(["decode", "hit"])),
            "verdict": draw(st.sampled_from([*VERDICTS, "unfinished"])),
            "gap": gap,
            "ci90_lo": ends[0],
            "ci90_hi": ends[1],
            "aa_gap": draw(_number),
            "aa_ci90_lo": -0.01,
            "aa_ci90_hi": 0.01,
            "context": float(draw(st.integers(1, 10**6))),
            "batch": float(draw(st.integers(1, 256))),
            "query": 1.0,
            "topk": float(draw(st.sampled_from([256, 512, 2048]))),
        }
        rows.append(row)
    return pd.DataFrame(rows)
