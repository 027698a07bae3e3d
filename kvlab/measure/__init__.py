"""Layer 3: measuring. schedule: which arm when. timer: how long a replay takes. telemetry, sampler: what the card did.

kernels, trace: where a step's time goes.
"""
