"""What the tests of the lab share: places, an environment of their own, and waiting for a server."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
SCREENSHOTS = Path(os.environ.get("KVLAB_SCREENSHOTS", ROOT / "build" / "screenshots"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def quiet_environment(home: Path) -> dict[str, str]:
    """One thread, and Jupyter's own files in a temporary folder."""
    places = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
        "IPYTHONDIR": home / "ipython",
    }
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    news = home / "settings" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True, exist_ok=True)
    (news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    return {**os.environ, **{name: str(place) for name, place in places.items()}, "OMP_NUM_THREADS": "1"}


def wait_for(address: str, server: subprocess.Popen, log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, f"JupyterLab ended:\n{log.read_text()}"
        try:
            urllib.request.urlopen(f"{address}/api", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not answer in {seconds:.0f} s:\n{log.read_text()}")


def texts_of(book):
    """All that the outputs say as text or HTML."""
    said = []
    for output in (output for cell in book.cells for output in cell.get("outputs", ())):
        data = output.get("data", {})
        said += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
        said += output.get("traceback", [])
    return "\n".join("".join(part) for part in said)


def pictures_of(book):
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)
