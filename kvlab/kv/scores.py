"""Layer 1: fills that give a sparse indexer scores of a chosen shape, over random KV.

All tokens of an indexer layer get one e4m3 vector c, and token j a scale s_j of its own, so that its score for a query
is `s_j * A` with `A = sum over heads of w * relu(q . c)`: the scores have the shape of the scales, or of their mirror
image where A is negative. A query whose every q . c is negative scores 0 everywhere, which many heads make rare. The
scales are drawn once a request and group: all layers of a group (with as many tokens a block) share them, but not c.
A constant c lowers power: compare the time of the top-k alone, or with `iid`, which differs in the scores only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch

from kvlab.errors import FillError
from kvlab.kv.roles import in_order
from kvlab.kv.rules import Fill, Random

# The top-k kernels of vLLM 0.33 sort a bin of up to 2,048 equal scores in one go.
LEVEL_COPIES = 2047
_FEWEST_LEVELS = 4
HOT_TOKENS = 8192
# Far enough from the largest float32 that no sum over heads overflows.
_LARGEST_SCALE = 1e30


@dataclass(frozen=True)
class Scores(Fill, ABC):
    """Indexer scales of one shape; layers of other roles get `random`."""

    by_role = True

    @abstractmethod
    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Scales of a request's tokens in order: float32 [count], finite, on the generator's device."""

    def part(self, role: str) -> Fill:
        return self if role == "indexer" else Random()

    def refusal(self, role: str) -> str:
        return "" if role == "indexer" else "it shapes the scores of an indexer"

    def check_roles(self, roles: Collection[str]) -> None:
        if "indexer" not in roles:
            raise FillError(
                f"fill {self.kind!r} shapes the scores of a sparse indexer, and no layer of this model is one; its"
                f" roles are {', '.join(in_order(roles)) or 'none'}"
            )


@dataclass(frozen=True)
class Iid(Scores):
    """Independent normal scales: what the other shapes are compared with."""

    kind = "iid"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return _normal(count, generator)


@dataclass(frozen=True)
class Tiny(Scores):
    """Normal scales times 1e-8: every score rounds to zero in fp16."""

    kind = "tiny"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return 1e-8 * _normal(count, generator)


@dataclass(frozen=True)
class Huge(Scores):
    """Normal scales times 1e6: scores beyond fp16's largest."""

    kind = "huge"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return 1e6 * _normal(count, generator)


@dataclass(frozen=True)
class Levels(Scores):
    """Few distinct scales, 1.1 apart, on just under 2,048 tokens each, permuted; a quarter of a short context each."""

    kind = "levels"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        levels = max(_FEWEST_LEVELS, -(-count // LEVEL_COPIES))
        step = min(1.1, _LARGEST_SCALE ** (1 / levels))
        order = torch.randperm(count, generator=generator, device=generator.device)
        return (step ** (order * levels // count).double()).float()


@dataclass(frozen=True)
class Pow2(Scores):
    """Powers of two from 2^-4 to 2^3, as writers of UE8M0 scales store."""

    kind = "pow2"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        exponents = torch.randint(-4, 4, (count,), generator=generator, device=generator.device, dtype=torch.int32)
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


@dataclass(frozen=True)
class Cluster(Scores):
    """All scales within 1 % of 3: normal with a third of that as its deviation, cut at three."""

    kind = "cluster"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        uniform = torch.rand(count, generator=generator, device=generator.device).mul_(2).sub_(1)
        return 3 + 0.01 * math.sqrt(2) * torch.erfinv(uniform * math.erf(3 / math.sqrt(2)))


@dataclass(frozen=True)
class Ramp(Scores):
    """From 0.5 to 1 by position: the tokens picked are the last ones, or the first."""

    kind = "ramp"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.linspace(0.5, 1, count, device=generator.device)


@dataclass(frozen=True)
class HotContiguous(Scores):
    """Normal scales, and in mid-context 8,192 (of a short context half) of a hundred times that size.

    Half of the hot ones are negative and they fall by position, so that the best are one run whatever the sign of A.
    """

    kind = "hot_contiguous"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        scales = _normal(count, generator)
        hot = min(HOT_TOKENS, count // 2)
        sizes = 100 * _normal(hot, generator).abs()
        sizes[hot // 2 :] *= -1
        begin = (count - hot) // 2
        scales[begin : begin + hot] = sizes.sort(descending=True).values
        return scales


@dataclass(frozen=True)
class HotScattered(HotContiguous):
    """The scales of `hot_contiguous`, permuted: the same selection, another gather."""

    kind = "hot_scattered"

    def scales(self, count: int, generator: torch.Generator) -> torch.Tensor:
        scales = super().scales(count, generator)
        return scales[torch.randperm(count, generator=generator, device=generator.device)]


SCORES: tuple[type[Scores], ...] = (Iid, Levels, Pow2, Cluster, HotContiguous, HotScattered, Tiny, Huge, Ramp)


def _normal(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, generator=generator, device=generator.device)
