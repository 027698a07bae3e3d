"""Layer 5: a grid of cases, contexts x phases x batch sizes x top-k x zero fractions, and sweep(), a check over it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvlab.cases import Case, Request
from kvlab.engines.base import Engine
from kvlab.errors import StudyError
from kvlab.kv.fills import Fill, Random
from kvlab.plan import DEFAULT_BUDGET, Arm, Plan
from kvlab.run import Run
from kvlab.study import Study
from kvlab.ticks import Progress

PHASES = ("decode", "verify", "prefill", "chunk", "hit")
# Query tokens of a hit or a chunk over all requests, as much as schedulers give a step by default.
QUERY_TOKENS = 2048
DRAFTS = 3
# What a geometry says of top-k; in a sweep over it each case says its own.
_TOPK_KEYS = ("topk", "index_topk")

Load = Callable[[int | None], Engine]


@dataclass(frozen=True)
class Grid:
    """What a sweep goes over.

    Attributes:
        contexts: tokens of KV of each request, the query's included.
        phases: of `PHASES`. A decode computes one token; a verify `1 + DRAFTS`; a prefill all of them; a hit or a
            chunk the last `query` tokens, at most half of the context.
        batch: requests.
        query: query tokens of each request of a hit or a chunk; by default `QUERY_TOKENS` over the batch.
        topk: tokens that sparse attention chooses, a load of the model each; empty for the model's own.
        zero_fractions: an arm `random(zero_fraction=f)` each; 0 is `random` and 1 is `zeros`.

    Raises:
        StudyError: for an empty axis, an unknown phase, or a number that is out of range or given twice.
    """

    contexts: tuple[int, ...]
    phases: tuple[str, ...] = ("decode", "hit")
    batch: tuple[int, ...] = (8,)
    query: int | None = None
    topk: tuple[int, ...] = ()
    zero_fractions: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("contexts", "phases", "batch"):
            if not getattr(self, name):
                raise StudyError(f"sweep: {name} is empty; give at least one")
        for name, kind, what in (
            *((name, numbers.Integral, "a whole number") for name in ("contexts", "batch", "topk")),
            ("zero_fractions", numbers.Real, "a number"),
        ):
            if other := [value for value in getattr(self, name) if not isinstance(value, kind)]:
                raise StudyError(f"sweep: {name} has {other[0]!r}, which is not {what}")
        for name in ("contexts", "phases", "batch", "topk", "zero_fractions"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise StudyError(f"sweep: {name} {', '.join(map(str, values))} has a value twice; give each once")
        if unknown := [phase for phase in self.phases if phase not in PHASES]:
            raise StudyError(f"sweep: phase {unknown[0]!r} is unknown; known are {', '.join(PHASES)}")
        for name, least in (("contexts", 2), ("batch", 1), ("topk", 1)):
            if low := [value for value in getattr(self, name) if value < least]:
                raise StudyError(f"sweep: {name} has {low[0]}; give {least} or more")
        if self.query is not None and self.query < 2:
            raise StudyError(f"sweep: query is {self.query}; a hit computes 2 tokens or more (a decode computes 1)")
        if outside := [value for value in self.zero_fractions if not 0 <= value <= 1]:
            raise StudyError(f"sweep: zero fraction {outside[0]} is out of range; give shares in [0, 1]")

    def cases(self, topk: int | None = None) -> list[Case]:
        """The cases at one top-k, named `PHASE-bBATCH-kCONTEXT[-topkN]`; the shortest contexts first.

        Raises:
            CaseError: for a context too short for a phase.
        """
        suffix = "" if topk is None else f"-topk{topk}"
        return [
            Case(f"{phase}-b{batch}-k{context}{suffix}", (self._request(phase, context, batch),) * batch)
            for context, phase, batch in product(sorted(self.contexts), self.phases, self.batch)
        ]

    def _request(self, phase: str, context: int, batch: int) -> Request:
        if phase == "decode":
            return Request(1, context)
        if phase == "verify":
            return Request(1 + DRAFTS, context, DRAFTS)
        if phase == "prefill":
            return Request(context, context)
        query = max(2, min(self.query or QUERY_TOKENS // batch, context // 2))
        return Request(query, context, chunked=phase == "chunk")

    def arms(self, others: Sequence[str | Fill] = ()) -> list[str | Fill]:
        """The others, and an arm for each zero fraction that is not among them; 1 is the baseline itself.

        Raises:
            FillError: for another that is none.
        """
        listed = [others] if isinstance(others, str | Fill) else list(others)
        named = {Arm.parse(arm).name for arm in listed}
        fills = [Random(zero_fraction=share) for share in self.zero_fractions if share < 1]
        return [*listed, *(fill for fill in fills if str(fill) not in named)]


def sweep(
    engine: Engine | Load,
    *,
    contexts: Sequence[int] = (1024, 8192),
    phases: Sequence[str] = ("decode", "hit"),
    batch: Sequence[int] = (8,),
    query: int | None = None,
    topk: Sequence[int] | None = None,
    zero_fractions: Sequence[float] = (),
    arms: Sequence[str | Fill] = ("random",),
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
    """Check every case of a grid; all of it in one run, which the same call resumes after an interruption.

    Args:
        engine: a loaded engine, left open; or a function of a top-k that loads one, each closed here. Sweeping over
            top-k takes the latter, as a model fixes its top-k when it is loaded.
        contexts, phases, batch, query, topk, zero_fractions: the grid, see `Grid`.
        arms: compared with zeros in every case, beside the zero fractions.
        margin, mode, rounds, budget, replays, discard, seed, explain, out, progress: as for `check`.

    Returns:
        The run; `.gaps` has one row per case, mode and arm, with `context`, `batch`, `query` and `topk`.

    Raises:
        KvlabError: for bad input, before anything is measured. A case that does not fit gets the verdict `invalid`,
            and the others go on.
    """
    if not isinstance(engine, Engine) and not callable(engine):
        raise StudyError(f"sweep: engine is {engine!r}; pass kvlab.load_engine's, or a function topk -> Engine")
    grid = Grid(_axis(contexts), _axis(phases), _axis(batch), query, _axis(topk or ()), _axis(zero_fractions))
    if grid.topk and isinstance(engine, Engine):
        raise StudyError("sweep: a loaded engine has one top-k; pass a function topk -> Engine to sweep over it")
    plan = Plan.of(
        grid.arms(arms),
        margin=margin,
        mode=mode,
        rounds=rounds,
        budget=budget,
        replays=replays,
        discard=discard,
        seed=seed,
        explain=explain,
    )
    loads: tuple[int | None, ...] = grid.topk or (None,)
    by_topk = {each: grid.cases(each) for each in loads}
    study: Study | None = None
    for each, cases in by_topk.items():
        if study is not None and study.skip(cases):
            continue
        with _opened(engine, each) as loaded:
            if study is None:
                study = Study(loaded, plan, out, sum(map(len, by_topk.values())), progress, _about(loaded, grid))
            with study.closed_on_error():
                for case in cases:
                    study.check_case(loaded, case)
    assert study is not None
    return study.run


def _axis(values: Any) -> tuple[Any, ...]:
    """One value alone is an axis of one."""
    return (values,) if isinstance(values, str | numbers.Number) else tuple(values)


@contextmanager
def _opened(engine: Engine | Load, topk: int | None) -> Iterator[Engine]:
    if isinstance(engine, Engine):
        yield engine
        return
    loaded = engine(topk)
    try:
        yield loaded
    finally:
        loaded.close()


def _about(engine: Engine, grid: Grid) -> dict[str, Any]:
    """What the run's identity says in place of the first engine's geometry, where others follow."""
    if not grid.topk:
        return {}
    return {"geometry": _without_topk(engine.provenance().get("geometry")), "topk": "of each case"}


def _without_topk(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_topk(inner) for key, inner in value.items() if key not in _TOPK_KEYS}
