"""Layer 2: what outlives a model in vLLM's modules and in PyTorch, and would keep its memory for the process's life.

Each entry names the file that it relies on; one that this vLLM has not, or has not imported, is passed over.
"""

from __future__ import annotations

import gc
import sys
import traceback
from types import TracebackType

import torch

# Dictionaries, by module and name.
_EMPTIED = (
    # Its keys are weak, but a value keeps the weight loaders of its layer's parameters. `reload/sanitize.py` cuts those
    # that are the layer's own methods; one wrapped in a function refers to the layer still, which so keeps itself:
    # scales of MXFP4 experts (`quantization/mxfp4.py`), of MXFP8 linears (`quantization/modelopt.py`), and whatever
    # goes through `composed_weight_loader` (`model_loader/weight_utils.py`).
    ("vllm.model_executor.model_loader.reload.layerwise", "LAYERWISE_INFO"),
    # A runner that shuts down empties it; a load that failed has none.
    ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT"),
    ("vllm.models.deepseek_v4.nvidia.flashinfer_sparse", "_flashinfer_dsv4_workspace_by_device"),
)
# Made again where they are None.
_UNSET = (
    # As for `_ROPE_DICT`.
    ("vllm.v1.worker.workspace", "_manager"),
    # FlashInfer's workspaces: 128 to 400 MiB each.
    ("vllm.v1.attention.backends.flashinfer", "trtllm_workspace_buffer"),
    ("vllm.v1.attention.backends.mla.flashinfer_mla", "_fi_workspace"),
    ("vllm.v1.attention.backends.mla.flashinfer_mla_sparse", "_fi_sparse_workspace"),
    ("vllm.model_executor.layers.attention.mm_encoder_attention", "_flashinfer_workspace_buffer"),
)


def drop_leftovers() -> None:
    """Empty what vLLM's modules hold of closed models; for when no model is loaded in this process any more."""
    for module, name in _EMPTIED:
        if (held := getattr(sys.modules.get(module), name, None)) is not None:
            held.clear()
    for module, name in _UNSET:
        if getattr(sys.modules.get(module), name, None) is not None:
            setattr(sys.modules[module], name, None)
    gc.collect()
    _drop_blas_workspaces()


def _drop_blas_workspaces() -> None:
    """What cuBLAS keeps for each stream that it ran in: 32 MiB on Hopper, and every capture has a stream of its own.

    They stay while there is a CUDA graph, whoever's: its replays may write into them.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None or not torch.cuda.is_initialized():
        return
    # By type: `isinstance` would ask proxies for the class of what they stand for, which may import it.
    if not any(issubclass(type(thing), torch.cuda.CUDAGraph) for thing in gc.get_objects()):
        clear()


def release_frames(error: BaseException) -> None:
    """Let go of the calls that raised: as long as someone keeps the error, as a notebook does with its last one, their
    variables hold the model and its caches. Where they were stays with the error, as a note.

    `traceback.clear_frames` would leave what a closure refers to, and PyTorch calls a module with hooks in one.
    """
    found: list[BaseException] = [error]
    for each in found:
        if each.__traceback__ is not None:
            each.add_note("".join(["Raised in (most recent call last):\n", *traceback.format_tb(each.__traceback__)]))
            each.__traceback__ = None
        for cause in (each.__cause__, each.__context__):
            if cause is not None and not any(cause is other for other in found):
                found.append(cause)


class ReleasedFrames:
    """Within it, `release_frames` of what is raised; a `contextmanager` would put the traceback back."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            release_frames(error)
