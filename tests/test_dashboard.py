"""What the dashboard does without widgets: texts to a spec, a run to lines, figures and files."""

import pytest
from matplotlib.figure import Figure

import kvlab
from kvlab import dashboard
from kvlab.background import State
from kvlab.dashboard import TimeLeft
from kvlab.errors import RunError, StudyError

ASKED = {
    "engine": "reference",
    "model": " tiny-dsa ",
    "phases": ["decode"],
    "contexts": "1k, 4096",
    "batch": "8",
    "topk": "",
    "zero_fractions": "0.25, 0.5",
    "arms": "random, random(std=0.5, zero_fraction=0.25)",
    "other": "",
    "margin": 3.0,
    "mode": "isolated",
    "rounds": 20,
    "options": "",
}


def test_a_spec_from_what_people_type():
    assert dashboard.make_spec(**ASKED) == {
        "command": "sweep",
        "model": "tiny-dsa",
        "engine": "reference",
        "engine_options": {},
        "arms": ("random", "random(std=0.5, zero_fraction=0.25)"),
        "margin": 0.03,
        "mode": "isolated",
        "rounds": 20,
        "sweep": {
            "contexts": (1024, 4096),
            "phases": ("decode",),
            "batch": (8,),
            "topk": (),
            "zero_fractions": (0.25, 0.5),
        },
    }
    assert dashboard.make_spec(**{**ASKED, "rounds": 0})["rounds"] is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model", dashboard.OTHER, "other model: none is named"),
        ("contexts", "1.5", "contexts: '1.5' is no number"),
        ("topk", "-1", "top-k: '-1' is no number"),
        ("zero_fractions", "half", "zero fractions: 'half' is no number"),
        ("options", "num_kv_blocks=4", "engine options: 'num_kv_blocks=4' is no JSON"),
        ("options", '"text"', "is no JSON object"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(name, value, said):
    with pytest.raises(StudyError) as error:
        dashboard.make_spec(**{**ASKED, name: value})
    assert said in str(error.value)


def test_the_time_left_counts_only_rounds_that_were_seen_to_pass():
    now = [100.0]
    left = TimeLeft(clock=lambda: now[0])
    assert left.of(4, 10) == ""  # where a resumed run stands costs nothing
    now[0] += 20
    assert left.of(6, 10) == ", about 40 s left"
    now[0] += 580
    assert left.of(8, 10) == ", about 5 min left"
    assert left.of(10, 10) == ""
    assert left.of(1, 10) == ""  # begun anew


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (89, "89 s"), (100, "2 min"), (5400, "1 h 30 min"), (86400, "24 h 00 min")]
)
def test_durations(seconds, said):
    assert dashboard.seconds(seconds) == said


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State("loading", message="loading tiny-dsa"), "loading tiny-dsa ..."),
        (State("measuring", "c", "isolated", 3, 20), "measuring c, isolated: round 3 of 20"),
        (State("cancelled", "c", "isolated", 3, 20), "cancelled: 3 of 20 rounds"),
        (State("failed"), "failed"),
    ],
)
def test_a_status_line(state, said):
    assert dashboard.status(state, TimeLeft()) == said


@pytest.fixture
def part(tmp_path, make_hand_engine, simulated_clock):
    """A run with one finished case, and one that was interrupted after three rounds."""
    times = iter(range(100, 10**6))
    simulated_clock(lambda step: 100 + next(times) % 7 / 10)

    def stop(tick):
        if tick.case == "second" and tick.done == 3:
            raise KeyboardInterrupt

    cases = ["first=2*1@64", "second=1@64"]
    with pytest.raises(KeyboardInterrupt):
        kvlab.check(make_hand_engine(), cases, rounds=8, out=tmp_path / "part", progress=stop)
    return kvlab.open_run(tmp_path / "part")


def test_an_unfinished_run_is_told_and_drawn_as_far_as_it_is(part):
    rows = dashboard.so_far(part)
    assert rows["case"].tolist() == ["first", "second"]
    assert rows["verdict"].tolist() == ["equivalent", "3 of 8 rounds"]
    assert rows["gap"].notna().all()
    assert dashboard.headline(part).startswith("second: gap of random ")
    assert dashboard.headline(part).endswith("3 of 8 rounds")
    for kind in ("gaps", "samples of a case", "gap against context"):
        assert isinstance(dashboard.draw(part, kind, "first"), Figure)
    with pytest.raises(RunError, match="without NVML"):
        dashboard.draw(part, "clocks and power", "first")
    with pytest.raises(RunError, match="figure 'none' is unknown; there are gaps"):
        dashboard.draw(part, "none", "first")


def test_runs_are_listed_newest_first(part, tmp_path):
    (tmp_path / "other").mkdir()
    part.export(tmp_path / "exported")
    names = [name for name, _ in dashboard.list_runs(tmp_path)]
    assert names[:2] == ["exported", "part"]
    assert all(name.startswith("data: ") for name in names[2:])
    assert dashboard.list_runs(tmp_path / "absent") == dashboard.list_runs(tmp_path)[2:]


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_a_figure_is_saved_as_its_ending_says(ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = dashboard.save(Figure(), f" fig.{ending}")
    assert place == tmp_path / f"fig.{ending}"
    begins = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending]
    assert place.read_bytes().startswith(begins)


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(RunError, match="no figure to save yet"):
        dashboard.save(None, "fig.png")
    with pytest.raises(RunError, match=r"end it in \.png"):
        dashboard.save(Figure(), "fig")
    with pytest.raises(RunError, match="choose another place"):
        dashboard.save(Figure(), str(tmp_path / "absent" / "fig.png"))


@pytest.mark.parametrize(
    "arms",
    [
        ("random", "mix(indexer=zeros, kv=random(std=0.5, zero_fraction=0.25))"),
        ("mix(kv=random(std=0.5), indexer=levels)", "constant(0.015)"),
        ("prefill",),
    ],
)
def test_arms_are_split_as_the_fills_themselves_are(arms):
    assert dashboard.make_spec(**{**ASKED, "arms": ", ".join(arms)})["arms"] == arms
    assert all(kvlab.parse_fill(arm) for arm in arms)
