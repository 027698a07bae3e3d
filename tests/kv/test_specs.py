"""Specs are read by attribute and class name, so vLLM's own and the barest stand-in both serve."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import GeometryError
from kvlab.kv.specs import (
    is_recurrent,
    is_sliding_window,
    kind_names,
    layer_spec,
    member_specs,
    prefix_replay_tokens,
    representative_spec,
    states_per_block,
    tokens_per_block,
)

from standins import (
    KINDS,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    specs,
)


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_is_the_class_s_own_or_a_base_s(name):
    spec = KINDS[name](block_size=16)

    class TheirOwn(KINDS[name]):
        pass

    for one in (spec, TheirOwn(block_size=16)):
        assert name in kind_names(one)
        assert is_recurrent(one) == (name in ("MambaSpec", "CircularBufferSpec"))
        assert is_sliding_window(one) == name.startswith("SlidingWindow")


def test_a_block_size_is_enough():
    class Bare:
        __slots__ = ("block_size",)

    bare = Bare()
    bare.block_size = 16
    assert not is_recurrent(bare)
    assert not is_sliding_window(bare)
    assert member_specs(bare) == {}
    assert representative_spec(bare) is layer_spec(bare, "any") is bare
    assert tokens_per_block(bare, 4) == states_per_block(bare) == 16
    assert prefix_replay_tokens(bare) == 0


def test_a_full_attention_spec_that_has_a_window_is_no_sliding_window():
    assert not is_sliding_window(FullAttentionSpec(block_size=16, sliding_window=128))


@settings(max_examples=300, deadline=None)
@given(specs(), st.integers(1, 8))
def test_only_sharded_specs_count_tokens_of_all_ranks(spec, dcp_size):
    members = getattr(spec, "kv_cache_specs", None)
    first = next(iter(members.values())) if members else spec
    sharded = vars(spec).get("dcp_sharded", vars(first).get("dcp_sharded", False))
    assert tokens_per_block(spec, dcp_size) == spec.block_size * (dcp_size if sharded else 1)
    assert tokens_per_block(spec) == spec.block_size


def test_a_uniform_group_says_itself_or_asks_its_members():
    first = FullAttentionSpec(block_size=16, dcp_sharded=True)
    second = SlidingWindowMLASpec(block_size=16, sliding_window=99, bounded_replay=True)
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": first, "b": second})
    assert representative_spec(uniform) is first
    assert layer_spec(uniform, "b") is second
    assert tokens_per_block(uniform, 2) == 32
    assert prefix_replay_tokens(uniform) == 99
    uniform.dcp_sharded, uniform.prefix_replay_tokens = False, 7
    assert tokens_per_block(uniform, 2) == 16
    assert prefix_replay_tokens(uniform) == 7
    assert member_specs(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={})) == {}


def test_a_layer_without_a_member_spec_is_named():
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FullAttentionSpec(block_size=16)})
    with pytest.raises(GeometryError, match=r"'b'.*uniform.*a"):
        layer_spec(uniform, "b")


def test_replayed_tokens_are_the_window_only_where_replay_is_bounded():
    assert prefix_replay_tokens(SlidingWindowMLASpec(block_size=16, sliding_window=99)) == 0
    assert prefix_replay_tokens(SlidingWindowMLASpec(block_size=16, sliding_window=99, bounded_replay=True)) == 99
    assert prefix_replay_tokens(SlidingWindowSpec(block_size=16, sliding_window=99)) == 0


def test_states_are_fewer_than_tokens_where_a_state_covers_several():
    assert states_per_block(SimpleNamespace(block_size=256, num_states=64)) == 64
    assert states_per_block(SimpleNamespace(block_size=256, num_states=None)) == 256


class Kind(enum.Enum):
    MAMBA = "mamba"


@dataclass(frozen=True)
class FrozenMamba(MambaSpec):
    block_size: int = 528
    shapes: tuple[tuple[int, ...], ...] = field(default=((2, 2),))
    kind: Kind = Kind.MAMBA


def test_frozen_dataclasses_serve():
    assert is_recurrent(FrozenMamba())
    assert is_recurrent(CircularBufferSpec(block_size=4))
