"""The panel's front-end alone, in a browser: each control sends its command, each view shows what it was sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.browser import keep_shot, missing
from workbench.panel.messages import COMMANDS, TABS

pytestmark = pytest.mark.skipif(missing("anywidget") is not None, reason=missing("anywidget") or "")

if missing("anywidget") is None:
    from tests.ui.panel_page import PanelPage, panel_page
    from tests.ui.panel_worlds import (
        bar_view,
        everything,
        requests_view,
        stops_view,
        strip_view,
    )

HTML = '<img src=x onerror="window.wasHit=true"><b>bold</b>'
AREA = ".wb-pane:not([hidden]) .wb-scroll"


@pytest.fixture
def page(browser: Any) -> Iterator[PanelPage]:
    """A page with a session in mid run; no test may leave an error on its console."""
    with panel_page(browser, everything()) as panel:
        yield panel
        assert panel.errors == []


class TestControls:
    @pytest.mark.parametrize(
        ("name", "command", "args"),
        [
            ("Phase", "step_phase", {}),
            ("Step", "step", {}),
            ("Run", "run", {"n": None}),
            ("Pause", "pause", {}),
            ("mode legacy", "set_mode", {"mode": "legacy"}),
        ],
    )
    def test_send_their_command(self, page: PanelPage, name: str, command: str, args: dict[str, Any]) -> None:
        page.button(name).click()

        assert page.commands() == [(command, args)]

    def test_run_as_many_iterations_as_the_field_says(self, page: PanelPage) -> None:
        page.page.get_by_label("Iterations to run").fill("25")
        page.button("Run").click()
        page.page.get_by_label("Iterations to run").press("Enter")

        assert page.commands() == 2 * [("run", {"n": 25})]

    def test_do_not_run_a_number_of_iterations_that_is_none(self, page: PanelPage) -> None:
        page.page.get_by_label("Iterations to run").fill("-3")
        page.button("Run").click()

        assert page.commands() == []

    def test_set_the_pace(self, page: PanelPage) -> None:
        page.page.get_by_label("Pace").select_option(label="5 steps/s")
        page.page.get_by_label("Pace").select_option(label="full speed")

        assert page.commands() == [("set_pace", {"per_s": 5}), ("set_pace", {"per_s": 0})]

    def test_show_a_pace_that_python_set(self, page: PanelPage) -> None:
        page.set("pace", 2.5)

        assert page.page.get_by_label("Pace").input_value() == "2.5"
        assert "2.5 steps/s" in page.page.get_by_label("Pace").inner_text()

    @pytest.mark.parametrize("name", ["Reset", "Restart"])
    def test_drop_what_was_recorded_only_by_a_second_click(self, page: PanelPage, name: str) -> None:
        page.button(name).click()
        assert page.commands() == []
        page.page.get_by_role("button", name="Sure?").click()

        assert page.commands() == [(name.lower(), {})]
        assert page.button(name).is_visible()

    def test_forget_a_first_click_on_reset_after_a_while(self, page: PanelPage) -> None:
        page.page.clock.install()
        page.button("Reset").click()
        page.page.clock.run_for(4_500)

        assert page.button("Reset").is_visible()
        assert page.commands() == []

    def test_offer_to_recover_only_what_failed(self, page: PanelPage) -> None:
        assert not page.button("Recover").is_visible()
        page.set("bar", bar_view(state="failed", can={name: name == "recover" for name in COMMANDS}))
        page.button("Recover").click()

        assert page.commands() == [("recover", {})]

    def test_send_nothing_for_what_means_nothing_now(self, page: PanelPage) -> None:
        page.set("bar", bar_view(can={name: name == "pause" for name in COMMANDS}))
        for name in ("Phase", "Step", "Run", "Until", "Submit…", "Restart", "Reset", "Save…", "mode legacy"):
            assert page.button(name).is_disabled(), name
            page.button(name).click(force=True)
        assert page.page.get_by_label("Pace").is_disabled()
        assert not page.page.locator(".wb-popover:popover-open").count()
        assert page.commands() == []
        page.button("Pause").click()
        assert page.commands() == [("pause", {})]

    def test_do_nothing_before_anything_is_known(self, browser: Any) -> None:
        with panel_page(browser) as page:
            page.button("Run").click(force=True)
            page.point()
            page.press("p")

            assert page.commands() == []
            assert page.errors == []


class TestUntil:
    def test_runs_to_a_phase(self, page: PanelPage) -> None:
        page.button("Until").click()
        page.button("resolve").click()

        assert page.commands() == [("run_to", {"phase": "resolve"})]
        page.answer("run_to")
        assert not page.page.locator(".wb-popover:popover-open").count()

    def test_runs_until_an_expression_is_true(self, page: PanelPage) -> None:
        page.button("Until").click()
        page.page.get_by_label("until this is true").fill("s.row(0).output_tokens >= 8")
        page.press("Enter")

        assert page.commands() == [("run_until", {"expression": "s.row(0).output_tokens >= 8"})]

    def test_stays_open_with_what_was_typed_and_the_reason_where_it_is_refused(self, page: PanelPage) -> None:
        """A typo closed the popover, and why was said only in the bar."""
        page.button("Until").click()
        page.page.get_by_label("until this is true").fill("s.rwo(0)")
        page.press("Enter")
        page.answer("step", "the answer to something else")
        page.answer("run_until", "no attribute 'rwo'", level="error")
        opened = page.page.locator(".wb-popover:popover-open")

        assert opened.locator(".wb-form-error").inner_text() == "✕ no attribute 'rwo'"
        assert page.page.get_by_label("until this is true").input_value() == "s.rwo(0)"
        page.press("Enter")
        page.answer("run_until", "runs until")
        assert opened.count() == 0

    def test_wants_an_expression(self, page: PanelPage) -> None:
        page.button("Until").click()
        page.button("Run until").click()

        assert page.commands() == []

    def test_closes_by_escape_and_by_its_own_button(self, page: PanelPage) -> None:
        opened = page.page.locator(".wb-popover:popover-open")
        for close in (lambda: page.press("Escape"), lambda: page.button("Until").click()):
            page.button("Until").click()
            assert opened.count() == 1
            close()
            assert opened.count() == 0
        assert page.commands() == []


class TestSubmit:
    def test_sends_what_was_filled_in_and_none_for_the_rest(self, page: PanelPage) -> None:
        page.button("Submit…").click()
        page.page.get_by_label("prompt").fill("Once upon\na time")
        page.page.get_by_label("temperature").fill("0.7")
        page.page.get_by_label("stop texts").fill("\\n\nThe end")
        page.button("Submit").click()

        assert page.commands() == [
            (
                "submit",
                {
                    "prompt": "Once upon\na time",
                    "max_tokens": None,
                    "temperature": 0.7,
                    "stop": ["\n", "The end"],
                    "seed": None,
                },
            )
        ]
        page.answer("submit", "submitted request-3")
        assert not page.page.locator(".wb-popover:popover-open").count()

    def test_is_handed_in_from_the_prompt_by_ctrl_enter_which_runs_no_cell(self, page: PanelPage) -> None:
        page.button("Submit…").click()
        page.page.get_by_label("prompt").fill("Once")
        page.press("Control+Enter")

        assert [(name, args["prompt"]) for name, args in page.commands()] == [("submit", "Once")]
        assert "up Ctrl+Enter" not in page.heard()

    def test_saves_into_a_folder(self, page: PanelPage) -> None:
        page.button("Save…").click()
        page.page.get_by_label("folder").fill("runs/mine")
        page.button("Save").click()

        assert page.commands() == [("save", {"folder": "runs/mine"})]


class TestKeys:
    KEYS = (("p", "step_phase"), ("s", "step"), ("r", "run"), (" ", "pause"), ("m", "set_mode"))

    @pytest.mark.parametrize(("key", "command"), KEYS)
    def test_work_while_the_pointer_is_in_the_panel_and_stay_there(
        self, page: PanelPage, key: str, command: str
    ) -> None:
        page.point()
        page.press(key)

        assert [name for name, _ in page.commands()] == [command]
        assert page.heard() == []

    def test_work_while_the_focus_is_in_the_panes(self, page: PanelPage) -> None:
        page.page.get_by_role("tab", name="Requests").focus()
        page.leave()
        page.press("p")

        assert page.commands() == [("step_phase", {})]
        assert page.heard() == []

    def test_are_not_taken_elsewhere(self, page: PanelPage) -> None:
        page.leave()
        page.press("p")

        assert page.commands() == []
        assert page.heard() == ["down p", "up p"]

    def test_are_letters_in_a_field(self, page: PanelPage) -> None:
        page.button("Submit…").click()
        page.page.keyboard.type("press")
        assert page.page.get_by_label("prompt").input_value() == "press"
        page.press("Escape")
        page.page.focus("#elsewhere")
        page.point()
        page.page.keyboard.type("p")

        assert page.page.input_value("#elsewhere") == "p"
        assert page.commands() == []

    @pytest.mark.parametrize(("opener", "field"), [("Submit…", "prompt"), ("Save…", "folder"), ("Until", "admit")])
    def test_go_to_the_first_field_of_a_form_from_the_very_click_that_opens_it(
        self, page: PanelPage, opener: str, field: str
    ) -> None:
        """The focus came a task later: what was typed before that was lost on a busy machine."""
        for _ in range(2):
            focused = page.button(opener).evaluate(
                """(opener) => {
                  opener.click();
                  const { name, textContent } = document.activeElement;
                  return name || textContent;
                }"""
            )
            assert focused == field
            page.press("Escape")
            assert not page.page.locator(".wb-popover:popover-open").count()

    def test_with_ctrl_go_on_to_the_notebook(self, page: PanelPage) -> None:
        page.button("Phase").focus()
        page.press("Control+s")

        assert page.heard()[-2:] == ["down Ctrl+s", "up Ctrl+s"]
        assert page.commands() == []

    def test_that_mean_nothing_here_are_not_the_notebooks_either(self, page: PanelPage) -> None:
        page.button("Phase").focus()
        page.press("d", "d")

        assert page.heard() == []

    def test_space_does_not_press_again_what_was_clicked_last(self, page: PanelPage) -> None:
        """A clicked button that kept the focus would: Step, then R, then Space to pause stepped once more."""
        page.button("Step").click()
        page.leave()
        page.press("r", " ")

        assert [name for name, _ in page.commands()] == ["step", "run", "pause"]

    def test_are_taken_from_switches_thumbs_and_closed_lists_in_the_panel_but_for_space(self, page: PanelPage) -> None:
        """S after a click on "record changes" did nothing: any field swallowed it."""
        page.open_tab("Read / wrote")
        page.page.get_by_label("record changes").focus()
        page.press("s", " ")
        assert page.commands() == [("step", {}), ("record_changes", {"wanted": False})]
        page.open_tab("History")
        for label in ("Iteration", "Pace"):
            page.page.get_by_label(label, exact=True).focus()
            page.press("p")
            assert page.commands() == [("step_phase", {})], label
        page.page.get_by_label("Go to iteration").focus()
        page.press("p")
        assert page.commands() == []

    def test_say_that_they_go_to_an_editor_elsewhere_until_the_panel_is_clicked(self, page: PanelPage) -> None:
        """Behind Shift+Enter the cursor is in the next cell: P was typed there, and nothing said so."""
        words = page.page.get_by_text("Typing goes to the cell")
        assert not words.is_visible()
        page.page.focus("#elsewhere")
        page.point()
        assert words.is_visible()
        words.click()
        assert not words.is_visible()
        page.page.focus("#elsewhere")
        page.page.click(".wb-pane-requests .wb-left-out")
        page.press("p")

        assert not words.is_visible()
        assert page.commands() == [("step_phase", {})]
        assert page.page.input_value("#elsewhere") == ""

    def test_space_presses_a_button_that_tab_reached_and_pauses_once_it_means_nothing(self, page: PanelPage) -> None:
        page.button("Step").focus()
        page.press(" ")
        assert page.commands() == [("step", {})]
        page.set("bar", bar_view(state="running", can={"pause": True}))
        page.press(" ")

        assert page.commands() == [("pause", {})]

    def test_are_named_in_the_buttons_titles(self, page: PanelPage) -> None:
        titles = {name: page.button(name).get_attribute("title") for name in ("Phase", "Step", "Run", "Pause")}

        assert [title[-3:] for title in titles.values()][:3] == ["(P)", "(S)", "(R)"]
        assert titles["Pause"].endswith("(Space)")


class TestMode:
    def test_tells_what_a_switch_would_do(self, page: PanelPage) -> None:
        page.page.hover(".wb-modes")
        assert "No token is lost" in page.page.inner_text(".wb-hint-box:popover-open")
        page.leave()
        assert page.page.locator(".wb-hint-box:popover-open").count() == 0
        page.button("mode async").focus()
        assert page.page.locator(".wb-hint-box:popover-open").count() == 1

    def test_shows_the_mode_that_is_on_its_way_and_takes_it_back(self, page: PanelPage) -> None:
        page.set("bar", bar_view(wanted_mode="legacy"))
        assert page.button("mode legacy, from the next iteration on").inner_text() == "legacy …"
        page.point()
        page.press("m")
        page.button("mode async").click()

        assert page.commands() == 2 * [("set_mode", {"mode": "async"})]

    def test_is_left_alone_by_a_click_on_the_mode_it_is_in(self, page: PanelPage) -> None:
        page.button("mode async").click()

        assert page.commands() == []


class TestNotice:
    def test_shows_a_line_and_its_traceback_on_demand(self, page: PanelPage) -> None:
        page.set("notice", {"number": 4, "level": "error", "text": f"it failed: {HTML}", "detail": f"Traceback {HTML}"})

        assert page.page.inner_text(".wb-notice-text") == f"it failed: {HTML}"
        assert page.page.get_attribute(".wb-notice-text", "aria-live") == "assertive"
        assert not page.page.is_visible(".wb-detail")
        page.button("Detail").click()
        assert page.page.inner_text(".wb-detail") == f"Traceback {HTML}"
        assert page.page.evaluate("() => window.wasHit") is None

    def test_can_be_taken_away_and_comes_back_with_the_next(self, page: PanelPage) -> None:
        page.button("Dismiss the notice").click()
        assert page.page.inner_text(".wb-notice-text") == ""
        page.set("notice", {"number": 4, "level": "info", "text": "breakpoint 2 is hit", "detail": ""})

        assert page.page.inner_text(".wb-notice-text") == "breakpoint 2 is hit"

    def test_grows_old_when_the_session_moves_on_without_the_panel(self, page: PanelPage) -> None:
        """ "forward of iteration 3 ran" still stood there after a cell had run everything."""
        page.answer("step_phase", "sample of iteration 1,204 ran")
        page.set("bar", bar_view())
        assert page.page.inner_text(".wb-notice-text") == "sample of iteration 1,204 ran"
        page.set("bar", bar_view(place="1300", state="running"))
        assert page.page.inner_text(".wb-notice-text") == "sample of iteration 1,204 ran"
        page.set("bar", bar_view(place="1300", stopped="nothing is left to do"))

        assert page.page.inner_text(".wb-notice-text") == ""
        assert page.page.inner_text(".wb-rest") == "nothing is left to do"

    def test_without_words_leaves_the_one_before(self, page: PanelPage) -> None:
        page.answer("step", "iteration 1,204 ran")
        page.answer("choose", "")

        assert page.page.inner_text(".wb-notice-text") == "iteration 1,204 ran"


class TestBar:
    def test_says_where_the_session_stands(self, page: PanelPage) -> None:
        assert page.page.inner_text(".wb-state > :last-child") == "paused"
        assert "before forward" in page.page.inner_text(".wb-headline")
        page.set("notice", {})
        assert "breakpoint 2" in page.page.inner_text(".wb-rest")
        assert page.page.inner_text(".wb-setup") == "SmolLM2-135M · cpu · clock wall 12.4 s · 1,205 begun"
        assert page.page.locator(".wb-badges li").all_inner_texts() == ["stepped: times void"]

    def test_strip_names_what_ran_last_and_what_comes_next(self, page: PanelPage) -> None:
        cells = page.page.locator(".wb-phase").all_inner_texts()

        assert [" ".join(cell.split()) for cell in cells] == [
            "✓ prepare done",
            "● sample ran last",
            "▶ forward next",
            "resolve to come",
            "emit to come",
        ]
        assert page.page.inner_text(".wb-phase[aria-current=step] .wb-phase-name") == "sample"
        assert "because all rows" in page.page.inner_text(".wb-why")

    def test_strip_follows_another_order(self, page: PanelPage) -> None:
        phases = [{**one, "state": "coming"} for one in strip_view()["phases"][::-1]]
        page.set("strip", strip_view(order="drain", phases=phases[:2], forwards=[]))
        assert page.page.locator(".wb-phase-name").all_inner_texts() == ["emit", "resolve"]
        page.set("strip", strip_view(is_in_hand=False, next_order="overlap: decode rows only", next_phase="prepare"))

        assert page.page.inner_text(".wb-strip-foot").startswith("Next, from prepare on: Iteration 1,204 takes overlap")

    def test_strip_tells_how_a_forward_uses_its_token_budget(self, page: PanelPage) -> None:
        budget = {"limit": 128, "decode": 16, "prompt": 48, "padding": 0}
        text = "1 prefill and 16 decode rows, 64 tokens"
        page.set("strip", strip_view(forwards=[{"role": "prepared", "iteration": 7, "text": text, "budget": budget}]))
        cell = page.page.locator(".wb-forwards li")

        said = " ".join(cell.inner_text().split("·")[0].split())
        assert said == "prepared: forward 7 16 decode + 48 prompt of 128 tokens"
        assert "16 decode + 48 prompt of max_batch_tokens=128" in cell.get_attribute("title")
        whole = cell.locator(".wb-budget").bounding_box()["width"]
        shares = [part.bounding_box()["width"] / whole for part in cell.locator(".wb-budget i").all()]
        assert shares == pytest.approx([1 / 8, 3 / 8, 0], abs=0.02)

    def test_strip_says_once_that_nothing_can_come(self, page: PanelPage) -> None:
        words = "No request is live: submit one."
        page.set("strip", strip_view(is_in_hand=False, next_order=words, next_phase=None, why=words))

        assert page.page.inner_text(".wb-strip-foot") == words

    def test_strip_without_an_order_has_no_colour_of_one(self, page: PanelPage) -> None:
        """Behind Restart "no order yet" stood on the colour of the last order."""
        background = "() => getComputedStyle(document.querySelector('.wb-order')).backgroundColor"
        painted = page.page.evaluate(background)
        page.set("strip", strip_view(order=None, colour="", phases=[], iteration=None))

        assert page.page.inner_text(".wb-order") == "no order yet"
        assert page.page.evaluate(background) != painted

    def test_cuts_neither_the_place_nor_the_explanation_in_jupyterlab(self, browser: Any) -> None:
        """The title lost "before resolve" behind its reason, and the explanation its last words."""
        with panel_page(browser, everything(), width=870) as page:
            cut = page.page.evaluate(
                """() => [".wb-headline", ".wb-strip-title", ".wb-strip-foot", ".wb-id"].filter((name) =>
                  [...document.querySelectorAll(name)].some((one) => {
                    const box = one.closest("td") || one;
                    return box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
                  }))"""
            )
            assert cut == []

    def test_keeps_its_height_whatever_happens(self, page: PanelPage) -> None:
        def height() -> float:
            tall: float = page.page.locator(".wb-panel-bar").bounding_box()["height"]
            return tall

        before = height()
        page.set("notice", {})
        page.set("bar", bar_view(stopped="", badges=[], headline="iteration 9"))
        page.set("strip", strip_view(forwards=[], why="", phases=[], order=None, reason=""))

        assert height() == before


class TestTabs:
    @pytest.mark.parametrize("tab", TABS)
    def test_show_their_pane_alone(self, page: PanelPage, tab: str) -> None:
        page.page.locator(f"[role=tab][id$=-tab-{tab}]").click()
        shown = page.page.locator("[role=tabpanel]:visible")

        assert page.trait("tab") == tab
        assert shown.count() == (0 if tab == "figures" else 1)
        assert tab == "figures" or shown.get_attribute("class") == f"wb-pane wb-pane-{tab}"
        assert page.page.evaluate("() => document.documentElement.scrollWidth") <= 1280

    def test_are_chosen_by_arrow_keys_round_the_bar(self, page: PanelPage) -> None:
        page.page.get_by_role("tab", name="Requests").focus()
        page.press("ArrowRight")
        assert page.trait("tab") == "blocks"
        page.press("ArrowLeft", "ArrowLeft")
        assert page.trait("tab") == "log"
        page.press("Home")

        assert page.trait("tab") == "requests"
        assert page.page.evaluate("() => document.activeElement.textContent") == "Requests"
        assert page.page.locator("[role=tab][tabindex='0']").count() == 1

    def test_follow_python(self, page: PanelPage) -> None:
        page.set("tab", "stops")

        assert page.page.locator("[role=tab][aria-selected=true]").inner_text() == "Breakpoints"

    def test_wait_for_what_was_not_sent_and_tell_what_to_do_where_nothing_is(self, page: PanelPage) -> None:
        page.set("requests", {})
        assert page.page.inner_text(".wb-pane-requests") == "…"
        page.set("requests", requests_view(rows=[], left_out=0))

        assert "Submit… hands one in" in page.page.inner_text(".wb-pane-requests")

    def test_catch_up_when_they_are_chosen(self, page: PanelPage) -> None:
        page.set("stops", stops_view(rows=[]))
        page.open_tab("Breakpoints")

        assert page.page.locator(".wb-stops li").count() == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
class TestThemes:
    def test_have_words_that_can_be_read_in_every_pane(self, browser: Any, dark: bool) -> None:
        with panel_page(browser, everything(), dark=dark) as page:
            for tab in TABS:
                page.set("tab", tab)
                keep_shot(page.page, f"panel-{tab}-{'dark' if dark else 'light'}")
                assert page.page.evaluate("() => window.faint(4.5)") == [], tab
            assert page.page.get_attribute(".wb-panel-bar", "data-theme") == ("dark" if dark else "light")
            assert page.errors == []

    def test_follow_the_notebook_and_not_the_browser(self, browser: Any, dark: bool) -> None:
        with panel_page(browser, everything(), dark=not dark) as page:
            page.page.evaluate(
                """(dark) => {
                  document.body.dataset.jpThemeLight = String(!dark);
                  document.body.style.setProperty("--jp-layout-color0", dark ? "#111111" : "#ffffff");
                  document.body.style.setProperty("--jp-ui-font-color0", dark ? "#ffffff" : "rgba(0, 0, 0, 1)");
                }""",
                dark,
            )
            page.settle()

            for part in ("bar", "panes"):
                assert page.page.get_attribute(f".wb-panel-{part}", "data-theme") == ("dark" if dark else "light")
            assert page.page.evaluate("() => window.faint(4.5)") == []


class TestPlace:
    def test_shows_the_strip_and_the_first_requests_in_one_view_beside_a_timeline(self, browser: Any) -> None:
        """The panel was 1,020 px high in a view of 680: strip and requests were never seen together."""
        timeline = 215  # px: tests/ui/test_timeline.py measures it
        with panel_page(browser, everything(), width=870) as page:
            bar = page.page.locator(".wb-panel-bar").bounding_box()
            panes = page.page.locator(".wb-panel-panes").bounding_box()
            third = page.page.locator(".wb-pane-requests tbody tr").nth(2).bounding_box()

            assert bar["height"] + timeline + third["y"] + third["height"] - panes["y"] <= 680
            assert panes["height"] <= 350

    def test_gives_a_few_requests_no_more_room_than_they_need(self, page: PanelPage) -> None:
        page.set("requests", requests_view(rows=requests_view()["rows"][:2], left_out=0))

        assert page.page.locator(".wb-area").bounding_box()["height"] < 100

    @pytest.mark.parametrize("width", [1280, 870, 640], ids=["1280", "in JupyterLab", "200 percent"])
    def test_needs_no_scrolling_sideways(self, browser: Any, width: int) -> None:
        with panel_page(browser, everything(), width=width) as page:
            for tab in TABS:
                page.set("tab", tab)
                assert page.page.evaluate("() => document.documentElement.scrollWidth") <= width, tab

    def test_names_every_control(self, page: PanelPage) -> None:
        for tab in TABS:
            page.set("tab", tab)
            nameless = page.page.evaluate(
                """() => [...document.querySelectorAll(".wb-panel :is(button, input, select, textarea, canvas)")]
                  .filter((one) => !(one.labels || []).length)
                  .filter((one) => !one.getAttribute("aria-label") && !one.textContent.trim())
                  .map((one) => one.outerHTML)"""
            )
            assert nameless == []

    def test_shows_where_the_focus_is(self, page: PanelPage) -> None:
        page.page.focus("#elsewhere")
        page.press("Tab")
        while page.page.evaluate("() => document.activeElement.getAttribute('role')") != "tab":
            width = page.page.evaluate("() => getComputedStyle(document.activeElement).outlineWidth")
            assert width == "2px", page.page.evaluate("() => document.activeElement.outerHTML")
            page.press("Tab")

    def test_is_left_without_a_trace(self, page: PanelPage) -> None:
        page.page.evaluate("() => { window.shut.bar(); window.shut.panes(); }")
        page.page.mouse.move(300, 100)
        page.press("p")
        page.page.evaluate("() => { document.body.dataset.jpThemeLight = 'false'; }")
        page.settle()

        assert page.page.locator(".wb-panel").count() == 0
        assert page.page.evaluate("() => Object.values(window.models).map((one) => one.numHandlers)") == [0, 0]
        assert page.commands() == []

    def test_works_as_single_modules_too(self, browser: Any) -> None:
        with panel_page(browser, everything(), joined=False) as page:
            page.button("Step").click()

            assert page.commands() == [("step", {})]
            assert page.errors == []
