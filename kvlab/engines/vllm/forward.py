"""Layer 2: the model call of one prepared batch, taken over from vLLM's runner.

`execute_model` prepares inputs, attention metadata and the forward context as in serving; the model call inside it is
caught once, and can then be repeated with the same inputs under the same context. Relies on `execute_model` of
`vllm/v1/worker/gpu/model_runner.py` (V2) and `vllm/v1/worker/gpu_model_runner.py` (V1: `_model_forward`), on
`vllm/forward_context.py`, and follows `vllm/benchmarks/forward/capture.py` in what it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvlab.engines.vllm.flavour import Flavour
from kvlab.engines.vllm.schedule import finishing_output, scheduler_output
from kvlab.errors import EngineError
from kvlab.kv.batch import Batch


class CaughtForward:
    """A model call that can be repeated: `CaughtForward(runner, batch, flavour)()` gives hidden states.

    Raises:
        EngineError: when the runner built another batch than was asked for, or vLLM fails.
    """

    def __init__(self, runner: Any, batch: Batch, flavour: Flavour) -> None:
        self.runner: Any = runner
        self.batch = batch
        self._call: Callable[[], Any] | None = None
        self._req_ids: list[str] = []
        catch = self._catch_v2 if flavour.runner == "v2" else self._catch_v1
        try:
            with torch.inference_mode(), _current_config(runner):
                catch(scheduler_output(batch, flavour))
            if self._call is None:
                raise EngineError("vLLM's runner did not call the model; its step may be empty")
        except BaseException:
            # The runner holds the requests already; the next batch's would come on top. What failed first is told.
            with suppress(Exception):
                self.finish()
            raise
        finally:
            # No sampling follows, which the runner would else wait for.
            runner.execute_model_state = None

    def order(self) -> torch.Tensor:
        """Row of each of the batch's tokens in what the model returns: int64 [tokens]; runners sort their requests."""
        ends = np.cumsum([self.batch.expected[req_id][0] for req_id in self._req_ids])
        end_of = dict(zip(self._req_ids, ends.tolist(), strict=True))
        spans = [range(end_of[r] - self.batch.expected[r][0], end_of[r]) for r in self.batch.req_ids]
        return torch.tensor([row for span in spans for row in span], dtype=torch.int64)

    def __call__(self) -> torch.Tensor:
        assert self._call is not None
        with torch.inference_mode(), _current_config(self.runner):
            return _hidden_states(self._call())

    def finish(self) -> None:
        """Remove the batch's requests from the runner, and let go of it; the last call."""
        # The call holds the model, and is to go even where the runner fails.
        runner, self.runner, self._call = self.runner, None, None
        runner.execute_model_state = None
        with torch.inference_mode(), _current_config(runner):
            runner.execute_model(finishing_output(self.batch))
        runner.execute_model_state = None

    def _catch_v2(self, output: Any) -> None:
        runner, model = self.runner, self.runner.model
        model_forward, prepare_inputs = model.forward, runner.prepare_inputs
        built: list[Any] = []

        def prepare_and_keep(*args: Any, **kwargs: Any) -> Any:
            built.append(prepare_inputs(*args, **kwargs))
            return built[-1]

        def catch(**inputs: Any) -> Any:
            (batch,) = built
            computed = batch.num_computed_tokens_np
            self._check(
                {
                    req_id: (int(batch.num_scheduled_tokens[i]), int(computed[i]), not bool(batch.is_prefilling_np[i]))
                    for i, req_id in enumerate(batch.req_ids)
                }
            )
            self._write_input_ids(batch.req_ids, inputs.get("input_ids"))
            self._call = _repeatable(model_forward, inputs)
            return self._call()

        # Attributes of the instances shadow their methods for this one step.
        runner.prepare_inputs, model.forward = prepare_and_keep, catch
        try:
            runner.execute_model(output)
        finally:
            del runner.prepare_inputs, model.forward

    def _catch_v1(self, output: Any) -> None:
        runner = self.runner
        model_forward = runner._model_forward

        def catch(*args: Any, **inputs: Any) -> Any:
            ids = runner.input_batch.req_ids
            computed = runner.input_batch.num_computed_tokens_cpu
            self._check(
                {
                    # V1 has no notion of a decode apart from the lengths.
                    req_id: (output.num_scheduled_tokens[req_id], int(computed[i]), self.batch.expected[req_id][2])
                    for i, req_id in enumerate(ids)
                }
            )
            self._call = _repeatable(lambda **kw: model_forward(*args, **kw), inputs)
            return self._call()

        runner._model_forward = catch
        try:
            runner.execute_model(output)
        finally:
            del runner._model_forward

    def _check(self, built: dict[str, tuple[int, int, bool]]) -> None:
        self._req_ids = list(built)
        for req_id, wanted in self.batch.expected.items():
            if built.get(req_id) != wanted:
                raise EngineError(
                    f"vLLM built another batch: request {req_id} has (scheduled, computed, decode) ="
                    f" {built.get(req_id)}, wanted {wanted}"
                )
        if extra := set(built) - set(self.batch.expected):
            raise EngineError(f"vLLM's batch has a request that was not asked for: {sorted(extra)[0]}")

    def _write_input_ids(self, req_ids: list[str], input_ids: torch.Tensor | None) -> None:
        if input_ids is None:
            raise EngineError(
                "vLLM gives this model embeddings in place of the case's token IDs, as for images and the like; load it"
                " for text alone: --engine-arg language_model_only=true"
            )
        ids = np.concatenate([self.batch.query_token_ids[req_id] for req_id in req_ids])
        input_ids[: len(ids)].copy_(torch.from_numpy(ids))


def _repeatable(model_forward: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], Any]:
    """The call under the present forward context, which models may change in place: each call starts from it anew."""
    from vllm.forward_context import get_forward_context, override_forward_context

    context = get_forward_context()
    saved = dict(vars(context))

    def call() -> Any:
        for name, value in saved.items():
            setattr(context, name, value)
        with override_forward_context(context):
            return model_forward(**inputs)

    return call


def _current_config(runner: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(runner.vllm_config)


def _hidden_states(output: Any) -> torch.Tensor:
    if isinstance(output, tuple):
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise EngineError(f"the model returned {type(output).__name__}, not hidden states")
    return output
