"""One step at a time, on every engine: the next one would take the blocks and the runner of the first."""

from types import SimpleNamespace

import pytest

from kvlab.cases import parse_case
from kvlab.engines.reference import load_reference
from kvlab.engines.vllm.engine import VllmEngine
from kvlab.errors import EngineError

CASE = parse_case("second=1@20")


@pytest.fixture(params=["reference", "vllm"])
def busy(request):
    """An engine with an open step of case `first`, and that step."""
    if request.param == "reference":
        engine = load_reference("tiny-dense", device="cpu", num_kv_blocks=16)
        return engine, engine.prepare(parse_case("first=1@20"))
    # Before it looks at anything else; vLLM's own steps are in test_models.py.
    engine = VllmEngine.__new__(VllmEngine)
    step = SimpleNamespace(closed=False, case=parse_case("first=1@20"))
    engine._open_step = lambda: step
    return engine, step


@pytest.mark.parametrize("call", ["prepare", "prefill"])
def test_a_second_step_is_refused_while_the_first_is_open(busy, call):
    engine, _ = busy
    with pytest.raises(EngineError) as error:
        getattr(engine, call)(CASE)
    assert str(error.value) == "case 'second': the step of case 'first' is still open; close it first (step.close())"


def test_a_closed_step_makes_room():
    engine = load_reference("tiny-dense", device="cpu", num_kv_blocks=16)
    step = engine.prepare(CASE)
    step.close()
    step.close()
    engine.prefill(CASE)
    assert engine.prepare(CASE).closed is False


def test_a_reference_step_that_was_dropped_makes_room_too():
    engine = load_reference("tiny-dense", device="cpu", num_kv_blocks=16)
    engine.prepare(CASE)
    engine.prepare(CASE)
