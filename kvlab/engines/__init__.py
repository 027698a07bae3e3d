"""Layer 2: what runs steps. `reference` is embedded and pure PyTorch; `vllm` runs real models."""
