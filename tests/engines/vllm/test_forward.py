"""Taking over a runner's model call, on a stand-in for it: order of rows, and what is left when something fails."""

import gc
import sys
import weakref
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from kvlab.cases import parse_case
from kvlab.engines.vllm import forward
from kvlab.engines.vllm.flavour import SUPPORTED
from kvlab.engines.vllm.forward import CaughtForward
from kvlab.errors import EngineError
from kvlab.kv.batch import build_batch

V2 = SUPPORTED[0]


class FullAttentionSpec:
    block_size = 16


class Model:
    def __init__(self, call):
        self.call = call

    def forward(self, **inputs):
        return self.call(**inputs)


class Runner:
    """As the V2 runner: it keeps requests, sorts decodes first, and calls `model.forward` with keywords."""

    execute_model_state = None
    vllm_config = None

    def __init__(self, call):
        self.model = Model(call)
        self.requests = []

    def prepare_inputs(self, output):
        ids = sorted(output.expected, key=lambda r: output.expected[r][0])
        scheduled, computed, decode = zip(*(output.expected[r] for r in ids), strict=True)
        return SimpleNamespace(
            req_ids=ids,
            num_scheduled_tokens=np.array(scheduled),
            num_computed_tokens_np=np.array(computed),
            is_prefilling_np=~np.array(decode),
        )

    def execute_model(self, output):
        assert self.execute_model_state is None, "the last step was never sampled"
        self.requests = [r for r in self.requests if r not in output.finished]
        if not output.expected:
            return
        self.requests += list(output.expected)
        batch = self.prepare_inputs(output)
        ids = torch.zeros(int(batch.num_scheduled_tokens.sum()), dtype=torch.int32)
        self.model.forward(**self.inputs(ids))
        self.execute_model_state = "waits for sampling"

    def inputs(self, ids):
        return {"input_ids": ids}


class EmbeddingRunner(Runner):
    def inputs(self, ids):
        return {"input_ids": None, "inputs_embeds": torch.zeros(len(ids), 4)}


@pytest.fixture(autouse=True)
def vllm_stubs(monkeypatch):
    monkeypatch.setattr(forward, "_current_config", lambda runner: nullcontext())
    monkeypatch.setattr(
        forward, "scheduler_output", lambda batch, flavour: SimpleNamespace(expected=batch.expected, finished=())
    )
    monkeypatch.setattr(
        forward, "finishing_output", lambda batch: SimpleNamespace(expected={}, finished=tuple(batch.req_ids))
    )
    context = ModuleType("vllm.forward_context")
    context.get_forward_context = lambda: SimpleNamespace(changed=0)
    context.override_forward_context = lambda context: nullcontext()
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, context.__name__, context)


@pytest.fixture
def batch():
    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec())]
    return build_batch(parse_case("mix=9,1@40,4@20,1@30"), groups, 64, 1000, np.random.default_rng(0))


def test_the_order_puts_a_runner_s_rows_back(batch):
    runner = Runner(lambda input_ids: input_ids.float().unsqueeze(1))
    caught = CaughtForward(runner, batch, V2)
    expected = np.concatenate([batch.query_token_ids[r] for r in batch.req_ids])
    assert caught()[caught.order(), 0].tolist() == expected.tolist()
    assert caught.order().tolist() != list(range(15))
    caught.finish()
    assert runner.requests == []


def test_a_failing_model_leaves_no_request_and_no_pending_state_behind(batch):
    def model(input_ids):
        raise RuntimeError("no kernel")

    runner = Runner(model)
    with pytest.raises(RuntimeError, match="no kernel"):
        CaughtForward(runner, batch, V2)
    assert runner.requests == []
    assert runner.execute_model_state is None
    assert "forward" not in vars(runner.model)
    assert "prepare_inputs" not in vars(runner)


def test_a_finished_call_lets_go_of_model_and_runner_though_the_runner_fails(batch):
    runner = Runner(lambda input_ids: input_ids)
    caught = CaughtForward(runner, batch, V2)
    gone = [weakref.ref(runner), weakref.ref(runner.model)]

    def execute_model(output):
        raise RuntimeError("CUDA error")

    runner.execute_model = execute_model
    with pytest.raises(RuntimeError, match="CUDA error"):
        caught.finish()
    del runner
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_model_that_is_given_embeddings_would_not_see_the_case_s_tokens(batch):
    runner = EmbeddingRunner(lambda **inputs: inputs["inputs_embeds"])
    with pytest.raises(EngineError, match=r"embeddings in place of the case's token IDs.*language_model_only"):
        CaughtForward(runner, batch, V2)
    assert runner.requests == []


def test_another_batch_than_was_asked_for_is_told(batch):
    runner = Runner(lambda input_ids: input_ids)
    honest = runner.prepare_inputs

    def prepare_inputs(output):
        built = honest(output)
        built.num_scheduled_tokens[0] += 1
        return built

    runner.prepare_inputs = prepare_inputs
    with pytest.raises(EngineError, match=r"vLLM built another batch: request bench-\d has \(scheduled, computed"):
        CaughtForward(runner, batch, V2)
    assert runner.requests == []
