"""Layer 5: check(), the comparison of KV contents on one step: engine + arms + schedule -> run.

One prepared step serves every arm, so that kernels and addresses are the same: contents change, nothing else does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvlab.cases import Case, distinct_cases
from kvlab.engines.base import Engine, Step
from kvlab.errors import CapacityError, CaseError, EngineError, StudyError
from kvlab.estimates import round_ratios
from kvlab.examination import Examination, captured, examine
from kvlab.explain import explain
from kvlab.gaps import case_axes
from kvlab.kv.draws import draw_method
from kvlab.kv.fills import Fill
from kvlab.measure.telemetry import make_telemetry
from kvlab.measure.timer import COUNTED, MODES, GraphTimer, Timer, make_timer
from kvlab.pilot import PILOT_ROUNDS, RoundPlan, given_rounds, plan_rounds, replanned
from kvlab.plan import AGAIN, BOTH, DEFAULT_ARMS, DEFAULT_BUDGET, Plan
from kvlab.provenance import identity, machine
from kvlab.rest import apply_rest
from kvlab.rounds import measure_round
from kvlab.run import Run
from kvlab.stats import MIN_ROUNDS
from kvlab.ticks import Progress, Tick, told
from kvlab.verdict import case_verdict, failed_verdict, finite_so_far, kept_verdict, verdict_head, with_reason

# Seconds of replays before the first round.
_WARM_UP = 0.5


def check(
    engine: Engine,
    cases: Iterable[Case | str],
    *,
    arms: Sequence[str | Fill] = DEFAULT_ARMS,
    margin: float = 0.03,
    mode: str = "isolated",
    rounds: int | None = None,
    budget: float = DEFAULT_BUDGET,
    replays: int = 5,
    discard: int = 2,
    seed: int = 0,
    explain: bool = False,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Time each case under every arm and decide whether contents matter.

    Args:
        engine: a loaded engine; it is left open.
        cases: cases, or texts in the case grammar, with distinct names.
        arms: fills or their texts; `zeros` and `zeros_again` are added where absent.
        margin: of equivalence, a fraction; declared before the run.
        mode: `isolated`, `sustained` or `both`.
        rounds: randomised rounds over all arms; a verdict needs at least `kvlab.stats.MIN_ROUNDS`. By default a
            pilot of `kvlab.pilot.PILOT_ROUNDS` rounds decides, see `kvlab.pilot.plan_rounds`.
        budget: seconds of rounds a case and mode that the pilot may plan for.
        replays, discard: timed replays per arm and round, after discarded ones; under a power cap, sustained, 2 s.
        explain: profile each arm's kernels after the rounds, and name the cause of the gap.
        out: folder of the run; `runs/MODEL-ENGINE-TIME` when absent. A folder with an unfinished run of the same
            study is resumed.
        progress: called with a `Tick` as rounds finish.

    Returns:
        The run, open for reading; `.verdicts` has one row per case and mode.

    Raises:
        KvlabError: for bad input, before anything is measured. A case that fails later gets the verdict `invalid`.
        KeyboardInterrupt: as it comes; finished rounds are kept.
    """
    if not isinstance(engine, Engine):
        raise StudyError(f"check: engine is {engine!r}; pass kvlab.load_engine's")
    plan = Plan.of(
        arms,
        margin=margin,
        mode=mode,
        rounds=rounds,
        budget=budget,
        replays=replays,
        discard=discard,
        seed=seed,
        explain=explain,
    )
    parsed = distinct_cases(cases)
    for case in parsed:
        engine.build(case, seed)
    study = Study(engine, plan, out, len(parsed), progress)
    with study.closed_on_error():
        for case in parsed:
            study.check_case(engine, case)
    return study.run


def default_folder(engine: Engine) -> Path:
    """`runs/MODEL-ENGINE-TIME`, new with each second."""
    return Path("runs") / f"{Path(engine.model).name}-{engine.name}-{time.strftime('%Y%m%d-%H%M%S')}"


class Study:
    """A plan under way: the run it writes, and what it has come to. `check` and `sweep` drive it case by case.

    Attributes:
        plan: what is done with each case; on a CPU, in the first of its modes alone.
        run: open for writing.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        out: str | Path | None,
        num_cases: int,
        progress: Progress | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin the run, or go on with it.

        Args:
            engine: the first one; its versions and geometry are the run's identity.
            num_cases: for `progress`.
            about: in place of what the identity says of the engine.

        Raises:
            RunError: for the folder of another study.
        """
        self._telemetry = make_telemetry(engine.device)
        provenance = {**machine(), **engine.provenance(), "telemetry": self._telemetry.source}
        if engine.device.type == "cpu" and plan.modes != MODES[:1]:
            asked = BOTH if plan.modes == MODES else plan.modes[0]
            note = f"mode {asked}: a CPU has no launch queue, so a lone replay and a queued one are the same there"
            provenance["notes"] = [*provenance.get("notes", ()), note]
            plan = replace(plan, modes=plan.modes[:1])
        self.plan = plan
        provenance |= {"routing": engine.routing, "load_s": engine.load_s, "draws": draw_method(engine.device)}
        identity_of = {
            "model": engine.model,
            "engine": engine.name,
            "device": engine.device.type,
            "geometry": provenance.get("geometry"),
            "routing": engine.routing,
            **identity(provenance),
            **plan.identity,
            **(about or {}),
        }
        self.run = Run.create(out or default_folder(engine), identity_of, provenance)
        self._progress = progress
        self._of = num_cases * len(plan.modes)
        self._index = -1

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Within it an error closes the run before it goes on; what was stored is kept."""
        try:
            yield
        except BaseException:
            self.run.close()
            raise

    def is_finished(self, case: str, mode: str) -> bool:
        """Whether the run holds all that the plan asks of a case in a mode."""
        verdict = self.run.verdict_of(case, mode)
        if not verdict or (self.plan.explain and "cause" not in verdict):
            return False
        planned = self._planned(case, mode)
        # A verdict of fewer rounds is from before more were asked for, one of none from a failure.
        return planned is not None and verdict["rounds"] >= planned.rounds

    def _planned(self, case: str, mode: str) -> RoundPlan | None:
        """The plan of rounds where it is given or was made by a pilot before; None where a pilot is still to run."""
        if self.plan.rounds:
            return given_rounds(self.plan.rounds)
        stored = self.run.facts_of(case).get(f"plan_{mode}")
        if not stored or stored["limit"] == "given":
            return None
        return replanned(RoundPlan(**stored), self.plan.margin, self.plan.budget)

    def skip(self, cases: Sequence[Case]) -> bool:
        """Whether all of the cases are finished, so that nothing need be loaded for them; they then count as done."""
        finished = all(self.is_finished(case.name, mode) for case in cases for mode in self.plan.modes)
        if finished:
            self._index += len(cases) * len(self.plan.modes)
        return finished

    def check_case(self, engine: Engine, case: Case) -> None:
        """Measure a case in every mode in which it is not finished, and store the verdicts."""
        todo = [mode for mode in self.plan.modes if not self.is_finished(case.name, mode)]
        self._index += len(self.plan.modes) - len(todo)
        if not todo:
            return
        begin = time.perf_counter()
        facts = {**case_axes(case), "topk": engine.topk}
        self.run.add_case(case.name, str(case), case.phase, [asdict(request) for request in case.requests], **facts)
        step: Step | None = None
        found: Examination | Exception
        try:
            try:
                step = self._prepare(engine, case)
                found = examine(step, self.plan)
            except (EngineError, CapacityError, CaseError) as error:
                # The other cases can still be decided; the run says of this one what was wrong.
                found = error
            for mode in todo:
                self._index += 1
                head = {**verdict_head(engine, case, self.plan, mode, self.run.path), **facts}
                for verdict in self._verdicts(case.name, step, found, mode, begin):
                    self.run.add_verdict(case.name, mode, {**head, **verdict})
                self._tick(case.name, mode, verdict["rounds"], verdict["rounds"], told(verdict), decided=True)
                begin = time.perf_counter()
        finally:
            if step is not None:
                step.close()

    def _prepare(self, engine: Engine, case: Case) -> Step:
        prefilled = engine.prefill(case, self.plan.seed) if self.plan.prefills else None
        step = engine.prepare(case, self.plan.seed)
        step.prefilled = prefilled
        return step

    def _verdicts(
        self, case: str, step: Step | None, found: Examination | Exception, mode: str, begin: float
    ) -> Iterator[dict[str, Any]]:
        """The verdict, then the verdict with its cause, so that an interrupt while profiling keeps the first."""
        if step is None or isinstance(found, Exception):
            yield kept_verdict(self.run, self.plan, case, mode, None, str(found))
        elif found.culprits:
            yield failed_verdict(self.plan, found.culprits, found.finite)
        else:
            try:
                yield from self._measured(step, found, mode, begin)
            except (EngineError, StudyError) as error:
                yield kept_verdict(self.run, self.plan, case, mode, found, str(error))

    def _measured(self, step: Step, found: Examination, mode: str, begin: float) -> Iterator[dict[str, Any]]:
        name, plan = step.case.name, self.plan
        finite = finite_so_far(self.run, name, mode, found)
        step.fill(plan.arms[0].fill, plan.seed)
        timer = make_timer(step, mode)
        try:
            how = {"timer": timer.kind, "restore": step.restore_method, "restore_bytes": step.restore_bytes}
            self.run.case_facts(name, **found.facts, **how, **captured(step, timer))
            rest = apply_rest(self.run, step, timer, plan, self._telemetry)
            timer.settle(_WARM_UP)
            warm = time.perf_counter()
            first = "measure_s" not in self.run.facts_of(name)
            rounds = self._rounds(step, timer, mode, finite)
            if first:
                self.run.case_facts(name, warm_up_s=warm - begin, measure_s=time.perf_counter() - warm)
            verdict = case_verdict(self.run.samples_of(name, mode), plan, replace(found, finite=finite))
            verdict["plan"] = rounds.as_dict()
            if rest.share:
                verdict = with_reason({**verdict, "rest": rest.share}, str(rest))
            if timer.kind == GraphTimer.kind and timer.clock != COUNTED:
                verdict = with_reason(verdict, f"MHz are what the driver reads now and then, as {timer.clock}.")
            if lost := self.run.facts_of(name).get(f"sensors_failed_{mode}"):
                verdict = with_reason(verdict, f"Some rounds have no clocks or watts, as a sensor failed: {lost}.")
            yield verdict
            if plan.explain:
                try:
                    yield verdict | explain(step, timer, plan, mode, self.run, found.routing_moved)
                except (EngineError, StudyError) as error:
                    # The times stand without it; the same call again tries once more.
                    yield with_reason(verdict, f"no cause was looked for: {error}")
        finally:
            timer.close()

    def _rounds(self, step: Step, timer: Timer, mode: str, finite: dict[str, bool]) -> RoundPlan:
        """Time the rounds that are missing; their number is given, was planned earlier, or is planned here."""
        name, key = step.case.name, f"plan_{mode}"
        planned = self._planned(name, mode)
        if planned is not None:
            self.run.case_facts(name, **{key: planned.as_dict()})
            self._time_rounds(step, timer, mode, finite, planned.rounds)
            return planned
        seconds = self._time_rounds(step, timer, mode, finite, PILOT_ROUNDS, self.plan.budget)
        if not seconds:
            # How long the rounds of an earlier process took is not known; one more tells it.
            seconds = self._time_rounds(step, timer, mode, finite, len(self.run.finished_rounds(name, mode)) + 1)
        samples = self.run.samples_of(name, mode)
        aa, *arms = (round_ratios(samples, arm) for arm in (AGAIN, *(arm.name for arm in self.plan.compared)))
        planned = plan_rounds(aa, statistics.fmean(seconds), self.plan.margin, self.plan.budget, arms)
        self.run.case_facts(name, **{key: planned.as_dict()})
        self._tick(name, mode, len(aa), planned.rounds, str(planned))
        self._time_rounds(step, timer, mode, finite, planned.rounds)
        return planned

    def _time_rounds(
        self, step: Step, timer: Timer, mode: str, finite: dict[str, bool], rounds: int, budget: float = float("inf")
    ) -> list[float]:
        """Time the missing rounds; seconds of each. Beyond `MIN_ROUNDS` none is begun that the budget lacks."""
        name, seconds = step.case.name, list[float]()
        done = set(self.run.finished_rounds(name, mode))
        for index in range(rounds):
            if index not in done:
                if index >= MIN_ROUNDS and seconds and sum(seconds) + statistics.fmean(seconds) > budget:
                    break
                begin = time.perf_counter()
                rows, readings = measure_round(step, timer, self.plan, index, self._telemetry, finite)
                for failed in dict.fromkeys(each["failure"] for each in readings if "failure" in each):
                    self.run.case_facts(name, **{f"sensors_failed_{mode}": failed})
                if bad := sorted(arm for arm, fine in finite.items() if not fine):
                    self.run.case_facts(name, **{f"nonfinite_{mode}": bad})
                self.run.add_round(name, mode, index, rows)
                self.run.add_telemetry({"case": name, "mode": mode, "round": index, **each} for each in readings)
                seconds.append(time.perf_counter() - begin)
            self._tick(name, mode, index + 1, rounds)
        return seconds

    def _tick(self, case: str, mode: str, done: int, rounds: int, note: str = "", decided: bool = False) -> None:
        if self._progress is not None:
            self._progress(Tick(case, mode, done, rounds, self._index, self._of, note, decided))
