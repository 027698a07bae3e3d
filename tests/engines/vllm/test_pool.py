"""A pool sized by the cases: enough for each, little more, within what there is."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cases import Case, Request, parse_case
from kvlab.engines.vllm import pool
from kvlab.engines.vllm.pool import blocks_for, sized_by
from kvlab.errors import CapacityError
from kvlab.kv.batch import build_batch


class FullAttentionSpec:
    block_size = 16


class SlidingWindowSpec(FullAttentionSpec):
    block_size = 8
    sliding_window = 20


class MambaSpec(FullAttentionSpec):
    pass


GROUPS = [SimpleNamespace(kv_cache_spec=spec()) for spec in (FullAttentionSpec, SlidingWindowSpec, MambaSpec)]
requests = st.tuples(st.integers(1, 40), st.integers(0, 900)).map(lambda r: Request(r[0], r[0] + r[1]))
cases = st.lists(st.lists(requests, min_size=1, max_size=9), min_size=1, max_size=3).map(
    lambda lists: [Case(f"c{i}", tuple(reqs)) for i, reqs in enumerate(lists)]
)


@given(cases)
def test_every_case_has_its_blocks(cases):
    for case in cases:
        build_batch(case, GROUPS, blocks_for(cases, GROUPS), 100, np.random.default_rng(0))


@pytest.fixture
def vllm_core(monkeypatch):
    """Stand-in for vLLM's planning: 1 MiB a block, `room` blocks of memory, requests of at least `least` blocks."""

    def install(room, least=1, free=64):
        core = ModuleType("vllm.v1.engine.core")

        def get_kv_cache_configs(vllm_config, specs, available):
            blocks = vllm_config.cache_config.num_gpu_blocks_override or available[0] // 2**20
            if blocks < least:
                raise ValueError("To serve at least one request")
            tensors = [SimpleNamespace(size=blocks * 2**20)]
            return [SimpleNamespace(num_blocks=blocks, kv_cache_groups=GROUPS, kv_cache_tensors=tensors)]

        core.get_kv_cache_configs = get_kv_cache_configs
        engine = ModuleType("vllm.v1.engine")
        engine.core = core
        for name, module in (("vllm", None), ("vllm.v1", None), ("vllm.v1.engine", engine), (core.__name__, core)):
            monkeypatch.setitem(sys.modules, name, module or ModuleType(name))

        monkeypatch.setattr(pool, "free_bytes", lambda device: free * 2**30)

        def plan(cases):
            config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks_override=None))
            with sized_by(cases):
                (found,) = core.get_kv_cache_configs(config, [{}], [room * 2**20])
            assert core.get_kv_cache_configs is get_kv_cache_configs
            return found.num_blocks

        return plan

    return install


@pytest.mark.parametrize(
    ("text", "room", "least", "blocks"),
    [
        ("d=1@16", 1024, 1, 64),  # never fewer than some
        ("d=4*1@512", 1024, 1, 2 * (1 + 4 * (32 + 64 + 1))),  # twice what is needed
        ("d=4*1@512", 500, 1, 500),  # what there is
        ("d=4*1@512", 100, 1, 389),  # what is needed, whatever vLLM would take
        ("d=1@16", 1024, 400, 512),  # as many as one longest request takes
    ],
)
def test_the_size(vllm_core, text, room, least, blocks):
    assert vllm_core(room, least)([parse_case(text)]) == blocks


def test_more_than_the_machine_has_is_refused_with_numbers(vllm_core):
    with pytest.raises(
        CapacityError, match=r"need 9701 KV blocks .* 9\.5 GiB in all, but 1\.0 GiB are free; take fewer"
    ):
        vllm_core(100, free=1)([parse_case("d=100*1@512")])
