"""What vLLM raises when something does not fit becomes one line: how much is needed, and what to reduce."""

import pytest
import torch

from kvlab.engines.vllm.failures import forward_failure, load_failure
from kvlab.errors import CapacityError, EngineError

OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.25 GiB is"
    " free. Process 1 has 138.00 GiB memory in use.\nSee documentation"
)
CPU_OUT_OF_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    " 4194304000 bytes. Error code 12"
)
NO_CACHE = ValueError(
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine"
    " (this flag also controls CPU memory reservation on the CPU backend, despite its name). See https://docs.vllm.ai"
)
SHORT_CACHE = ValueError(
    "To serve at least one request with the model's max seq len (100016), (12.5 GiB KV cache is needed, which is"
    " larger than the available KV cache memory (3.25 GiB). Based on the available memory, the estimated maximum model"
    " length is 26000. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or"
    " decreasing `max_model_len` when initializing the engine. See https://docs.vllm.ai"
)
FEW_TOKENS = ValueError(
    "The model's max seq len (100016) is larger than the maximum number of tokens that can be stored in KV cache"
    " (26000). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
TAKEN = ValueError(
    "Free memory on device cuda:0 (20.5/139.8 GiB) on startup is less than desired GPU memory utilization (0.85, 118.83"
    " GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)

LOADS = [
    (
        OUT_OF_MEMORY,
        {},
        ["does not fit: an allocation of 2.50 GiB failed with 1.25 GiB free", "reduce num_hidden_layers"],
    ),
    (CPU_OUT_OF_MEMORY, {}, ["does not fit: an allocation of 4194304000 bytes failed", "experts (--hf-overrides)"]),
    (NO_CACHE, {"gpu_memory_utilization": 0.5}, ["no memory for KV blocks", "(now 0.5)", "query tokens of the cases"]),
    (NO_CACHE, {}, ["(now vLLM's default)"]),
    (
        SHORT_CACHE,
        {},
        ["one request of 100016 tokens needs 12.5 GiB of KV, 3.25 GiB are there", "at most 26000 tokens"],
    ),
    (SHORT_CACHE, {"num_gpu_blocks_override": 64}, ["enlarge --num-kv-blocks (now 64), or shorten K to at most 26000"]),
    (FEW_TOKENS, {}, ["one request of 100016 tokens needs 100016 tokens of KV, 26000 tokens are there", "shorten K"]),
    (TAKEN, {}, ["device cuda:0 has 20.5/139.8 GiB free", "0.85 takes 118.83 GiB", "end the other process"]),
]


@pytest.mark.parametrize(("error", "arguments", "said"), LOADS)
def test_a_model_that_does_not_fit(error, arguments, said):
    found = load_failure("m", error, arguments)
    assert isinstance(found, CapacityError)
    for part in ["model 'm'", *said]:
        assert part in str(found)
    assert "\n" not in str(found)


def test_any_other_failure_shows_its_first_line():
    found = load_failure("m", RuntimeError("\n  no kernel for this device\nhint: none\n"), {})
    assert type(found) is EngineError
    assert str(found) == "vLLM could not load model 'm': RuntimeError: no kernel for this device"
    assert str(load_failure("m", ValueError(), {})).endswith("ValueError: no message")


def test_kvlab_s_own_errors_pass():
    error = CapacityError("said already")
    assert load_failure("m", error, {}) is error
    assert forward_failure("case 'c'", error) is error


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, CPU_OUT_OF_MEMORY])
def test_a_forward_without_memory_leaves_the_other_cases_to_go_on(error):
    found = forward_failure("case 'c'", error)
    assert type(found) is EngineError  # a check marks the case invalid and goes on with the next
    assert str(found).startswith("case 'c': no memory is left for the forward: an allocation of ")
    assert "take fewer requests or query tokens" in str(found)


def test_a_failing_kernel_is_told_with_its_message():
    found = forward_failure(
        "case 'c'", RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel")
    )
    assert type(found) is EngineError
    assert str(found) == (
        "case 'c': vLLM failed inside the forward: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
