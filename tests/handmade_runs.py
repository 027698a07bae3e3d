"""A study, its provenance and rounds for tests of runs, and hypothesis strategies for rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

STUDY: dict[str, Any] = {
    "model": "tiny",
    "engine": "reference",
    "routing": "none",
    "margin": 0.03,
    "mode": "isolated",
    "seed": 7,
    "replays": 2,
    "arms": ["zeros", "zeros_again", "random"],
    "geometry": {"layers": 2, "block_size": 16},
}
PROVENANCE: dict[str, Any] = {
    "kvlab": "0.1.0",
    "torch": "2.13.0",
    "vllm": None,
    "cpu": "a processor",
    "gpus": [{"name": "NVIDIA H200", "memory_mib": 143771}],
    "utc": "2026-01-01T00:00:00+00:00",
}
ARMS = ("zeros", "zeros_again", "random")


def rows(number: int = 0, replays: int = 2, arms: Sequence[str] = ARMS, **more: Any) -> list[dict[str, Any]]:
    """A round of some arms; the time tells round, position and replay."""
    return [
        {
            "position": position,
            "arm": arm,
            "fill": "zeros" if arm == "zeros_again" else arm,
            "seed": number % 4,
            "replay": replay,
            "us": 1000.0 + 100 * number + 10 * position + replay,
            **more,
        }
        for position, arm in enumerate(arms)
        for replay in range(replays)
    ]


def add_case(run: Any, case: str = "decode") -> None:
    run.add_case(case, f"{case}=4*1@4096", "decode", [[1, 4096]] * 4)


def verdict(**more: Any) -> dict[str, Any]:
    return {
        "verdict": "equivalent",
        "margin": 0.03,
        "gap": 0.001,
        "ci90": [-0.002, 0.004],
        "aa": {"gap": 0.0, "ci90": [-0.001, 0.001]},
        "median_us": {"zeros": 1000.0, "random": 1001.0},
        "finite": {"zeros": True, "random": True},
        "rounds": 20,
        "mde": 0.004,
        "reasons": [],
        **more,
    }


names = st.text(min_size=1, max_size=8)
times = st.floats(min_value=1e-3, max_value=1e9, allow_nan=False)
sensed = st.fixed_dictionaries(
    {},
    optional={
        "sm_mhz": st.floats(0, 3000),
        "mem_mhz": st.floats(0, 3000),
        "watts": st.none() | st.floats(0, 1000),
        "celsius": st.floats(0, 110),
        "throttled": st.none() | st.booleans(),
        "flagged": st.booleans(),
        "routing": st.sampled_from(["none", "real", "balanced"]),
    },
)


@st.composite
def drawn_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A round of one to five arms with one to three replays each, and whatever sensors said."""
    return [
        {
            "position": position,
            "arm": arm,
            "fill": draw(names),
            "seed": draw(st.integers(-(2**63), 2**63 - 1)),
            "replay": replay,
            "us": draw(times),
            **draw(sensed),
        }
        for position, arm in enumerate(draw(st.lists(names, min_size=1, max_size=5)))
        for replay in range(draw(st.integers(1, 3)))
    ]
