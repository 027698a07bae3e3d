"""Layer 5: check(), the comparison of KV contents on one step: engine + arms + schedule -> run.

One prepared step serves every arm, so that kernels and addresses are the same: contents change, nothing else does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlab.cases import Case, parse_case
from kvlab.engines.base import Engine, Step
from kvlab.errors import CaseError, EngineError
from kvlab.kv.extents import storage_extents
from kvlab.kv.fills import Fill
from kvlab.kv.views import iter_tensors
from kvlab.measure.schedule import round_order
from kvlab.measure.telemetry import Telemetry, make_telemetry
from kvlab.measure.timer import GraphTimer, Timer, make_timer
from kvlab.plan import DEFAULT_ARMS, Plan
from kvlab.provenance import identity, machine
from kvlab.run import Run
from kvlab.verdict import case_verdict, failed_verdict, verdict_head
from kvlab.verification import verify_step

# Random contents are drawn anew from this many seeds in turn, so that a verdict is not about one draw.
RANDOM_SEEDS = 4
# The byte-level check needs a copy of the caches; a check makes it unasked only where that is cheap.
_VERIFY_BYTES = 2 * 2**30
# Seconds of replays before the first round, and before each arm of a sustained round.
_WARM_UP, _SETTLE = 0.5, 0.2
# A captured forward that is further from the eager one than this, and than eager is from itself, is another step.
_CAPTURE_DISTANCE = 0.02

Progress = Callable[[str, int, int], None]


def check(
    engine: Engine,
    cases: Iterable[Case | str],
    *,
    arms: Sequence[str | Fill] = DEFAULT_ARMS,
    margin: float = 0.03,
    mode: str = "isolated",
    rounds: int = 20,
    replays: int = 5,
    discard: int = 2,
    seed: int = 0,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Time each case under every arm and decide whether contents matter.

    Args:
        engine: a loaded engine; it is left open.
        cases: cases, or texts in the case grammar, with distinct names.
        arms: fills or their texts; `zeros` and `zeros_again` are added where absent.
        margin: of equivalence, a fraction; declared before the run.
        mode: `isolated` or `sustained`.
        rounds: randomised rounds over all arms; a verdict needs at least `kvlab.stats.MIN_ROUNDS`.
        replays, discard: timed replays per arm and round, after discarded ones.
        out: folder of the run; `runs/MODEL-ENGINE-TIME` when absent. A folder with an unfinished run of the same
            study is gone on with.
        progress: called with (case name, rounds done, rounds in all) as rounds finish.

    Returns:
        The run, open for reading; `.verdicts` has a row a case.

    Raises:
        KvlabError: for bad input, before anything is measured. A case that fails later gets the verdict `invalid`.
        KeyboardInterrupt: as it comes; finished rounds are kept.
    """
    plan = Plan.of(arms, margin=margin, mode=mode, rounds=rounds, replays=replays, discard=discard, seed=seed)
    parsed = _distinct([parse_case(case) if isinstance(case, str) else case for case in cases])
    for case in parsed:
        engine.build(case, seed)
    telemetry = make_telemetry(engine.device)
    provenance = {**machine(), **engine.provenance(), "telemetry": telemetry.source, "routing": engine.routing}
    provenance["load_s"] = engine.load_s
    run = Run.create(out or default_folder(engine), _study(engine, plan, provenance), provenance)
    try:
        for case in parsed:
            _check_case(engine, case, plan, run, telemetry, progress)
    except BaseException:
        run.close()
        raise
    return run


def _distinct(cases: list[Case]) -> list[Case]:
    if not cases:
        raise CaseError("no case given; add --case NAME=[N*]Q[@K][c][:D], e.g. --case decode=4*1@4096")
    names = [case.name for case in cases]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CaseError(f"two cases are named {repeated[0]!r}; name each case once")
    return cases


def default_folder(engine: Engine) -> Path:
    """`runs/MODEL-ENGINE-TIME`, new with each second."""
    return Path("runs") / f"{Path(engine.model).name}-{engine.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _study(engine: Engine, plan: Plan, provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": engine.model,
        "engine": engine.name,
        "device": engine.device.type,
        "geometry": provenance.get("geometry"),
        "routing": engine.routing,
        **identity(provenance),
        **{key: value for key, value in asdict(plan).items() if key not in ("arms", "rounds")},
        "arms": [arm.name for arm in plan.arms],
    }


def _check_case(
    engine: Engine, case: Case, plan: Plan, run: Run, telemetry: Telemetry, progress: Progress | None
) -> None:
    if run.verdict_of(case.name, plan.mode) and len(run.finished_rounds(case.name, plan.mode)) >= plan.rounds:
        return
    begin = time.perf_counter()
    run.add_case(case.name, str(case), case.phase, [asdict(request) for request in case.requests])
    step = None
    try:
        step = engine.prepare(case, plan.seed)
        verdict = _measure(step, plan, run, telemetry, progress, begin)
    except EngineError as error:
        # The other cases can still be decided; the run says of this one what was wrong.
        verdict = failed_verdict(plan, [str(error)])
    finally:
        if step is not None:
            step.close()
    run.add_verdict(case.name, plan.mode, {**verdict_head(engine, case, plan, run.path), **verdict})


def _measure(
    step: Step, plan: Plan, run: Run, telemetry: Telemetry, progress: Progress | None, begin: float
) -> dict[str, Any]:
    finite, culprits = _probe_finite(step, plan)
    if culprits:
        return failed_verdict(plan, culprits, finite)
    facts: dict[str, Any] = {"outside_writes": _outside_writes(step, plan.seed)}
    step.fill(plan.arms[0].fill, plan.seed)
    timer = make_timer(step, plan.mode)
    try:
        facts |= {"timer": timer.kind, "restore": step.restore_method, "restore_bytes": step.restore_bytes}
        if isinstance(timer, GraphTimer):
            facts |= {"eager_repeat": timer.eager_repeat, "graph_vs_eager": timer.graph_vs_eager}
            if timer.graph_vs_eager > max(_CAPTURE_DISTANCE, 4 * timer.eager_repeat):
                raise EngineError(
                    f"case {step.case.name!r}: the captured step's output is {timer.graph_vs_eager:.1%} from the eager"
                    " one's: another step was captured than was asked for"
                )
        timer.settle(_WARM_UP)
        warm = time.perf_counter()
        run.case_facts(step.case.name, **facts, warm_up_s=warm - begin)
        done = set(run.finished_rounds(step.case.name, plan.mode))
        for index in range(plan.rounds):
            if index not in done:
                rows = _round(step, timer, plan, index, telemetry, finite)
                run.add_round(step.case.name, plan.mode, index, rows)
            if progress is not None:
                progress(step.case.name, index + 1, plan.rounds)
    finally:
        timer.close()
    samples = run.samples_of(step.case.name, plan.mode)
    verdict = case_verdict(samples, plan, finite, facts["outside_writes"])
    run.case_facts(step.case.name, measure_s=time.perf_counter() - warm)
    return verdict


def _probe_finite(step: Step, plan: Plan) -> tuple[dict[str, bool], list[str]]:
    """Which arms give finite outputs, and where the others first do not: known before a time is taken."""
    finite, culprits = {}, []
    for arm in plan.arms:
        step.fill(arm.fill, plan.seed)
        layer = step.first_nonfinite()
        finite[arm.name] = layer is None
        if layer is not None:
            culprits.append(f"arm {arm.name!r} has a non-finite output, first in layer {layer!r}; nothing was timed")
    return finite, culprits


def _outside_writes(step: Step, seed: int) -> int | None:
    """Bytes that the step writes outside its touched views; None where the caches are too large to look unasked."""
    tensors = [t for cache in step.engine.kv_caches.values() for t in iter_tensors(cache)]
    if sum(extent.storage.numel() for extent in storage_extents(tensors).values()) > _VERIFY_BYTES:
        return None
    return verify_step(step, seed, probe_reads=False).bytes_outside


def _round(
    step: Step, timer: Timer, plan: Plan, index: int, telemetry: Telemetry, finite: dict[str, bool]
) -> list[dict[str, Any]]:
    by_name = {arm.name: arm for arm in plan.arms}
    rows: list[dict[str, Any]] = []
    for position, name in enumerate(round_order(list(by_name), index, plan.seed)):
        seed = plan.seed + index % RANDOM_SEEDS
        step.fill(by_name[name].fill, seed)
        if plan.mode == "sustained":
            timer.settle(_SETTLE)
        elif plan.discard:
            timer.time(plan.discard)
        times = timer.time(plan.replays)
        reading = telemetry.read()
        finite[name] &= bool(timer.output().isfinite().all())
        rows += [
            {
                "position": position,
                "arm": name,
                "fill": str(by_name[name].fill),
                "seed": seed,
                "replay": replay,
                "us": us,
                "routing": step.engine.routing,
                "sm_mhz": reading.sm_mhz,
                "watts": reading.watts,
                "celsius": reading.celsius,
                "throttled": reading.throttled,
                "flagged": bool(reading.throttled),
            }
            for replay, us in enumerate(times)
        ]
    return rows
