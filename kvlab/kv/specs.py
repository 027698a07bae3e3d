"""Layer 1: reading a KV cache spec, duck-typed.

vLLM's specs (`vllm/v1/kv_cache_interface.py`), the reference engine's and a hand-written stand-in all serve. Only
`block_size` is required. The kind is read from the class names in the spec's MRO, so a stand-in class named
`MambaSpec` is one.
"""

from __future__ import annotations

from typing import Any

from kvlab.errors import GeometryError

RECURRENT_KINDS = frozenset({"MambaSpec", "CircularBufferSpec"})


def kind_names(spec: Any) -> frozenset[str]:
    """Names of the spec's class and of its bases."""
    return frozenset(cls.__name__ for cls in type(spec).__mro__)


def declared_name(value: Any) -> str:
    """The word in which a spec's field says something: a string, an enum's, or "" for None."""
    # Enums carry the field's word in `name` (quant modes) or `value` (string enums such as the cache role).
    if isinstance(getattr(value, "value", None), str):
        return str(value.value)
    return "" if value is None else str(getattr(value, "name", value))


def is_recurrent(spec: Any) -> bool:
    """Whether a layer keeps one state (or ring) a request, read and written in place."""
    return not kind_names(spec).isdisjoint(RECURRENT_KINDS)


def is_sliding_window(spec: Any) -> bool:
    """Whether blocks wholly before the window are freed; a full-attention spec that has a window keeps them."""
    return "SlidingWindowSpec" in kind_names(spec)


def member_specs(spec: Any) -> dict[str, Any]:
    """Per-layer specs of a uniform-type group (`UniformTypeKVCacheSpecs`), else empty."""
    return getattr(spec, "kv_cache_specs", None) or {}


def representative_spec(spec: Any) -> Any:
    """The spec that decides how a group's blocks are counted: the first member's in a uniform-type group."""
    members = member_specs(spec)
    return next(iter(members.values())) if members else spec


def layer_spec(spec: Any, layer_name: str) -> Any:
    """The spec of one layer; a uniform-type group holds one for each.

    Raises:
        GeometryError: when a uniform-type group has no spec for the layer.
    """
    members = member_specs(spec)
    if not members:
        return spec
    if layer_name not in members:
        known = ", ".join(sorted(members)[:4])
        raise GeometryError(f"layer {layer_name!r} has no spec in its uniform-type group (it has {known}, ...)")
    return members[layer_name]


def tokens_per_block(spec: Any, dcp_size: int = 1) -> int:
    """Tokens in one allocator block as the scheduler counts them.

    Decode context parallelism (DCP) spreads a sharded spec's block over `dcp_size` ranks, so one block ID stands for
    `block_size * dcp_size` tokens. A uniform-type group is sharded as its members are.
    """
    sharded = getattr(spec, "dcp_sharded", None)
    if sharded is None:
        sharded = getattr(representative_spec(spec), "dcp_sharded", False)
    return int(spec.block_size) * (dcp_size if sharded else 1)


def prefix_replay_tokens(spec: Any) -> int:
    """Tokens that a prefix hit recomputes (DeepSeek-V4.1's bounded replay of its window), 0 elsewhere."""
    own = getattr(spec, "prefix_replay_tokens", None)
    if own is not None:
        return int(own)
    return max((prefix_replay_tokens(member) for member in member_specs(spec).values()), default=0)


def states_per_block(spec: Any) -> int:
    """Stored states in one allocator block: `block_size`, or fewer where a state covers several tokens."""
    num_states = getattr(spec, "num_states", None)
    return int(num_states) if num_states is not None else int(spec.block_size)
