"""Layer 6: the command line, one skin over the calls that Python has too."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.cases import Case, claim_cases, distinct_cases, jitter_kv_lens, load_cases, parse_case
from kvlab.errors import CaseError, KvlabError
from kvlab.options import BAD_INPUT, engine_options, make_parser, study_options, sweep_axes

if TYPE_CHECKING:
    from kvlab.run import Run

OK, DIFFERENT, UNDECIDED = 0, 1, 3  # BAD_INPUT is 2
# As a shell says it of a command that a signal ended: SIGINT, SIGPIPE.
INTERRUPTED, CLOSED = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 equivalent, 1 different, 2 bad input, 3 inconclusive or invalid)."""
    begin = time.perf_counter()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not cost the run's output.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    commands = {
        **{"check": _check, "sweep": _sweep, "verify": _verify, "views": _views, "report": _report},
        **{"models": _models, "doctor": _doctor},
    }
    args = make_parser(commands).parse_args(argv)
    args.begin = begin
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except KvlabError as error:
        print(f"kvlab: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return CLOSED
        print(f"kvlab: {error.filename or 'file'}: {error.strerror or error}; what was stored is kept", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        resumes = args.run in (_check, _sweep) and args.out
        kept = f"; finished rounds are kept in {args.out}, the same command resumes" if resumes else ""
        print(f"kvlab: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has seen enough; the interpreter's last flush then keeps quiet."""
    try:
        file = sys.stdout.fileno()
    except OSError:
        return False
    poll = select.poll()
    poll.register(file, 0)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    return closed


@contextmanager
def _loaded(args: argparse.Namespace) -> Iterator[tuple[Any, list[Case]]]:
    """The engine, and the cases as it takes them. Bad cases are found first: loading can take minutes."""
    cases = [parse_case(text) for text in args.case]
    if args.shapes:
        cases += load_cases(args.shapes)
    if not (cases or args.claim):
        raise CaseError(
            "no case given; add --case NAME=[N*]Q[@K][c][:D], e.g. --case decode=4*1@4096, or --claim for the claim's"
        )
    from kvlab.engines.load import load_engine, longest_context

    options = engine_options(args)
    limit = longest_context(args.model, args.engine, options) or sys.maxsize
    if args.claim:
        cases += claim_cases(min(limit, args.max_model_len or limit))
    cases = distinct_cases(cases)
    if args.engine == "vllm":
        # The batch and the context are sized by the cases as they will run.
        options["cases"] = [jitter_kv_lens(case, args.kv_len_jitter, limit, args.seed) for case in cases]
    engine = load_engine(args.model, args.engine, **options)
    args.loaded = time.perf_counter()
    try:
        yield engine, [jitter_kv_lens(case, args.kv_len_jitter, engine.max_model_len, args.seed) for case in cases]
    finally:
        engine.close()


def _check(args: argparse.Namespace) -> int:
    from kvlab.plan import Plan
    from kvlab.progress import Bar
    from kvlab.study import check, default_folder

    arms, how = args.arm or ["random"], study_options(args)
    plan = Plan.of(arms, **how)  # a slip in these should not cost a load
    with _loaded(args) as (engine, cases):
        args.out = args.out or str(default_folder(engine))
        with Bar(args.no_progress) as bar:
            run = check(engine, cases, arms=arms, **how, out=args.out, progress=bar)
    with run:
        if "resumed" not in run.provenance:
            _say_where_the_time_went(run.cases, args.loaded - args.begin)
        return _show(args, run, [(case.name, mode) for case in cases for mode in plan.modes])


def _sweep(args: argparse.Namespace) -> int:
    from kvlab.engines.load import load_engine
    from kvlab.grid import Grid, sweep
    from kvlab.plan import Plan
    from kvlab.progress import Bar

    axes, how = sweep_axes(args), study_options(args)
    grid = Grid(**axes)
    cases = grid.cases()
    plan = Plan.of(grid.arms(args.arm or ["random"]), **how)
    options = engine_options(args)
    if args.engine == "vllm":
        options["cases"] = cases

    def load(topk: int | None) -> Any:
        return load_engine(args.model, args.engine, **options, **({} if topk is None else {"topk": topk}))

    args.out = args.out or f"runs/{Path(args.model).name}-{args.engine}-sweep"
    with Bar(args.no_progress) as bar:
        run = sweep(load, **axes, arms=args.arm or ["random"], **how, out=args.out, progress=bar)
    with run:
        # The folder may hold other grids of the same study too.
        asked = [case.name for topk in axes["topk"] or (None,) for case in grid.cases(topk)]
        return _show(args, run, [(name, mode) for name in asked for mode in plan.modes])


def _show(args: argparse.Namespace, run: Run, wanted: Sequence[tuple[str, str]]) -> int:
    """Print the verdicts of some cases and modes, draw their plot; the exit status that follows from them."""
    found = [run.verdict_of(*each) for each in wanted]
    verdicts = [verdict for verdict in found if verdict is not None]
    if not args.no_plot:
        from kvlab.plots import plot_gaps

        plot_gaps(run.verdicts)[0].savefig(run.path / "gaps.png", dpi=150)
    if args.json:
        from kvlab.verdict_table import kernel_records

        for note in run.provenance.get("notes", ()):
            print(f"fallback: {note}", file=sys.stderr)
        kernels = run.kernels
        for verdict in verdicts:
            print(json.dumps(verdict | kernel_records(verdict, kernels)))
    else:
        from kvlab.verdict_table import explanation, verdict_table

        print(verdict_table(verdicts))
        for note in run.provenance.get("notes", ()):
            print(f"fallback: {note}")
        kernels = run.kernels
        for verdict in verdicts:
            if "cause" in verdict:
                here = (kernels["case"] == verdict["case"]) & (kernels["mode"] == verdict["mode"])
                print(f"\n{explanation(verdict, kernels[here])}")
        print(f"run: {run.path}" + ("" if args.no_plot else f"   plot: {run.path / 'gaps.png'}"))
    return exit_status(verdicts)


def _report(args: argparse.Namespace) -> int:
    from kvlab.report import write_report

    unread: list[str] = []
    print(write_report(args.runs, args.out, title=args.title, missing=unread.append))
    for sentence in unread:
        print(f"kvlab: not in this report: {' '.join(sentence.split())}", file=sys.stderr)
    return BAD_INPUT if unread else OK


def _say_where_the_time_went(cases: Any, load: float) -> None:
    """To standard error: the parts of the time from the command to its first verdict."""
    first = cases.iloc[0]
    if "measure_s" not in cases or not first["measure_s"] > 0:
        return
    parts = {"load": load, "warm-up": first["warm_up_s"], "measure": first["measure_s"]}
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    print(f"time to the first verdict: {shown}; {sum(parts.values()):.1f} s in all", file=sys.stderr)


def exit_status(verdicts: Sequence[dict[str, Any]]) -> int:
    """0 when all are equivalent, 1 when some differ, else 3."""
    found = {verdict["verdict"] for verdict in verdicts}
    if "different" in found:
        return DIFFERENT
    return OK if found == {"equivalent"} else UNDECIDED


def _verify(args: argparse.Namespace) -> int:
    from kvlab.verification import verify

    with _loaded(args) as (engine, cases):
        results = verify(engine, cases, args.seed)
    for result in results:
        if args.json:
            print(json.dumps(result.as_dict()))
            continue
        print(
            f"{result.case}: {'ok' if result.ok else 'FAILED'}: {result.bytes_written:,} bytes written,"
            f" {result.bytes_outside:,} outside the touched views ({result.bytes_touched:,} bytes of"
            f" {result.bytes_cache:,}; {result.tightness:.1%} of the views written)"
            + (f"; first outside: {result.outside}" if result.outside else "")
            + f"; bytes without a token are read: {result.reads_unwritten}"
        )
    return OK if all(result.ok for result in results) else UNDECIDED


def _views(args: argparse.Namespace) -> int:
    from kvlab.touched import touched_table

    with _loaded(args) as (engine, cases):
        for case in cases:
            step = engine.prepare(case, args.seed)
            table = touched_table(step)
            step.close()
            if args.json:
                for row in table.to_dict("records"):
                    print(json.dumps({"case": case.name, **row}))
            else:
                shown = table.assign(share_touched=table["share_touched"].map("{:.2%}".format))
                print(f"{case}\n{shown.to_string(index=False)}\n")
    return OK


def _models(args: argparse.Namespace) -> int:
    from kvlab.engines.presets import list_models, missing_presets

    rows = list_models()
    if args.json:
        for row in rows:
            print(json.dumps(row))
    else:
        for row in rows:
            cut = ", ".join(f"{key} {value}" for key, value in row["reduced"].items() if key != "why")
            print(
                f"{row['model']:{max(len(r['model']) for r in rows)}s}  {row['engine']:9s}  {row['layers']:3d} layers"
                f"  {row['source']}" + (f"; cut: {cut}" if cut else "")
            )
    if advice := missing_presets():
        print(f"kvlab: {advice}", file=sys.stderr)
    return OK


def _doctor(args: argparse.Namespace) -> int:
    from kvlab.provenance import machine

    facts = machine()
    if args.json:
        print(json.dumps(facts))
        return OK
    for key, value in facts.items():
        print(f"{key:14s} {json.dumps(value) if isinstance(value, dict | list) else value}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
