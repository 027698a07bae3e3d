"""Layer 6: a check's or sweep's progress as a bar on the terminal: rounds, time left, the last verdict."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm

from kvlab.ticks import Tally, Tick


class Bar:
    """A `progress` for `kvlab.check`, and a context manager; plans and verdicts go to lines of their own."""

    def __init__(self, hidden: bool) -> None:
        # None hides it where standard error is no terminal.
        self._bar = tqdm(unit="round", disable=hidden or None)
        self._tally = Tally()

    def __call__(self, tick: Tick) -> None:
        """Move the bar."""
        self._tally.count(tick)
        self._bar.total = self._tally.total
        self._bar.set_description(f"{tick.case} {tick.mode}", refresh=False)
        self._bar.update(self._tally.done - self._bar.n)
        if tick.note and not self._bar.disable:
            self._bar.write(f"{tick.case} {tick.mode}: {tick.note}", file=self._bar.fp)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
