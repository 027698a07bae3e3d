"""Layer 1: KV caches as bytes. Pure PyTorch and NumPy, CPU or CUDA, no vLLM import.

specs, roles: what a group says about itself, and what its layers are for. batch: which blocks a case owns. views: which
of them a step may write. codecs, formats, detect: values to bytes and back. fills: contents, made of rules and scores
(what to write), parsing (their texts), draws and request_draws (random values), filling and launches (writing them).
extents, overlaps: views as byte intervals. snapshot: save and restore.
"""
