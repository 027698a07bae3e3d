"""Layer 5: what a step may write, as a table."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pandas as pd

from kvlab.engines.base import Step
from kvlab.kv.detect import format_of
from kvlab.kv.extents import storage_extents
from kvlab.kv.specs import is_recurrent, is_sliding_window, tokens_per_block
from kvlab.kv.views import (
    LayerTensor,
    block_views,
    layer_tensors,
    owned_block_ranges,
    owned_kv_views,
    touched_block_ranges,
)


def touched_table(step: Step) -> pd.DataFrame:
    """One row for each group and kind of layer.

    Columns: group; kind (`attention`, `window`, `state`); format; layers; block_size, tokens; shape of one layer's
    tensor; factor, kernel blocks a block; blocks owned and touched, over all requests; views; bytes owned and touched
    over the row's layers, each byte once; share touched.
    """
    engine, batch = step.engine, step.batch
    tensors = layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims)
    ranges = touched_block_ranges(engine.attn_groups, batch, engine.dcp_size, engine.lookahead)
    rows: dict[tuple[Any, ...], list[LayerTensor]] = defaultdict(list)
    for tensor in tensors:
        fmt = engine.formats.get(tensor.layer) or format_of(tensor.spec, tensor.tensor, tensor.layer)
        block_size = tokens_per_block(tensor.spec, engine.dcp_size)
        shape = tuple(tensor.tensor.shape)
        rows[tensor.group_id, _kind(tensor.spec), fmt.name, block_size, shape, tensor.factor].append(tensor)
    table = []
    for (group, kind, fmt_name, block_size, shape, factor), members in rows.items():
        owned_ranges = owned_block_ranges(group, batch)
        touched_ranges = ranges[members[0].layer]
        owned = _num_bytes(view for m in members for view in owned_kv_views(m, batch))
        touched = _num_bytes(view for m in members for view in block_views(m, ranges[m.layer]))
        table.append(
            {
                "group": group,
                "kind": kind,
                "format": fmt_name,
                "layers": len({m.layer for m in members}),
                "block_size": block_size,
                "shape": "x".join(map(str, shape)),
                "factor": factor,
                "blocks_owned": int((owned_ranges[:, 1] - owned_ranges[:, 0]).sum()),
                "blocks_touched": int((touched_ranges[:, 1] - touched_ranges[:, 0]).sum()),
                "views": len(members) * len(touched_ranges),
                "bytes_owned": owned,
                "bytes_touched": touched,
                "share_touched": touched / owned if owned else 0.0,
            }
        )
    return pd.DataFrame(table)


def touched_blocks(step: Step) -> pd.DataFrame:
    """One row for each group, kind of layer and request: the blocks it owns, and those of them that a step may write.

    Columns: group; kind (`attention`, `window`, `state`); request, from 0; begin, end: block IDs owned, `end` outside;
    touched_begin, touched_end: those touched; block_size, tokens; tokens: of KV after the step, those to come from a
    drafter included; layers.
    """
    engine, batch = step.engine, step.batch
    tensors = layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims)
    ranges = touched_block_ranges(engine.attn_groups, batch, engine.dcp_size, engine.lookahead)
    kinds: dict[tuple[int, str, int], list[LayerTensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.group_id, _kind(tensor.spec), tokens_per_block(tensor.spec, engine.dcp_size)].append(tensor)
    rows = []
    for (group, kind, block_size), members in kinds.items():
        owned, touched = owned_block_ranges(group, batch), ranges[members[0].layer]
        lengths = [scheduled + computed + engine.lookahead for scheduled, computed, _ in batch.expected.values()]
        ids = zip(owned.tolist(), touched.tolist(), lengths, strict=True)
        for request, ((begin, end), (first, last), tokens) in enumerate(ids):
            rows.append(
                {
                    "group": group,
                    "kind": kind,
                    "request": request,
                    "begin": begin,
                    "end": end,
                    "touched_begin": first,
                    "touched_end": last,
                    "block_size": block_size,
                    "tokens": tokens,
                    "layers": len({member.layer for member in members}),
                }
            )
    return pd.DataFrame(rows)


def _kind(spec: Any) -> str:
    if is_recurrent(spec):
        return "state"
    return "window" if is_sliding_window(spec) else "attention"


def _num_bytes(views: Any) -> int:
    return sum(extent.num_bytes for extent in storage_extents(views).values())
