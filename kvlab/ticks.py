"""Layer 5: how far a check has come, as it is told while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tick:
    """How far a check has come.

    Attributes:
        case, mode: what is being measured.
        done, rounds: of this case and mode; `rounds` grows once the pilot has decided.
        index, of: the case and mode among all of them, from 0.
        note: a sentence when there is something to say: the plan of rounds, or a verdict.
        decided: the note is the verdict, which ends the case and mode.
    """

    case: str
    mode: str
    done: int
    rounds: int
    index: int
    of: int
    note: str = ""
    decided: bool = False


Progress = Callable[[Tick], None]


class Tally:
    """Rounds over all cases and modes, counted from ticks.

    Attributes:
        done: so far.
        total: as far as can be said: cases that have not begun will take about as many rounds as the present one.
    """

    def __init__(self) -> None:
        self.done = self.total = 0
        self._rounds: dict[tuple[str, str], int] = {}

    def count(self, tick: Tick) -> None:
        """Take in a tick."""
        self._rounds[tick.case, tick.mode] = tick.done
        self.done = sum(self._rounds.values())
        self.total = self.done + (tick.rounds - tick.done) + (tick.of - tick.index - 1) * tick.rounds


def told(verdict: Mapping[str, Any]) -> str:
    """A verdict in a few words."""
    gap = "" if verdict.get("gap") is None else f", gap {verdict['gap']:+.2%}"
    return f"{verdict['verdict']}{gap}"
