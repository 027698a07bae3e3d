"""Marks of the SMs' clock as a card would leave them."""

import numpy as np


def marks(mhz, us, sms=132, step_ns=32, seed=0):
    """Marks as SMs leave them that share a clock: counters of their own, begun at times of their own."""
    rng = np.random.default_rng(seed)
    ns = np.stack([rng.integers(0, 300, sms), us * 1e3 + rng.integers(0, 300, sms)]) + 1e15
    cycles = rng.integers(1, 1 << 40, sms) + ns * np.broadcast_to(mhz, sms) / 1e3
    return np.stack([cycles, ns // step_ns * step_ns], axis=-1).astype(np.int64)
