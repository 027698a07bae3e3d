"""A real JupyterLab over a copy of the notebooks, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labserver import BROWSERS, NOTEBOOKS, SCREENSHOTS, quiet_environment, wait_for


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server's address, and the folder that it shows."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: make test-lab")
    home = tmp_path_factory.mktemp("jupyter")
    root = home / "notebooks"
    shutil.copytree(NOTEBOOKS, root, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": str(port),
        "ServerApp.port_retries": "0",
        "ServerApp.root_dir": str(root),
        "ServerApp.allow_root": "True",
        "IdentityProvider.token": "",
        "LabApp.collaborative": "False",
    }
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", *(f"--{k}={v}" for k, v in options.items())],
            env=quiet_environment(home),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, server, home / "log")
        yield address, root
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def page():
    """A page of headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-lab")
    with playwright.sync_playwright() as play:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        try:
            browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            if found:
                raise
            pytest.skip(f"no Chromium: install one (apt-get install chromium, or playwright install chromium): {error}")
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


@pytest.fixture(scope="session")
def shoot():
    """Keep a picture of a page: `shoot(page, name)`."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)

    def take(page, name):
        page.screenshot(path=SCREENSHOTS / f"{name}.png")

    return take


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run a copy of a notebook: `execute(name, **parameters)` gives the notebook with its outputs."""
    nbformat = pytest.importorskip("nbformat", reason="Jupyter is not installed: make test-lab")
    papermill = pytest.importorskip("papermill", reason="papermill is not installed: make test-lab")
    for key, value in quiet_environment(tmp_path / "jupyter").items():
        monkeypatch.setenv(key, value)

    def run(name, **parameters):
        copy = shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path)
        done = tmp_path / f"{name}-done.ipynb"
        how = {"cwd": tmp_path, "kernel_name": "python3", "progress_bar": False, "execution_timeout": 240}
        try:
            papermill.execute_notebook(copy, done, parameters, **how)
        finally:
            book = nbformat.read(done, as_version=4)
        return book

    return run
