"""Layer 6: what the dashboard does, without its widgets: texts to a job's spec, a run to a figure and a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlab import plots
from kvlab.background import State
from kvlab.errors import RunError, StudyError
from kvlab.export import run_files
from kvlab.kv.parsing import split_fills
from kvlab.lab import COMMITTED
from kvlab.plots.style import percent, percent_interval
from kvlab.report.answer import headline as answer
from kvlab.report.facts import read_run
from kvlab.run import Run
from kvlab.texts import fractions, json_object, token_counts

# Of the dashboard, as they are shown; the engine goes before the model, whose choices it decides on.
FIELDS = (
    *("engine", "model", "other", "options", "contexts", "batch"),
    *("topk", "zero_fractions", "arms", "margin", "mode", "rounds"),
)
OTHER = "other, named below"
_NUMBERS = ("margin", "gap", "ci90_lo", "ci90_hi", "aa_gap", "aa_ci90_lo", "aa_ci90_hi")
_COLUMNS = ["model", "engine", "gpu", "case", "mode", "verdict", *_NUMBERS]

OF_ONE_CASE = ("samples of a case", "clocks and power", "parts of a step", "kernels")
FIGURES: dict[str, Callable[[Run, str], Any]] = {
    "gaps": lambda run, case: plots.plot_gaps(so_far(run)),
    "samples of a case": lambda run, case: plots.plot_samples(run.samples, case),
    "clocks and power": lambda run, case: plots.plot_clocks(run.samples[run.samples["case"] == case]),
    "parts of a step": lambda run, case: plots.plot_parts(run.kernels, case=case),
    "kernels": lambda run, case: plots.plot_kernels(run.kernels, case=case),
    "gap against context": lambda run, case: plots.plot_context_sweep(run.gaps),
    "gap against top-k": lambda run, case: plots.plot_topk_sweep(run.gaps),
    "gap against zero fraction": lambda run, case: plots.plot_zero_fraction(run.gaps),
}


def make_spec(**settings: Any) -> dict[str, Any]:
    """A sweep's spec for `kvlab.background.start`.

    Args:
        settings: `FIELDS` as people type them, `margin` in percent, `rounds` 0 for a pilot's; and `phases`.

    Raises:
        StudyError: for one that cannot be read; what is out of range the child says.
    """
    model = settings["other" if settings["model"] == OTHER else "model"].strip()
    if not model:
        raise StudyError("other model: none is named; give a folder with a config.json, or ORG/NAME")
    grid = {
        "contexts": token_counts(settings["contexts"], "contexts"),
        "phases": tuple(settings["phases"]),
        "batch": token_counts(settings["batch"], "batch"),
        "topk": token_counts(settings["topk"], "top-k"),
        "zero_fractions": fractions(settings["zero_fractions"], "zero fractions"),
    }
    return {
        "command": "sweep",
        "model": model,
        "engine": settings["engine"],
        "engine_options": json_object(settings["options"] or "{}", "engine options", '{"num_kv_blocks": 4096}'),
        "arms": tuple(split_fills(settings["arms"])),
        "margin": settings["margin"] / 100,
        "mode": settings["mode"],
        "rounds": settings["rounds"] or None,
        "sweep": grid,
    }


def list_runs(folder: Path) -> list[tuple[str, str]]:
    """Name and folder of runs: those in `folder`, the newest first, then those of this repository's data."""
    own = list(_folders(folder))
    own.sort(key=_changed)
    data = [(f"data: {place.name}", str(place)) for place in sorted(_folders(COMMITTED))]
    return [*((place.name, str(place)) for place in reversed(own)), *data]


def _changed(place: Path) -> float:
    """When a run was last written to; 0 for one that is being removed."""
    try:
        return max((file.stat().st_mtime for file in run_files(place)), default=0.0)
    except OSError:
        return 0.0


def _folders(parent: Path) -> Iterator[Path]:
    if parent.is_dir():
        yield from filter(run_files, parent.iterdir())


def short(place: Path) -> str:
    """A path as it would be typed here."""
    return str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place)


def so_far(run: Run) -> pd.DataFrame:
    """One row per case and mode, as `plot_gaps` takes them; one without a verdict says how far it is instead.

    Columns: model, engine, gpu, case, mode, margin, verdict, gap, ci90_lo, ci90_hi, aa_gap, aa_ci90_lo, aa_ci90_hi.
    Numbers are NaN where there is none yet.
    """
    records = []
    for row in read_run(run).rows:
        unfinished = row.verdict == "unfinished"
        low, high = row.ci90 or (None, None)
        aa_low, aa_high = row.aa_ci90 or (None, None)
        records.append(
            {
                **{key: getattr(row, key) for key in ("model", "engine", "gpu", "case", "mode", "margin")},
                "verdict": f"{row.progress} rounds" if unfinished else row.verdict,
                "gap": row.gap,
                "ci90_lo": low,
                "ci90_hi": high,
                "aa_gap": row.aa_gap,
                "aa_ci90_lo": aa_low,
                "aa_ci90_hi": aa_high,
            }
        )
    frame = pd.DataFrame(records, columns=_COLUMNS)
    return frame.astype({name: "float64" for name in frame if name in _NUMBERS})


def status(state: State, left: TimeLeft) -> str:
    """How far a job is, in a line; `left` is told of it."""
    if state.stage == "loading":
        return f"{state.message} ...".strip()
    if state.stage == "measuring":
        where = f"measuring {state.case}, {state.mode}: round {state.done} of {state.total}"
        return f"{where}{left.of(state.done, state.total)}"
    return f"{state.stage}: {state.done} of {state.total} rounds" if state.total else state.stage


def headline(run: Run) -> str:
    """The case under way with its gap so far; with none under way, what the verdicts say together."""
    rows = read_run(run).rows
    begun = [row for row in rows if row.verdict == "unfinished" and row.rounds]
    if not begun:
        return answer(rows)
    row = begun[-1]
    interval = percent_interval(*(row.ci90 or (None, None)))
    return f"{row.case}: gap of {row.arm} {percent(row.gap)} ({interval or 'no interval yet'}), {row.progress} rounds"


def draw(run: Run, kind: str, case: str) -> Figure:
    """A figure of a run as it is on disk now.

    Args:
        kind: a key of `FIGURES`.
        case: for the figures that are of one case.

    Raises:
        RunError: when the run has nothing for it.
    """
    if kind not in FIGURES:
        raise RunError(f"figure {kind!r} is unknown; there are {', '.join(FIGURES)}")
    fig: Figure = FIGURES[kind](run, case)[0]
    return fig


def save(fig: Figure | None, path: str) -> Path:
    """Save a figure; the ending says the format.

    Returns:
        Where it is.

    Raises:
        RunError: for no figure, an ending that is no format, or a place that cannot be written.
    """
    if fig is None:
        raise RunError("there is no figure to save yet; start a measurement or open a run")
    place = Path(path.strip() or "figure.png").expanduser().absolute()
    kinds = fig.canvas.get_supported_filetypes()
    if place.suffix.removeprefix(".").lower() not in kinds:
        raise RunError(f"{place.name}: no ending that names a format; end it in .png, .pdf or .svg")
    try:
        fig.savefig(place, dpi=200)
    except OSError as error:
        raise RunError(f"{place}: {error.strerror or error}; choose another place") from None
    return place


def seconds(count: float) -> str:
    """A duration as a person says it: 50 s, 4 min, 1 h 20 min."""
    if count < 90:
        return f"{max(1, round(count))} s"
    minutes = round(count / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class TimeLeft:
    """How long the rest will take, by the rounds that were seen to pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def of(self, done: int, total: int) -> str:
        """`, about 4 min left`; empty while no round was seen to pass, or none is left."""
        if self._first is None or done < self._first[1]:
            self._first = (self._clock(), done)
        begin, before = self._first
        if not before < done < total:
            return ""
        return f", about {seconds((self._clock() - begin) * (total - done) / (done - before))} left"
