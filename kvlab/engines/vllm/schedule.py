"""Layer 2: a batch as vLLM's `SchedulerOutput`, without a scheduler.

Relies on `vllm/v1/core/sched/output.py`. The V2 runner takes a decode's query tokens from sampler state (they are
written into its input buffer afterwards); the V1 runner takes all tokens from the prompt.
"""

from __future__ import annotations

from typing import Any

from kvlab.engines.vllm.flavour import Flavour
from kvlab.kv.batch import Batch


def scheduler_output(batch: Batch, flavour: Flavour) -> Any:
    """One step that adds all requests of the batch and schedules their tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = []
    for req_id in batch.req_ids:
        scheduled, computed, _ = batch.expected[req_id]
        prompt = batch.prompt_token_ids[req_id].tolist()
        if flavour.runner == "v1":
            prompt = prompt[:computed] + batch.query_token_ids[req_id].tolist()
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=prompt,
                prefill_token_ids=prompt,
                mm_features=[],
                sampling_params=SamplingParams(max_tokens=16, temperature=0.0),
                pooling_params=None,
                block_ids=batch.block_ids[req_id],
                num_computed_tokens=computed,
                lora_request=None,
                replay_start=computed if batch.replayed[req_id] else 0,
            )
        )
        output.num_scheduled_tokens[req_id] = scheduled
        if req_id in batch.draft_token_ids and flavour.runner == "v2":
            output.scheduled_spec_decode_tokens[req_id] = batch.draft_token_ids[req_id].tolist()
    output.total_num_scheduled_tokens = batch.num_tokens
    return output


def finishing_output(batch: Batch) -> Any:
    """A step that only removes the batch's requests."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.finished_req_ids = set(batch.req_ids)
    return output
