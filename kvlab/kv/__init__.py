"""Layer 1: KV caches as bytes. Pure PyTorch and NumPy, CPU or CUDA, no vLLM import.

specs: what a group says about itself. batch: which blocks a case owns. views: which of them a step may write.
codecs, formats, detect: values to bytes and back. fills: contents. extents, overlaps: views as byte intervals.
snapshot: save and restore.
"""
