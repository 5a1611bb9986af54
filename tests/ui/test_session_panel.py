"""``session.panel()`` in JupyterLab: every button does to the real engine what it says, and the page shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ui.browser import keep_shot, missing
from tests.ui.lab import Lab, opened_lab

NEEDED = ("anywidget", "jupyterlab", "nbformat", "plotly")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing(*NEEDED) is not None, reason=missing(*NEEDED) or "")]

MAKE = """
from workbench import Session

options = dict(max_requests=4, max_batch_tokens=512, max_sequence_length=512, num_blocks=128, graphs=(1, 2, 4))
session = Session("oracle", device="cpu", op_sleep_s=0.004, **options)
session.submit([[1, 2, 3], [4, 5]], max_tokens=300, ignore_eos=True)
panel = session.panel()
panel
""".strip()
BREAK = """
phases = session.engine.controller.phase_functions
whole = phases.copy()
resolve = next(phase for phase in phases if phase.value == "resolve")

def break_resolve():
    phases[resolve] = lambda iteration: 1 / 0

def mend_resolve():
    phases.update(whole)
""".strip()
IN_HAND = "session.engine.in_hand is not None"
SHOWN = "[[row['request_id'], str(row['kv_len'])] for row in panel.panes.shown('requests')['rows']]"
IS_SHOWN = """
(told) => JSON.stringify(told) === JSON.stringify([...document.querySelectorAll(".wb-pane-requests tbody tr")]
  .map((line) => [line.querySelector(".wb-id").textContent, line.cells[6].textContent]))
"""
BEGUN = "session.engine.controller.next_index"


@contextmanager
def opened_panel(browser: Any, folder: Path, *more: str, dark: bool = False) -> Iterator[Lab]:
    """A notebook whose first cell makes a session of two long requests and shows its panel."""
    with opened_lab(browser, folder, [MAKE, *more], dark=dark) as lab:
        lab.run_all()
        lab.page.wait_for_selector(".wb-panel-bar .wb-headline:text('between')")
        lab.page.keyboard.press("Escape")
        yield lab


def command(lab: Lab, name: str) -> Any:
    return lab.page.locator(f".wb-panel [data-command={name}]").first


def slow_down(lab: Lab, rest_s: float = 0.2) -> None:
    """Have a run of 300 iterations last for a minute, so that it goes on however late a busy machine looks at it."""
    lab.ask(f"setattr(session, 'pace_s', {rest_s!r})")


def open_tab(lab: Lab, name: str) -> None:
    lab.page.locator(".wb-panel [role=tab]", has_text=name).click()


class TestDriving:
    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    def test_a_phase_a_step_and_the_strip_between_them(self, browser: Any, tmp_path: Path, dark: bool) -> None:
        with opened_panel(browser, tmp_path, dark=dark) as lab:
            command(lab, "step_phase").click()
            lab.wait_for("session.engine.next_phase.value", "prepare")
            lab.page.wait_for_selector(".wb-headline:text('before prepare (after admit)')")
            command(lab, "step").click()
            lab.wait_for(IN_HAND, False)
            for _ in range(2):
                command(lab, "step").click()
            lab.wait_for(BEGUN, 3)
            command(lab, "step_phase").click()
            lab.wait_for("session.engine.next_phase.value", "sample")
            lab.page.wait_for_selector(".wb-headline:text('3 overlap')")

            keep_shot(lab.page, f"panel-{'dark' if dark else 'light'}")
            assert lab.page.get_attribute(".wb-timeline", "data-theme") == ("dark" if dark else "light")
            lab.wait_for("panel.timeline.theme", "dark" if dark else "light")
            assert lab.errors == []

    def test_a_run_of_many_is_paused_and_the_kernel_answers_meanwhile(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path, "answer = session.state") as lab:
            slow_down(lab)
            command(lab, "run").click()
            lab.page.wait_for_selector(".wb-panel :text('running')")
            lab.wait_for("session.state", "running")
            shown = lab.page.locator(".wb-setup").inner_text()  # with the count of iterations
            lab.page.wait_for_function("(text) => document.querySelector('.wb-setup').textContent !== text", arg=shown)
            begun = lab.ask(f"[session.pause(), {BEGUN}][1]")
            lab.wait_for("session.state", "paused")
            assert lab.ask(BEGUN) <= begun + 1
            lab.page.wait_for_selector(".wb-headline:text('between iterations')")

            lab.page.locator(".wb-joined .wb-count").fill("5")
            before = lab.ask(BEGUN)
            command(lab, "run").click()
            lab.wait_for(BEGUN, before + 5)
            lab.wait_for("session.state", "paused")
            assert lab.errors == []

    def test_the_mode_is_switched_in_the_middle_of_a_run(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path) as lab:
            slow_down(lab)
            command(lab, "run").click()
            lab.wait_for("session.state", "running")
            lab.page.get_by_label("mode legacy").click()
            lab.wait_for("session.mode", "legacy")
            lab.page.get_by_label("mode async").click()
            lab.wait_for("session.mode", "async")
            assert lab.ask("session.state") == "running"
            slow_down(lab, 0.0)
            lab.wait_for("session.state", "finished")
            lab.wait_for("[len(output.token_ids) for output in session.outputs.values()]", [300, 300])
            assert lab.errors == []

    def test_a_slow_pace_is_kept_and_ended_at_once(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path) as lab:
            lab.page.locator(".wb-pace").select_option("1")
            lab.wait_for("session.pace_s", 1.0)
            slow_down(lab, 3_600.0)
            command(lab, "run").click()
            lab.wait_for("session.state", "running")
            command(lab, "pause").click()
            lab.wait_for("session.state", "paused")  # and not an hour later
            assert lab.ask(BEGUN) <= 2


class TestLooking:
    def test_a_breakpoint_made_in_its_pane_stops_the_run_where_it_says(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path) as lab:
            open_tab(lab, "Breakpoints")
            lab.page.locator(".wb-panel select[name=phase]").select_option("resolve")
            lab.page.locator(".wb-panel input[name=when]").fill("s.row(0).output_tokens >= 8")
            lab.page.get_by_role("button", name="Add breakpoint").click()
            lab.wait_for("len(list(session.breakpoints))", 1)
            command(lab, "run").click()
            lab.wait_for("session.stopped is not None and session.stopped.cause.value", "breakpoint")
            assert lab.ask("session.engine.next_phase.value") == "resolve"
            assert lab.ask("session.row(0).output_tokens") == 8
            lab.page.wait_for_selector(".wb-headline:text('before resolve')")
            keep_shot(lab.page, "panel-breakpoint")
            assert lab.errors == []

    def test_what_phases_wrote_is_shown_and_history_goes_back_to_it(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path) as lab:
            open_tab(lab, "Read / wrote")
            lab.page.get_by_label("record changes").check()
            lab.wait_for("session.record_changes", True)
            for _ in range(4):
                command(lab, "step").click()
            lab.wait_for(BEGUN, 4)
            lab.page.wait_for_selector(".wb-card:has-text('resolve') :text('num_output')")
            keep_shot(lab.page, "panel-changes")
            open_tab(lab, "History")
            lab.page.get_by_label("Previous iteration").click()
            lab.wait_for("panel.commands.chosen", 2)
            lab.wait_for("panel.timeline.selected_iteration", 2)
            lab.page.wait_for_selector(".wb-panel :text('iteration 2 overlap')")
            keep_shot(lab.page, "panel-history")
            assert lab.errors == []

    def test_an_iteration_clicked_in_the_timeline_is_the_one_that_panes_show(
        self, browser: Any, tmp_path: Path
    ) -> None:
        with opened_panel(browser, tmp_path) as lab:
            lab.ask("[session.run(12), None][1]")
            lab.page.wait_for_function(
                "() => document.querySelector('.wb-timeline')?.timeline.store.numIterations >= 11"
            )
            lab.ask("[setattr(panel.timeline, 'selected_iteration', 7), None][1]")
            lab.wait_for("panel.commands.chosen", 7)
            open_tab(lab, "History")
            lab.page.wait_for_selector(".wb-panel :text('iteration 7')")

    def test_figures_are_drawn_and_saved_where_somebody_looks(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path) as lab:
            lab.ask("[session.run(), None][1]")
            assert lab.ask("panel.figures is None") is True
            open_tab(lab, "Figures")
            lab.page.locator("button:has-text('Draw')").click()
            lab.page.wait_for_selector(".js-plotly-plot .main-svg")
            lab.page.locator("input[type=text]").last.fill("latency.svg")
            lab.page.locator("button:has-text('Save')").last.click()
            lab.wait_for("panel.figures.line.value[:6]", "saved:")
            assert "<svg" in (tmp_path / "latency.svg").read_text()
            lab.page.locator(".js-plotly-plot").scroll_into_view_if_needed()
            keep_shot(lab.page, "panel-figures")
            assert lab.errors == []


class TestTheWholeTruth:
    def test_of_the_requests_is_there_in_a_reloaded_page_while_only_changes_are_sent(
        self, browser: Any, tmp_path: Path
    ) -> None:
        with opened_panel(browser, tmp_path) as lab:
            lab.ask("[session.submit([[6]] * 10, max_tokens=300, ignore_eos=True), session.run(9), None][2]")
            lab.wait_for("len(panel.panes.shown('requests')['rows'])", 12)
            lab.ask("[session.run(1), panel.redraw(), None][2]")  # the wait until now voids them all
            lab.ask("[session.abort('request-9'), session.run(3), panel.redraw(), None][3]")
            assert lab.ask("len(panel.panes.requests_news['rows'])") == 5
            told = lab.ask(SHOWN)
            lab.page.wait_for_function(IS_SHOWN, arg=told)
            lab.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
            lab.page.reload()
            lab.page.wait_for_function(IS_SHOWN, arg=told)
            lab.ask("[session.step(), None][1]")
            lab.page.wait_for_function(IS_SHOWN, arg=lab.ask(f"[panel.redraw(), {SHOWN}][1]"))
            assert lab.errors == []

    def test_a_cell_that_is_run_again_ends_the_looking_of_the_panel_it_showed_before(
        self, browser: Any, tmp_path: Path
    ) -> None:
        with opened_panel(browser, tmp_path, "old = globals().get('old', panel)") as lab:
            assert lab.ask("old._ticker.is_running") is True
            lab.page.evaluate(
                """() => {
                  window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0;
                  window.jupyterapp.commands.execute("notebook:run-cell");
                }"""
            )
            lab.wait_for("[panel is not old, panel._ticker.is_running, old._ticker.is_running]", [True, True, False])


class TestRequests:
    def test_one_is_handed_in_and_another_aborted(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path) as lab:
            command(lab, "submit").click()
            lab.page.locator(".wb-panel [name=prompt]").fill("7 8 9")
            lab.page.locator(".wb-panel [name=max_tokens]").fill("5")
            lab.page.locator(".wb-panel form button:has-text('Submit')").click()
            lab.wait_for("len(session.submissions)", 3)
            for _ in range(3):
                command(lab, "step").click()
            lab.page.get_by_label("Abort request-0").click()
            lab.page.wait_for_selector(".wb-notice-text:has-text('request-0 is aborted')")
            command(lab, "step").click()
            lab.wait_for("session.outputs['request-0'].finish_reason", "abort")
            assert lab.errors == []


class TestTrouble:
    def test_an_exception_in_a_phase_is_shown_and_the_session_recovers(self, browser: Any, tmp_path: Path) -> None:
        with opened_panel(browser, tmp_path, BREAK) as lab:
            for _ in range(3):
                command(lab, "step").click()
            lab.wait_for(BEGUN, 3)
            lab.ask("break_resolve()")
            command(lab, "step").click()
            lab.page.wait_for_selector(".wb-notice-text:has-text('ZeroDivisionError')")
            lab.wait_for("session.state", "failed")
            keep_shot(lab.page, "panel-failed")
            lab.ask("mend_resolve()")
            command(lab, "recover").click()
            lab.wait_for("session.state", "paused")
            lab.ask("[session.run(), None][1]")
            assert lab.ask("[len(output.token_ids) for output in session.outputs.values()]") == [300, 300]

    def test_two_sessions_in_one_kernel_are_driven_apart(self, browser: Any, tmp_path: Path) -> None:
        second = MAKE.replace("session", "other").replace(
            "panel = other.panel()\npanel", "second = other.panel()\nsecond"
        )
        with opened_panel(browser, tmp_path, second) as lab:
            first, last = (lab.page.locator(".wb-panel-whole").nth(n) for n in (0, 1))
            last.locator("[data-command=step]").click()
            lab.wait_for("other.engine.controller.next_index", 1)
            slow_down(lab)
            first.locator("[data-command=run]").click()
            lab.wait_for("session.state", "running")
            last.locator("[data-command=step_phase]").click()
            lab.wait_for("other.engine.in_hand is not None", True)
            assert lab.ask("session.state") == "running"
            lab.ask("[second.close(), None][1]")
            slow_down(lab, 0.0)
            lab.wait_for("session.state", "finished")
            assert lab.ask("[len(other.step()), other.engine.controller.next_index][1]") == 2
