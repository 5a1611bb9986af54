"""The timeline in JupyterLab, on a session that is stepped in the notebook's own kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ui.browser import keep_shot, missing
from tests.ui.lab import Lab, opened_lab
from tracing.records import PHASE_COLOURS

NEEDED = ("anywidget", "jupyterlab", "nbformat")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing(*NEEDED) is not None, reason=missing(*NEEDED) or "")]

CELLS = [
    """
from workbench import Session
from workbench.widgets.timeline import TimelineWidget

options = dict(max_requests=4, max_batch_tokens=64, max_sequence_length=64, num_blocks=64)
session = Session("oracle", device="cpu", op_sleep_s=0.001, **options)
view = TimelineWidget(session)
view
""".strip(),
    """
session.submit([[1, 2, 3], [4, 5]], max_tokens=40, ignore_eos=True)
session.run(12)
session.engine.device.synchronize()
view.update()
""".strip(),
]


# What a page's scripts below begin with; `lanes` and `strip` are places on the canvas.
TIMELINE = """
const { painter, canvas, store, view } = document.querySelector(".wb-timeline").timeline;
const { group, strip, lanes } = painter.blocks[0];
const topOf = (lane) => (lane === "iterations" ? strip : lanes.find((one) => one.lane.label === lane).top);
"""


def of_timeline(lab: Lab, script: str, *arguments: Any) -> Any:
    """Run a script's body with the timeline's parts in hand; ``rest`` holds the arguments."""
    return lab.page.evaluate(f"(rest) => {{ {TIMELINE} {script} }}", list(arguments))


def wait_for_iterations(lab: Lab, count: int) -> None:
    """Until the browser has so many, and has painted them."""
    lab.page.wait_for_function(
        "(count) => document.querySelector('.wb-timeline')?.timeline.store.numIterations === count",
        arg=count,
    )
    lab.wait_until_painted()


def colours_in(lab: Lab, lane: str) -> set[str]:
    """All colours along the upper part of a lane."""
    data = of_timeline(
        lab,
        """const pen = canvas.getContext("2d");
           return [...pen.getImageData(104, topOf(rest[0]) + 3, canvas.width - 104, 1).data];""",
        lane,
    )
    return {"#{:02X}{:02X}{:02X}".format(*data[at : at + 3]) for at in range(0, len(data), 4)}


def place(lab: Lab, lane: str, iteration: int) -> tuple[float, float]:
    """The middle of an iteration in a lane."""
    lab.page.locator(".wb-timeline canvas").scroll_into_view_if_needed()
    x, y = of_timeline(
        lab,
        """const box = canvas.getBoundingClientRect(), row = group.rowOf(rest[1]), { at, till } = group.iterations;
           return [box.left + painter.x((at[row] + till[row]) / 2), box.top + topOf(rest[0]) + 9];""",
        lane,
        iteration,
    )
    return x, y


def view_of(lab: Lab) -> list[float]:
    """Its ends, once what is due was painted."""
    lab.wait_until_painted()
    ends: list[float] = of_timeline(lab, "return [view.from, view.to];")
    return ends


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_stepped_session_is_shown_hovered_selected_moved_and_followed(
    browser: Any, tmp_path: Path, dark: bool
) -> None:
    with opened_lab(browser, tmp_path, CELLS, dark=dark) as lab:
        lab.run_all()
        wait_for_iterations(lab, 12)
        page, theme = lab.page, "dark" if dark else "light"
        assert page.get_attribute(".wb-timeline", "data-theme") == theme
        assert PHASE_COLOURS["forward"] in colours_in(lab, "device compute")
        assert PHASE_COLOURS["resolve"] in colours_in(lab, "host")
        keep_shot(page, f"lab-{theme}")

        page.mouse.move(*place(lab, "iterations", 10))
        assert page.inner_text(".wb-timeline-tip").startswith("iteration 10 · overlap")
        page.mouse.click(*place(lab, "iterations", 10))
        lab.wait_for("view.selected_iteration", 10)
        keep_shot(page, f"lab-{theme}-selected")

        page.mouse.wheel(0, -500)
        zoomed = view_of(lab)
        page.keyboard.press("ArrowLeft")
        assert view_of(lab)[0] < zoomed[0]
        lab.wait_for("view.follow", False)

        lab.ask("[session.run(3), view.update(), None][2]")
        wait_for_iterations(lab, 15)
        assert view_of(lab)[1] < zoomed[1]
        page.click(".wb-timeline >> text=Follow")
        lab.wait_for("view.follow", True)
        assert view_of(lab)[1] > zoomed[1]

        lab.ask("setattr(view, 'selected_iteration', 2)")
        page.wait_for_function("() => document.querySelector('.wb-selected').innerText.startsWith('iteration 2 ')")
        assert lab.errors == []


def test_its_keys_do_nothing_to_the_notebook_around_it(browser: Any, tmp_path: Path) -> None:
    """In command mode JupyterLab takes D, D for "delete the cell" and A for "insert one above"."""
    with opened_lab(browser, tmp_path, CELLS) as lab:
        lab.run_all()
        wait_for_iterations(lab, 12)
        page = lab.page
        page.mouse.click(*place(lab, "iterations", 9))
        lab.wait_for("view.selected_iteration", 9)
        before = view_of(lab)
        for key in ("d", "d", "a", "b", "x", "m", "f", "0", "w"):
            page.keyboard.press(key)

        assert view_of(lab) != before
        sources = page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
              .map((cell) => [cell.model.type, cell.model.sharedModel.getSource()])"""
        )
        assert sources == [["code", cell] for cell in CELLS]
        page.keyboard.press("Control+s")
        page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
        assert lab.errors == []


def test_a_reloaded_page_gets_its_picture_back_and_a_step_shows_what_is_in_hand(browser: Any, tmp_path: Path) -> None:
    with opened_lab(browser, tmp_path, CELLS) as lab:
        lab.run_all()
        wait_for_iterations(lab, 12)
        page = lab.page
        page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        page.wait_for_timeout(1_000)
        page.reload()
        wait_for_iterations(lab, 12)
        lab.ask("[session.step_phase(), session.step_phase(), session.step_phase(), view.update(), None][4]")
        page.wait_for_function("() => document.querySelector('.wb-timeline').timeline.store.groups[0].inHand")
        lab.wait_until_painted()
        keep_shot(page, "lab-stepped")

        assert (
            page.evaluate("() => document.querySelector('.wb-timeline').timeline.store.groups[0].inHand.iteration")
            == 12
        )
        assert lab.errors == []
