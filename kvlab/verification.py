"""Layer 5: the byte-level proof that a step writes nothing outside its touched views, and a probe of what it reads.

The oracle is the memory itself: all cache bytes before and after a step. Contents are random, and drawn twice, as a
write of the value that was there already cannot be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kvlab.cases import Case, parse_case
from kvlab.engines.base import Engine, Step
from kvlab.engines.memory import GIB, free_bytes
from kvlab.errors import EngineError
from kvlab.kv.detect import format_of
from kvlab.kv.extents import StorageExtent, storage_extents
from kvlab.kv.formats import RawFormat
from kvlab.kv.specs import is_recurrent, tokens_per_block
from kvlab.kv.views import LayerTensor, layer_tensors, owned_block_ranges, owned_kv_views
from kvlab.measure.timer import relative_rms

# 0xFF is NaN in every float format, and as a scale in every packed one; 0x3C and 0x34 are two small finite numbers in
# all of them.
_NAN, _FINITE, _OTHER = 0xFF, 0x3C, 0x34
REGIONS = ("all", "own", "foreign")
_CHUNK = 256 * 2**20


@dataclass(frozen=True)
class Verification:
    """What one step wrote.

    Attributes:
        case, model, engine: as given.
        ok: nothing outside the touched views changed.
        bytes_cache: size of the caches' storages, each once.
        bytes_touched: bytes in the touched views, each once.
        bytes_written: bytes that changed in at least one of two steps from different random contents.
        bytes_outside: changed bytes outside the touched views, in the worse of the two steps.
        outside: where the first of them lies: layer, block, request; None when there is none.
        tightness: bytes_written / bytes_touched, 1.0 for views without slack.
        reads_unwritten: what the output owes to bytes that hold no token of the case: `no`; `masked`, read but given
            no weight, so that only a NaN there would show; `yes`; None where not probed.
    """

    case: str
    model: str
    engine: str
    ok: bool
    bytes_cache: int
    bytes_touched: int
    bytes_written: int
    bytes_outside: int
    outside: str | None
    tightness: float
    reads_unwritten: str | None

    def as_dict(self) -> dict[str, Any]:
        """The attributes, for JSON."""
        return asdict(self)


def verify(
    engine: Engine, cases: Iterable[Case | str], seed: int = 0, *, probe_reads: bool = True
) -> list[Verification]:
    """Check each case's step byte for byte.

    Args:
        engine: any engine; its caches are copied once, so as much memory again must be free.
        probe_reads: also overwrite every byte that holds no token of the case, and compare outputs, where two and a
            half times the caches' memory is free.

    Raises:
        KvlabError: for a case that the engine does not admit.
    """
    results = []
    for case in cases:
        case = parse_case(case) if isinstance(case, str) else case
        step = engine.prepare(case, seed)
        try:
            results.append(verify_step(step, seed, probe_reads=probe_reads))
        finally:
            step.close()
    return results


def verify_step(step: Step, seed: int = 0, *, probe_reads: bool = True) -> Verification:
    """Check one prepared step; see `verify`."""
    engine = step.engine
    layers = layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims)
    caches = storage_extents(layer.tensor for layer in layers)
    touched = storage_extents(step.touched)
    num_bytes = sum(extent.storage.numel() for extent in caches.values())
    if (free := free_bytes(engine.device)) < num_bytes:
        raise EngineError(
            f"case {step.case.name!r}: verify copies the caches once, {num_bytes / GIB:.1f} GiB, but"
            f" {free / GIB:.1f} GiB are free; make the pool smaller (--num-kv-blocks)"
        )
    written: dict[tuple[int, int], torch.Tensor] = {}
    num_outside, outside = 0, None
    for draw in (seed, seed + 1):
        step.fill("random", draw)
        before = {address: extent.storage.clone() for address, extent in caches.items()}
        step.forward()
        stray_bytes = 0
        for address, extent in caches.items():
            for begin, end in _pieces(extent.storage):
                changed = extent.storage[begin:end] != before[address][begin:end]
                inside = touched[address].mask(begin, end) if address in touched else torch.zeros_like(changed)
                key = (address, begin)
                written[key] = changed[inside] | written.get(key, False)
                stray = changed & ~inside
                count = int(stray.sum())
                if count and outside is None:
                    outside = _locate(step, layers, extent, begin + int(stray.nonzero()[0]))
                stray_bytes += count
        del before
        num_outside = max(num_outside, stray_bytes)
    num_written = sum(int(changed.sum()) for changed in written.values())
    num_touched = sum(extent.num_bytes for extent in touched.values())
    return Verification(
        case=str(step.case),
        model=engine.model,
        engine=engine.name,
        ok=num_outside == 0,
        bytes_cache=num_bytes,
        bytes_touched=num_touched,
        bytes_written=num_written,
        bytes_outside=num_outside,
        outside=outside,
        tightness=num_written / num_touched if num_touched else 0.0,
        reads_unwritten=reads_unwritten(step, seed) if probe_reads and free > 2.5 * num_bytes else None,
    )


def reads_unwritten(step: Step, seed: int = 0, region: str = "all") -> str | None:
    """What the output owes to bytes that hold no token of the case: `no`, `masked`, `yes`, or None: it cannot be told.

    A step may read the states of each request's first `kv_len` tokens, whole recurrent states and rings, and the null
    block. All other bytes are overwritten: with NaNs, and where the output moves by more than it does by
    itself, with two finite values. A kernel that reads whole pages and gives the rest no weight turns a NaN into NaN,
    a number into nothing; one that uses what it reads tells the two values apart.

    How far the output moves by itself is taken from forwards that follow as many writes of the caches, of the bytes
    that were there: what such a write does to a GPU's caches can change the order in which a top-k finds its tokens,
    and so the last bits. An output that moves under poison but is the same for both values, and finite for NaNs, owes
    it to something of this kind, and None is the answer.

    Args:
        region: which bytes to poison: `all`, `own` (of the case's blocks: behind its tokens, and padding) or `foreign`
            (blocks of nobody, and what lies between blocks).

    Raises:
        EngineError: for an unknown region.
    """
    if region not in REGIONS:
        raise EngineError(f"region {region!r} is unknown; give {', '.join(REGIONS)}")
    engine = step.engine
    layers = layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims)
    caches = storage_extents(layer.tensor for layer in layers)
    spare = _marked(caches, _readable(step, layers))
    for mask in spare.values():
        mask.logical_not_()
    if region != "all":
        owned = [view.view(torch.uint8) for layer in layers for view in owned_kv_views(layer, step.batch)]
        for address, mask in _marked(caches, owned).items():
            spare[address] &= mask if region == "own" else ~mask
    step.fill("random", seed)
    step.forward()
    step.restore()
    before = {address: extent.storage.clone() for address, extent in caches.items()}

    def output(poison: int | None) -> torch.Tensor:
        for address, extent in caches.items():
            for begin, end in _pieces(extent.storage):
                piece = extent.storage[begin:end]
                piece.copy_(before[address][begin:end])
                if poison is not None:
                    piece.masked_fill_(spare[address][begin:end], poison)
        return step.forward().clone()

    try:
        clean = output(None)
        repeats = [relative_rms(output(None), clean) for _ in range(3)]
        poisoned = relative_rms(output(_NAN), clean)
        if poisoned <= 4 * max(repeats):
            return "no"
        # Also what NaNs left behind elsewhere, such as in a kernel's workspace, counts as moving by itself.
        repeats.append(relative_rms(output(None), clean))
        one, other = output(_FINITE), output(_OTHER)
        repeats.append(relative_rms(output(_FINITE), one))
        allowed = math.nan if any(map(math.isnan, repeats)) else 4 * max(repeats)
        if relative_rms(other, one) > allowed:
            return "yes"
        return "masked" if math.isnan(poisoned) and not math.isnan(allowed) else None
    finally:
        for address, extent in caches.items():
            extent.storage.copy_(before[address])


def _marked(caches: dict[int, StorageExtent], fields: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """For each storage, bool of its bytes: true within the fields, which are byte views of it."""
    marks = {address: torch.zeros_like(extent.storage, dtype=torch.bool) for address, extent in caches.items()}
    for field in fields:
        mark = marks[field.untyped_storage().data_ptr()]
        mark.as_strided(field.shape, field.stride(), field.storage_offset()).fill_(True)
    return marks


def _readable(step: Step, layers: Iterable[LayerTensor]) -> Iterator[torch.Tensor]:
    """Byte views of what a step may read."""
    for layer in layers:
        yield from _readable_fields(step, layer)


def _readable_fields(step: Step, layer: LayerTensor) -> Iterator[torch.Tensor]:
    engine, batch = step.engine, step.batch
    fmt = engine.formats.get(layer.layer) or format_of(layer.spec, layer.tensor, layer.layer)
    null = layer.blocks(0, 1)
    yield from (null.view(torch.uint8),) if isinstance(fmt, RawFormat) else fmt.fields(layer.token_major(0, 1)).values()
    block_size = tokens_per_block(layer.spec)
    for req_id, (begin, end) in zip(batch.req_ids, owned_block_ranges(layer.group_id, batch).tolist(), strict=True):
        if is_recurrent(layer.spec):
            yield layer.blocks(begin, end).view(torch.uint8)
            continue
        scheduled, computed, _ = batch.expected[req_id]
        freed = len(batch.block_ids[req_id][layer.group_id]) - (end - begin)
        view = layer.token_major(begin, end)
        per_kernel_block = view.shape[-2]
        # A compressed layer stores fewer states than tokens; the last one may cover tokens that are still to come.
        states = -(-(computed + scheduled - freed * block_size) * layer.factor * per_kernel_block // block_size)
        whole, rest = divmod(states, per_kernel_block)
        # Any byte of the last block may be a token's where a kernel orders values its own way, and of any block where
        # ranks share one.
        if rest and not fmt.token_major:
            whole, rest = whole + 1, 0
        if engine.dcp_size > 1:
            whole, rest = view.shape[0], 0
        for field in fmt.fields(view).values():
            yield field[:whole]
            if rest:
                yield field[whole : whole + 1, ..., :rest, :]


def _pieces(storage: torch.Tensor) -> Iterator[tuple[int, int]]:
    for begin in range(0, storage.numel(), _CHUNK):
        yield begin, min(begin + _CHUNK, storage.numel())


def _locate(step: Step, layers: Sequence[LayerTensor], extent: StorageExtent, offset: int) -> str:
    """Whose byte it is: layers of overlaid groups share bytes, so the owner of the block decides."""
    address = extent.storage.data_ptr()
    for layer in layers:
        if layer.tensor.untyped_storage().data_ptr() != address:
            continue
        owned = owned_block_ranges(layer.group_id, step.batch)
        for req_id, view, (begin, _) in zip(step.batch.req_ids, owned_kv_views(layer, step.batch), owned, strict=True):
            if not _covers(view, offset):
                continue
            for block in range(begin, begin + view.shape[layer.dim] // layer.factor):
                if _covers(layer.blocks(block, block + 1), offset):
                    return f"layer {layer.layer!r}, block {block} of request {req_id}, byte {offset} of its storage"
    return f"byte {offset} of the cache's storage, in no block of the case"


def _covers(view: torch.Tensor, offset: int) -> bool:
    (extent,) = storage_extents([view]).values()
    row = int(np.searchsorted(extent.intervals[:, 0], offset, side="right")) - 1
    return row >= 0 and offset < extent.intervals[row, 1]
