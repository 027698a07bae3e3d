"""The README says what the committed data say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def readme_tool():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "tools" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_in_the_readme_is_computed_from_the_committed_runs():
    text = (ROOT / "README.md").read_text()
    assert readme_tool().render(text) == text


def test_every_file_that_the_docs_link_is_there():
    import re

    for page in ("README.md", "CONTRIBUTING.md", "data/README.md"):
        path = ROOT / page
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{page} links {target}"


def test_the_committed_runs_open_with_their_provenance():
    from kvlab.run import open_run

    folders = [p.parent for p in (ROOT / "data" / "h200").glob("*/provenance.json")]
    assert len(folders) >= 10
    for folder in folders:
        run = open_run(folder)
        assert not run.samples.empty
        assert run.samples["us"].gt(0).all()
        assert run.verdicts["gpu"].eq("NVIDIA H200").all()
        assert run.provenance["driver"]
        assert run.provenance["command"]
        assert sum(p.stat().st_size for p in folder.iterdir()) < 2**20


def blocks(language):
    import re

    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_snippets_are_whole_programs():
    import subprocess
    import sys

    source = "\n".join(blocks("python"))
    assert source.count("kvlab.") > 8
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", "--isolated", "--select", "F821", "-"]
    done = subprocess.run(ruff, input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_parses():
    import re
    import shlex

    from kvlab.options import make_parser

    names = ("check", "sweep", "verify", "views", "report", "models", "doctor")
    parser = make_parser(dict.fromkeys(names, lambda args: 0))
    lines = re.findall(r"^    (kvlab .+)$", (ROOT / "README.md").read_text(), re.M)
    commands = [words for line in lines for words in re.split(r";\s*", line.split("  #")[0])]
    assert len(commands) >= 10
    for command in commands:
        parser.parse_args(shlex.split(command)[1:])
