"""Layer 2: what an engine promises: caches, groups, and steps that run one exact batch.

A rank owns its caches; the study that drives several ranks drives each through these same calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvlab.cases import Case, jitter_kv_lens
from kvlab.errors import EngineError
from kvlab.kv.batch import Batch, build_batch
from kvlab.kv.fills import Fill, fill_kv_blocks
from kvlab.kv.formats import Format
from kvlab.kv.snapshot import Snapshot
from kvlab.kv.views import touched_kv_views


class Engine(ABC):
    """A loaded model with its KV caches.

    Attributes:
        name: `reference` or `vllm`.
        model: the name that a user gave.
        device: where the caches live.
        kv_caches: layer name -> tensor or nest of tensors.
        kv_cache_groups: objects with `.kv_cache_spec` and `.layer_names`, by group ID.
        attn_groups: objects with `.kv_cache_group_id`, `.kv_cache_spec` and `.layer_names`.
        formats: layer name -> byte format, for layers whose spec alone does not tell.
        block_dims: the caches' block dimension where the engine knows it.
        num_blocks: allocator blocks of the pool, the null block included.
        vocab_size, max_model_len: tokens.
        dcp_size: decode context parallel ranks.
        lookahead: tokens that a drafter may write beyond the scheduled ones.
        routing: `none` for a model without experts, else `balanced` or `real`.
        load_s: seconds that loading took; None where it was not timed.
    """

    name: str
    model: str
    device: torch.device
    kv_caches: Mapping[str, Any]
    kv_cache_groups: Sequence[Any]
    attn_groups: Sequence[Any]
    formats: Mapping[str, Format]
    block_dims: Mapping[str, int] | None = None
    num_blocks: int
    vocab_size: int
    max_model_len: int
    dcp_size: int = 1
    lookahead: int = 0
    routing: str = "none"
    load_s: float | None = None

    def build(self, case: Case, seed: int = 0) -> Batch:
        """The case's batch over this engine's blocks, tokens drawn from `seed`; touches no memory of the device.

        Raises:
            CaseError, CapacityError: when the model or the pool does not admit the case.
        """
        case = jitter_kv_lens(case, 0.0, self.max_model_len, seed)
        rng = np.random.default_rng(seed)
        groups = self.kv_cache_groups
        return build_batch(case, groups, self.num_blocks, self.vocab_size, rng, self.dcp_size, self.lookahead)

    @abstractmethod
    def prepare(self, case: Case, seed: int = 0) -> Step:
        """A step of the case's batch; one is prepared at a time.

        Raises:
            CaseError, CapacityError: as `build`.
            EngineError: when the engine cannot run it.
        """

    def provenance(self) -> dict[str, Any]:
        """What the engine adds to a run's provenance: geometry, versions, fallbacks."""
        return {}

    def close(self) -> None:  # noqa: B027  (an engine without resources need not override it)
        """Give back memory and processes."""


class Step(ABC):
    """One prepared batch: contents go in with `fill`, `restore` undoes what a forward wrote, `forward` runs.

    Attributes:
        engine: the engine that prepared it.
        case: the case.
        batch: its blocks and tokens.
        touched: the views that the step may write.
    """

    def __init__(self, engine: Engine, case: Case, batch: Batch) -> None:
        self.engine = engine
        self.case = case
        self.batch = batch
        self.touched = touched_kv_views(
            engine.kv_caches,
            engine.attn_groups,
            batch,
            engine.num_blocks,
            engine.dcp_size,
            engine.lookahead,
            block_dims=engine.block_dims,
        )
        self._snapshot = Snapshot(self.touched)
        self._filled = False

    def fill(self, fill: Fill | str, seed: int = 0) -> None:
        """Give all blocks of the case new contents, and save the touched views for `restore`."""
        generator = torch.Generator(device=self.engine.device).manual_seed(seed)
        fill_kv_blocks(
            self.engine.kv_caches,
            self.engine.attn_groups,
            self.batch,
            self.engine.num_blocks,
            fill,
            generator,
            formats=self.engine.formats,
            block_dims=self.engine.block_dims,
        )
        self.save()

    def save(self) -> None:
        """Take the present contents as those that `restore` brings back."""
        self._snapshot.save()
        self._filled = True

    def restore(self) -> None:
        """Bring the touched views back to the saved contents; a few copies on the current stream.

        Raises:
            EngineError: before any contents were given: an uninitialised cache is never run.
        """
        if not self._filled:
            raise EngineError(f"case {self.case.name!r}: the KV cache has no contents yet; fill it before a forward")
        self._snapshot.restore()

    @property
    def restore_method(self) -> str:
        """How `restore` copies: see `kvlab.kv.snapshot.Snapshot`."""
        return self._snapshot.method

    @property
    def restore_bytes(self) -> int:
        """Bytes that `restore` writes."""
        return self._snapshot.num_bytes

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """Run the step on the current contents: hidden states [num_tokens, hidden]. It writes the touched views."""

    @abstractmethod
    def first_nonfinite(self) -> str | None:
        """Run the step eagerly from the saved contents; the first layer with a NaN or an infinity, or None."""

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.Stream | None]:
        """What must surround a CUDA graph capture of `forward`, and the stream to capture on; any by default."""
        yield None

    def close(self) -> None:  # noqa: B027
        """Drop the batch; the engine can then prepare another."""
