"""One sentence of cause for each kind of gap, and numbers that follow from planted ones."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.causes import find_cause, gap_in_cycles
from kvlab.errors import StudyError
from kvlab.stats import MIN_ROUNDS

H200 = Path(__file__).parents[1] / "data" / "h200"
ROUNDS = 12
KV_ALONE, INDEXER_ALONE = "mix(kv=random, indexer=zeros)", "mix(kv=zeros, indexer=random)"


def samples(medians, mhz=None, watts=None, noise=0.0005, rounds=ROUNDS, routing="none"):
    """Rounds of 3 replays; `medians`, `mhz` and `watts` by arm."""
    rng = np.random.default_rng(7)
    rows = []
    for index in range(rounds):
        drift = 1 + 0.02 * (index / max(1, rounds - 1) - 0.5)
        for arm, us in medians.items():
            for replay in range(3):
                row = {
                    "round": index,
                    "arm": arm,
                    "replay": replay,
                    "routing": routing,
                    "case": "c",
                    "mode": "isolated",
                }
                row["us"] = us * drift * np.exp(noise * rng.standard_normal())
                rows.append(row | {"sm_mhz": (mhz or {}).get(arm), "watts": (watts or {}).get(arm)})
    return pd.DataFrame(rows)


def kernels(arms):
    """arm -> role -> microseconds; one kernel a role, steady over three replays."""
    return pd.DataFrame(
        [
            {"arm": arm, "kernel": f"{role}_kernel", "role": role, "us": us, "us_each": [us, us * 1.0001, us * 0.9999]}
            for arm, roles in arms.items()
            for role, us in roles.items()
        ]
    ).assign(case="c", mode="isolated")


def test_the_clock():
    """Llama-3.1-8B prefill after a prefix hit on an H200: more watts, fewer MHz, the same cycles."""
    found = find_cause(
        samples(
            {"zeros": 2000.0, "zeros_again": 2000.0, "random": 2262.0},
            {"zeros": 1845.0, "zeros_again": 1845.0, "random": 1635.0},
            {"zeros": 590.0, "zeros_again": 591.0, "random": 692.0},
        ),
        kernels({"zeros": {"attention": 1600.0, "GEMM": 380.0}, "random": {"attention": 1850.0, "GEMM": 390.0}}),
    )
    assert found.kind == "clocks"
    assert found.sentence == (
        "Random KV is 13.1 % slower (262 us): attention takes 250 us more, at 1,635 instead of 1,845 MHz (692 instead"
        " of 590 W); in cycles the gap is +0.23 % (90 %: +0.22 % to +0.24 %), so the cause is the clock."
    )
    assert found.cycles.gap == pytest.approx(2262 * 1635 / 2000 / 1845 - 1, abs=1e-3)
    assert found.clocks.us == pytest.approx(2262 * (1 - 1635 / 1845), rel=0.02)
    assert found.selection.us == 0
    assert found.other.us == pytest.approx(262 - found.clocks.us, abs=3)


def test_the_clock_of_a_step_that_waits_for_memory():
    found = find_cause(
        samples({"zeros": 4000.0, "zeros_again": 4000.0, "random": 4030.0}, {"zeros": 1980.0, "random": 1425.0})
    )
    assert found.kind == "clocks"
    assert found.sentence == (
        "Random KV is 0.75 % slower (30 us): at 1,425 instead of 1,980 MHz; that change alone could make +38.9 %, so"
        " the cause is the clock, for which the step waits only in part."
    )
    assert found.clocks.of_step == pytest.approx(found.gap.gap, abs=1e-4)
    assert found.cycles.gap < -0.25


def test_selection_alone():
    found = find_cause(
        samples({"zeros": 20_000.0, "zeros_again": 20_000.0, "random": 13_400.0}, {"zeros": 1980.0, "random": 1980.0}),
        kernels(
            {
                "zeros": {"top-k": 10_050.0, "gather/remap": 800.0, "attention": 8000.0},
                "random": {"top-k": 3480.0, "gather/remap": 810.0, "attention": 8010.0},
            }
        ),
    )
    assert found.kind == "selection"
    assert found.sentence == (
        "Random KV is 33.0 % faster (6.6 ms): top-k takes 6.6 ms less, so the cause is the selection of tokens by the"
        " indexer's scores."
    )
    assert found.selection.us == pytest.approx(-6560)
    assert found.selection.of_step == pytest.approx(-6560 / 20_000, rel=0.02)
    assert found.clocks.us == 0


def test_selection_and_power_cancel():
    """DeepSeek-V3.2, hit 2048@100000: the total says -1.3 %, its parts say far more."""
    made = kernels(
        {
            "zeros": {"top-k": 10_050.0, "attention": 11_400.0, "GEMM": 70_000.0},
            "zeros_again": {"top-k": 10_060.0, "attention": 11_420.0, "GEMM": 70_050.0},
            "random": {"top-k": 3480.0, "attention": 12_400.0, "GEMM": 74_000.0},
        }
    )
    medians = {"zeros": 92_000.0, "zeros_again": 92_000.0, "random": 90_800.0}
    found = find_cause(samples(medians, {"zeros": 1980.0, "random": 1845.0}, {"zeros": 560.0, "random": 692.0}), made)
    assert found.kind == "cancelling"
    assert found.sentence == (
        "Selection and power cancel: top-k takes 6.6 ms less; at 1,845 instead of 1,980 MHz (692 instead of 560 W) all"
        " else takes 5.4 ms more (90 %: 5.4 to 5.4), of it GEMM 4.00 ± 0.01 ms and attention 1.0 ms; the whole step"
        " -1.3 % (90 %: -1.3 % to -1.3 %)."
    )
    without_clocks = find_cause(samples(medians), made)
    assert without_clocks.sentence == (
        "Selection and GEMM cancel: top-k takes 6.6 ms less, GEMM 4.00 ± 0.01 ms more (90 %, 3 profiled replays); the"
        " whole step -1.3 %."
    )


@pytest.mark.parametrize(("clock", "share"), [(1800.0, 0.36), (1940.0, 0.13)])
def test_all_else_is_told_whole_and_apart_from_what_the_clock_can_make_of_it(clock, share):
    """Top-k saves 100 us and attention costs 300; the clock alone would make a tenth or less of the step."""
    found = find_cause(
        samples(
            {"zeros": 1000.0, "zeros_again": 1000.0, "random": 1200.0},
            {"zeros": 1980.0, "zeros_again": 1980.0, "random": clock},
        ),
        kernels({"zeros": {"top-k": 200.0, "attention": 800.0}, "random": {"top-k": 100.0, "attention": 1100.0}}),
    )
    assert found.clocks.us + found.other.us == pytest.approx(300, rel=0.02)
    assert found.clocks.us == pytest.approx(1200 * (1 - clock / 1980), rel=0.02)
    assert found.clocks.us < 0.5 * 300
    # A clock that makes less than half of it is not the name of the cause.
    assert found.sentence.startswith("Attention and selection cancel in part")
    assert "power" not in found.sentence


def test_a_cause_by_selection_tells_all_else_and_the_clock_s_part():
    found = find_cause(
        samples(
            {"zeros": 1000.0, "zeros_again": 1000.0, "random": 1290.0},
            {"zeros": 1980.0, "zeros_again": 1980.0, "random": 1885.0},
        ),
        kernels({"zeros": {"top-k": 200.0, "attention": 800.0}, "random": {"top-k": 400.0, "attention": 890.0}}),
    )
    assert found.kind == "selection"
    assert "all else takes 90 us more, of which the clock can make 62 us more" in found.sentence


def test_cycles_and_role_effects_are_clustered_by_process_as_the_gap_is():
    """Twenty rounds in two processes, the second a percent slower under random, at one clock: time and cycles agree."""
    table = samples(
        {"zeros": 1000.0, "zeros_again": 1000.0, "random": 1000.0, KV_ALONE: 1000.0, INDEXER_ALONE: 1000.0},
        dict.fromkeys(("zeros", "zeros_again", "random", KV_ALONE, INDEXER_ALONE), 1980.0),
        rounds=20,
    )
    table["process"] = (table["round"] >= 10).astype(int)
    table.loc[(table["process"] == 1) & table["arm"].isin(["random", KV_ALONE]), "us"] *= 1.01
    found = find_cause(table)
    assert found.cycles.processes == found.gap.processes == found.kv.processes == 2
    assert found.cycles.ci90 == pytest.approx(found.gap.ci90)
    assert gap_in_cycles(table).ci90 == pytest.approx(found.gap.ci90)
    assert found.kv.half_width > 0.01


def test_scores_are_work_and_no_selection():
    """Scoring is done for all tokens: at a lower clock it is slower like any other kernel."""
    made = kernels(
        {
            "zeros": {"top-k": 10_000.0, "indexer scores": 20_700.0, "attention": 11_100.0},
            "random": {"top-k": 3600.0, "indexer scores": 23_500.0, "attention": 12_800.0},
        }
    )
    medians = {"zeros": 65_000.0, "zeros_again": 65_000.0, "random": 63_800.0}
    found = find_cause(samples(medians, {"zeros": 1965.0, "random": 1808.0}), made)
    assert found.selection.us == pytest.approx(-6400)
    assert found.clocks.us == pytest.approx(63_800 * (1 - 1808 / 1965), rel=0.01)
    assert "of it indexer scores 2.8" in found.sentence


def test_intervals_of_the_parts_come_from_replays_and_rounds():
    made = kernels({"zeros": {"top-k": 900.0, "MoE": 4000.0}, "random": {"top-k": 500.0, "MoE": 4400.0}})
    made["us_each"] = [[us - 10, us, us + 10] for us in made["us"]]
    table = samples(
        {"zeros": 10_000.0, "zeros_again": 10_000.0, "random": 10_000.0}, {"zeros": 1980.0, "random": 1780.0}
    )
    found = find_cause(table, made)
    # Welch by hand: both variances 100 over 3, 4 degrees of freedom.
    half = 2.1318 * np.sqrt(200 / 3)
    assert found.selection.ci90 == pytest.approx((-400 - half, -400 + half), rel=1e-3)
    assert found.role_ci90["MoE"] == pytest.approx((400 - half, 400 + half), rel=1e-3)
    assert found.profiled == "3 profiled replays"
    lo, hi = found.clocks.ci90
    assert lo < found.clocks.us < hi
    assert hi - lo > 2 * half
    # Where all of the change could not make the rest, the rounds' clocks say how much it could.
    bound = find_cause(table.assign(us=table["us"].where(table["arm"] != "random", table["us"] * 1.2)))
    assert bound.clocks.us == pytest.approx(12_000 * (1 - 1780 / 1980), rel=1e-3)
    assert bound.clocks.ci90 == pytest.approx((bound.clocks.us, bound.clocks.us), rel=1e-3)


def test_without_a_profile_the_2x2_in_cycles_tells_selection():
    arms = {"zeros": 10_000.0, "zeros_again": 10_000.0, KV_ALONE: 10_100.0, INDEXER_ALONE: 9400.0, "random": 9500.0}
    clocks = {"zeros": 1980.0, "zeros_again": 1980.0, KV_ALONE: 1960.0, INDEXER_ALONE: 1980.0, "random": 1960.0}
    found = find_cause(samples(arms, clocks))
    assert found.kind == "selection"
    assert found.selection.of_step == pytest.approx(-0.06, abs=0.002)
    assert found.indexer_cycles.gap == pytest.approx(-0.06, abs=0.002)
    assert found.kv_cycles.gap == pytest.approx(0, abs=0.002)
    assert "the indexer's contents make -6.0 %" in found.sentence
    same_clock = find_cause(samples(arms))
    assert same_clock.selection is None
    assert same_clock.kind == "unknown"


def test_a_wide_gap_in_cycles_leaves_room():
    arms, clocks = {"zeros": 2000.0, "random": 2260.0}, {"zeros": 1845.0, "random": 1700.0}
    noisy = samples(arms, clocks, noise=0.08)
    found = find_cause(noisy)
    assert found.likely
    assert "likely the clock, but the interval leaves room" in found.sentence


@pytest.mark.parametrize("read", [1, 2, MIN_ROUNDS - 1, MIN_ROUNDS])
def test_a_clock_that_few_rounds_read_is_likely_the_cause(read):
    table = samples({"zeros": 2000.0, "random": 2200.0}, {"zeros": 1980.0, "random": 1800.0})
    table.loc[table["round"] >= read, "sm_mhz"] = None
    found = find_cause(table)
    assert found.kind == "clocks"
    assert found.likely == (read < MIN_ROUNDS)
    assert ("rounds only" in found.sentence or "one round only" in found.sentence) == found.likely


@given(st.floats(0.002, 0.03), st.sampled_from([1980.0, 1965.0]), st.floats(0.001, 0.03), st.booleans())
@settings(max_examples=30, deadline=None)
def test_work_is_named_only_where_the_cycles_show_a_gap(share, mhz, noise, slower):
    """Within a step of the clock (1,980 to 1,965 MHz) nothing is laid to it; the interval of the cycles decides."""
    other = 10_000.0 * (1 + share if slower else 1 - share)
    table = samples({"zeros": 10_000.0, "random": other}, {"zeros": 1980.0, "random": mhz}, noise=noise)
    roles = {"zeros": {"attention": 5000.0}, "random": {"attention": 5000.0 + other - 10_000.0}}
    found = find_cause(table, kernels(roles))
    if found.kind == "kernels":
        lo, hi = found.cycles.ci90
        shown = lo > 0 if found.gap.gap > 0 else hi < 0
        assert ("so by their work, or by dips" in found.sentence) == shown
        assert ("does not tell their work from the clock" in found.sentence) != shown


def test_parts_that_cancel_to_nothing_are_still_told():
    found = find_cause(
        samples({"zeros": 10_000.0, "zeros_again": 10_000.0, "random": 10_000.0}),
        kernels({"zeros": {"top-k": 900.0, "MoE": 4000.0}, "random": {"top-k": 500.0, "MoE": 4400.0}}),
    )
    assert found.kind == "cancelling"
    assert not found.gap.nonzero or abs(found.gap.gap) < 1e-3


def test_kernels_that_only_wander_cancel_nothing():
    arms = {
        "zeros": {"top-k": 900.0, "MoE": 4000.0},
        "zeros_again": {"top-k": 600.0, "MoE": 4300.0},
        "random": {"top-k": 500.0, "MoE": 4400.0},
    }
    medians = {"zeros": 10_000.0, "zeros_again": 10_000.0, "random": 10_000.0}
    assert find_cause(samples(medians), kernels(arms)).kind == "none"
    noisy = kernels({arm: arms[arm] for arm in ("zeros", "random")})
    noisy["us_each"] = [[us * f for f in (0.7, 1.0, 1.3)] for us in noisy["us"]]
    assert find_cause(samples(medians), noisy).kind == "none"


def test_routing():
    arms = {"zeros": {"MoE": 3000.0, "attention": 2000.0}, "random": {"MoE": 4400.0, "attention": 2000.0}}
    table = samples({"zeros": 5000.0, "zeros_again": 5000.0, "random": 6400.0}, routing="real")
    found = find_cause(table, kernels(arms), routing_moved=0.93)
    assert found.kind == "routing"
    assert found.sentence == (
        "Random KV is 28.0 % slower (1.4 ms): at least 93 % of the tokens went to other experts and MoE takes 1.4 ms"
        " more, so the cause is the routing and not the KV."
    )
    assert find_cause(table, None, routing_moved=0.93).kind == "routing"
    assert find_cause(table, kernels(arms), routing_moved=0.0).kind == "kernels"
    assert "routing was real, but" in find_cause(table).sentence
    attention = {"zeros": {"MoE": 3000.0, "attention": 2000.0}, "random": {"MoE": 3000.0, "attention": 3400.0}}
    assert find_cause(table, kernels(attention), routing_moved=0.93).kind == "kernels"


def test_routing_comes_before_kernels_that_cancel_in_part():
    """Experts that take longer by half of the step, and a GEMM that takes less."""
    arms = {"zeros": {"MoE": 1000.0, "GEMM": 4000.0}, "random": {"MoE": 2600.0, "GEMM": 3900.0}}
    table = samples({"zeros": 5000.0, "zeros_again": 5000.0, "random": 6500.0}, routing="real")
    assert find_cause(table, kernels(arms), routing_moved=0.93).kind == "routing"
    assert find_cause(table, kernels(arms), routing_moved=0.0).kind == "cancelling"
    level = samples({"zeros": 5000.0, "zeros_again": 5000.0, "random": 5000.0}, routing="real")
    assert find_cause(level, kernels(arms), routing_moved=0.93).kind == "cancelling"


def test_routing_is_not_blamed_for_what_the_indexer_makes():
    """Without a profile: one token in a hundred goes elsewhere, and the 2x2 gives the indexer all of the gap."""
    found = find_cause(
        samples(
            {"zeros": 1000.0, "zeros_again": 1000.0, "random": 900.0, KV_ALONE: 1000.0, INDEXER_ALONE: 900.0},
            dict.fromkeys(("zeros", "zeros_again", "random", KV_ALONE, INDEXER_ALONE), 1980.0),
            routing="real",
        ),
        routing_moved=0.012,
    )
    assert found.kind == "selection"
    assert "routing" not in found.sentence


def test_nothing():
    found = find_cause(samples({"zeros": 1000.0, "zeros_again": 1004.0, "random": 1003.0}))
    assert found.kind == "none"
    assert found.sentence.startswith("No cause to look for: the gap of +0.3")
    assert "is within the A/A floor of 0.4" in found.sentence
    assert "is not told from 0" in find_cause(samples({"zeros": 1000.0, "random": 1000.0}, noise=0.01)).sentence
    assert "one round cannot tell" in find_cause(samples({"zeros": 1000.0, "random": 1100.0}, rounds=1)).sentence


def test_other_kernels_and_the_unknown():
    table = samples(
        {"zeros": 1000.0, "zeros_again": 1000.0, "constant(0.015)": 1100.0},
        {"zeros": 1980.0, "constant(0.015)": 1980.0},
    )
    arms = {"zeros": {"attention": 500.0}, "constant(0.015)": {"attention": 600.0}}
    found = find_cause(table, kernels(arms), "constant(0.015)")
    assert found.kind == "kernels"
    assert found.sentence == (
        "KV of constant(0.015) is 10.0 % slower (100 us): attention takes 100 us more; in cycles of the clock that was"
        " read the gap is +10.0 % (90 %: +10.0 % to +10.0 %), so by their work, or by dips of the clock that are too"
        " short to be read."
    )
    unknown = find_cause(table, None, "constant(0.015)")
    assert unknown.kind == "unknown"
    assert unknown.sentence == (
        "KV of constant(0.015) is 10.0 % slower (100 us) at the same clock (1,980 MHz), and the cause is not known: its"
        " kernels were not profiled."
    )
    still = kernels({"zeros": {"attention": 500.0}, "constant(0.015)": {"attention": 500.0}})
    assert "no kind of kernel moved" in find_cause(table, still, "constant(0.015)").sentence


@given(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1), st.floats(-0.05, 0.05))
@settings(max_examples=15, deadline=None)
def test_the_two_by_two_gives_back_planted_effects(indexer, kv, interaction):
    logs = {
        "zeros": 0.0,
        KV_ALONE: kv - interaction / 2,
        INDEXER_ALONE: indexer - interaction / 2,
        "random": kv + indexer,
    }
    table = samples({arm: 1000 * np.exp(log) for arm, log in logs.items()}, noise=1e-5)
    found = find_cause(table)
    assert found.indexer.log_gap == pytest.approx(indexer, abs=1e-4)
    assert found.kv.log_gap == pytest.approx(kv, abs=1e-4)
    assert found.interaction.log_gap == pytest.approx(interaction, abs=1e-4)
    respaced = table.replace({"arm": {KV_ALONE: "mix(kv=random,indexer=zeros)"}})
    assert find_cause(respaced).kv == found.kv
    assert find_cause(table[table["arm"] != KV_ALONE]).kv is None


def test_effects_of_an_arm_with_commas_are_in_the_sentence():
    arm = "random(std=0.5, zero_fraction=0.1)"
    alone = (f"mix(kv={arm}, indexer=zeros)", f"mix(kv=zeros, indexer={arm})")
    table = samples({"zeros": 1000.0, alone[0]: 1050.0, alone[1]: 980.0, arm: 1029.0})
    found = find_cause(table, arm=arm)
    assert found.kv.gap == pytest.approx(0.05, abs=2e-3)
    assert found.sentence.endswith("; the indexer's contents make -2.0 %, the KV's +5.0 %.")


def shaken(arms, half):
    """As `kernels`, with times that spread by so much from replay to replay."""
    table = kernels(arms)
    return table.assign(us_each=[[us - half, us, us + half] for us in table["us"]])


def test_selection_within_its_own_noise_is_not_the_cause():
    arms = {"zeros": {"top-k": 500.0}, "zeros_again": {"top-k": 505.0}, "random": {"top-k": 530.0}}
    table = samples({"zeros": 5000.0, "zeros_again": 5000.0, "random": 5040.0}, noise=0.0002)
    assert find_cause(table, shaken(arms, 1.0)).kind == "selection"
    assert find_cause(table, shaken(arms, 200.0)).kind != "selection"
    arms["zeros_again"]["top-k"] = 480.0
    assert find_cause(table, shaken(arms, 1.0)).kind != "selection"


COUNTED = 0.37  # MHz beside whole ones, which only a driver tells


@pytest.mark.parametrize("counted", [False, True])
def test_a_counted_clock_moves_by_its_interval_and_a_read_one_by_its_steps(counted):
    """0.9 % of time by 0.9 % of clock: less than a driver's readings may be off."""
    mhz = {"zeros": 1980.0 + COUNTED * counted, "random": 1962.0 + COUNTED * counted}
    found = find_cause(samples({"zeros": 5000.0, "zeros_again": 5000.0, "random": 5045.9}, mhz, noise=0.0001))
    assert found.counted == counted
    assert found.clock_moved == counted
    assert found.clock.gap == pytest.approx(-18 / 1980, rel=1e-2)
    assert found.kind == ("clocks" if counted else "unknown")
    assert ("at 1,962 instead of 1,980 MHz" in found.sentence) == counted
    assert ("at the same clock" in found.sentence) != counted


def test_medians_of_a_drivers_readings_are_not_counted():
    table = samples({"zeros": 5000.0, "random": 5045.0}, {"zeros": 1980.0, "random": 1897.5})
    assert not find_cause(table).counted


@pytest.mark.parametrize("counted", [False, True])
def test_a_counted_clock_misses_no_dips(counted):
    mhz = dict.fromkeys(("zeros", "random"), 1980.0 + COUNTED * counted)
    arms = {"zeros": {"attention": 4000.0}, "random": {"attention": 4250.0}}
    found = find_cause(samples({"zeros": 5000.0, "random": 5250.0}, mhz), kernels(arms))
    assert found.kind == "kernels"
    assert found.sentence.endswith("so by their work.") == counted
    assert ("dips of the clock" in found.sentence) != counted


def test_what_acts_beside_the_cause_is_named():
    clocks = {"zeros": 1980.0, "random": 1899.0}
    attention = {"zeros": {"attention": 3000.0}, "random": {"attention": 3280.0}}
    table = samples({"zeros": 4000.0, "random": 4400.0}, clocks, noise=0.0002)
    found = find_cause(table, kernels(attention))
    assert found.kind == "kernels"
    assert "; at 1,899 instead of 1,980 MHz, which can make 180 us of it" in found.sentence
    deeper = find_cause(samples({"zeros": 4000.0, "random": 4400.0}, {**clocks, "random": 1880.0}, noise=0.0002))
    assert deeper.kind == "clocks"
    assert "so the clock makes the larger part of it, and not all" in deeper.sentence


def test_the_clock_goes_before_few_tokens_at_other_experts():
    """Every kernel takes longer as the clock falls, the experts' too."""
    arms = {"zeros": {"MoE": 2000.0, "GEMM": 1800.0}, "random": {"MoE": 2210.0, "GEMM": 1990.0}}
    table = samples({"zeros": 4000.0, "random": 4400.0}, {"zeros": 1980.0, "random": 1800.0}, routing="real")
    assert find_cause(table, kernels(arms), routing_moved=0.02).kind == "clocks"


def test_the_least_evidence_does_not_give_the_surest_sentence():
    table = samples({"zeros": 2000.0, "random": 2200.0}, {"zeros": 1980.0, "random": 1800.0})
    apart = table.copy()  # each read, and never in one round
    apart.loc[(table["arm"] == "zeros") & (table["round"] != 0), "sm_mhz"] = None
    apart.loc[(table["arm"] == "random") & (table["round"] != 1), "sm_mhz"] = None
    waits = samples({"zeros": 2000.0, "random": 2200.0}, {"zeros": 1980.0, "random": 1500.0})
    waits.loc[waits["round"] > 0, "sm_mhz"] = None
    for found in map(find_cause, (apart, waits)):
        assert found.kind == "clocks"
        assert found.likely
        assert "likely the clock" in found.sentence


@given(st.integers(0, 40), st.floats(0.001, 0.03))
@settings(max_examples=30, deadline=None)
def test_a_part_lies_in_its_own_interval(seed, noise):
    rng = np.random.default_rng(seed)
    table = samples({"zeros": 4000.0, "random": 4600.0}, {"zeros": 1980.0, "random": 1800.0})
    table["sm_mhz"] *= 1 + noise * rng.standard_normal(len(table))
    found = find_cause(table).clocks
    assert found.ci90[0] <= found.us <= found.ci90[1]


@given(st.floats(0.8, 1.25), st.floats(0.6, 1.4))
@settings(max_examples=20, deadline=None)
def test_a_gap_in_cycles_is_that_of_time_times_clock(time, clock):
    table = samples({"zeros": 1000.0, "random": 1000 * time}, {"zeros": 1500.0, "random": 1500.0 * clock}, noise=0)
    assert gap_in_cycles(table).gap == pytest.approx(time * clock - 1, abs=1e-9)
    beside = pd.DataFrame(
        {
            "round": [*range(ROUNDS)] * 2,
            "arm": ["zeros"] * ROUNDS + ["random"] * ROUNDS,
            "sm_mhz": [1000.0] * 2 * ROUNDS,
        }
    )
    # The replays' own clock goes before what was read beside them.
    assert gap_in_cycles(table, telemetry=beside).gap == pytest.approx(time * clock - 1, abs=1e-9)
    assert gap_in_cycles(table.drop(columns="sm_mhz"), telemetry=beside).gap == pytest.approx(time - 1, abs=1e-9)


@given(st.lists(st.floats(1400, 1980), min_size=4, max_size=4), st.sampled_from(["isolated", "sustained"]))
def test_cycles_are_of_each_replay_by_its_own_clock(clocks, mode):
    """A swing: replays of one work whose time goes against their clock. No median or mean of either tells that."""
    rows = [
        {"round": r, "arm": arm, "us": 1e6 / mhz, "sm_mhz": mhz, "mode": mode, "throttled": arm == "random"}
        for r in range(6)
        for arm in ("zeros", "random")
        for mhz in (clocks if arm == "random" else [1980.0] * 4)
    ]
    assert gap_in_cycles(pd.DataFrame(rows)).gap == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("lost", "told"), [(0, True), (1, True), (2, False), (4, False)])
def test_a_swing_that_is_half_seen_has_no_cycles(lost, told):
    """The slow half of the replays, whose SMs did not agree."""
    rows = [
        {"round": r, "arm": arm, "us": 1e6 / mhz, "sm_mhz": None if arm == "random" and n >= 8 - lost else mhz}
        for r in range(6)
        for arm in ("zeros", "random")
        for n, mhz in enumerate([1980.0, 1960.0, 1940.0, 1920.0, 1800.0, 1790.0, 1780.0, 1770.0])
    ]
    found = gap_in_cycles(pd.DataFrame(rows))
    assert (found is not None) == told
    assert not told or found.gap == pytest.approx(0, abs=1e-9)


def test_without_clocks_there_is_no_gap_in_cycles():
    table = samples({"zeros": 1000.0, "random": 1100.0})
    assert gap_in_cycles(table) is None
    assert gap_in_cycles(table.drop(columns="sm_mhz")) is None
    one_sided = samples({"zeros": 1000.0, "random": 1100.0}, {"zeros": 1500.0})
    assert gap_in_cycles(one_sided) is None
    assert find_cause(one_sided).clocks is None


def test_telemetry_and_kernels_of_other_cases_are_left_out():
    table = samples({"zeros": 1000.0, "random": 1100.0})
    beside = pd.DataFrame({"case": ["c", "c", "d"], "mode": "isolated", "arm": ["zeros", "random", "random"]})
    beside = beside.assign(sm_mhz=[1900.0, 1700.0, 200.0], watts=[500.0, 690.0, 1.0])
    others = kernels({"zeros": {"MoE": 1.0}, "random": {"MoE": 90.0}}).assign(case="d")
    found = find_cause(table, others, telemetry=beside)
    assert found.mhz == (1900.0, 1700.0)
    assert found.watts == (500.0, 690.0)
    assert found.roles == {}


def test_an_arm_that_was_not_measured_is_refused():
    with pytest.raises(StudyError, match="no arm 'prefill'"):
        find_cause(samples({"zeros": 1.0, "random": 2.0}), arm="prefill")


def test_a_measured_run_gives_the_cause_that_was_found_by_hand():
    table = pd.read_parquet(H200 / "vllm-llama-3.1-8b-sustained" / "samples.parquet")
    found = find_cause(table[table["case"] == "hit100k"])
    assert found.kind == "clocks"
    assert found.gap.gap > 0.1
    assert abs(found.cycles.gap) < 0.01
