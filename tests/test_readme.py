"""The README says what the committed data say."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent


def readme_tool():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "tools" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["readme"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_readme_and_figures_say_what_the_committed_runs_say():
    tool = readme_tool()
    page = tool.Page(ROOT / "data" / "h200", "data/figures")
    assert tool.stale(page, ROOT / "README.md", ROOT / "data" / "figures") == [], "run python tools/readme.py"


def edit(folder, change):
    """Change the verdicts of an export, in place."""
    path = folder / "provenance.json"
    record = json.loads(path.read_text())
    record["run"] = folder.name
    del record["tables"]  # what is changed here no longer counts as exported
    change(record["verdicts"])
    path.write_text(json.dumps(record))


def test_new_runs_make_it_stale_and_one_command_mends_it(tmp_path, capsys):
    tool, committed = readme_tool(), ROOT / "data" / "h200"
    data, figures, readme = tmp_path / "data", tmp_path / "figures", tmp_path / "README.md"
    for name in ("vllm-deepseek-v3.2-6l-claim", "vllm-llama-3.1-8b-claim", "vllm-gpt-oss-20b-isolated"):
        shutil.copytree(committed / name, data / name)
    shutil.copy(ROOT / "README.md", readme)
    places = ["--data", str(data), "--figures", str(figures), "--readme", str(readme)]
    assert tool.main(places) == 0
    assert tool.main([*places, "--check"]) == 0
    text = readme.read_text()
    assert sorted(path.stem for path in figures.iterdir()) == ["claim", "contexts"]
    assert "](figures/claim.png)" in text
    assert "qwen3" not in text.split("## Two commands")[0]
    assert "**Prefill after a prefix-cache hit: not in general.**" in text
    assert "The largest that differ: llama-3.1-8b +10.5 % at 100k, isolated" in text
    assert "; deepseek-v3.2-6l \N{MINUS SIGN}7.5 % at 100k, isolated, top-k" in text
    assert "Not counted: 3 timed at another pace (\N{DAGGER})." in text
    assert "gpt-oss-20b with real routing" in text

    def to_sweep(verdicts):
        _, mode, verdict = next(row for row in verdicts if row[0] == "hit100k")
        verdicts[:] = []
        for topk in (512, 2048):
            name = f"hit-b1-k100000-topk{topk}"
            arms = {arm: {"gap": 0.01, "ci90": [0.0, 0.02], "verdict": "equivalent"} for arm in ARMS}
            text = f"{name}=2048@100000"
            verdicts.append([name, mode, {**verdict, "case": name, "text": text, "topk": topk, "arms": arms}])

    def to_newer(verdicts):
        for _, _, verdict in verdicts:
            verdict["arms"]["random"]["gap"] = 0.2

    shutil.copytree(data / "vllm-deepseek-v3.2-6l-claim", data / "sweep-deepseek-v3.2-6l-topk")
    for table in ("verdicts", "samples"):
        edit_table(data / "sweep-deepseek-v3.2-6l-topk" / f"{table}.parquet")
    edit(data / "sweep-deepseek-v3.2-6l-topk", to_sweep)
    edit(data / "vllm-deepseek-v3.2-6l-claim", to_newer)
    assert tool.main([*places, "--check"]) == 1
    told = capsys.readouterr().err
    assert all(name in told for name in ("README.md", "claim.png", "topk.png", "zeros.png", "contents.png"))
    assert tool.main(places) == 0
    assert tool.main([*places, "--check"]) == 0
    assert {"topk", "zeros", "contents"} < {path.stem for path in figures.iterdir()}
    assert "deepseek-v3.2-6l +20.0 %" in readme.read_text()
    shutil.rmtree(data / "sweep-deepseek-v3.2-6l-topk")
    assert tool.main([*places, "--check"]) == 1
    assert tool.main(places) == 0
    assert not (figures / "topk.png").exists()


ARMS = ("random", "random(zero_fraction=0.5)", "levels")


def edit_table(path):
    """Two cases of a sweep over top-k, of the one that the table has."""
    table = pd.read_parquet(path)
    table = table[table["case"] == "hit100k"]
    cases = [table.assign(case=f"hit-b1-k100000-topk{topk}") for topk in (512, 2048)]
    pd.concat(cases, ignore_index=True).to_parquet(path)


def test_a_folder_without_runs_says_so_everywhere(tmp_path):
    tool = readme_tool()
    readme, figures = tmp_path / "README.md", tmp_path / "figures"
    shutil.copy(ROOT / "README.md", readme)
    assert tool.main(["--data", str(tmp_path / "none"), "--figures", str(figures), "--readme", str(readme)]) == 0
    answer = readme.read_text().split("<!-- answer -->")[1]
    assert answer.split()[:6] == tool.NOT_YET.split()[:6]
    assert not figures.exists() or list(figures.iterdir()) == []


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
