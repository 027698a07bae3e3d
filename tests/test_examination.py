"""What is seen of a step before it is timed: finite outputs, stray writes, experts that move."""

import json

import pytest
import torch

from kvlab.cases import parse_case
from kvlab.examination import Examination, captured, examine
from kvlab.plan import Plan
from kvlab.study import check


@pytest.fixture
def routed(make_hand_engine):
    """An engine with experts, whose tokens follow the contents when `follows` is set."""
    engine = make_hand_engine()
    engine.routing = "balanced"
    engine.follows = False
    prepare = engine.prepare

    def prepared(case, seed=0):
        step = prepare(case, seed)

        def loads():
            moved = engine.follows and bool(engine.kv_caches["attn"][1:].any())
            return {"moe": torch.tensor([3, 1] if moved else [2, 2])}

        step.expert_loads = loads
        return step

    engine.prepare = prepared
    return engine


@pytest.mark.parametrize(("follows", "moved"), [(False, 0.0), (True, 0.25)])
def test_loads_are_counted_under_each_arm_and_compared_with_zeros(routed, follows, moved):
    routed.follows = follows
    found = examine(routed.prepare(parse_case("d=4*1@40")), Plan.of())
    assert found.routing_moved == {"zeros": 0.0, "zeros_again": 0.0, "random": moved}
    told = json.loads(found.facts["expert_loads"])
    assert told == {"zeros": {"moe": [2, 2]}, **({"random": {"moe": [3, 1]}} if moved else {})}


def test_routing_that_moves_is_a_fault_if_balanced_and_said_if_real(routed, simulated_clock, tmp_path):
    simulated_clock(lambda step: 100.0)
    routed.follows = True
    balanced = check(routed, ["d=4*1@40"], rounds=6, out=tmp_path / "balanced").verdict_of("d", "isolated")
    assert balanced["verdict"] == "invalid"
    assert "routing moved" in " ".join(balanced["reasons"])
    routed.routing = "real"
    real = check(routed, ["d=4*1@40"], rounds=6, out=tmp_path / "real").verdict_of("d", "isolated")
    assert real["verdict"] == "equivalent"
    assert "25% of the tokens went to other experts" in " ".join(real["reasons"])
    assert real["routing_moved"]["random"] == 0.25


def test_loads_that_were_not_counted_under_zeros_are_compared_with_nothing(routed):
    step = routed.prepare(parse_case("d=4*1@40"))
    step.expert_loads = lambda: {"moe": torch.tensor([2, 2])} if routed.kv_caches["attn"][1:].any() else {}
    found = examine(step, Plan.of())
    assert found.routing_moved == {}
    assert "expert_loads" not in found.facts


def test_a_model_without_experts_is_not_asked(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    step.expert_loads = lambda: pytest.fail("asked")
    found = examine(step, Plan.of())
    assert found == Examination(dict.fromkeys(("zeros", "zeros_again", "random"), True), 0)


def test_a_timer_without_a_capture_has_nothing_to_compare(hand_engine):
    assert captured(hand_engine.prepare(parse_case("d=1@40")), object()) == {}
