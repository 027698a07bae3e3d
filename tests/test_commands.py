"""The command of a spec is read by the command line as the spec."""

from collections import defaultdict

import pytest

from kvlab.commands import command_of
from kvlab.options import engine_options, make_parser, study_options, sweep_axes

SWEEP = {
    "command": "sweep",
    "model": "org/name",
    "engine": "vllm",
    "engine_options": {"num_kv_blocks": 64, "hf_overrides": {"a": [1, "b c"]}, "block_size": 32, "dtype": "half"},
    "sweep": {
        "contexts": (256, 8192),
        "phases": ("decode", "hit"),
        "batch": (1, 8),
        "topk": (64, 128),
        "zero_fractions": (0.25, 0.5),
        "query": 16,
    },
    "arms": ("random", "random(std=0.5, zero_fraction=0.25)"),
    "margin": 0.02,
    "mode": "both",
    "rounds": 30,
    "seed": 3,
    "explain": True,
}


@pytest.fixture
def parse():
    parser = make_parser(defaultdict(lambda: lambda args: 0))
    return lambda spec: parser.parse_args(command_of(spec)[1:])


def test_a_sweep(parse):
    args = parse(SWEEP)
    axes = sweep_axes(args)
    assert {key: axes[key] for key in SWEEP["sweep"]} == SWEEP["sweep"]
    assert engine_options(args) == {**SWEEP["engine_options"], "seed": 3}
    assert args.arm == [*SWEEP["arms"]]
    how = study_options(args)
    assert {key: how[key] for key in ("margin", "mode", "rounds", "seed", "explain")} == {
        key: SWEEP[key] for key in ("margin", "mode", "rounds", "seed", "explain")
    }


def test_a_check(parse):
    args = parse({"command": "check", "model": "tiny-dsa", "cases": ["a=1@64", "b=2*1@64"], "rounds": None})
    assert (args.model, args.engine, args.case, args.rounds) == ("tiny-dsa", "reference", ["a=1@64", "b=2*1@64"], None)


def test_what_is_not_given_is_not_said():
    assert command_of({"command": "check", "model": "m"}) == ["kvlab", "check", "m"]
    nothing = {"contexts": [64], "topk": (), "zero_fractions": None}
    assert command_of({"command": "sweep", "model": "m", "sweep": nothing}) == [
        "kvlab",
        "sweep",
        "m",
        "--contexts",
        "64",
    ]
