"""Layer 5: what a check does, declared before it is done: arms, margin, mode, rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.errors import StudyError
from kvlab.kv.fills import Fill, Zeros, parse_fill
from kvlab.measure.timer import MODES

BASELINE, AGAIN = "zeros", "zeros_again"
DEFAULT_ARMS = (BASELINE, AGAIN, "random")


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
        mode: `isolated` (each replay alone) or `sustained` (back to back).
        rounds: randomised rounds over all arms, fixed beforehand.
        replays, discard: timed replays per arm and round, after discarded ones.
        seed: of tokens, contents and orders.
    """

    arms: tuple[Arm, ...]
    margin: float
    mode: str
    rounds: int
    replays: int
    discard: int
    seed: int

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise StudyError(f"arm {sorted(repeated)[0]!r} is given twice; name each arm once")
        if not self.compared:
            raise StudyError(f"arms {', '.join(names)}: nothing to compare with {BASELINE}; add --arm random")
        if not 0 < self.margin < 1:
            raise StudyError(f"margin {self.margin} is out of range; give a fraction in (0, 1), e.g. 0.03")
        if self.mode not in MODES:
            raise StudyError(f"mode {self.mode!r} is unknown; give {' or '.join(MODES)}")
        for name, least in (("rounds", 1), ("replays", 1), ("discard", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise StudyError(f"{name} is {getattr(self, name)}; give {least} or more")

    @classmethod
    def of(cls, arms: Sequence[str | Fill], **how: Any) -> Plan:
        """A plan for some fills; the baseline and its repetition take part whether named or not."""
        wanted = [Arm.parse(arm) for arm in arms]
        fixed = (Arm(BASELINE, Zeros()), Arm(AGAIN, Zeros()))
        return cls((*fixed, *(arm for arm in wanted if arm.name not in (BASELINE, AGAIN))), **how)

    @property
    def compared(self) -> tuple[Arm, ...]:
        """The arms that are compared with the baseline."""
        return tuple(arm for arm in self.arms if arm.name not in (BASELINE, AGAIN))

    @property
    def claim(self) -> Arm:
        """The arm that a case's verdict is about: `random` where it takes part, else the first compared."""
        return next((arm for arm in self.compared if arm.name == "random"), self.compared[0])
