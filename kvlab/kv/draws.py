"""Layer 1: random values that depend on a seed and on where they lie, never on what else is drawn beside them.

A draw has a 64-bit key, hashed from the seed and a name (a layer's tensor, say), and is counted by kernel block and
place within it: the same seed gives the same contents in one go, block by block, and beside other requests. The random
words come from NumPy's Philox4x64-10 on the CPU, from Philox4x32-7 in a Triton kernel on CUDA (Salmon et al. 2011,
doi:10.1145/2063384.2063405, pass BigCrush with both), and from PyTorch's generator, seeded block by block, on CUDA
without Triton. These agree in distribution, not in values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec

import numpy as np
import torch


def seed_of(generator: torch.Generator | None) -> int:
    """The seed that a generator was given, 0 without one. It is read on the host and draws nothing.

    So two fills with one generator give the same contents; `manual_seed` it for others.
    """
    return 0 if generator is None else generator.initial_seed()


def key_of(*place: object) -> int:
    """64-bit key of a seed, names and numbers: a hash of what `repr` shows of them."""
    return int.from_bytes(blake2b(repr(place).encode(), digest_size=8).digest(), "little")


def generator_of(device: torch.device, *place: object) -> torch.Generator:
    """A generator of its own for one request's draws, seeded with their key."""
    return torch.Generator(device).manual_seed(key_of(*place))


def draw_method(device: torch.device) -> str:
    """Where a device's random values come from: `triton`, `torch` (ROCm, or CUDA without Triton) or `numpy`."""
    if device.type != "cuda":
        return "numpy"
    return "triton" if torch.version.cuda and find_spec("triton") else "torch"


@dataclass(frozen=True)
class Place:
    """Some kernel blocks of one cache tensor, for which values are wanted.

    Attributes:
        key: of the tensor's draws.
        begin: the first kernel block.
        shape: of the values, [kernel blocks, ...].
        device: where the cache lives.
        recurrent: whether they are a recurrent state.
    """

    key: int
    begin: int
    shape: tuple[int, ...]
    device: torch.device
    recurrent: bool

    def normal(self, scale: float = 1.0) -> torch.Tensor:
        """Independent normal values: float32 of `shape`."""
        return normals(self.key, self.begin, self.shape, self.device).mul_(scale)

    def chance(self, share: float) -> torch.Tensor:
        """Independent events, each true with probability `share`: bool of `shape`."""
        if share >= 1:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        below = float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))
        return normals(key_of(self.key, "chance"), self.begin, self.shape, self.device) < below


def normals(key: int, begin: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Independent normal values for the kernel blocks from `begin` on: float32 of `shape`, [kernel blocks, ...].

    Box and Muller's transform of 32 random bits gives two: 20 bits of radius, so that none is beyond 5.4, and 12 of
    angle.
    """
    count = math.prod(shape[1:])
    method = draw_method(device)
    if method == "triton":
        from kvlab.kv.launches import launch_normals

        values = launch_normals(key, begin, shape[0], count, device)
    elif method == "torch":
        values = torch.empty(shape[0], count, device=device)
        generator = torch.Generator(device)
        for block, row in enumerate(values, begin):
            row.normal_(generator=generator.manual_seed(key_of(key, block)))
    else:
        values = _numpy_normals(key, begin, shape[0], count).to(device)
    return values.reshape(shape)


def _numpy_normals(key: int, begin: int, blocks: int, count: int) -> torch.Tensor:
    raw = np.empty((blocks, -(-count // 4)), np.uint64)
    for block, row in enumerate(raw, begin):
        row[:] = np.random.Philox(key=np.array([key, block], np.uint64)).random_raw(len(row))
    words = torch.from_numpy(raw.view(np.int32))
    # The bits become the upper ones of a mantissa, a half step added: floats in (1, 2), no conversion needed.
    radius = (words >> 9).bitwise_and_(0x7FFFF8).bitwise_or_(0x3F800004).view(torch.float32)
    length = radius.sub_(1).log_().mul_(-2).sqrt_()
    angle = (words << 11).bitwise_and_(0x7FF800).bitwise_or_(0x3F800400).view(torch.float32)
    angle.sub_(1.5).mul_(2 * math.pi)
    values = torch.empty(blocks, 2, words.shape[1])
    torch.cos(angle, out=values[:, 0]).mul_(length)
    torch.sin(angle, out=values[:, 1]).mul_(length)
    return values.flatten(1)[:, :count]
