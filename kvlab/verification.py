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
from kvlab.errors import EngineError
from kvlab.kv.detect import format_of
from kvlab.kv.extents import StorageExtent, storage_extents
from kvlab.kv.formats import RawFormat
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import LayerTensor, layer_tensors, owned_block_ranges, owned_kv_views
from kvlab.measure.timer import relative_rms

# 0xFF is NaN in every float format, and as a scale in every packed one; 0x3C is a small finite number in all of them.
_NAN, _FINITE = 0xFF, 0x3C
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
        probe_reads: also overwrite every byte that holds no token of the case, and compare outputs, where three
            times the caches' memory is free.

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
    if (free := _free_bytes(engine.device)) < num_bytes:
        raise EngineError(
            f"case {step.case.name!r}: verify copies the caches once, {num_bytes / 2**30:.1f} GiB, but"
            f" {free / 2**30:.1f} GiB are free; make the pool smaller (--num-kv-blocks)"
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
        reads_unwritten=reads_unwritten(step, seed) if probe_reads and free > 3 * num_bytes else None,
    )


def reads_unwritten(step: Step, seed: int = 0) -> str:
    """What the output owes to bytes that hold no token of the case: `no`, `masked` or `yes`.

    Readable are the slots of the first `kv_len` tokens of each request, whole recurrent states, and the null block.
    All other bytes are overwritten with NaNs, and where the output moves by more than it does by itself, with finite
    values: a kernel that reads whole pages and gives the rest no weight turns a NaN into NaN, a number into nothing.
    """
    engine = step.engine
    layers = layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims)
    caches = storage_extents(layer.tensor for layer in layers)
    readable = {address: torch.zeros_like(e.storage, dtype=torch.bool) for address, e in caches.items()}
    for layer in layers:
        mask = readable[layer.tensor.untyped_storage().data_ptr()]
        for field in _readable_fields(step, layer):
            mask.as_strided(field.shape, field.stride(), field.storage_offset()).fill_(True)
    step.fill("random", seed)
    clean = step.forward().clone()
    step.restore()
    # A forward that does not repeat itself (atomics, a scheduler of its own) is held to its own distance instead.
    repeats = []
    for _ in range(3):
        repeats.append(relative_rms(step.forward(), clean))
        step.restore()
    allowed = 4 * max(repeats)
    before = {address: extent.storage.clone() for address, extent in caches.items()}

    def shows(value: int) -> bool:
        try:
            for address, extent in caches.items():
                for begin, end in _pieces(extent.storage):
                    extent.storage[begin:end].masked_fill_(~readable[address][begin:end], value)
            return not relative_rms(step.forward(), clean) <= allowed
        finally:
            for address, extent in caches.items():
                extent.storage.copy_(before[address])

    return "no" if not shows(_NAN) else "yes" if shows(_FINITE) else "masked"


def _readable_fields(step: Step, layer: LayerTensor) -> Iterator[torch.Tensor]:
    """Byte views of what a step may read in one layer."""
    engine, batch = step.engine, step.batch
    fmt = engine.formats.get(layer.layer) or format_of(layer.spec, layer.tensor, layer.layer)
    null = layer.blocks(0, 1)
    yield from (null.view(torch.uint8),) if isinstance(fmt, RawFormat) else fmt.fields(layer.token_major(0, 1)).values()
    for req_id, (begin, end) in zip(batch.req_ids, owned_block_ranges(layer.group_id, batch).tolist(), strict=True):
        if is_recurrent(layer.spec):
            yield layer.blocks(begin, end).view(torch.uint8)
            continue
        scheduled, computed, _ = batch.expected[req_id]
        freed = len(batch.block_ids[req_id][layer.group_id]) - (end - begin)
        view = layer.token_major(begin, end)
        per_kernel_block = view.shape[-2]
        tokens = computed + scheduled - freed * layer.factor * per_kernel_block
        whole, rest = divmod(tokens, per_kernel_block)
        if rest and not fmt.token_major:  # any byte of the last block may be a token's
            whole, rest = whole + 1, 0
        for field in fmt.fields(view).values():
            yield field[:whole]
            if rest:
                yield field[whole : whole + 1, ..., :rest, :]


def _pieces(storage: torch.Tensor) -> Iterator[tuple[int, int]]:
    for begin in range(0, storage.numel(), _CHUNK):
        yield begin, min(begin + _CHUNK, storage.numel())


def _free_bytes(device: torch.device) -> float:
    # The allocator's cached blocks are as good as free; a CPU has swap and its own way to say no.
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info(device)[0])


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
