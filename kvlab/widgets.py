"""Layer 6: the dashboard, a skin of stock ipywidgets over `kvlab.sweep`, which measures in a child process.

One watcher thread assigns traits, and nothing else: what a thread prints can land in another cell (ipywidgets 2358,
4020), `clear_output` in a loop flickers (3260), and the main thread is the user's (3468). What is shown is read from
the run on disk, so an interrupted or restarted kernel loses nothing that was measured.
"""

from __future__ import annotations

import atexit
import contextlib
import html
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets as w
from matplotlib.figure import Figure
from traitlets import TraitError

from kvlab import background, dashboard, unfinished
from kvlab.engines.load import ENGINES
from kvlab.engines.presets import list_models
from kvlab.errors import KvlabError, RunError
from kvlab.grid import PHASES
from kvlab.lab import png_bytes, verdict_table
from kvlab.measure.timer import MODES
from kvlab.plan import BOTH
from kvlab.plots import plot_compare
from kvlab.run import Run, open_run

_POLL, _REDRAW = 0.3, 2.5  # seconds; drawing takes a core that the embedded engine could use
_LABEL = "104px"
_GRID = {"grid_template_columns": "repeat(auto-fill, minmax(290px, 1fr))", "width": "98%"}
_WRAP = {"flex_flow": "row wrap", "width": "98%"}
_STYLES = {"done": "success", "failed": "danger", "cancelled": "warning"}


class Lab:
    """Choose, start, watch, cancel, open, compare, save. Name it in the last line of a cell to show it.

    `close()` ends the child that measures, and so does the end of the kernel. A second dashboard in the same kernel
    takes over the measurement of the first, as two at once would disturb each other.

    Args:
        runs: folder that new runs go to and earlier ones are offered from.

    Attributes:
        box: the widget that holds all others.
        run: the run that is shown, or None.
    """

    _latest: Lab | None = None

    def __init__(self, runs: str | Path = "runs") -> None:
        self.runs = Path(runs)
        self.run: Run | None = None
        self._figure: Figure | None = None
        self._job: background.Job | None = None
        self._asked: dict[str, Any] = {}
        self._lock = threading.RLock()
        self.box = w.VBox([*self._settings(), *self._earlier(), *self._results()])
        self._engine_chosen()
        self.refresh()
        atexit.register(self.close)
        if left := unfinished.last_left(self.runs):
            self.fill_in(left.settings)
            self.status.value = html.escape(f"{left.folder.name} is not finished: Start resumes it.")
        before, Lab._latest = Lab._latest, self
        if before is not None and before._job is not None:
            self._asked, job, before._job = before._asked, before._job, None
            self._watch(job)

    def _repr_mimebundle_(self, **how: Any) -> Any:
        return self.box._repr_mimebundle_(**how)

    def _settings(self) -> list[w.Widget]:
        self.engine = _field(w.Dropdown, "Engine", "reference: embedded; vllm: real models", options=ENGINES)
        self.model = _field(w.Dropdown, "Model", "the engine's presets")
        self.other = _field(w.Text, "Other model", "for vllm", placeholder="folder with config.json, or ORG/NAME")
        self.phases = {name: w.Checkbox(name == "decode", description=name, indent=False) for name in PHASES}
        for box in self.phases.values():
            box.layout.width = "80px"
        self.contexts = _field(w.Text, "Contexts", "tokens of KV; 8k is 8,192", value="256, 1k")
        self.batch = _field(w.Text, "Batch", "requests of a step", value="4")
        self.topk = _field(w.Text, "Top-k", "tokens that sparse attention chooses", placeholder="the model's own")
        self.zero_fractions = _field(
            w.Text, "Zero fractions", "shares of zero tokens, an arm each", placeholder="0.25, 0.5"
        )
        self.arms = _field(w.Text, "Arms", "contents that are compared with zeros", value="random")
        self.margin = _field(w.FloatText, "Margin, %", "of equivalence; declared before the run", value=3.0, step=0.5)
        modes = "isolated: each replay alone; sustained: back to back"
        self.mode = _field(w.Dropdown, "Mode", modes, options=(*MODES, BOTH))
        self.rounds = _field(w.IntText, "Rounds", "over all arms; 0: a pilot of each case decides", value=20)
        self.options = _field(w.Text, "Engine options", "a JSON object", placeholder='{"num_kv_blocks": 4096}')
        self.engine.observe(self._engine_chosen, "value")
        self.model.observe(self._model_chosen, "value")
        label = w.Label("Phases", layout=w.Layout(width=_LABEL, display="flex", justify_content="flex-end"))
        phases = w.HBox([label, *self.phases.values()], layout=w.Layout(**_WRAP))
        self.start_button = self._button("Start", "play", self.start, "measure, in a process of its own")
        self.cancel_button = self._button("Cancel", "stop", self.cancel, "finished rounds are kept")
        self.start_button.button_style, self.cancel_button.disabled = "primary", True
        self.progress = w.IntProgress(0, 0, 1, layout=w.Layout(flex="1 1 200px"))
        fields = [getattr(self, name) for name in dashboard.FIELDS]
        begin = w.HBox([self.start_button, self.cancel_button, self.progress], layout=w.Layout(**_WRAP))
        self.status = w.HTML("Nothing measured yet: press Start, or open an earlier run.")
        self.message = w.HTML()
        return [w.GridBox(fields, layout=w.Layout(**_GRID)), phases, begin, self.status, self.message]

    def _earlier(self) -> list[w.Widget]:
        self.choice = _field(w.Dropdown, "Earlier run", "the newest first, then this repository's own")
        self.folder = _field(w.Text, "or folder", "of any run or export", placeholder="a path, in its place")
        self.open_button = self._button("Open", "folder-open", self.open, "show this run")
        self.compare_button = self._button("Compare", "exchange", self.compare, "with the run that is shown")
        self.refresh_button = self._button("Refresh", "refresh", self.refresh, "look for new runs")
        buttons = w.HBox([self.open_button, self.compare_button, self.refresh_button])
        return [w.GridBox([self.choice, self.folder, buttons], layout=w.Layout(**_GRID))]

    def _results(self) -> list[w.Widget]:
        self.live, self.note, self.table, self.saved = (w.HTML() for _ in range(4))
        self.figure = _field(w.Dropdown, "Figure", "what is drawn of the run", options=[*dashboard.FIGURES])
        self.case = _field(w.Dropdown, "Case", "of the figures that show one case")
        self.case.layout.display = "none"
        self.image = w.Image(format="png", layout=w.Layout(display="none", max_width="98%", object_fit="contain"))
        self.path = _field(w.Text, "Save to", "the ending says the format: .png, .pdf, .svg", value="figure.png")
        self.save_button = self._button("Save figure", "save", self.save, "the figure above, as a file")
        for choice in (self.figure, self.case):
            choice.observe(lambda _: self._guarded(lambda: self._show(self.run)), "value")
        choose = w.GridBox([self.figure, self.case], layout=w.Layout(**_GRID))
        save = w.GridBox([self.path, self.save_button], layout=w.Layout(**_GRID))
        return [self.live, choose, self.note, self.image, save, self.saved, self.table]

    def settings(self) -> dict[str, Any]:
        """What the fields say, by their names."""
        said = {name: getattr(self, name).value for name in dashboard.FIELDS}
        return {**said, "phases": [name for name, box in self.phases.items() if box.value]}

    def fill_in(self, settings: Mapping[str, Any]) -> None:
        """Set the fields; what one cannot take any more is left as it is."""
        for name, value in settings.items():
            with contextlib.suppress(TraitError):
                if name == "phases":
                    for phase, box in self.phases.items():
                        box.value = phase in value
                elif name in dashboard.FIELDS:
                    getattr(self, name).value = value

    def start(self) -> None:
        """Measure with the settings. Unless they are done, the same settings go on with the same run."""
        if self._job is not None:
            raise RunError("a measurement is under way; cancel it first: two at once would disturb each other")
        settings = self.settings()
        self._asked = dashboard.make_spec(**settings)
        place = unfinished.begin(self.runs, self._asked, settings)
        self._show(None)
        self._watch(background.start(self._asked, place))

    def cancel(self) -> None:
        """End the measurement after the round that is under way; finished rounds are kept."""
        if self._job is not None:
            self.cancel_button.disabled = True
            self._job.cancel()

    def open(self, folder: str | Path | None = None) -> None:
        """Show a run, finished or not; by default the chosen one."""
        self._show(open_run(folder or self._chosen()))

    def compare(self, folder: str | Path | None = None) -> None:
        """Draw the gaps of a run, by default the chosen one, beside those of the run that is shown."""
        if self.run is None:
            raise RunError("no run is shown yet, so there is nothing to compare with; open one first")
        self._show(self.run, beside=open_run(folder or self._chosen()))

    def save(self) -> None:
        """Save the figure that is shown, and say where it is."""
        self.saved.value = ""
        self.saved.value = f"Saved: {html.escape(str(dashboard.save(self._figure, self.path.value)))}"

    def refresh(self) -> None:
        """Look for runs again."""
        chosen = self.choice.value
        found = dashboard.list_runs(self.runs)
        self.choice.options = found
        places = [place for _, place in found]
        self.choice.value = chosen if chosen in places else places[0] if places else None

    def close(self) -> None:
        """End the own child, if one measures, and take the dashboard away."""
        job, self._job = self._job, None
        if job is not None:
            job.close()
        self.box.close()

    def _watch(self, job: background.Job) -> None:
        self._job = job
        self.message.value = self.saved.value = ""
        self.progress.value, self.progress.max, self.progress.bar_style = 0, 1, ""
        self.start_button.disabled, self.cancel_button.disabled = True, False
        threading.Thread(target=self._follow, args=(job,), name="kvlab-lab", daemon=True).start()

    def _follow(self, job: background.Job) -> None:
        """The watcher: reads the job's state and the run on disk, and assigns traits, until the job ends."""
        left, seen, drawn = dashboard.TimeLeft(), None, 0.0
        try:
            while self._job is job and (seen is None or seen.stage not in background.ENDED):
                state = job.state()
                if state != seen:
                    self._tell(state, left)
                    if state.done and (state.stage in background.ENDED or time.monotonic() - drawn > _REDRAW):
                        self._show(open_run(job.out))
                        drawn = time.monotonic()
                seen = state
                time.sleep(_POLL)
            if seen is not None and seen.stage == "done":
                unfinished.finish(self.runs, self._asked)
        except Exception as error:  # a thread's traceback would land in any cell
            self._say(error)
        finally:
            if self._job is job:
                self._job = None
                self.start_button.disabled, self.cancel_button.disabled = False, True
                self.refresh()

    def _tell(self, state: background.State, left: dashboard.TimeLeft) -> None:
        """Say how far the job is."""
        self.progress.max, self.progress.value = max(1, state.total), state.done
        self.progress.bar_style = _STYLES.get(state.stage, "")
        self.status.value = html.escape(dashboard.status(state, left))
        if state.stage == "failed":
            self._say(RunError(state.message))

    def _show(self, run: Run | None, beside: Run | None = None) -> None:
        """Draw a run as it is on disk now, alone or beside another; what cannot be drawn is said instead."""
        with self._lock:
            self.run = run
            cases = [] if run is None else [*run.cases["case"]]
            if [*self.case.options] != cases:
                chosen = self.case.value
                self.case.options = cases
                self.case.value = chosen if chosen in cases else cases[0] if cases else None
            self._figure, note, live, table = None, "", "", ""
            if run is not None:
                told = [dashboard.headline(run), *([f"Beside {beside.path.name}."] if beside else [])]
                live = f"<b>{html.escape(' '.join(told))}</b><br>{html.escape(dashboard.short(run.path))}"
                table = f"<div style='overflow-x:auto'>{verdict_table(run).to_html()}</div>"
                try:
                    self._figure = self._drawn(run, beside)
                    self.image.value = png_bytes(self._figure)
                except KvlabError as error:
                    note = html.escape(str(error))
            self.note.value, self.live.value, self.table.value, self.saved.value = note, live, table, ""
            self.image.layout.display = "none" if self._figure is None else ""
            self.case.layout.display = "" if self.figure.value in dashboard.OF_ONE_CASE else "none"

    def _drawn(self, run: Run, beside: Run | None) -> Figure:
        if beside is None:
            return dashboard.draw(run, self.figure.value, self.case.value)
        return plot_compare(beside.gaps, run.gaps, (beside.path.name, run.path.name))[0]

    def _chosen(self) -> str:
        place = self.folder.value.strip() or self.choice.value
        if not place:
            raise RunError("no run is chosen; choose one, or type its folder")
        return str(place)

    def _engine_chosen(self, _: Any = None) -> None:
        names = [row["model"] for row in list_models() if row["engine"] == self.engine.value]
        self.model.options = [*names, *([dashboard.OTHER] if self.engine.value == "vllm" else [])]
        self.model.value = "tiny-dsa" if "tiny-dsa" in names else names[0] if names else dashboard.OTHER

    def _model_chosen(self, _: Any = None) -> None:
        self.other.layout.display = "" if self.model.value == dashboard.OTHER else "none"

    def _button(self, name: str, icon: str, do: Callable[[], None], tooltip: str) -> w.Button:
        button = w.Button(description=name, icon=icon, tooltip=tooltip, layout=w.Layout(width="112px"))
        button.on_click(lambda _: self._guarded(do))
        return button

    def _guarded(self, do: Callable[[], None]) -> None:
        """Do what a button asks for; what is wrong is said in place."""
        self.message.value = ""
        try:
            do()
        except (KvlabError, OSError) as error:
            self._say(error)

    def _say(self, error: Exception) -> None:
        text = " ".join(str(error).split()) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
        self.message.value = f"<div role='alert' style='color:#B00020'>{html.escape(text)}</div>"


def _field(kind: Callable[..., Any], name: str, tooltip: str, **how: Any) -> Any:
    style = {"description_width": _LABEL}
    return kind(description=name, tooltip=tooltip, layout=w.Layout(width="auto"), style=style, **how)
