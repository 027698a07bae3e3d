"""The clock between two marks: of made-up counters, of the kernel as it compiles, and of a real card."""

import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cases import parse_case
from kvlab.measure.clock import MARK, make_counter, megahertz
from kvlab.measure.sampler import Sampler
from kvlab.measure.telemetry import make_telemetry
from kvlab.measure.timer import make_timer

from handmade_marks import marks


@given(
    st.floats(200, 3000), st.floats(20, 1e6), st.integers(1, 200), st.sampled_from([1, 32, 1000]), st.integers(0, 99)
)
def test_the_clock_is_cycles_over_time(mhz, us, sms, step_ns, seed):
    found = megahertz(marks(mhz, us, sms, step_ns, seed))
    assert found == pytest.approx(mhz, rel=max(1e-3, step_ns / (1e3 * us)))


@given(st.integers(0, 131), st.integers(0, 131), st.integers(0, 99))
def test_sms_that_noted_one_end_or_none_do_not_count(begun, ended, seed):
    sheet = marks(1755.0, 500.0, seed=seed)
    sheet[0, :begun], sheet[1, 132 - ended :] = 0, 0
    if begun + ended < 132:
        assert megahertz(sheet) == pytest.approx(1755.0, rel=1e-3)
    else:
        assert megahertz(sheet) is None


def test_nothing_was_noted():
    assert megahertz(np.zeros((2, 132, 2), np.int64)) is None


@pytest.mark.parametrize("slow", [0.01, 0.5, 0.9])
def test_sms_that_do_not_agree_tell_no_clock(slow):
    """Counters that stood still while their SM had nothing to do, say."""
    clocks = np.full(132, 1980.0)
    clocks[:60] *= slow
    assert megahertz(marks(clocks, 5000.0)) is None
    clocks[20:] = 1980.0  # few of them are outliers, no more
    assert megahertz(marks(clocks, 5000.0)) == pytest.approx(1980.0, rel=1e-3)


@pytest.mark.slow
def test_the_kernel_reads_the_counters_side_by_side_and_in_order(compile_for_hopper):
    from kvlab.measure.clock_kernel import mark_clock

    ptx, _ = compile_for_hopper(mark_clock, {"marks": "*i64"}, {"SLOTS": 132}, num_warps=1)
    read = re.findall(r"mov\.u(?:32|64)\s+%\w+, %(smid|clock64|globaltimer);", ptx)
    assert read == ["smid", "clock64", "globaltimer"]
    assert ptx.count("st.global") == 2
    assert f".entry {MARK}(" in ptx


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["isolated", "sustained"])
def test_the_card_counts_the_clock_that_its_driver_reads(mode):
    from kvlab.engines.load import load_engine

    step = load_engine("tiny-dense", device="cuda").prepare(parse_case("hit=64@2048"))
    step.fill("random", 1)
    timer = make_timer(step, mode)
    assert timer.clock == "counted"
    timer.settle(0.5)
    with Sampler(make_telemetry(step.engine.device)) as sampler:
        begin, clocks = time.perf_counter(), []
        while time.perf_counter() - begin < 1.0:
            clocks += [replay.mhz for replay in timer.replay(20)]
    told = [mhz for mhz in clocks if mhz is not None]
    assert len(told) >= 0.9 * len(clocks)
    assert np.median(told) == pytest.approx(sampler.summary().sm_mhz, rel=0.02)
    timer.close()
    step.close()


@pytest.mark.gpu
@needs_gpu
def test_counters_of_one_card_agree():
    device = torch.device("cuda")
    (one, why), (other, _) = make_counter(device), make_counter(device)
    assert why == ""
    work = torch.randn(4096, 4096, device=device)
    for counter in (one, other):
        counter.mark(0)
    for _ in range(20):
        work = (work @ work).clamp(-1, 1)
    for counter in (one, other):
        counter.mark(1)
    torch.cuda.synchronize()
    clocks = [megahertz(counter.take()) for counter in (one, other)]
    assert clocks[0] == pytest.approx(clocks[1], rel=0.01)
    assert megahertz(one.take()) is None
