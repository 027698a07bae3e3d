"""Layer 6: the command line, one skin over the calls that Python has too."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvlab.cases import Case, jitter_kv_lens, load_cases, parse_case
from kvlab.errors import CaseError, KvlabError

OK, DIFFERENT, BAD_INPUT, UNDECIDED = 0, 1, 2, 3
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for any other bad input."""
        self.exit(BAD_INPUT, f"kvlab: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 equivalent, 1 different, 2 bad input, 3 inconclusive or invalid)."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KvlabError as error:
        print(f"kvlab: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"kvlab: {error.filename or 'file'}: {error.strerror or error}; what was stored is kept", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        kept = (
            f"; finished rounds are kept in {args.out}, the same command resumes" if getattr(args, "out", None) else ""
        )
        print(f"kvlab: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvlab", description="Does it matter what is in the KV cache? Time it, and decide.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser, required=True)

    check = commands.add_parser("check", help="time each case under zero, random and other KV, and decide")
    _add_model(check)
    _add_cases(check)
    check.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="FILL",
        help="contents to compare with zeros: random (default), 'random(std=0.5, zero_fraction=0.25)',"
        " 'constant(0.015)'; repeatable",
    )
    check.add_argument(
        "--margin", type=_fraction, default=0.03, help="of equivalence, declared beforehand: 0.03 or 3%% (default)"
    )
    check.add_argument(
        "--mode", default="isolated", help="isolated: each replay alone (default); sustained: back to back"
    )
    check.add_argument("--rounds", type=int, default=20, help="randomised rounds over all arms (default 20)")
    check.add_argument("--replays", type=int, default=5, help="timed replays per arm and round (default 5)")
    check.add_argument("--out", metavar="DIR", help="folder of the run; an unfinished run of the same study is resumed")
    check.add_argument("--json", action="store_true", help="print one JSON object a case")
    check.add_argument("--no-plot", action="store_true", help="do not draw gaps.png into the run's folder")
    check.add_argument("--no-progress", action="store_true", help="no progress bar")
    check.set_defaults(run=_check)

    verify = commands.add_parser(
        "verify", help="prove byte by byte that a step writes nothing outside its touched views"
    )
    _add_model(verify)
    _add_cases(verify)
    verify.add_argument("--json", action="store_true", help="print one JSON object a case")
    verify.set_defaults(run=_verify)

    views = commands.add_parser("views", help="what a step may write, as a table")
    _add_model(views)
    _add_cases(views)
    views.add_argument("--json", action="store_true", help="print one JSON object a row")
    views.set_defaults(run=_views)

    models = commands.add_parser("models", help="the models that come with kvlab")
    models.set_defaults(run=_models)
    doctor = commands.add_parser("doctor", help="what this machine has: versions, GPU, clocks")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    from kvlab.engines.load import ENGINES

    parser.add_argument("model", metavar="MODEL", help="a name from `kvlab models`")
    parser.add_argument("--engine", default="reference", help=f"{' or '.join(ENGINES)} (default reference)")
    parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--num-kv-blocks", type=int, metavar="N", help="blocks of the KV cache pool")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest KV of one request, tokens")
    parser.add_argument("--topk", type=int, metavar="N", help="tokens that sparse attention chooses")
    parser.add_argument("--seed", type=int, default=0, help="of tokens, contents and orders (default 0)")


def _add_cases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME=REQS",
        help="REQS is a comma list of [N*]Q[@K][c][:D]: Q query tokens, K tokens of KV (Q included), c a chunk,"
        " D drafts; e.g. decode=32*1@8192; repeatable",
    )
    parser.add_argument("--shapes", metavar="FILE", help="JSON or YAML file with cases")
    parser.add_argument(
        "--kv-len-jitter",
        type=_fraction,
        default=0.0,
        help="draw each prefix within this share of its length (default 0)",
    )


def _fraction(text: str) -> float:
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no fraction in [0, 1); write 0.03 or 3%")
    return value


def _engine(args: argparse.Namespace) -> Any:
    from kvlab.engines.load import load_engine

    given = {name: getattr(args, name) for name in ("device", "num_kv_blocks", "max_model_len", "topk")}
    return load_engine(args.model, args.engine, **{k: v for k, v in given.items() if v is not None}, seed=args.seed)


def _cases(args: argparse.Namespace, engine: Any) -> list[Case]:
    cases = [parse_case(text) for text in args.case]
    if args.shapes:
        cases += load_cases(args.shapes)
    if not cases:
        raise CaseError("no case given; add --case NAME=[N*]Q[@K][c][:D], e.g. --case decode=4*1@4096")
    return [jitter_kv_lens(case, args.kv_len_jitter, engine.max_model_len, args.seed) for case in cases]


def _check(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from kvlab.study import check, default_folder

    engine = _engine(args)
    cases = _cases(args, engine)
    args.out = args.out or str(default_folder(engine))
    with tqdm(total=args.rounds * len(cases), unit="round", disable=args.no_progress or None) as bar:

        def progress(name: str, done: int, rounds: int) -> None:
            bar.set_description(name, refresh=False)
            bar.update(1)

        run = check(
            engine,
            cases,
            arms=args.arm or ["random"],
            margin=args.margin,
            mode=args.mode,
            rounds=args.rounds,
            replays=args.replays,
            seed=args.seed,
            out=args.out,
            progress=progress,
        )
    with run:
        found = [run.verdict_of(case.name, args.mode) for case in cases]
        verdicts = [verdict for verdict in found if verdict is not None]
        if not args.no_plot:
            from kvlab.plots import plot_gaps

            plot_gaps(run.verdicts)[0].savefig(run.path / "gaps.png", dpi=150)
        if args.json:
            for verdict in verdicts:
                print(json.dumps(verdict))
        else:
            print(_verdict_table(verdicts))
            print(f"run: {run.path}" + ("" if args.no_plot else f"   plot: {run.path / 'gaps.png'}"))
    return exit_status(verdicts)


def exit_status(verdicts: Sequence[dict[str, Any]]) -> int:
    """0 when all are equivalent, 1 when some differ, else 3."""
    found = {verdict["verdict"] for verdict in verdicts}
    if "different" in found:
        return DIFFERENT
    return OK if found == {"equivalent"} else UNDECIDED


def _verdict_table(verdicts: Sequence[dict[str, Any]]) -> str:
    import pandas as pd

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:+.2%}"

    def interval(pair: Sequence[float] | None) -> str:
        return "-" if pair is None else f"{pair[0]:+.2%} .. {pair[1]:+.2%}"

    rows = [
        {
            "case": v["case"],
            "phase": v["phase"],
            "zeros µs": "-" if not v["median_us"] else f"{v['median_us']['zeros']:.1f}",
            f"{v['arm']} µs": "-" if not v["median_us"] else f"{v['median_us'][v['arm']]:.1f}",
            "gap": percent(v["gap"]),
            "90 % interval": interval(v["ci90"]),
            "A/A 90 %": interval(v["aa"]["ci90"]),
            "MDE": "-" if v["mde"] is None else f"{v['mde']:.2%}",
            "rounds": v["rounds"],
            "verdict": f"{v['verdict']} at {v['margin']:.3g}",
        }
        for v in verdicts
    ]
    lines = [pd.DataFrame(rows).to_string(index=False)]
    lines += [f"  {v['case']}: {reason}" for v in verdicts for reason in v["reasons"]]
    return "\n".join(lines)


def _verify(args: argparse.Namespace) -> int:
    from kvlab.verification import verify

    engine = _engine(args)
    results = verify(engine, _cases(args, engine), args.seed)
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

    engine = _engine(args)
    for case in _cases(args, engine):
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
    from kvlab.engines.reference.presets import PRESETS

    for name, config in PRESETS.items():
        kinds = ", ".join(config.kinds)
        print(f"{name:14s} reference  {config.num_layers} layers: {kinds}; block size {config.block_size}")
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
