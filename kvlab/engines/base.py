"""Layer 2: what an engine promises: caches, groups, and steps that run one exact batch.

An engine is one rank and owns its caches; no study drives several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvlab.cases import Case, jitter_kv_lens
from kvlab.engines.memory import GIB, free_bytes
from kvlab.engines.prefill import Prefilled, prefix_batches
from kvlab.errors import CapacityError, EngineError
from kvlab.kv.batch import Batch, build_batch
from kvlab.kv.extents import storage_extents
from kvlab.kv.fills import Fill, FillPlans, distinct_layers, fill_kv_blocks, zero_kv_blocks
from kvlab.kv.formats import Format
from kvlab.kv.snapshot import Snapshot
from kvlab.kv.views import layer_tensors, owned_kv_views, touched_kv_views


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
        routing_note: what `routing` does not say by itself; empty where there is nothing.
        prefill_tokens: tokens that one step of a prefill computes, at most.
        load_s: seconds that loading took; None where it was not timed.
        topk: tokens that sparse attention chooses; None for a model that attends to all.
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
    routing_note: str = ""
    prefill_tokens: int = 2048
    load_s: float | None = None
    topk: int | None = None
    _open_step: Callable[[], Step | None] | None = None

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
        """A step of the case's batch; one is open at a time.

        Raises:
            CaseError, CapacityError: as `build`.
            EngineError: when the engine cannot run it, or another step is open.
        """

    def prefill(self, case: Case, seed: int = 0) -> Prefilled:
        """The KV that the model itself writes for the tokens before a case's step, prefilled in chunks.

        Called before `prepare` with the same case and seed; `step.prefilled = ...` then gives the step the arm
        `prefill`. Slots behind a request's prefix are zero.

        Raises:
            CaseError, CapacityError: as `build`; also where no memory is left to keep the result, or no blocks to
                take the prefill through.
            EngineError: when the engine cannot prefill, the model fails, or a step is open.
        """
        self.refuse_second_step(case)
        batch = self.build(case, seed)
        layers = distinct_layers(layer_tensors(self.kv_caches, self.attn_groups, self.num_blocks, self.block_dims))
        views = [view for layer in layers for view in owned_kv_views(layer, batch)]
        needed = sum(extent.num_bytes for extent in storage_extents(views).values())
        if needed > (free := free_bytes(self.device)):
            raise CapacityError(
                f"case {case.name!r}: its prefilled KV is kept beside the caches and needs {needed / GIB:.1f} GiB, but"
                f" {free / GIB:.1f} GiB are free; take fewer requests ({len(batch.req_ids)} now), shorten K, or make"
                " the pool smaller (--num-kv-blocks)"
            )
        zero_kv_blocks(self.kv_caches, self.attn_groups, batch, self.num_blocks, block_dims=self.block_dims)
        tokens = min(self.prefill_tokens, self.max_model_len)
        self.compute(
            prefix_batches(case.name, batch, self.kv_cache_groups, self.num_blocks, tokens, self.dcp_size), seed
        )
        prefilled = Prefilled(views, case, batch)
        prefilled.save()
        return prefilled

    def compute(self, batches: Iterable[Batch], seed: int = 0) -> None:
        """Run some batches one after the other for what they write into the caches.

        Raises:
            EngineError: when the engine cannot, or the model fails.
        """
        raise EngineError(f"engine {self.name!r} cannot prefill; drop the arm prefill")

    def refuse_second_step(self, case: Case) -> None:
        """Raise EngineError while an earlier step is open: it shares blocks and runner with the next one."""
        step = self._open_step() if self._open_step else None
        if step is not None and not step.closed:
            raise EngineError(
                f"case {case.name!r}: the step of case {step.case.name!r} is still open; close it first (step.close())"
            )

    def provenance(self) -> dict[str, Any]:
        """What the engine adds to a run's provenance: geometry, versions; `notes` of what it fell back to."""
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
        closed: whether it was closed; it then runs no more.
    """

    closed: bool = False

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
        self._plans = FillPlans()
        self._prefilled: Snapshot | None = None

    @property
    def prefilled(self) -> Snapshot | None:
        """What `Engine.prefill` returned for this step's case and seed, for the fill `prefill`; None until it is set.

        Raises:
            EngineError: when set to that of other blocks or tokens.
        """
        return self._prefilled

    @prefilled.setter
    def prefilled(self, prefilled: Snapshot | None) -> None:
        if isinstance(prefilled, Prefilled):
            prefilled.check(self.case, self.batch)
        self._prefilled = prefilled

    def fill(self, fill: Fill | str, seed: int = 0) -> None:
        """Give all blocks of the case new contents, and save the touched views for `restore`.

        Raises:
            EngineError: for `prefill` without a prefill.
        """
        if (fill.strip() if isinstance(fill, str) else fill.kind) == "prefill":
            if self.prefilled is None:
                raise EngineError(
                    f"case {self.case.name!r}: nothing was prefilled for this step; call engine.prefill(case, seed)"
                    " before prepare and set step.prefilled"
                )
            self.prefilled.restore()
            self.save()
            return
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
            plans=self._plans,
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

    def selection(self) -> dict[str, torch.Tensor]:
        """What sparse attention chooses: one eager forward from the saved contents, never the timed one.

        Returns:
            Indexer name -> positions within a request's KV, int64 [rows, k] on the caches' device, -1 for none. Rows
            are the step's tokens, requests in the batch's order. Layers that choose none are absent.
        """
        return {}

    def expert_loads(self) -> dict[str, torch.Tensor]:
        """Where tokens go: one eager forward from the saved contents, never the timed one.

        Returns:
            MoE layer -> tokens that each expert gets, int64 [experts] on the CPU; empty for a model without experts.
            See `kvlab.engines.loads.loads_moved`.
        """
        return {}

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.Stream | None]:
        """What must surround a CUDA graph capture of `forward`, and the stream to capture on; any by default."""
        yield None

    def close(self) -> None:
        """Drop the batch; the engine can then prepare another. Harmless when called twice."""
        self.closed = True
