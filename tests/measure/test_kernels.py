"""Profiles close on the timed total, on a CPU for real and on CUDA from a made-up trace."""

from statistics import median

import pytest
import torch

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.errors import EngineError
from kvlab.kernel_names import CLOSE, REST, ROLES
from kvlab.measure import kernels
from kvlab.measure.clock import MARK
from kvlab.measure.kernels import BETWEEN, profile_kernels
from kvlab.measure.settling import PACE_S, SETTLE_CAPPED_S, SETTLE_S
from kvlab.measure.timer import CpuTimer, GraphTimer, Replay, Timer, make_timer
from kvlab.measure.trace import Event


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-dsa"])
def profiled(request):
    step = load_engine(request.param, device="cpu").prepare(parse_case("decode=4*1@4096"))
    step.fill("random", 1)
    timer = make_timer(step, "isolated")
    timer.time(2)
    before = timer.output().clone()
    profile = profile_kernels(step, timer)
    timer.time(1)
    return request.param, profile, torch.equal(before, timer.output())


def test_rows_and_rest_add_to_the_timed_total(profiled):
    _, profile, _ = profiled
    assert sum(row["us"] for row in profile.rows) == pytest.approx(profile.timed_us)
    own, rest = profile.rows[:-1], profile.rows[-1]
    assert rest == {"kernel": BETWEEN, "role": REST, "us": profile.rest_us, "calls": 0, "us_each": []}
    assert profile.total_us == pytest.approx(sum(row["us"] for row in own))
    assert profile.closes == (abs(profile.total_us / profile.timed_us - 1) <= CLOSE)
    # Operators are most of a forward of this size (85 to 95 % of it on a quiet machine).
    assert profile.total_us > 0.5 * profile.profiled_us
    assert profile.overlap_us == pytest.approx(0, abs=1e-6)
    for row in own:
        assert len(row["us_each"]) == profile.replays == 3
        assert row["us"] == pytest.approx(sum(row["us_each"]) / 3)
        assert row["role"] in ROLES


def test_roles_and_calls_are_those_of_the_model(profiled):
    model, profile, _ = profiled
    calls = {row["kernel"]: row["calls"] for row in profile.rows}
    roles = {row["role"] for row in profile.rows}
    assert {"attention", "GEMM", "gather/remap", "norm/rope/quant", "cache write"} <= roles
    assert calls["aten::_scaled_dot_product_flash_attention_for_cpu"] >= 1
    assert isinstance(calls["aten::mm"], int)
    assert ("aten::topk" in calls) == (model == "tiny-dsa") == ("top-k" in roles)


def test_a_cpu_profile_sees_the_restore_outside_and_changes_nothing(profiled):
    _, profile, unchanged = profiled
    assert unchanged
    assert profile.restore_outside
    assert profile.restore_us > 0
    assert profile.source == "operators"
    assert profile.facts()["closure"] == pytest.approx(profile.closure, abs=1e-4)


def test_a_restore_within_the_forward_is_seen(hand_engine, monkeypatch):
    step = hand_engine.prepare(parse_case("d=1@40"))
    step.fill("random")
    timer = make_timer(step, "isolated")
    assert profile_kernels(step, timer, 1).restore_outside
    forward = type(step).forward
    monkeypatch.setattr(type(step), "forward", lambda self: (self.restore(), forward(self))[1])
    assert not profile_kernels(step, timer, 1).restore_outside


def test_no_replays_and_timers_without_kernels_are_refused(hand_engine):
    step = hand_engine.prepare(parse_case("d=1@40"))
    step.fill("zeros")
    with pytest.raises(EngineError, match="0 replays"):
        profile_kernels(step, CpuTimer(step), 0)

    class Sundial(Timer):
        kind = "sundial"

        def time(self, count):
            return [1.0] * count

        def output(self):
            return torch.zeros(1)

    with pytest.raises(EngineError, match="sundial"):
        profile_kernels(step, Sundial())


class FakeCard:
    """A CUDA device as the profiler would show it: a restore, then kernels of which two overlap."""

    RESTORE = ("copy_runs",)
    FORWARD = (
        ("void vllm::topKPerRowPrefill<512, true>(...)", 0.0, 40.0),
        ("sparse_attn_fwd_kernel", 42.0, 90.0),
        ("nvjet_tst_128x256", 80.0, 100.0),
    )

    def __init__(self, timed_us=102.0, lost=False, intruder=None):
        self.clock, self.launch, self.timed_us, self.lost = 0.0, 0, timed_us, lost
        self.intruder = intruder
        self.events, self.settled = [], []

    def restore(self):
        self.launch += 1
        self._run(("copy_runs", 0.0, 5.0))
        self.clock += 50

    def forward(self):
        for kernel in self.FORWARD:
            self.launch += 1
            self._run(kernel)
        self.clock += 500

    def replay(self):
        self.launch += 1
        self._run(("copy_runs", 0.0, 5.0))
        begin = self.clock
        self.clock += 6
        # Marks of the clock lie on either side of the timed region, and in no time.
        self._run((MARK, -1.0, 0.0))
        for kernel in self.FORWARD:
            self._run(kernel)
        if self.intruder:
            self._run((self.intruder, 95.0, 99.0))
        self._run((MARK, 101.0, 102.0))
        self.clock = begin + 200

    def _run(self, kernel):
        name, start, end = kernel
        self.events.append(Event(name, self.clock + start, self.clock + end, self.launch))

    def trace(self, work, device, before=None):
        if before:
            before()
        self.events = []
        work()
        return sorted(self.events, key=lambda e: e.start_us)[1 if self.lost and len(self.events) > 4 else 0 :]


class FakeGraphTimer(GraphTimer):
    def __init__(self, card, mode):
        self.card, self.mode = card, mode

    def time(self, count):
        for _ in range(count):
            self.card.replay()
        return [self.card.timed_us] * count

    def replay(self, count):
        return [Replay(us) for us in self.time(count)]

    def settle(self, seconds, until=lambda: False):
        self.card.settled.append(seconds)
        self.time(1)
        self.paced_s = 0.1


@pytest.fixture
def profile_card(hand_engine, monkeypatch):
    def run(card, mode="isolated", **how):
        step = hand_engine.prepare(parse_case("d=1@40"))
        monkeypatch.setattr(kernels, "device_trace", card.trace)
        monkeypatch.setattr(step, "restore", card.restore)
        monkeypatch.setattr(step, "forward", card.forward)
        return profile_kernels(step, FakeGraphTimer(card, mode), **how)

    return run


@pytest.mark.parametrize("lost", [False, True])
def test_a_graph_profile_leaves_out_the_restore_and_counts_overlap_once(profile_card, lost):
    profile = profile_card(FakeCard(lost=lost))
    assert {row["kernel"]: row["us"] for row in profile.rows} == pytest.approx(
        {"topKPerRowPrefill": 40, "sparse_attn_fwd_kernel": 48, "nvjet_tst_128x256": 20, BETWEEN: -6}
    )
    assert [row["kernel"] for row in profile.rows][:2] == ["sparse_attn_fwd_kernel", "topKPerRowPrefill"]
    assert [row["role"] for row in profile.rows][:3] == ["attention", "top-k", "GEMM"]
    assert profile.total_us == pytest.approx(108)
    assert profile.busy_us == pytest.approx(98)
    assert profile.overlap_us == pytest.approx(10)
    assert profile.rest_us == pytest.approx(-6)
    assert profile.closure == pytest.approx(108 / 102)
    assert not profile.closes
    assert profile.restore_us == pytest.approx(5)
    assert profile.restore_outside
    assert profile.replays == 3
    assert profile.source == "cupti"


def test_a_graph_profile_closes_where_nothing_is_missing(profile_card):
    assert profile_card(FakeCard(timed_us=110.0)).closes


def test_a_fill_in_the_timed_region_is_reported(profile_card):
    profile = profile_card(FakeCard(intruder="fill_runs"))
    assert not profile.restore_outside
    assert "fill_runs" in {row["kernel"] for row in profile.rows}


@pytest.mark.parametrize(
    ("mode", "capped", "settled", "replays"),
    [
        ("isolated", False, PACE_S, 3),
        ("isolated", True, PACE_S, 3),
        ("sustained", False, SETTLE_S, 3),
        ("sustained", True, SETTLE_CAPPED_S, 10),  # a second of them
    ],
)
def test_a_profile_keeps_the_pace_of_the_rounds(profile_card, mode, capped, settled, replays):
    card = FakeCard()
    profile = profile_card(card, mode, capped=capped)
    assert card.settled == [settled] * 2
    assert profile.replays == replays
    assert profile.total_us == pytest.approx(108)


def test_a_restore_that_cannot_be_told_apart_is_an_error(profile_card):
    card = FakeCard()
    card.restore = lambda: card._run(("another_copy", 0.0, 5.0))
    with pytest.raises(EngineError, match="not those of the restore"):
        profile_card(card)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-dsa", "tiny-hybrid"])
@pytest.mark.parametrize("mode", ["isolated", "sustained"])
@pytest.mark.parametrize("case", ["decode=4*1@4096", "hit=64@2048"])
def test_a_real_graph_is_profiled(model, mode, case):
    from kvlab.measure.trace import device_trace, timed_region_is_clean

    step = load_engine(model, device="cuda").prepare(parse_case(case))
    step.fill("random", 1)
    timer = make_timer(step, mode)
    timer.time(3)
    before = timer.output().clone()
    profile = profile_kernels(step, timer)
    print(model, mode, case, profile.facts())
    assert profile.restore_outside
    assert profile.source == "cupti"
    assert profile.profiled_us < 10 * profile.timed_us
    assert 0.2 < profile.closure < 1.5
    assert sum(row["us"] for row in profile.rows) == pytest.approx(profile.timed_us)
    assert ("top-k" in {row["role"] for row in profile.rows}) == (model == "tiny-dsa")
    assert max(row["us"] for row in profile.rows[:-1]) > 0
    timer.time(1)
    assert torch.equal(timer.output(), before)
    # A whole arm as a round runs it: what fills is over before the first replay begins (vllm PR 56473).
    device = step.engine.device
    restore = [event.name for event in device_trace(step.restore, device)]
    forward = [event.name for event in device_trace(step.forward, device)]
    timer.time(1)
    events = device_trace(lambda: (step.fill("random", 2), timer.time(2)), device)
    size = round(sum(row["calls"] for row in profile.rows)) + len(restore)
    fills, replays = events[: -2 * size], events[-2 * size :]
    assert fills
    assert max(event.end_us for event in fills) <= replays[0].start_us
    assert timed_region_is_clean(replays[:size], restore, forward)
    assert timed_region_is_clean(replays[size:], restore, forward)
    assert median(timer.time(5)) > 0
    step.close()
