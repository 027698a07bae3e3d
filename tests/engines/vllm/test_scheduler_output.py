"""A batch as the scheduler's output, through stand-ins for the three classes of vLLM that it is made of."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.cases import Case, Request, parse_case
from kvlab.engines.vllm.flavour import SUPPORTED
from kvlab.engines.vllm.schedule import finishing_output, scheduler_output
from kvlab.kv.batch import build_batch

BOTH = pytest.mark.parametrize("flavour", SUPPORTED, ids=lambda f: f.runner)
requests = st.tuples(st.integers(1, 30), st.integers(0, 90), st.booleans()).map(
    lambda r: Request(r[0], r[0] + r[1], chunked=r[2] and r[0] > 1 and r[1] > 0)
)


class FullAttentionSpec:
    block_size = 16


class ReplayingSpec(FullAttentionSpec):
    prefix_replay_tokens = 20


def group(spec=FullAttentionSpec):
    return SimpleNamespace(kv_cache_spec=spec(), layer_names=["attn"])


def batch_of(case, spec=FullAttentionSpec):
    return build_batch(case, [group(spec), group(spec)], 4096, 100, np.random.default_rng(0))


@pytest.fixture(autouse=True)
def vllm_stubs(monkeypatch):
    sampling, output = ModuleType("vllm.sampling_params"), ModuleType("vllm.v1.core.sched.output")
    sampling.SamplingParams = lambda **kwargs: SimpleNamespace(**kwargs)
    output.NewRequestData = lambda **kwargs: SimpleNamespace(**kwargs)

    class SchedulerOutput(SimpleNamespace):
        @classmethod
        def make_empty(cls):
            return cls(
                scheduled_new_reqs=None,
                num_scheduled_tokens={},
                total_num_scheduled_tokens=0,
                scheduled_spec_decode_tokens={},
                finished_req_ids=set(),
                new_block_ids_to_zero=None,
            )

    output.SchedulerOutput = SchedulerOutput
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.output", output)


@BOTH
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(requests, min_size=1, max_size=5))
def test_every_token_is_scheduled_once_over_its_own_blocks(flavour, reqs):
    batch = batch_of(Case("c", tuple(reqs)))
    output = scheduler_output(batch, flavour)
    assert [new.req_id for new in output.scheduled_new_reqs] == batch.req_ids
    assert output.total_num_scheduled_tokens == sum(r.query_len for r in reqs)
    # A fill would be erased by the zeroing that a scheduler asks for.
    assert output.new_block_ids_to_zero is None
    for new, request in zip(output.scheduled_new_reqs, reqs, strict=True):
        assert output.num_scheduled_tokens[new.req_id] == request.query_len
        assert new.num_computed_tokens == request.prefix_len
        assert new.block_ids == batch.block_ids[new.req_id]
        if flavour.runner == "v1":
            # V1 reads every scheduled token from the prompt.
            assert len(new.prompt_token_ids) == request.kv_len
            assert new.prompt_token_ids[request.prefix_len :] == batch.query_token_ids[new.req_id].tolist()
        else:
            # V2 takes a decode for one by its prompt being computed.
            assert len(new.prompt_token_ids) == (request.prefix_len if request.is_decode else request.kv_len)


@BOTH
def test_drafts_are_scheduled_where_the_runner_verifies_them(flavour):
    batch = batch_of(parse_case("v=2*4@50:3,1@20"))
    output = scheduler_output(batch, flavour)
    drafts = {req_id: ids.tolist() for req_id, ids in batch.draft_token_ids.items()}
    assert output.scheduled_spec_decode_tokens == (drafts if flavour.runner == "v2" else {})


@BOTH
def test_a_replayed_window_is_computed_again_from_its_start(flavour):
    batch = batch_of(parse_case("hit=8@100"), ReplayingSpec)
    output = scheduler_output(batch, flavour)
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, new.replay_start) == (72, 72)
    assert output.num_scheduled_tokens[new.req_id] == 28
    (plain,) = scheduler_output(batch_of(parse_case("hit=8@100")), flavour).scheduled_new_reqs
    assert plain.replay_start == 0


def test_finishing_removes_all_requests_and_schedules_none():
    batch = batch_of(parse_case("d=3*1@20"))
    output = finishing_output(batch)
    assert output.finished_req_ids == set(batch.req_ids)
    assert output.total_num_scheduled_tokens == 0
