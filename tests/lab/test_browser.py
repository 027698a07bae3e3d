"""The dashboard in real JupyterLab: start, watch, cancel, start again, a verdict, a figure on disk.

`KVLAB_SCREENSHOTS` says where the pictures go, `build/screenshots` by default.
"""

import re
import time

import pytest

import kvlab

pytestmark = pytest.mark.lab

# Small enough for a verdict within seconds; rounds enough to be cancelled on the way.
SETTINGS = {"Contexts": "256", "Batch": "1", "Rounds": "30"}


def field(page, name):
    """The input that is labelled `name`."""
    return page.get_by_label(name, exact=True)


def button(page, name):
    return page.locator("button.widget-button", has_text=re.compile(rf"^\s*{name}$"))


def wait_for_text(page, pattern, seconds=60):
    """Wait for a line of the dashboard, and return its match."""
    line = page.locator(".widget-html-content").filter(has_text=re.compile(pattern)).first
    line.wait_for(timeout=1000 * seconds)
    return re.search(pattern, line.inner_text())


def wait_until_enabled(page, name):
    page.locator("button.widget-button:not([disabled])", has_text=re.compile(rf"^\s*{name}$")).wait_for()


def wait_for_round(page, least):
    page.wait_for_function(
        "least => [...document.querySelectorAll('.widget-html-content')].some(line => "
        "{ const found = line.innerText.match(/round (\\d+) of/); return found && +found[1] >= least })",
        arg=least,
    )


def choose(page, menu, entry):
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=re.compile(entry)).click()


def restart_and_run_all(page):
    choose(page, "Run", "Restart Kernel and Run All")
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    page.wait_for_timeout(1000)  # until the outputs of before are cleared
    button(page, "Start").wait_for(timeout=90_000)


@pytest.fixture(scope="module")
def board(jupyterlab, page, shoot):
    """The notebook with the dashboard, after Restart Kernel and Run All Cells."""
    address, _ = jupyterlab
    page.goto(f"{address}/lab/tree/00_lab.ipynb?reset")
    page.locator("#jp-main-statusbar").get_by_text(re.compile(r"Python 3.*Idle")).first.wait_for()
    restart_and_run_all(page)
    page.evaluate("document.querySelector('.widget-gridbox').scrollIntoView()")
    shoot(page, "01-dashboard")
    return page


def test_from_start_to_figure(board, jupyterlab, shoot):
    page, (_, root) = board, jupyterlab
    for name, value in SETTINGS.items():
        field(page, name).fill(value)
        field(page, name).press("Tab")

    # By keyboard, as by mouse.
    button(page, "Start").focus()
    page.keyboard.press("Enter")
    first = int(wait_for_text(page, r"round (\d+) of")[1])
    wait_for_round(page, first + 1)
    page.locator(".widget-image").wait_for()
    wait_for_text(page, r"gap of random .*%")
    shoot(page, "02-measuring")
    assert button(page, "Start").is_disabled()

    button(page, "Cancel").click()
    wait_for_text(page, "^cancelled")
    shoot(page, "03-cancelled")
    wait_until_enabled(page, "Start")
    (run,) = runs_in(root)

    # The same settings go on with the same run.
    button(page, "Start").click()
    wait_for_text(page, "^done", seconds=120)
    assert runs_in(root) == {run}
    wait_for_text(page, r"(equivalent|different|inconclusive|invalid)")
    shoot(page, "04-verdict")

    field(page, "Save to").fill("gap.pdf")
    button(page, "Save figure").click()
    wait_for_text(page, r"Saved: .*gap\.pdf")
    assert (root / "gap.pdf").read_bytes().startswith(b"%PDF")
    button(page, "Save figure").scroll_into_view_if_needed()
    shoot(page, "05-saved")


def test_bad_input_is_said_in_place(board, shoot):
    page = board
    field(page, "Contexts").fill("many")
    button(page, "Start").click()
    wait_for_text(page, "contexts: 'many' is no number")
    shoot(page, "06-bad-input")
    field(page, "Contexts").fill("256")


def test_runs_of_the_repository_open_and_compare(board, shoot):
    page = board
    field(page, "Earlier run").select_option("data: vllm-llama-3.1-8b-sustained")
    button(page, "Open").click()
    wait_for_text(page, "vllm-llama-3.1-8b-sustained")
    shoot(page, "07-opened")
    field(page, "Earlier run").select_option("data: vllm-deepseek-v3.2-6l-claim")
    button(page, "Compare").click()
    wait_for_text(page, "Beside vllm-deepseek-v3.2-6l-claim")
    page.wait_for_timeout(500)  # until the picture is painted
    shoot(page, "08-compared")


def test_an_interrupt_changes_nothing_and_a_restart_keeps_the_rounds(board, jupyterlab, shoot):
    page, (_, root) = board, jupyterlab
    before = runs_in(root)
    field(page, "Rounds").fill("5000")
    field(page, "Rounds").press("Tab")
    button(page, "Start").click()
    wait_for_text(page, r"round \d+ of 5000")
    choose(page, "Kernel", "^Interrupt Kernel")
    seen = int(wait_for_text(page, r"round (\d+) of 5000")[1])
    wait_for_round(page, seen + 1)

    restart_and_run_all(page)
    (run,) = runs_in(root) - before
    wait_for_text(page, f"{run.name} is not finished: Start resumes it")
    assert field(page, "Rounds").input_value() == "5000"
    button(page, "Open").click()
    wait_for_text(page, rf"runs/{run.name}")
    wait_for_text(page, "gap of random")
    shoot(page, "09-after-a-restart")
    kept = rounds_in(run)
    assert kept > seen
    time.sleep(3)
    assert rounds_in(run) == kept, "the child outlived its kernel"


def runs_in(root):
    return {place for place in (root / "runs").iterdir() if place.is_dir()}


def rounds_in(run):
    return kvlab.open_run(run).samples["round"].nunique()
