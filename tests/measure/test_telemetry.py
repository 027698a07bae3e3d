"""Telemetry where there is no card: it says so, and reads nothing."""

import torch

from kvlab.measure.telemetry import Reading, make_telemetry


def test_without_a_card_the_source_says_why_and_readings_are_empty():
    telemetry = make_telemetry(torch.device("cpu"))
    assert telemetry.source == "none (device cpu)"
    assert telemetry.read() == Reading(None, None, None, None, None)


def test_a_missing_or_broken_nvml_is_said_and_not_raised(monkeypatch):
    import builtins

    real = builtins.__import__

    def no_nvml(name, *args, **kwargs):
        if name == "pynvml":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_nvml)
    assert make_telemetry(torch.device("cuda")).source == "none (nvidia-ml-py is not installed)"
