"""Layer 6: what the command line takes, as text to values."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from kvlab.errors import StudyError
from kvlab.texts import fractions, json_object, token_counts, words

BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for any other bad input."""
        self.exit(BAD_INPUT, f"kvlab: {message}; see {self.prog} --help\n")


def make_parser(commands: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """The whole command line; `args.run(args)` then runs a command and returns the exit status.

    Args:
        commands: what runs each command, by its name.
    """
    parser = _Parser(prog="kvlab", description="Does it matter what is in the KV cache? Time it, and decide.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser, required=True)

    check = subparsers.add_parser("check", help="time each case under zero, random and other KV, and decide")
    _add_model(check)
    _add_cases(check)
    _add_study(check)

    sweep = subparsers.add_parser("sweep", help="check a grid of contexts, phases, batch sizes, top-k, zero fractions")
    _add_model(sweep)
    for option, default, what in (
        ("--contexts", "1k,8k", "tokens of KV of each request; k is 1,024"),
        ("--phase", "decode,hit", "of decode, verify, prefill, chunk, hit"),
        ("--batch", "8", "requests"),
        ("--zero-fraction", "", "an arm each: random KV with this share of the tokens zero"),
    ):
        sweep.add_argument(option, default=default, metavar="LIST", help=f"{what} (default {default or 'none'})")
    sweep.add_argument("--query", type=int, metavar="Q", help="query tokens of a hit or chunk (default 2048 / batch)")
    _add_study(sweep)

    verify = subparsers.add_parser(
        "verify", help="prove byte by byte that a step writes nothing outside its touched views"
    )
    _add_model(verify)
    _add_cases(verify)
    verify.add_argument("--json", action="store_true", help="print one JSON object per case")

    views = subparsers.add_parser("views", help="what a step may write, as a table")
    _add_model(views)
    _add_cases(views)
    views.add_argument("--json", action="store_true", help="print one JSON object a row")

    report = subparsers.add_parser("report", help="one HTML file that says what some runs show")
    report.add_argument("runs", nargs="+", metavar="DIR", help="folder of a run, or of its export")
    report.add_argument("--out", default="report.html", metavar="FILE", help="report.html (default), or a .pdf")
    report.add_argument("--title", help="of the report; from models and GPUs by default")

    models = subparsers.add_parser("models", help="the models that come with kvlab, by engine")
    models.add_argument("--json", action="store_true", help="print one JSON object per model")
    doctor = subparsers.add_parser("doctor", help="what this machine has: versions, GPU, clocks")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    for name, subparser in subparsers.choices.items():
        subparser.set_defaults(run=commands[name])
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    from kvlab.engines.load import ENGINES

    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name from `kvlab models`; for vllm also a folder with a config.json or ORG/NAME",
    )
    parser.add_argument("--engine", default="reference", help=f"{' or '.join(ENGINES)} (default reference)")
    parser.add_argument("--num-kv-blocks", type=int, metavar="N", help="blocks of the KV cache pool")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest KV of one request, tokens")
    parser.add_argument("--topk", metavar="N", help="tokens that sparse attention chooses; of a sweep, a list")
    parser.add_argument("--seed", type=_seed, default=0, help="of tokens, contents and orders (default 0)")
    reference = parser.add_argument_group("engine reference")
    reference.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    vllm = parser.add_argument_group("engine vllm")
    vllm.add_argument(
        "--routing",
        help="of experts: balanced (the same whatever the KV), real, or auto (default): balanced for dummy weights",
    )
    vllm.add_argument("--kv-cache-dtype", metavar="DTYPE", help="auto (default), fp8, fp8_ds_mla, ...")
    vllm.add_argument("--load-format", metavar="FORMAT", help="dummy (default): made-up weights; auto: the model's own")
    vllm.add_argument(
        "--hf-overrides", type=_json_object, metavar="JSON", help="values of the model's configuration to replace"
    )
    vllm.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        type=_key_value,
        metavar="KEY=VALUE",
        help="any argument of vLLM's EngineArgs, its value as JSON; repeatable",
    )


def _add_study(parser: argparse.ArgumentParser) -> None:
    from kvlab.plan import DEFAULT_BUDGET

    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="FILL",
        help="contents to compare with zeros: random (default), 'random(std=0.5, zero_fraction=0.25)', prefill,"
        " 'constant(0.015)', 'mix(kv=random, indexer=zeros)', levels, pow2, cluster, ...; repeatable",
    )
    parser.add_argument(
        "--margin", type=fraction, default=0.03, help="of equivalence, declared beforehand: 0.03 or 3%% (default)"
    )
    parser.add_argument(
        "--mode", default="isolated", help="isolated: each replay alone (default); sustained: back to back; both"
    )
    parser.add_argument("--rounds", type=int, help="randomised rounds over all arms; by default a pilot decides")
    parser.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET,
        metavar="S",
        help=f"seconds of rounds a case and mode that the pilot may plan for, 6 rounds in any case (default"
        f" {DEFAULT_BUDGET:g})",
    )
    parser.add_argument("--replays", type=int, default=5, help="timed replays per arm and round (default 5)")
    parser.add_argument("--explain", action="store_true", help="profile each arm's kernels and name the gap's cause")
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the run; an unfinished one of the same study is resumed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per case and mode")
    parser.add_argument("--no-plot", action="store_true", help="do not draw gaps.png into the run's folder")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def _add_cases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME=REQS",
        help="REQS is a comma list of [N*]Q[@K][c][:D]: Q query tokens, K tokens of KV (Q included), c a chunk,"
        " D drafts; e.g. decode=32*1@8192; repeatable",
    )
    parser.add_argument(
        "--claim",
        action="store_true",
        help="the cases that the claim about zero KV is about: decodes and hits at 8K and 100K tokens of context",
    )
    parser.add_argument("--shapes", metavar="FILE", help="JSON or YAML file with cases")
    parser.add_argument(
        "--kv-len-jitter",
        type=fraction,
        default=0.0,
        help="draw each prefix within this share of its length (default 0)",
    )


def fraction(text: str) -> float:
    """0.03 or 3%."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no fraction in [0, 1); write 0.03 or 3%")
    return value


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2^31 - 1")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return json_object(text, "JSON")
    except StudyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _key_value(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not separator or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE; write e.g. block_size=64")
    try:
        return key, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"the value of {key} is no JSON; write a text in double quotes: '{key}=\"{value}\"'"
        ) from None


def _one_count(text: str) -> int:
    counts = token_counts(text, "--topk")
    if len(counts) != 1:
        raise StudyError(f"--topk {text!r}: give one number here; `kvlab sweep` takes a list")
    return counts[0]


def study_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that `kvlab.check` and `kvlab.sweep` share."""
    names = ("margin", "mode", "rounds", "budget", "replays", "seed", "explain")
    return {name: getattr(args, name) for name in names}


def sweep_axes(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `kvlab.grid.Grid`.

    Raises:
        StudyError: for a list that cannot be read.
    """
    axes = {
        "contexts": token_counts(args.contexts, "--contexts"),
        "phases": words(args.phase),
        "batch": token_counts(args.batch, "--batch"),
        "query": args.query,
        "topk": token_counts(args.topk or "", "--topk"),
        "zero_fractions": fractions(args.zero_fraction, "--zero-fraction"),
    }
    args.topk = None  # each load says its own
    return axes


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `load_engine` that were given.

    Raises:
        StudyError: for one that is given twice.
    """
    named = ("device", "num_kv_blocks", "max_model_len", "topk")
    vllm = ("routing", "kv_cache_dtype", "load_format", "hf_overrides")
    options = {name: getattr(args, name) for name in (*named, *vllm) if getattr(args, name) is not None}
    if "topk" in options:
        options["topk"] = _one_count(options["topk"])
    if args.engine_arg and args.engine == "reference":
        raise StudyError("--engine-arg is an option of engine 'vllm'; drop it, or add --engine vllm")
    for key, value in args.engine_arg:
        if key in (*options, "seed", "cases"):
            raise StudyError(f"--engine-arg {key} is given twice, or has an option of its own; give it once")
        options[key] = value
    return {**options, "seed": args.seed}
