"""Stand-ins for vLLM's specs and groups, and hypothesis strategies for cases, groups and cache tensors.

Class names and attributes are vLLM's (`vllm/v1/kv_cache_interface.py`); kvlab reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kvlab.cases import Case, Request
from kvlab.kv.batch import Batch, build_batch
from kvlab.kv.detect import format_of


class KVCacheSpec(SimpleNamespace):
    """`FullAttentionSpec(block_size=16)` and its like."""


class AttentionSpec(KVCacheSpec):
    pass


class FullAttentionSpec(AttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class ChunkedLocalAttentionSpec(AttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    pass


class SlidingWindowMLASpec(SlidingWindowSpec):
    @property
    def prefix_replay_tokens(self) -> int:
        return self.sliding_window if getattr(self, "bounded_replay", False) else 0


class CircularBufferSpec(AttentionSpec):
    pass


class MambaSpec(KVCacheSpec):
    pass


class UniformTypeKVCacheSpecs(KVCacheSpec):
    pass


KINDS = {
    cls.__name__: cls
    for cls in (
        FullAttentionSpec,
        MLAAttentionSpec,
        ChunkedLocalAttentionSpec,
        SlidingWindowSpec,
        SlidingWindowMLASpec,
        CircularBufferSpec,
        MambaSpec,
    )
}


@dataclass
class Group:
    """A KV cache group and, as vLLM has them apart, an attention group over it."""

    kv_cache_spec: Any
    layer_names: list[str] = field(default_factory=list)
    kv_cache_group_id: int = 0


@st.composite
def requests(draw, max_kv: int = 120) -> Request:
    """Any request, all phases about equally often."""
    phase = draw(st.sampled_from(("decode", "verify", "prefill", "chunk", "hit")))
    if phase == "decode":
        return Request(1, draw(st.integers(2, max_kv)))
    if phase == "verify":
        drafts = draw(st.integers(1, 6))
        return Request(1 + drafts, draw(st.integers(2 + drafts, max_kv)), drafts)
    if phase == "prefill":
        query = draw(st.integers(1, max_kv))
        return Request(query, query)
    query = draw(st.integers(2, max_kv - 1))
    return Request(query, draw(st.integers(query + 1, max_kv)), chunked=phase == "chunk")


def cases(max_requests: int = 5, max_kv: int = 120) -> st.SearchStrategy[Case]:
    return st.lists(requests(max_kv), min_size=1, max_size=max_requests).map(lambda rs: Case("any", tuple(rs)))


@st.composite
def attention_specs(draw, block_sizes=(1, 2, 3, 4, 8, 16)) -> Any:
    cls = draw(
        st.sampled_from(
            (FullAttentionSpec, MLAAttentionSpec, ChunkedLocalAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec)
        )
    )
    attributes: dict[str, Any] = {"block_size": draw(st.sampled_from(block_sizes))}
    if draw(st.booleans()):
        attributes["dcp_sharded"] = draw(st.booleans())
    if issubclass(cls, SlidingWindowSpec):
        attributes["sliding_window"] = draw(st.integers(1, 60))
    if cls is SlidingWindowMLASpec:
        attributes["bounded_replay"] = draw(st.booleans())
    return cls(**attributes)


@st.composite
def specs(draw, block_sizes=(1, 2, 3, 4, 8, 16)) -> Any:
    """A group's spec: attention, recurrent, or uniform-type with layers `a`, `b`, ... of one block size or several."""
    kind = draw(st.sampled_from(("attention", "attention", "recurrent", "ring", "uniform")))
    if kind == "attention":
        return draw(attention_specs(block_sizes))
    if kind == "recurrent":
        return MambaSpec(block_size=draw(st.sampled_from((4, 528))))
    if kind == "ring":
        return CircularBufferSpec(block_size=draw(st.sampled_from(block_sizes)))
    first = draw(attention_specs(block_sizes))
    sizes = st.sampled_from(block_sizes) if draw(st.booleans()) else st.just(first.block_size)
    members = {"a": first}
    for name in "bc"[: draw(st.integers(0, 2))]:
        members[name] = type(first)(**{**vars(first), "block_size": draw(sizes)})
    uniform = UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=members)
    if draw(st.booleans()):
        # vLLM's wrapper says so itself; a stand-in may leave it to its members.
        uniform.dcp_sharded = getattr(first, "dcp_sharded", False)
    return uniform


def is_state(spec: Any) -> bool:
    return isinstance(spec, MambaSpec | CircularBufferSpec)


@dataclass
class World:
    """Groups with caches in one or several buffers, and a batch laid out over them.

    `dims` and `factors` say, by layer, what the strategy built: the oracle never infers them.
    """

    batch: Batch
    groups: list[Group]
    kv_caches: dict[str, Any]
    dims: dict[str, int]
    factors: dict[str, int]
    num_blocks: int
    dcp_size: int
    lookahead: int
    case: Case
    buffers: list[torch.Tensor]
    plain: set[str]

    @property
    def block_dims(self) -> dict[str, int]:
        return {name: dim for name, dim in self.dims.items() if name not in self.plain}

    def spec_of(self, group: Group, layer: str) -> Any:
        members = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        return members[layer] if members else group.kv_cache_spec


def tensors_of(cache: Any) -> list[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        return [cache] if cache.numel() else []
    return [t for item in cache or () for t in tensors_of(item)]


# A byte that neither zeros nor encoded values leave everywhere.
GUARD = 0xA5


def owned_bytes(world):
    """Per buffer, a mask of the bytes of the batch's blocks: one `narrow` a block, by the geometry as built."""
    masks = [torch.zeros_like(buffer.view(torch.uint8).flatten()) for buffer in world.buffers]
    by_address = {b.untyped_storage().data_ptr(): mask for b, mask in zip(world.buffers, masks, strict=True)}
    for group in world.groups:
        for layer in group.layer_names:
            factor = world.factors[layer]
            for tensor in tensors_of(world.kv_caches[layer]):
                mask = by_address[tensor.untyped_storage().data_ptr()].view(tensor.dtype)
                twin = mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                bits = twin.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
                for begin, end in world.batch.group_block_ranges[group.kv_cache_group_id]:
                    for block in range(begin, end):
                        bits.narrow(world.dims[layer], block * factor, factor).fill_(
                            255 if bits.dtype == torch.uint8 else -1
                        )
    return [mask.view(torch.uint8) == 255 for mask in masks]


def refill_guards(world):
    for buffer in world.buffers:
        buffer.view(torch.uint8).fill_(GUARD)


def zero_tokens_of(layer, begin, end):
    """bool [tokens of blocks begin to end]: all bytes of the token are zero."""
    fmt = format_of(layer.spec, layer.tensor, layer.layer)
    fields = fmt.fields(layer.token_major(begin, end))
    used = torch.cat([field.contiguous() for field in fields.values()], -1).to(torch.int64)
    # Sum over everything but kernel block and token.
    return (used.sum(-1).flatten(1, -2).sum(1) if used.dim() > 3 else used.sum(-1)).flatten() == 0


DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def _attention_cache(draw, buffers, num_blocks, spec, shared: torch.Tensor | None) -> tuple[torch.Tensor, int, int]:
    block_size = spec.block_size
    factor = draw(st.sampled_from([f for f in (1, 2, 3, 4) if block_size % f == 0]))
    tokens = block_size // factor
    dtype = draw(st.sampled_from(DTYPES))
    heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    kernel_blocks = num_blocks * factor
    layout = draw(st.sampled_from(("BNC", "BHNC", "BNHC", "2BNHC", "B2NHC", "strided", "H-major")))
    if layout == "strided":
        # Blocks of a shared int8 buffer, with room for other layers between them.
        stride = (tokens * width + draw(st.integers(0, 7))) * dtype.itemsize
        if shared is not None and stride * kernel_blocks <= shared.numel():
            raw = shared.view(dtype)
        else:
            raw = torch.zeros(stride * kernel_blocks, dtype=torch.int8).view(dtype)
            buffers.append(raw)
        return (
            raw.as_strided((kernel_blocks, tokens, width), (stride // dtype.itemsize, width, 1)),
            0,
            factor,
        )
    shape = {
        "BNC": (kernel_blocks, tokens, width),
        "BHNC": (kernel_blocks, heads, tokens, width),
        "BNHC": (kernel_blocks, tokens, heads, width),
        "2BNHC": (2, kernel_blocks, tokens, heads, width),
        "B2NHC": (kernel_blocks, 2, tokens, heads, width),
        "H-major": (heads, kernel_blocks, tokens, width),
    }[layout]
    tensor = torch.zeros(shape, dtype=dtype)
    buffers.append(tensor)
    if layout == "H-major":
        return tensor.transpose(0, 1), 0, factor
    return tensor, 1 if layout == "2BNHC" else 0, factor


def _state_cache(draw, buffers, num_blocks, spec) -> Any:
    shapes = draw(st.lists(st.sampled_from(((3, 4), (2, 3, 2), (5,))), min_size=1, max_size=3))
    if draw(st.booleans()):
        spec.shapes = tuple(shapes)
    page = sum(int(np.prod(s)) for s in shapes) + draw(st.integers(0, 3))
    raw = torch.zeros(num_blocks * page)
    buffers.append(raw)
    states, offset = [], 0
    for shape in shapes:
        inner = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        states.append(raw.as_strided((num_blocks, *shape), (page, *inner), offset))
        offset += int(np.prod(shape))
    return tuple(states) if draw(st.booleans()) or len(states) > 1 else states[0]


@st.composite
def worlds(draw, one_block_size: bool = False) -> World:
    """Everything that `touched_kv_views` takes, of any geometry.

    Args:
        one_block_size: members of a uniform-type group agree in their block size, as in vLLM.
    """
    dcp_size, lookahead = draw(st.sampled_from((1, 1, 2, 3))), draw(st.sampled_from((0, 0, 1, 4, 20)))
    case = draw(cases())
    kv_groups = []
    for g in range(draw(st.integers(1, 3))):
        spec = draw(specs())
        members = getattr(spec, "kv_cache_specs", None)
        if members:
            if one_block_size:
                for member in members.values():
                    member.block_size = spec.block_size
            spec.kv_cache_specs = {f"g{g}.{name}": member for name, member in members.items()}
            layers = list(spec.kv_cache_specs)
        else:
            layers = [f"g{g}.{i}" for i in range(draw(st.integers(1, 3)))]
        kv_groups.append(Group(spec, layers, g))
    batch = build_batch(case, kv_groups, 1 << 20, 1000, np.random.default_rng(0), dcp_size, lookahead)
    num_blocks = batch.num_blocks + draw(st.integers(0, 3))
    world = World(batch, [], {}, {}, {}, num_blocks, dcp_size, lookahead, case, [], set())
    shared = torch.zeros(1 << 14, dtype=torch.int8) if draw(st.booleans()) else None
    if shared is not None:
        world.buffers.append(shared)
    for group in kv_groups:
        for name in group.layer_names:
            spec = world.spec_of(group, name)
            if is_state(spec):
                cache, dim, factor = _state_cache(draw, world.buffers, num_blocks, spec), 0, 1
            else:
                cache, dim, factor = _attention_cache(draw, world.buffers, num_blocks, spec, shared)
                if draw(st.integers(0, 7)) == 0:
                    cache = draw(st.sampled_from((None, [cache, []], [torch.empty(0), (cache, None)])))
            world.kv_caches[name], world.dims[name], world.factors[name] = cache, dim, factor
            sizes = [t.shape[:2] for t in tensors_of(cache)]
            if all(sum(n % num_blocks == 0 for n in size) == 1 for size in sizes) and draw(st.booleans()):
                world.plain.add(name)
    # vLLM's runner holds attention groups, several to a KV cache group and in an order of their own.
    for group in kv_groups:
        cut = draw(st.integers(0, len(group.layer_names)))
        for part in (group.layer_names[:cut], group.layer_names[cut:]):
            if part:
                world.groups.append(Group(group.kv_cache_spec, part, group.kv_cache_group_id))
    world.groups = draw(st.permutations(world.groups))
    return world
