"""What the command line takes: fractions, JSON, KEY=VALUE; anything else is one line."""

import argparse

import pytest

from kvlab.errors import StudyError
from kvlab.options import engine_options, fraction, make_parser

COMMANDS = dict.fromkeys(("check", "sweep", "verify", "views", "report", "models", "doctor"), lambda args: 0)


def options(*argv):
    return engine_options(make_parser(COMMANDS).parse_args(["check", "model", *argv]))


@pytest.mark.parametrize(("text", "value"), [("0.03", 0.03), ("3%", 0.03), ("0", 0.0), ("0.5%", 0.005)])
def test_fractions(text, value):
    assert fraction(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["1", "-0.1", "100%", "3 %%", "nan", ""])
def test_no_fractions(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no fraction"):
        fraction(text)


def test_only_what_was_given_goes_to_the_engine():
    assert options() == {"seed": 0}
    assert options("--topk", "8", "--num-kv-blocks", "9", "--seed", "3") == {"topk": 8, "num_kv_blocks": 9, "seed": 3}


def test_engine_arguments_are_json():
    given = options(
        *("--engine", "vllm", "--routing", "real", "--kv-cache-dtype", "fp8", "--load-format", "auto"),
        *("--hf-overrides", '{"num_hidden_layers": 2}', "--engine-arg", "block-size=64"),
        *("--engine-arg", 'attention_backend="FLASHMLA"', "--engine-arg", 'speculative_config={"method": "ngram"}'),
    )
    assert given == {
        "routing": "real",
        "kv_cache_dtype": "fp8",
        "load_format": "auto",
        "hf_overrides": {"num_hidden_layers": 2},
        "block_size": 64,
        "attention_backend": "FLASHMLA",
        "speculative_config": {"method": "ngram"},
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--engine-arg", "block_size"], "is no KEY=VALUE"),
        (["--engine-arg", "=3"], "is no KEY=VALUE"),
        (["--engine-arg", "backend=FLASHMLA"], "'backend=\"FLASHMLA\"'"),
        (["--hf-overrides", "{"], "is no JSON"),
        (["--hf-overrides", "[1]"], "is no JSON object"),
    ],
)
def test_slips_are_one_line(capsys, argv, said):
    with pytest.raises(SystemExit) as stop:
        options("--engine", "vllm", *argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("twice", [["--engine-arg", "block_size=1"] * 2, ["--seed", "1", "--engine-arg", "seed=1"]])
def test_an_argument_given_twice_is_refused(twice):
    with pytest.raises(StudyError, match="is given twice"):
        options("--engine", "vllm", *twice)


def test_engine_arguments_are_vllms():
    with pytest.raises(StudyError, match="add --engine vllm"):
        options("--engine-arg", "block_size=1")


def test_every_command_runs_what_it_was_given():
    parser = make_parser({name: (lambda args, name=name: name) for name in COMMANDS})
    assert parser.parse_args(["models"]).run(None) == "models"
    assert parser.parse_args(["verify", "model"]).run(None) == "verify"
