"""Shared: a hand-made engine whose step writes where a test tells it to, and simulated clocks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
import torch

from kvlab.engines.base import Engine, Step
from kvlab.measure.timer import Timer

# What `--json` promises for each case.
VERDICT_KEYS = {
    *("case", "model", "engine", "phase", "mode", "margin", "gap", "ci90", "verdict", "aa"),
    *("median_us", "rounds", "mde", "finite", "run"),
}


class FullAttentionSpec:
    """Stand-in: kvlab reads the class name."""

    def __init__(self, block_size=16):
        self.block_size = block_size


class MambaSpec(FullAttentionSpec):
    shapes = ((4, 8),)


@dataclass
class Group:
    kv_cache_group_id: int
    kv_cache_spec: object
    layer_names: list


class HandEngine(Engine):
    """One attention layer [B, H, N, C] bf16 and one state layer [B, 4, 8] fp32; a step writes each scheduled slot."""

    name = "hand"
    model = "hand-made"
    device = torch.device("cpu")
    formats: dict = {}  # noqa: RUF012
    vocab_size = 100
    max_model_len = 4096

    def __init__(self, num_blocks=64):
        self.num_blocks = num_blocks
        self.kv_caches = {
            "attn": torch.zeros(num_blocks, 2, 16, 4, dtype=torch.bfloat16),
            "state": (torch.zeros(num_blocks, 4, 8),),
        }
        self.attn_groups = [Group(0, FullAttentionSpec(), ["attn"]), Group(1, MambaSpec(), ["state"])]
        self.kv_cache_groups = self.attn_groups
        self.forwards = 0
        self.stray_block = None
        self.nonfinite_in = None

    def prepare(self, case, seed=0):
        return HandStep(self, case, self.build(case, seed))


class HandStep(Step):
    def forward(self):
        engine = self.engine
        engine.forwards += 1
        cache, (state,) = engine.kv_caches["attn"], engine.kv_caches["state"]
        total = torch.zeros(())
        for req_id in self.batch.req_ids:
            scheduled, computed, _ = self.batch.expected[req_id]
            table, (slot_state,) = self.batch.block_ids[req_id]
            for position in range(computed, computed + scheduled):
                # What was there plus one: a value that the old contents cannot hold already.
                cache[table[position // 16], :, position % 16] = position + 0.5
            total = total + sum(cache[block].float().sum() for block in table[:-1])
            state[slot_state] = state[slot_state] * 0.5 + 1
        if engine.stray_block is not None:
            cache[engine.stray_block] += 1
        return total.reshape(1, 1).clone()

    def first_nonfinite(self):
        return self.engine.nonfinite_in


@dataclass
class SimulatedClock(Timer):
    """Times drawn by a function of the arm's contents; no forward is run unless asked."""

    step: Step
    draw: object
    kind: str = "simulated"
    drawn: list = field(default_factory=list)

    def time(self, count):
        self.step.restore()
        times = [float(self.draw(self.step)) for _ in range(count)]
        self.drawn += times
        return times

    def output(self):
        return torch.zeros(1, 1)

    def settle(self, seconds, until=lambda: False):
        self.time(1)


@pytest.fixture(scope="session")
def make_hand_engine():
    return HandEngine


@pytest.fixture(scope="session")
def verdict_keys():
    return VERDICT_KEYS


@pytest.fixture
def hand_engine():
    return HandEngine()


@pytest.fixture
def simulated_clock(monkeypatch):
    """Install a simulated clock in `check`: call it with draw(step) -> microseconds."""

    def install(draw):
        monkeypatch.setattr("kvlab.study.make_timer", lambda step, mode: SimulatedClock(step, draw))

    return install


@pytest.fixture
def compile_for_hopper(monkeypatch, tmp_path):
    """Compile a Triton kernel for sm_90, which takes no GPU, by its arguments' types and its constants: its PTX and
    Triton's last form. Pointers, and the arguments in `divisible`, are multiples of 16."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    pytest.importorskip("triton", reason="Triton is not installed; its kernels are tested where it is")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def build(kernel, types, constants, divisible=(), num_warps=4):
        names = [parameter.name for parameter in kernel.params]
        types = {**types, **dict.fromkeys(constants, "constexpr")}
        types = {name: types[name] for name in names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types[name].startswith("*") or name in divisible
        }
        source = ASTSource(kernel, types, constants, aligned)
        binary = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        assert len(binary.asm["cubin"]) > 1000
        return binary.asm["ptx"], binary.asm["ttgir"]

    return build
