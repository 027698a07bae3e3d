"""Layer 5: a check or a sweep in a child process, so that a notebook's kernel stays free.

The child writes a run like any other, and beside it two small files: `job.json`, how far it is, rewritten whole at each
step, and, written by the parent, `job.cancel`, which the child looks for between rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlab.commands import command_of
from kvlab.errors import KvlabError, RunError, StudyError
from kvlab.ticks import Tally, Tick

STATE, CANCEL, LOG = "job.json", "job.cancel", "job.log"
ENDED = ("done", "cancelled", "failed")
COMMANDS = ("check", "sweep")
# Seconds that a cancelled child has to finish its round before it is ended.
GRACE = 30.0
# Seconds between a child's looks at whether its parent still lives.
_PARENT = 1.0
_KEYS = ("command", "model", "engine", "engine_options", "cases", "sweep")


@dataclass(frozen=True)
class State:
    """How far a job is.

    Attributes:
        stage: `loading`, `measuring`, `done`, `cancelled` or `failed`.
        case, mode: what is being measured, or was last; None before.
        done, total: rounds over all cases and modes; `total` changes as pilots decide.
        message: the last thing said: the plan of rounds, a verdict, or what went wrong.
        verdicts: of the cases that are finished, in order.
    """

    stage: str
    case: str | None = None
    mode: str | None = None
    done: int = 0
    total: int = 0
    message: str = ""
    verdicts: tuple[str, ...] = ()


class Job:
    """A child process that measures; see `start`. It ends with its Job: none is left behind.

    Attributes:
        out: the folder of its run, for `kvlab.open_run` as soon as the first round is in.
    """

    def __init__(self, process: subprocess.Popen[bytes], out: Path, files: Path) -> None:
        self.out = out
        self._process = process
        self._files = files
        self._cancelled: float | None = None
        self._last: State | None = None
        self._end = weakref.finalize(self, _end, process, files)

    def state(self) -> State:
        """How far it is, at once; after a cancel it also ends a child whose grace is over."""
        if self._last is not None:
            return self._last
        running = self._process.poll() is None
        stored = _read_state(self._files / STATE)
        if running:
            if self._cancelled is not None and time.monotonic() - self._cancelled > GRACE:
                _kill(self._process)
            return stored
        # The files go with `close`; what the child came to stays.
        self._last = self._ended(stored)
        return self._last

    def _ended(self, stored: State) -> State:
        if stored.stage in ENDED:
            return stored
        if self._cancelled is not None:
            return _with(stored, stage="cancelled", message="cancelled; finished rounds are kept")
        said = (_tail(self._files / LOG) or f"it ended with status {self._process.returncode}").rstrip(".")
        return _with(stored, stage="failed", message=f"the measuring process ended: {said}; finished rounds are kept")

    def cancel(self) -> None:
        """Ask the child to stop after the round that is under way; finished rounds are kept."""
        if self._cancelled is None:
            self._cancelled = time.monotonic()
            (self._files / CANCEL).touch()

    def wait(self, timeout: float | None = None) -> State:
        """The state once it has ended, or after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (state := self.state()).stage not in ENDED or self._process.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return state

    def close(self) -> None:
        """End the child now, if it still runs; what it came to `state` goes on saying."""
        if self._process.poll() is None:
            self.cancel()
            _kill(self._process)
        self.state()
        self._end()


def start(spec: Mapping[str, Any], out: str | Path) -> Job:
    """Measure in a child process of its own session, which an interrupt of this one does not reach.

    Args:
        spec: `command` (`check` or `sweep`), `model`, `engine`, `engine_options` (of `load_engine`); `cases` for a
            check, `sweep` (arguments of the grid) for a sweep; and any of `arms`, `margin`, `mode`, `rounds`,
            `budget`, `replays`, `discard`, `seed`, `explain`. JSON-able.
        out: folder of the run; the same spec resumes it.

    Raises:
        StudyError: for a spec that cannot be one. What is wrong in its values the child says, as state `failed`.
    """
    if spec.get("command") not in COMMANDS or not spec.get("model"):
        raise StudyError(f"job: give a command ({' or '.join(COMMANDS)}) and a model")
    files = Path(tempfile.mkdtemp(prefix="kvlab-job-"))
    folder = Path(out).absolute()
    try:
        (files / "spec.json").write_text(json.dumps({**spec, "out": str(folder)}), encoding="utf-8")
    except (TypeError, ValueError) as error:
        shutil.rmtree(files, ignore_errors=True)
        raise StudyError(f"job: {error}; give plain values") from None
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(files / LOG, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvlab.background", str(files), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    return Job(process, folder, files)


def measure(spec: Mapping[str, Any], files: Path) -> State:
    """What the child does: load, measure, and say so in `files`; returns its last state."""
    reporter = _Reporter(files)
    reporter.say(stage="loading", message=f"loading {spec['model']}")
    try:
        _measure(dict(spec), reporter)
    except (KvlabError, OSError) as error:
        reporter.say(stage="failed", message=" ".join(str(error).split()))
    except KeyboardInterrupt:
        reporter.say(stage="cancelled", message="cancelled; finished rounds are kept")
    else:
        reporter.say(stage="done")
    return reporter.state


def _measure(spec: dict[str, Any], reporter: _Reporter) -> None:
    from kvlab.cases import parse_case
    from kvlab.engines.load import load_engine
    from kvlab.grid import Grid, sweep
    from kvlab.study import check

    how = {key: value for key, value in spec.items() if key not in (*_KEYS, "out") and value is not None}
    how |= {"out": spec["out"], "progress": reporter.tick}
    name, options = spec.get("engine") or "reference", dict(spec.get("engine_options") or {})
    if spec["command"] == "check":
        cases = [parse_case(text) for text in spec.get("cases") or ()]
        sized = {"cases": cases} if name == "vllm" else {}
        engine = load_engine(spec["model"], name, **options, **sized)
        try:
            check(engine, cases, **how).close()
        finally:
            engine.close()
        return
    given: dict[str, Any] = dict(spec.get("sweep") or {})
    axes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}
    sized = {"cases": Grid(**axes).cases()} if name == "vllm" else {}

    def load(topk: int | None) -> Any:
        chosen = {} if topk is None else {"topk": topk}
        return load_engine(spec["model"], name, **{**options, **chosen}, **sized)

    sweep(load, **axes, **how).close()


class _Reporter:
    def __init__(self, files: Path) -> None:
        self._files = files
        self.state = State("loading")
        self._tally = Tally()

    def say(self, **changed: Any) -> None:
        self.state = _with(self.state, **changed)
        draft = self._files / f"{STATE}.new"
        with contextlib.suppress(OSError):  # a full disk is for the run to report, not for its progress
            draft.write_text(json.dumps(asdict(self.state)), encoding="utf-8")
            draft.replace(self._files / STATE)

    def tick(self, tick: Tick) -> None:
        self._tally.count(tick)
        verdicts = (*self.state.verdicts, f"{tick.case}: {tick.note}") if tick.decided else self.state.verdicts
        message = tick.note or self.state.message
        self.say(
            stage="measuring",
            case=tick.case,
            mode=tick.mode,
            done=self._tally.done,
            total=self._tally.total,
            message=message,
            verdicts=verdicts,
        )
        if (self._files / CANCEL).exists():
            raise KeyboardInterrupt


def _with(state: State, **changed: Any) -> State:
    return State(**{**asdict(state), **changed})


def _read_state(file: Path) -> State:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return State("loading", message="starting")
    return State(**{**stored, "verdicts": tuple(stored["verdicts"])})


def _tail(file: Path) -> str:
    try:
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child's own session, and nothing else's."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end(process: subprocess.Popen[bytes], files: Path) -> None:
    _kill(process)
    shutil.rmtree(files, ignore_errors=True)


def _end_with(parent: int, files: Path) -> None:
    """End this process's session once its parent is gone: killed, it could not; stored rounds are whole."""
    while os.getppid() == parent:
        time.sleep(_PARENT)
    for _ in range(100):
        # The other thread may be writing there; with the folder gone it no longer can.
        shutil.rmtree(files, ignore_errors=True)
        if not files.exists():
            break
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    threading.Thread(target=_end_with, args=(int(sys.argv[2]), place), daemon=True).start()
    try:
        asked = json.loads((place / "spec.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"no job in {place}: {error.strerror}") from error
    # The provenance is to say what repeats this, not what started it.
    sys.argv = command_of(asked)
    sys.exit(0 if measure(asked, place).stage == "done" else 1)
