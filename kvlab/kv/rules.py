"""Layer 1: the rules for KV contents: what each fill gives to a layer's cache. `kvlab.kv.filling` applies them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from kvlab.errors import FillError
from kvlab.kv.draws import Place
from kvlab.kv.roles import ROLES, in_order

# A recurrent state feeds back into itself within the step; unit variance there would swamp the activations.
STATE_SCALE = 0.1
# Values are made in float32 before they are encoded.
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Fill:
    """A rule for KV contents; `str` gives the text that `parse_fill` reads back.

    Attributes:
        kind: the word that names it.
        by_role: whether layers of different roles get different fills.
    """

    kind: ClassVar[str]
    by_role: ClassVar[bool] = False

    def __str__(self) -> str:
        given = [f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.kind}({', '.join(given)})" if given else self.kind

    def part(self, role: str) -> Fill:
        """The fill of layers of a role."""
        return self

    def refusal(self, role: str) -> str:
        """Why it cannot be a role's part of a mix; empty where it can."""
        return ""

    def check_roles(self, roles: Collection[str]) -> None:
        """Refuse a model whose layers have these roles only.

        Raises:
            FillError: naming the roles that the model has.
        """


@dataclass(frozen=True)
class ValueFill(Fill, ABC):
    """A fill that gives values to encode, block by block, whatever the request."""

    @abstractmethod
    def values(self, place: Place) -> torch.Tensor | None:
        """float32 values of `place.shape`; None for all-zero bytes."""

    @property
    def zero_share(self) -> float:
        """Share of the tokens whose bytes are all zero."""
        return 0.0


@dataclass(frozen=True)
class Zeros(ValueFill):
    """All bytes zero, scales included: what vLLM's forward benchmark times."""

    kind = "zeros"

    def values(self, place: Place) -> torch.Tensor | None:
        return None


@dataclass(frozen=True)
class Random(ValueFill):
    """Independent normal values, encoded in each layer's own format.

    Attributes:
        std: standard deviation; a tenth of it in recurrent states.
        zero_fraction: share of the tokens in each request's blocks whose bytes are all zero, the same tokens in all
            layers of a group (that hold as many a block); in recurrent states, share of the elements.
    """

    kind = "random"
    std: float = 1.0
    zero_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.std) and self.std > 0):
            raise FillError(f"fill {self.kind!r}: std is {self.std}; give a positive number")
        if not 0 <= self.zero_fraction <= 1:
            raise FillError(f"fill {self.kind!r}: zero_fraction is {self.zero_fraction}; give a share in [0, 1]")

    def scale(self, recurrent: bool) -> float:
        """Standard deviation in a recurrent state, or elsewhere."""
        return self.std * (STATE_SCALE if recurrent else 1.0)

    def values(self, place: Place) -> torch.Tensor | None:
        values = place.normal(self.scale(place.recurrent))
        if self.zero_fraction and place.recurrent:
            # Masked, not multiplied: a negative value times zero is a negative zero, whose bytes are not.
            values.masked_fill_(place.chance(self.zero_fraction), 0)
        return values

    @property
    def zero_share(self) -> float:
        return self.zero_fraction


@dataclass(frozen=True)
class Constant(ValueFill):
    """One value everywhere; 0.015 is the one of vLLM's `DecodeBenchConnector`."""

    kind = "constant"
    value: float = 0.015

    def __post_init__(self) -> None:
        if not abs(self.value) <= FLOAT32_MAX:
            raise FillError(f"fill {self.kind!r}: value is {self.value}; give a number that float32 holds")

    def __str__(self) -> str:
        return f"{self.kind}({_text(self.value)})"

    def values(self, place: Place) -> torch.Tensor | None:
        return torch.full(place.shape, self.value, device=place.device)


@dataclass(frozen=True)
class Prefill(Fill):
    """What the model itself writes for random tokens. Only an engine can: `fill_kv_blocks` refuses it."""

    kind = "prefill"

    def refusal(self, role: str) -> str:
        return "the model writes all roles at once"


@dataclass(frozen=True)
class Mix(Fill):
    """A fill for each role of the cache; see `kvlab.kv.roles.role_of`.

    Attributes:
        kv: keys and values, and every role that is not named.
        indexer, state, window: None for that of `kv`.
    """

    kind = "mix"
    by_role = True
    kv: Fill
    indexer: Fill | None = None
    state: Fill | None = None
    window: Fill | None = None

    def __post_init__(self) -> None:
        for role, fill in self.named.items():
            if why := fill.refusal(role):
                raise FillError(f"fill {str(self)!r}: {fill.kind} cannot be the {role} of a mix: {why}")

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{role}={fill}' for role, fill in self.named.items())})"

    @property
    def named(self) -> dict[str, Fill]:
        """The roles that have a fill of their own."""
        return {role: fill for role in ROLES if (fill := getattr(self, role)) is not None}

    def part(self, role: str) -> Fill:
        return self.named.get(role, self.kv)

    def check_roles(self, roles: Collection[str]) -> None:
        # `kv` stands for all roles that are not named, so it is never in vain.
        if absent := [role for role in self.named if role not in roles and role != "kv"]:
            raise FillError(
                f"fill {str(self)!r}: no layer of this model has the role {absent[0]}; its roles are"
                f" {', '.join(in_order(roles)) or 'none'}"
            )

    def refusal(self, role: str) -> str:
        return "a mix has no mix in it"


def _text(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))
