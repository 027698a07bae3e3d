"""Roles: what a layer's cache is for, by its format and its spec, never by its shape."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from hypothesis import given

from kvlab.kv.formats import DeepseekV4Format, Fp8DsMlaFormat, IndexerFormat, RawFormat
from kvlab.kv.roles import ROLES, in_order, role_of

from standins import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    attention_specs,
    is_state,
)

BF16 = RawFormat(torch.bfloat16)


class Role(Enum):
    INDEXER = "indexer"
    SPARSE = "sparse"


class Named(Enum):
    INDEXER = 2


@pytest.mark.parametrize(
    ("spec", "fmt", "role"),
    [
        (FullAttentionSpec(block_size=16), BF16, "kv"),
        (ChunkedLocalAttentionSpec(block_size=16), BF16, "kv"),
        # A full-attention spec with a window keeps all its blocks.
        (FullAttentionSpec(block_size=16, sliding_window=128), BF16, "kv"),
        (MLAAttentionSpec(block_size=64), Fp8DsMlaFormat(), "kv"),
        (MLAAttentionSpec(block_size=64, cache_role=Role.SPARSE), Fp8DsMlaFormat(), "kv"),
        (SlidingWindowSpec(block_size=16, sliding_window=128), BF16, "window"),
        (SlidingWindowMLASpec(block_size=64, sliding_window=128), DeepseekV4Format(), "window"),
        (type("SlidingWindowMLASpec", (KVCacheSpec,), {})(block_size=64), DeepseekV4Format(), "window"),
        (MambaSpec(block_size=16), BF16, "state"),
        (MambaSpec(block_size=16), None, "state"),
        (CircularBufferSpec(block_size=16), None, "state"),
        (MLAAttentionSpec(block_size=64), IndexerFormat(), "indexer"),
        # DeepSeek-V4's specs do not say it, nor that their indexer is no window.
        (SlidingWindowMLASpec(block_size=64, sliding_window=128), IndexerFormat(), "indexer"),
        (MLAAttentionSpec(block_size=64, cache_role="indexer"), BF16, "indexer"),
        (MLAAttentionSpec(block_size=64, cache_role=Role.INDEXER), BF16, "indexer"),
        (MLAAttentionSpec(block_size=64, cache_role=Named.INDEXER), BF16, "indexer"),
    ],
)
def test_the_role_of_a_layer(spec, fmt, role):
    assert role_of(spec, fmt) == role


@given(attention_specs())
def test_the_indexer_s_format_decides_for_any_attention(spec):
    assert role_of(spec, IndexerFormat()) == "indexer"
    assert role_of(spec, BF16) in ("kv", "window")
    assert not is_state(spec)


def test_roles_are_told_in_one_order():
    assert in_order(["window", "kv", "kv"]) == ["kv", "window"]
    assert in_order(reversed(ROLES)) == list(ROLES)
