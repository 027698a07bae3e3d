"""Layer 6: what the notebooks share: errors as a sentence, where figures come from, folders that resume.

Nothing here imports Jupyter: outside of a notebook `setup` has nothing to set up, and the rest works as it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler
from tqdm.auto import tqdm

from kvlab import background
from kvlab.engines.base import Step
from kvlab.errors import KvlabError, StudyError
from kvlab.evidence import open_runs
from kvlab.evidence import records as read_records
from kvlab.export import RECORD
from kvlab.lab_tables import TABLE
from kvlab.provenance import device_name, identity, machine
from kvlab.report.content import verdict_table as tabulate
from kvlab.report.facts import by_severity, read_runs
from kvlab.run import Run, open_run

# Beside the package in a checkout; an installed wheel has no such folder.
COMMITTED = Path(__file__).resolve().parents[1] / "data" / "h200"
_DPI = 144
_CSS_DPI = 96
_POLL = 0.2  # seconds


def setup() -> None:
    """Make this notebook show an error of kvlab as one sentence, and figures sharp on any screen."""
    # IPython's own protocol (`InteractiveShell.showtraceback`); other errors keep their traceback.
    setattr(KvlabError, "_render_traceback_", _sentence)  # noqa: B010
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython else None
    if shell is not None:
        png = shell.display_formatter.formatters["image/png"]
        png.for_type_by_name("matplotlib.figure", "Figure", _png)


def _sentence(error: KvlabError) -> list[str]:
    return [f"{type(error).__name__}: {' '.join(str(error).split())}"]


def _png(fig: Any) -> tuple[bytes, dict[str, int]]:
    """The figure, and the width at which its letters have their printed size."""
    return png_bytes(fig), {"width": round(fig.get_figwidth() * _CSS_DPI)}


def png_bytes(fig: Any) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def watermark(*runs: Run) -> pd.DataFrame:
    """This machine, then what the figures were measured with, and whether just now; runs that agree share a row.

    Columns: figures (as of `origin`), runs, gpu, driver, clocks (of the card: the highest, and the power limit),
    torch, vllm, kvlab, utc (day and minute; of several runs the first and the last day).
    """
    here = {"figures": "" if runs else "live", "runs": 0, **_facts(machine())}
    rows: dict[str, dict[str, Any]] = {"this machine": here}
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        facts = _facts(run.provenance)
        key = (_source(run), *(value for name, value in facts.items() if name != "utc"))
        groups.setdefault(key, []).append(run)
    for key, alike in groups.items():
        name = alike[0].path.name + (f" and {len(alike) - 1} more" if len(alike) > 1 else "")
        rows[name] = {"figures": key[0], "runs": len(alike), **_facts(alike[0].provenance), "utc": _days(alike)}
    return pd.DataFrame.from_dict(rows, orient="index")


def origin(*runs: Run) -> str:
    """Where the figures come from, as Markdown: `committed` with the repository, `stored` elsewhere, or `live`."""
    said = []
    for source in dict.fromkeys(map(_source, runs)):
        of = [run for run in runs if _source(run) == source]
        who = [identity(run.provenance) for run in of]
        gpus = ", ".join(dict.fromkeys(device_name(each["gpu"]) for each in who))
        vllm = ", ".join(dict.fromkeys(f"vLLM {each['vllm']}" for each in who if each["vllm"][:1].isdigit()))
        where = {
            "committed": f"from {_count(of)} that came with the repository",
            "live": f"measured by this notebook in {', '.join(f'`{run.path.name}`' for run in of)}",
        }.get(source, f"from {_count(of)} in `{of[0].path.parent}`")
        said.append(f"**{source.capitalize()} figures**: {where}; {gpus}{', ' if vllm else ''}{vllm}, {_days(of)} UTC.")
    return "  \n".join(said)


def _count(runs: Sequence[Run]) -> str:
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}"


def _source(run: Run) -> str:
    """An export is never being measured."""
    if run.path.resolve().is_relative_to(COMMITTED.parent):
        return "committed"
    return "stored" if (run.path / RECORD).is_file() else "live"


def _days(runs: Sequence[Run]) -> str:
    times = sorted(_facts(run.provenance)["utc"] for run in runs)
    if len(times) == 1:
        return times[0]
    return " to ".join(dict.fromkeys(time[:10] for time in (times[0], times[-1])))


def _facts(provenance: dict[str, Any]) -> dict[str, str]:
    who = identity(provenance)
    return {
        "gpu": who["gpu"],
        "driver": provenance.get("driver") or "none",
        "clocks": "; ".join(dict.fromkeys(_clocks(gpu) for gpu in provenance.get("gpus", ()))) or "none",
        "torch": who["torch"],
        "vllm": who["vllm"],
        "kvlab": who["kvlab"],
        "utc": str(provenance.get("utc", "unknown"))[:16].replace("T", " "),
    }


def _clocks(gpu: dict[str, Any]) -> str:
    known = [
        (gpu.get("max_sm_mhz"), "MHz SM"),
        (gpu.get("max_memory_mhz"), "MHz memory"),
        (gpu.get("power_limit_watts"), "W"),
    ]
    return (
        "up to " + ", ".join(f"{value:.0f} {unit}" for value, unit in known if value)
        if any(v for v, _ in known)
        else "unknown"
    )


def stored(source: str, having: Callable[[Run], Any] = bool) -> list[Run]:
    """The runs that a notebook shows, where it is not to measure.

    Args:
        source: `committed`: this repository's; `live`: none; else the folder of a run, or a folder of such folders.
        having: what a run must hold to be shown, e.g. `lambda run: len(run.kernels)`; a run that is named itself is
            shown whatever it holds.

    Returns:
        The runs; none where the notebook has to measure.

    Raises:
        RunError: for a folder without a run.
    """
    if source == "live":
        return []
    root = COMMITTED if source == "committed" else Path(source)
    found = open_runs(root, having)
    return found or ([] if source == "committed" or open_runs(root) else [open_run(source)])


def records(source: str, part: str) -> list[dict[str, Any]]:
    """The rows of the files beside the runs of `stored`, e.g. of `selection` or `loads`; none where there are none."""
    return [] if source == "live" else read_records(COMMITTED if source == "committed" else Path(source), part)


def in_vllm(run: Run) -> bool:
    """Is it a run of a model in vLLM, and not of the embedded engine?"""
    return bool(run.study.get("engine") == "vllm")


def verdict_table(*runs: Run) -> Styler:
    """One row per case and mode, the worst verdict first, and below why those that are not equivalent are not.

    For reading; `.data` is the DataFrame. A case that is not finished has its rounds in place of a verdict.

    Raises:
        RunError: for no runs.
    """
    rows = by_severity(row for each in read_runs(runs)[0] for row in each.rows)
    texts = tabulate(rows)
    told = [(f"{row.model}, {row.case}", [*row.reasons, row.cause]) for row in rows if row.verdict != "equivalent"]
    why = "<br>".join(f"<b>{escape(what)}</b>: {escape(_sentences(said))}" for what, said in told)
    style = pd.DataFrame(texts.rows, columns=[*texts.head]).style.hide().format(escape="html")
    return style.set_caption(why).set_table_styles(TABLE)


def _sentences(texts: Iterable[str | None]) -> str:
    return " ".join(f"{text.strip().rstrip('.')}." for text in texts if text)


def title(run: Run) -> str:
    """What a run is of: model, card, engine, mode."""
    first = run.verdicts.iloc[0] if len(run.verdicts) else run.study
    device = device_name(first["gpu"])
    modes = " and ".join(dict.fromkeys(run.verdicts["mode"]))
    return f"{first['model']} on {device}, {first['engine']} engine{', ' if modes else ''}{modes}"


def picks(step: Step, arms: Sequence[str], seed: int = 0) -> pd.DataFrame:
    """The tokens that the last sparse layer picks under each arm, for `kvlab.plots.plot_selection`.

    Returns:
        Columns arm, row (query row, from 0), position (token picked, from 0); no rows for a model that picks none.
    """
    tables = []
    for arm in arms:
        step.fill(arm, seed)
        for chosen in list(step.selection().values())[-1:]:
            numbers = chosen.cpu().numpy()
            rows = np.repeat(np.arange(numbers.shape[0]), numbers.shape[1])
            tables.append(pd.DataFrame({"arm": arm, "row": rows, "position": numbers.ravel()}))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["arm", "row", "position"])
    return table[table["position"] >= 0]


def folder(name: str, **parameters: Any) -> Path:
    """`runs/NAME-KEY`, the key made of the parameters and of what is measured with.

    So the same notebook with the same parameters resumes the run that it began; with others it begins another.
    """
    asked = json.dumps([parameters, identity(machine())], sort_keys=True, default=str)
    return Path("runs") / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"


def measure(name: str, command: str, model: str, engine: str, **spec: Any) -> Run:
    """Check or sweep in a child process, with a bar.

    The run is in `folder(name, ...)`, so the same call resumes it after an interruption.

    Args:
        name: of what asks, for the folder.
        command: `check` or `sweep`.
        spec: further keys of `kvlab.background.start`: `cases` or `sweep`, `arms`, `margin`, `mode`, `rounds`, ...

    Raises:
        KvlabError: what the child could not do; or that it was interrupted, and where the finished rounds are.
    """
    spec = {"command": command, "model": model, "engine": engine, **spec}
    out = folder(name, **spec)
    job = background.start(spec, out)
    with tqdm(unit="round", desc="loading") as bar:
        try:
            while (state := job.state()).stage not in background.ENDED:
                if state.case:
                    bar.total = state.total
                    bar.set_description(state.case, refresh=False)
                    bar.update(state.done - bar.n)
                time.sleep(_POLL)
        except KeyboardInterrupt:
            job.cancel()
            job.wait(background.GRACE)
            raise StudyError(f"interrupted; finished rounds are kept in {out}, run the cell again to go on") from None
        finally:
            job.close()
        bar.update(state.done - bar.n)
    if state.stage != "done":
        raise StudyError(state.message)
    return open_run(out)
