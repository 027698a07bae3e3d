"""Layer 5: what a check does, declared before it is done: arms, margin, modes, and how the rounds are decided on."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.errors import StudyError
from kvlab.kv.fills import Fill, Zeros, parse_fill
from kvlab.measure.timer import MODES

BASELINE, AGAIN = "zeros", "zeros_again"
DEFAULT_ARMS = (BASELINE, AGAIN, "random")
BOTH = "both"
# Seconds of rounds a case and mode, where the pilot decides on their number.
DEFAULT_BUDGET = 30.0
# What seeds are made of must fit a generator's and a database's integers.
_TOO_LARGE = 2**31


@dataclass(frozen=True)
class Arm:
    """One fill that takes part in a comparison.

    Attributes:
        name: the text it was asked for by, canonical: `zeros`, `zeros_again`, `random(std=0.5)`.
        fill: its contents.
    """

    name: str
    fill: Fill

    @classmethod
    def parse(cls, text: str | Fill) -> Arm:
        """`zeros_again` is `zeros` a second time; any other text is a fill's."""
        if isinstance(text, str) and text.strip() == AGAIN:
            return cls(AGAIN, Zeros())
        fill = parse_fill(text)
        return cls(str(fill), fill)


@dataclass(frozen=True)
class Plan:
    """What a check does; with the engine and the versions it is the identity of its run.

    Attributes:
        arms: the baseline, the baseline again, and what is compared with it.
        margin: of equivalence, a fraction.
        modes: of `isolated` (each replay alone) and `sustained` (back to back), one or both.
        rounds: randomised rounds over all arms, fixed beforehand; None where a pilot of each case decides.
        budget: seconds of rounds a case and mode that the pilot may plan for.
        replays, discard: timed replays per arm and round, after discarded ones; of a busy card under a power cap more,
            two seconds of them.
        seed: of tokens, contents and orders.
        explain: profile the kernels of each arm after the rounds, and name the cause of the gap.
    """

    arms: tuple[Arm, ...]
    margin: float
    modes: tuple[str, ...]
    rounds: int | None
    budget: float
    replays: int
    discard: int
    seed: int
    explain: bool = False

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise StudyError(f"arm {sorted(repeated)[0]!r} is given twice; name each arm once")
        if not self.compared:
            raise StudyError(f"arms {', '.join(names)}: nothing to compare with {BASELINE}; add --arm random")
        for name in ("margin", "budget"):
            if not isinstance(getattr(self, name), numbers.Real):
                raise StudyError(f"{name} is {getattr(self, name)!r}; give a number")
        if not 0 < self.margin < 1:
            raise StudyError(f"margin {self.margin} is out of range; give a fraction in (0, 1), e.g. 0.03")
        if unknown := [mode for mode in self.modes if mode not in MODES]:
            raise StudyError(f"mode {unknown[0]!r} is unknown; give {', '.join(MODES)} or {BOTH}")
        if not 0 < self.budget < math.inf:
            raise StudyError(f"budget is {self.budget} s; give a positive number of seconds")
        for name, least in (("rounds", 1), ("replays", 1), ("discard", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is None and name == "rounds":
                continue
            if not isinstance(value, numbers.Integral) or isinstance(value, bool):
                raise StudyError(f"{name} is {value!r}; give a whole number of {least} or more")
            if not least <= int(value) < _TOO_LARGE:
                raise StudyError(f"{name} is {value}; give {least} or more, under 2^31")

    @classmethod
    def of(
        cls,
        arms: Sequence[str | Fill] = DEFAULT_ARMS,
        *,
        margin: float = 0.03,
        mode: str = "isolated",
        rounds: int | None = None,
        budget: float = DEFAULT_BUDGET,
        replays: int = 5,
        discard: int = 2,
        seed: int = 0,
        explain: bool = False,
    ) -> Plan:
        """A plan for some fills; the baseline and its repetition take part whether named or not.

        Args:
            mode: `isolated`, `sustained` or `both`.

        Raises:
            StudyError, FillError: one line that names what is out of range.
        """
        wanted = [Arm.parse(arm) for arm in ([arms] if isinstance(arms, str | Fill) else arms)]
        fixed = (Arm(BASELINE, Zeros()), Arm(AGAIN, Zeros()))
        taking_part = (*fixed, *(arm for arm in wanted if arm.name not in (BASELINE, AGAIN)))
        modes = MODES if mode == BOTH else (mode,)
        return cls(taking_part, margin, modes, rounds, budget, replays, discard, seed, explain)

    @property
    def compared(self) -> tuple[Arm, ...]:
        """The arms that are compared with the baseline."""
        return tuple(arm for arm in self.arms if arm.name not in (BASELINE, AGAIN))

    @property
    def claim(self) -> Arm:
        """The arm that a case's verdict is about: `random` where it takes part, else the first compared."""
        return next((arm for arm in self.compared if arm.name == "random"), self.compared[0])

    @property
    def prefills(self) -> bool:
        """Whether an arm's contents are what the model itself writes, which takes a prefill first."""
        return any(arm.fill.kind == "prefill" for arm in self.arms)

    @property
    def identity(self) -> Mapping[str, Any]:
        """What must match for a run to be resumed. More rounds, another mode or an explanation add to it."""
        return {
            "margin": self.margin,
            "replays": self.replays,
            "discard": self.discard,
            "seed": self.seed,
            "arms": [arm.name for arm in self.arms],
        }
