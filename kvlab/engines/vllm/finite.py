"""Layer 2: where a model's activations first stop being finite."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Decoder layers and what they hold directly (attention, MLP); deeper modules would only repeat the finding.
_LAYER = re.compile(r"(?:^|\.)layers\.\d+(?:\.\w+)?$")


def first_nonfinite_module(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> str | None:
    """Run a forward; the first module whose output holds a NaN or an infinity, `output` for the last, or None."""
    flags: list[tuple[str, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(_flagging(name, flags))
        for name, module in model.named_modules()
        if _LAYER.search(name)
    ]
    try:
        output = forward()
    finally:
        for hook in hooks:
            hook.remove()
    flags.append(("output", output.isfinite().all()))
    finite = torch.stack([flag for _, flag in flags]).tolist()
    return next((name for (name, _), ok in zip(flags, finite, strict=True) if not ok), None)


def _flagging(name: str, flags: list[tuple[str, torch.Tensor]]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _floats(output):
            flags.append((name, tensor.isfinite().all()))

    return hook


def _floats(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.element_size() > 1:
            yield output
    elif isinstance(output, tuple | list):
        for item in output:
            yield from _floats(item)
