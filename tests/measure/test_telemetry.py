"""Telemetry where there is no card: it says so, and reads nothing."""

import sys
from types import SimpleNamespace

import pytest
import torch

from kvlab.measure.telemetry import NoTelemetry, NvmlTelemetry, Reading, make_telemetry


def test_without_a_card_the_source_says_why_and_readings_are_empty():
    telemetry = make_telemetry(torch.device("cpu"))
    assert telemetry.source == "none (device cpu)"
    assert telemetry.read() == Reading()


def test_a_missing_or_broken_nvml_is_said_and_not_raised(monkeypatch):
    import builtins

    real = builtins.__import__

    def no_nvml(name, *args, **kwargs):
        if name == "pynvml":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_nvml)
    assert make_telemetry(torch.device("cuda")).source == "none (nvidia-ml-py is not installed)"


class NVMLError_NotSupported(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """pynvml of one card; `absent` names functions that it does not support."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = 1, 2, 0, 186

    def __init__(self, absent=(), instant_mw=512_000, reasons=0x4 | 0x20, instant_return=0):
        super().__init__(calls=[], absent=set(absent))
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "card",
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetPowerUsage": 480_000,
            "nvmlDeviceGetTemperature": 54,
            "nvmlDeviceGetCurrentClocksThrottleReasons": reasons,
            "nvmlDeviceGetTotalEnergyConsumption": 7_000_500,
            "nvmlDeviceGetFieldValues": [
                SimpleNamespace(nvmlReturn=instant_return, value=SimpleNamespace(uiVal=instant_mw))
            ],
        }
        for name, answer in answers.items():
            setattr(self, name, self._function(name, answer))

    def _function(self, name, answer):
        def call(*_):
            self.calls.append(name)
            if name in self.absent:
                raise NVMLError_NotSupported
            return answer

        return call


@pytest.fixture
def make_nvml(monkeypatch):
    def make(**how):
        nvml = FakeNvml(**how)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
        return nvml

    return make


def test_a_reading_in_units_with_the_reasons_in_words(make_nvml):
    make_nvml()
    telemetry = make_telemetry(torch.device("cuda"))
    assert telemetry.read() == Reading(
        sm_mhz=1980.0,
        mem_mhz=1980.0,
        watts=512.0,
        celsius=54.0,
        throttled=True,
        reasons="sw_power_cap,sw_thermal_slowdown",
        joules=7000.5,
    )
    assert telemetry.source == "nvml"


@pytest.mark.parametrize(("reasons", "throttled"), [(0, False), (0x1, False), (0x2, False), (0x80, True), (0x8, True)])
def test_only_caps_heat_and_slowdowns_are_throttling(make_nvml, reasons, throttled):
    make_nvml(reasons=reasons)
    reading = NvmlTelemetry(torch.device("cuda")).read()
    assert reading.throttled is throttled
    assert reading.reasons.count(",") == 0


def test_what_a_card_does_not_give_is_none_said_and_not_asked_again(make_nvml):
    nvml = make_nvml(absent=["nvmlDeviceGetTotalEnergyConsumption"], instant_return=3)
    telemetry = make_telemetry(torch.device("cuda"))
    for _ in range(3):
        reading = telemetry.read()
        assert reading.joules is None
        # Without the present power, NVML's average over a second.
        assert reading.watts == 480.0
        assert reading.sm_mhz == 1980.0
    assert telemetry.source == "nvml (without present watts, joules)"
    assert nvml.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 1
    assert nvml.calls.count("nvmlDeviceGetFieldValues") == 1


def test_a_failure_of_one_moment_is_one_missing_value(make_nvml, monkeypatch):
    nvml = make_nvml()
    telemetry = make_telemetry(torch.device("cuda"))

    def fail(*_):
        raise RuntimeError("timeout")

    with monkeypatch.context() as patch:
        patch.setattr(nvml, "nvmlDeviceGetClockInfo", fail)
        assert telemetry.read().sm_mhz is None
    assert telemetry.read().sm_mhz == 1980.0
    assert telemetry.source == "nvml"


def test_a_card_that_gives_nothing_is_no_telemetry(make_nvml):
    nvml = make_nvml()
    nvml.absent = {name for name in vars(nvml) if name.startswith("nvmlDeviceGet") and not name.endswith("UUID")}
    telemetry = make_telemetry(torch.device("cuda"))
    assert isinstance(telemetry, NoTelemetry)
    assert telemetry.source == "none (NVML: this device gives no clock, power or temperature)"
