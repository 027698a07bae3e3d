"""Layer 6: a check's or sweep's progress as a bar on the terminal: rounds, time left, the last verdict."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm

from kvlab.ticks import Tick


class Bar:
    """A `progress` for `kvlab.check`, and a context manager; plans and verdicts go to lines of their own."""

    def __init__(self, hidden: bool) -> None:
        # None hides it where standard error is no terminal.
        self._bar = tqdm(unit="round", disable=hidden or None)
        self._rounds: dict[tuple[str, str], int] = {}

    def __call__(self, tick: Tick) -> None:
        """Move the bar."""
        self._rounds[tick.case, tick.mode] = tick.done
        done = sum(self._rounds.values())
        # Those that have not begun will take about as many rounds as this one.
        self._bar.total = done + (tick.rounds - tick.done) + (tick.of - tick.index - 1) * tick.rounds
        self._bar.set_description(f"{tick.case} {tick.mode}", refresh=False)
        self._bar.update(done - self._bar.n)
        if tick.note and not self._bar.disable:
            self._bar.write(f"{tick.case} {tick.mode}: {tick.note}", file=self._bar.fp)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
