"""Layer 2: what sparse attention's indexers choose, read from the buffer that all of them share.

Relies on `topk_indices_buffer`, int32 [tokens, k] with -1 for none, counted within a request in stored states
(`vllm/model_executor/layers/sparse_attn_indexer.py`; the indexers of `vllm/models/deepseek_v32/attention.py` and
`vllm/models/deepseek_v41/attention.py`), and on the rows that V4.1 still runs behind its last KV source
(`vllm/models/deepseek_v41/decoder_replay_layers.py`). After a step the buffer holds the last indexer's choice only, so
it is read as soon as each indexer's decoder layer has run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)(?=\.)")
# What no indexer writes: a row that still holds it was not chosen for.
_UNWRITTEN = -2


def indexers(model: torch.nn.Module) -> dict[str, Any]:
    """Name -> module that chooses tokens; the operators within one are left out."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        buffer = getattr(module, "topk_indices_buffer", None)
        is_one = isinstance(buffer, torch.Tensor) and type(module).__name__.endswith("Indexer")
        if is_one and not any(name.startswith(f"{other}.") for other in found):
            found[name] = module
    return found


@contextmanager
def watched_selection(model: torch.nn.Module, num_tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """While one eager forward runs: indexer name -> int64 [num_tokens, k] in the runner's order, filled as layers run.

    Rows that a layer did not run, and layers whose choice is not needed (all tokens are attended to), hold -1 or are
    absent.
    """
    chosen: dict[str, torch.Tensor] = {}
    hooks = []
    for name, indexer in indexers(model).items():
        layer = _LAYER.match(name)
        if layer is None:
            continue
        rows = _rows_of(model, int(layer[1]))
        owner = model.get_submodule(layer[0])
        hooks.append(owner.register_forward_pre_hook(_marking(indexer)))
        hooks.append(owner.register_forward_hook(_keeping(name, indexer, rows, num_tokens, chosen)))
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def _rows_of(model: torch.nn.Module, layer: int) -> Callable[[], torch.Tensor | None]:
    """The step's rows that a layer runs on; None for all."""

    def rows() -> torch.Tensor | None:
        for module in model.modules():
            start = getattr(module, "decoder_replay_start", None)
            replay = getattr(getattr(module, "decoder_replay_layers", None), "replay_batch", None)
            if isinstance(start, int) and layer >= start and replay is not None:
                found: torch.Tensor = replay.rows
                return found
        return None

    return rows


def _marking(indexer: Any) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any) -> None:
        indexer.topk_indices_buffer.fill_(_UNWRITTEN)

    return hook


def _keeping(
    name: str,
    indexer: Any,
    rows_of: Callable[[], torch.Tensor | None],
    num_tokens: int,
    chosen: dict[str, torch.Tensor],
) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        rows = rows_of()
        count = num_tokens if rows is None else len(rows)
        states = indexer.topk_indices_buffer[:count, : indexer.topk_tokens].long()
        if bool((states == _UNWRITTEN).all()):
            return
        # A state that covers several tokens stands for its first.
        positions = torch.where(states >= 0, states * int(getattr(indexer, "compress_ratio", 1)), -1)
        if rows is not None:
            whole = positions.new_full((num_tokens, positions.shape[1]), -1)
            positions = whole.index_copy_(0, rows, positions)
        chosen[name] = positions

    return hook
