"""The panel as a whole, without a browser: what a click does is shown at once, and what a cell does soon."""

from __future__ import annotations

import asyncio
import builtins
import gc
import logging
import sys
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("anywidget")

from engine.phases import Phase
from tests.unit.workbench.panel.loops import run_in_turns
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.worlds import make_session, tokens
from workbench.panel import panel as panel_module
from workbench.panel.messages import COMMANDS, TABS
from workbench.panel.panel import Panel
from workbench.session import Session, SessionError

SHOWN_TABS = [tab for tab in TABS if tab != "experts"]
"""Of a model without experts."""


def busy_session(**options: Any) -> Session:
    session = make_session(**options)
    session.submit([[1], [2, 3]], max_tokens=40, ignore_eos=True)
    return session


def shown(panel: Panel) -> tuple[Any, Any, Any]:
    """What is on the page: bar, strip and the pane in view."""
    tab = panel.panes.tab
    return panel.bar.bar, panel.bar.strip, None if tab == "figures" else panel.panes.shown(tab)


def there_is(panel: Panel) -> tuple[Any, Any, Any]:
    """What there is to show."""
    return panel.views.bar(), panel.views.strip(), panel.views.pane(panel.panes.tab)


def click(panel: Panel, name: str, /, **args: Any) -> None:
    """As the front-end sends it."""
    panel.bar._handle_custom_msg({"kind": "command", "name": name, "args": args}, [])


def scratch(name: str, folder: Path) -> dict[str, Any]:
    """Arguments with which a command does something."""
    args: dict[str, dict[str, Any]] = {
        "run": {"n": 3},
        "run_to": {"phase": "resolve"},
        "run_until": {"expression": "s.row(0).output_tokens >= 3"},
        "set_mode": {"mode": "legacy"},
        "set_pace": {"per_s": 100},
        "submit": {"prompt": "4 5", "max_tokens": 3},
        "abort": {"request_id": "request-1"},
        "record_changes": {"wanted": True},
        "read_device": {"name": "last_token"},
        "break_on": {"phase": "forward"},
        "enable_stop": {"id": 1, "enabled": False},
        "remove_stop": {"id": 1},
        "choose": {"iteration": 1},
        "save": {"folder": str(folder / "run")},
    }
    return args.get(name, {})


class TestClicks:
    @pytest.mark.parametrize("tab", SHOWN_TABS)
    @pytest.mark.parametrize("name", COMMANDS)
    def test_each_has_its_picture_at_once(self, name: str, tab: str, tmp_path: Path) -> None:
        async def work() -> None:
            panel = session.panel()
            panel.panes.tab = tab
            if name in ("enable_stop", "remove_stop"):
                session.break_on("emit", request="request-1")
            session.run(3)
            if name == "recover":
                fail_in(session, Phase.RESOLVE)
                panel.do("step")
            before = panel.bar.notice
            click(panel, name, **scratch(name, tmp_path))
            assert panel.bar.notice["number"] == before.get("number", 0) + 1
            assert panel.bar.notice["level"] == "info", panel.bar.notice
            if tab == "figures":
                assert shown(panel)[:2] == there_is(panel)[:2]
            else:
                assert shown(panel) == there_is(panel)
            assert panel.bar.pace == panel.commands.pace_per_s
            session.pause()
            panel.close()

        with busy_session() as session:
            asyncio.run(work())

    def test_an_argument_that_is_nonsense_is_a_notice(self) -> None:
        with busy_session() as session:
            panel = session.panel()
            for widget in (panel.bar, panel.panes):
                message = {"kind": "command", "name": "run", "args": {"n": "x"}}
                widget._handle_custom_msg(message, [])
                assert panel.bar.notice["level"] == "error"
            assert panel.bar.notice["number"] == 2

    def test_a_view_that_raises_is_logged_and_the_notice_stands(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """do() promised never to raise, and a view's error went through it to whoever clicked."""
        with busy_session() as session:
            panel = session.panel()
            with monkeypatch.context() as patch:
                patch.setattr(panel.views, "strip", lambda: 1 / 0)
                assert panel.do("step")["text"] == "iteration 0 ran"
            assert panel.bar.notice["text"] == "iteration 0 ran"
            assert "ZeroDivisionError" in caplog.text
            panel.do("step")
            assert shown(panel) == there_is(panel)

    def test_what_did_not_change_is_not_sent_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with busy_session() as session:
            panel = session.panel()
            session.run(2)
            panel.redraw()
            sent: list[Any] = []
            for widget in (panel.bar, panel.panes, panel.timeline):
                monkeypatch.setattr(widget, "_send", lambda message, buffers=None: sent.append(message))
            panel.redraw()
            assert sent == []
            session.step_phase()
            panel.redraw()
            of_bar = [message["state"] for message in sent if "bar" in message.get("state", ())]
            assert [sorted(state) for state in of_bar] == [["bar", "strip"]]  # one message, not two


class TestFollowing:
    def test_a_run_is_drawn_five_times_a_second_and_at_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[str, int]] = []

        async def work() -> int:
            panel = session.panel()
            panel._ticker._spent_s = lambda: 0.0  # what a redraw costs here is no matter: test_ticker has its own
            turns = 0
            run = session.start()
            plain = panel.views.bar
            monkeypatch.setattr(panel.views, "bar", lambda: note(plain()))
            while not run.done:
                turns += 1
                await asyncio.sleep(0)
            await asyncio.sleep(1)
            assert shown(panel) == there_is(panel)
            return turns

        def note(bar: Any) -> Any:
            seen.append((bar["state"], bar["iterations"]))
            return bar

        monkeypatch.setattr("workbench.background.SLICE_NS", 0)
        monkeypatch.setattr("workbench.background._LONGEST_SLICE_NS", 0)
        with make_session(max_sequence_length=600, max_batch_tokens=640, num_blocks=160) as session:
            session.submit([1], max_tokens=500, ignore_eos=True)
            turns = run_in_turns(work())

        running = [iterations for state, iterations in seen if state == "running"]
        assert len(running) >= 5 * turns * 0.01 - 1  # a turn of this loop takes 10 ms
        assert running == sorted(set(running))
        assert seen[-1][0] == "finished"

    def test_a_cell_that_steps_is_seen_by_the_ticker(self) -> None:
        async def work() -> None:
            panel = session.panel()
            session.step_phase()
            assert shown(panel) != there_is(panel)
            await asyncio.sleep(0.5)
            assert shown(panel) == there_is(panel)

        with busy_session() as session:
            run_in_turns(work())

    def test_a_click_is_drawn_once_and_not_by_the_ticker_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def work() -> None:
            panel = session.panel()
            await asyncio.sleep(1)
            drawn: list[int] = []
            plain = panel.views.strip
            monkeypatch.setattr(panel.views, "strip", lambda: drawn.append(1) or plain())
            panel.do("step")
            await asyncio.sleep(1)
            assert len(drawn) == 1

        with busy_session() as session:
            run_in_turns(work())

    def test_made_without_a_loop_it_is_driven_and_looks_once_there_is_one(self) -> None:
        with busy_session() as session:
            panel = session.panel()
            assert not panel._ticker.is_running
            assert panel.do("step_phase")["level"] == "info"
            assert shown(panel) == there_is(panel)
            assert "running event loop" in panel.do("run")["text"]

            async def work() -> None:
                panel.redraw()
                session.step_phase()
                await asyncio.sleep(0.5)
                assert shown(panel) == there_is(panel)

            run_in_turns(work())
            assert panel.do("step")["level"] == "info"
            assert shown(panel) == there_is(panel)
            panel.close()

    def test_what_a_cells_run_left_out_of_the_timeline_is_sent_when_it_ends(self) -> None:
        """Only the end of a run that the panel had seen running filled the timeline, and a cell's run() did not."""
        with make_session(max_sequence_length=600, max_batch_tokens=640, num_blocks=160) as session:
            panel = session.panel()
            session.submit([1], max_tokens=500, ignore_eos=True)
            session.run(5)
            panel.redraw()
            panel.timeline.update(most=10)
            loads: list[int] = []
            plain = panel.timeline.load
            panel.timeline.load = lambda: (loads.append(1), plain())
            session.step()
            panel.redraw()
            assert loads == []  # a step leaves nothing out
            session.run(200)
            panel.redraw()
            panel.redraw()
            assert loads == [1]
            assert not panel.timeline.left_out

    @pytest.mark.parametrize("tab", ["requests", "blocks", "log"])
    def test_in_a_run_what_changes_slowly_is_made_twice_a_second_and_at_its_end(
        self, tab: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of it made each time, a redraw cost three times as much, and came twice a second."""

        async def work() -> None:
            panel = session.panel()
            panel.panes.tab = tab
            for name in made:
                count_calls(panel.views, name)
            with monkeypatch.context() as patch:
                patch.setattr(Session, "state", property(lambda _: "running"))
                for _ in range(200):
                    session.step()
                    await asyncio.sleep(0.05)
            assert made["strip"] >= 5 * 10
            assert made["running_rows"] + made["pane"] >= 5 * 10 or tab != "requests"
            assert 10 <= made["pane"] <= 2 * 10 + 1
            await asyncio.sleep(1)
            assert shown(panel) == there_is(panel)

        def count_calls(views: Any, name: str) -> None:
            plain = getattr(views, name)

            def call(*given: Any) -> Any:
                made[name] += 1
                return plain(*given)

            monkeypatch.setattr(views, name, call)

        made = {"strip": 0, "pane": 0, "running_rows": 0}
        with make_session(max_requests=2, max_sequence_length=300, max_batch_tokens=300, num_blocks=80) as session:
            session.submit([[1], [2, 3], [4]], max_tokens=250, ignore_eos=True)
            run_in_turns(work())

    def test_a_redraw_in_passing_is_one_message_and_is_made_up_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each message cost the engine as much as a view, and the page a frame of its own."""

        def count(widget: Any) -> None:
            plain = widget._send
            monkeypatch.setattr(
                widget, "_send", lambda message, buffers=None: (sent.append(message), plain(message, buffers))
            )

        sent: list[dict[str, Any]] = []
        with busy_session() as session:
            panel = session.panel()
            session.run(3)
            panel.redraw()
            for widget in (panel.bar, panel.panes, panel.timeline):
                count(widget)
            session.run(2)
            panel.redraw(in_passing=True)
            ((carried),) = (message["content"]["carried"] for message in sent)
            assert carried.keys() == {"bar", "strip", "rows"}
            assert carried["bar"].items() <= panel.views.bar().items()
            assert {"place", "iterations"} <= carried["bar"].keys()
            assert not {"model", "can", "badges"} & carried["bar"].keys()  # those have not changed
            assert [row["output_tokens"] for row in carried["rows"]["rows"]] == [
                row["output_tokens"] for row in panel.views.pane("requests")["rows"]
            ]
            sent.clear()
            panel.redraw()
            (bar,) = (message["state"] for message in sent if "bar" in message.get("state", {}))
            assert bar == {"bar": panel.views.bar(), "strip": panel.views.strip()}

    def test_a_run_that_has_nothing_to_do_is_shown_whole_within_a_second(self) -> None:
        """Nothing new was seen behind a redraw in passing, so what it had left out was never made up for."""

        async def work() -> None:
            panel = session.panel()
            panel.panes.tab = "stops"
            session.start()
            await asyncio.sleep(1)
            while session.engine.has_unfinished():
                await asyncio.sleep(0)
            session.break_on("emit")
            panel.redraw(in_passing=True)
            assert panel.panes.shown("stops") != panel.views.pane("stops")
            await asyncio.sleep(1)
            assert session.state == "running"
            assert panel.panes.shown("stops") == panel.views.pane("stops")
            session.pause()

        with busy_session(clock="wall") as session:
            session.submit([4], max_tokens=3, arrival=1_000_000)
            run_in_turns(work())


class TestChoosing:
    def choose_by_timeline(self, panel: Panel, iteration: int | None) -> None:
        panel.timeline.set_state({"selected_iteration": iteration})

    def choose_by_slider(self, panel: Panel, iteration: int | None) -> None:
        message = {"kind": "command", "name": "choose", "args": {"iteration": iteration}}
        panel.panes._handle_custom_msg(message, [])

    def choose_by_command(self, panel: Panel, iteration: int | None) -> None:
        panel.do("choose", {"iteration": iteration})

    @pytest.mark.parametrize("way", ["timeline", "slider", "command"])
    def test_all_views_are_in_step_and_it_is_done_once(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        choose = getattr(self, f"choose_by_{way}")
        with busy_session() as session:
            session.run(6)
            panel = session.panel()
            panel.panes.tab = "history"
            done: list[Any] = []
            plain = panel.commands.run
            monkeypatch.setattr(panel.commands, "run", lambda *given: done.append(given) or plain(*given))
            for count, iteration in enumerate((3, 0, None, 5), start=1):
                choose(panel, iteration)
                assert panel.commands.chosen == panel.timeline.selected_iteration == iteration
                assert panel.panes.history["chosen"] == iteration
                assert len(done) == count

    def test_one_that_is_not_there_goes_back_to_the_one_before(self) -> None:
        with busy_session() as session:
            session.run(6)
            panel = session.panel()
            panel.do("choose", {"iteration": 2})
            self.choose_by_timeline(panel, 99)
            assert panel.bar.notice["level"] == "error"
            assert panel.commands.chosen == panel.timeline.selected_iteration == 2

    @pytest.mark.parametrize("way", ["restart", "reset"])
    def test_one_that_a_cell_has_reset_away_is_chosen_no_longer(self, way: str) -> None:
        """Only the panel's own restart forgot it: behind a cell's, history showed an iteration that never was."""
        with busy_session() as session:
            session.run(6)
            panel = session.panel()
            panel.panes.tab = "history"
            panel.do("choose", {"iteration": 4})
            getattr(session, way)()
            panel.redraw()
            assert panel.commands.chosen is panel.timeline.selected_iteration is None
            assert "4" not in panel.panes.history["hint"]


class TestFigures:
    pytest.importorskip("plotly")

    def test_the_shelf_is_made_once_when_somebody_looks(self) -> None:
        with busy_session() as session:
            panel = session.panel()
            panel.timeline.set_state({"theme": "dark", "width": 1_000})
            assert panel.figures is None
            panel.panes.tab = "figures"
            shelf = panel.figures
            assert shelf is not None
            assert shelf.template == "dark"
            assert panel._shelf_box.children == (shelf.box,)
            assert panel._shelf_box.layout.display is None
            panel.panes.tab = "log"
            assert panel._shelf_box.layout.display == "none"
            panel.panes.tab = "figures"
            assert panel.figures is shelf
            assert panel._shelf_box.layout.display is None

    def test_theme_and_width_reach_what_is_drawn(self) -> None:
        with busy_session() as session:
            session.run()
            panel = session.panel()
            panel.timeline.set_state({"theme": "dark", "width": 1_000})
            panel.panes.tab = "figures"
            assert panel.figures is not None
            panel.figures.draw()
            (first,) = panel.figures.box.children[2:]
            assert first.layout.width == 1_000
            panel.timeline.set_state({"width": 700})
            assert first.layout.width == 700
            panel.timeline.set_state({"theme": "light"})
            (second,) = panel.figures.box.children[2:]
            assert second.layout.template != first.layout.template
            assert second.layout.width == 700

    def test_it_is_drawn_again_when_a_run_ends_or_when_looked_at_behind_one(self) -> None:
        with busy_session() as session:
            session.run(3)
            panel = session.panel()
            panel.panes.tab = "figures"
            assert panel.figures is not None
            panel.figures.draw()
            figures = [panel.figures._figure]

            def look() -> None:
                panel.redraw()
                figures.append(panel.figures._figure)

            session.run(5)  # too short for a ticker to have seen it running
            look()
            session.step()
            look()
            panel.panes.tab = "log"
            session.run()
            look()
            panel.panes.tab = "figures"
            look()
        is_new = [one is not other for one, other in pairwise(figures)]
        assert is_new == [True, False, False, True]


class TestTwo:
    def test_panels_of_one_session_show_the_same_and_choose_apart(self) -> None:
        async def work() -> None:
            one, other = session.panel(), session.panel()
            one.do("run", {"n": 5})
            await asyncio.sleep(3)
            assert session.engine.controller.next_index == 5
            assert shown(one) == there_is(one)
            assert shown(other) == there_is(other)
            assert one.bar.bar == other.bar.bar
            assert "ran 5" in one.bar.notice["text"]
            assert other.bar.notice == {}
            other.do("choose", {"iteration": 2})
            assert (one.commands.chosen, other.commands.chosen) == (None, 2)
            one.close()
            other.do("step")
            assert shown(other) == there_is(other)

        with busy_session() as session:
            run_in_turns(work())

    def test_panels_of_two_sessions_do_not_meet(self) -> None:
        with busy_session() as left, busy_session() as right:
            one, other = left.panel(), right.panel()
            before = shown(other)
            one.do("step")
            one.close()
            assert shown(other) == before
            assert right.engine.controller.next_index == 0
            assert other.do("step")["level"] == "info"


class TestClosing:
    def test_it_leaves_the_session_usable_and_no_widget_and_no_listener(self) -> None:
        from ipywidgets.widgets.widget import _instances

        before = set(_instances)
        with busy_session() as session, busy_session() as untouched:
            listeners = len(session.events._listeners)
            panel = session.panel()
            panel.do("step_phase")
            panel.panes.tab = "figures"
            assert panel.figures is not None
            panel.figures.draw()
            panel.close()
            panel.close()
            assert set(_instances) == before
            assert len(session.events._listeners) == listeners
            again = session.panel()
            assert again.do("step")["level"] == "info"
            session.run()
            untouched.run()
            assert tokens(session) == tokens(untouched)
            again.close()

    def test_in_the_middle_of_a_run_it_stays_closed(self) -> None:
        """The notice at the run's end redrew the closed panel, which began to look again, for ever."""

        async def work() -> None:
            panel = session.panel()
            panel.do("run")
            await asyncio.sleep(0)
            panel.close()
            while session.state == "running":
                await asyncio.sleep(0)
            await asyncio.sleep(1)
            assert not panel._ticker.is_running
            assert len(asyncio.all_tasks()) == 1

        with busy_session() as session:
            run_in_turns(work())
            assert session.state == "finished"

    def test_a_closed_one_says_so_instead_of_showing_nothing(self) -> None:
        with busy_session() as session:
            panel = session.panel()
            assert "application/vnd.jupyter.widget-view+json" in bundle(panel)
            panel.close()
            assert bundle(panel)["text/plain"].startswith("<closed panel of <Session oracle")
            assert panel.do("step")["text"] == "iteration 0 ran"

    def test_one_that_nobody_holds_and_no_page_shows_is_let_go_of(self) -> None:
        """ipywidgets keeps every widget, and the widgets kept the panel: its ticker ran on for ever."""

        async def work() -> tuple[Any, int]:
            panel = session.panel()
            held = weakref.ref(panel)
            del panel
            gc.collect()
            await asyncio.sleep(1)
            return held(), len(asyncio.all_tasks())

        with busy_session() as session:
            assert run_in_turns(work()) == (None, 1)
            assert len(session.events._listeners) == 0

    def test_one_that_a_page_shows_lives_on(self) -> None:
        """display(session.panel()) holds it nowhere."""
        with busy_session() as session:
            panel = session.panel()
            bundle(panel)
            held = weakref.ref(panel)
            bar = panel.bar
            del panel
            gc.collect()
            bar._handle_custom_msg({"kind": "command", "name": "step", "args": {}}, [])
            assert bar.notice["text"] == "iteration 0 ran"
            found = held()
            assert found is not None
            found.close()
            assert found not in panel_module._shown


class TestTrouble:
    def test_a_closed_session_is_shown_and_says_what_to_do(self) -> None:
        with busy_session() as session:
            session.run(4)
            panel = session.panel()
        panel.redraw()
        assert panel.bar.bar["state"] == "closed"
        assert panel.do("step")["text"] == "step: the session is closed; make a new one"
        assert panel.do("choose", {"iteration": 2})["level"] == "info"
        later = session.panel()
        for tab in SHOWN_TABS:
            later.panes.tab = tab
        assert shown(panel) == there_is(panel)

    def test_an_exception_in_a_phase_of_a_run_is_told_and_the_session_goes_on(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def work() -> None:
            panel = session.panel()
            mend = fail_in(session, Phase.RESOLVE)
            with caplog.at_level(logging.CRITICAL):
                panel.do("run")
                await asyncio.sleep(1)
            assert panel.bar.notice["level"] == "error"
            assert "ZeroDivisionError in resolve" in panel.bar.notice["text"]
            assert panel.bar.bar["state"] == "failed"
            mend()
            panel.do("recover")
            panel.do("run")
            await asyncio.sleep(3)
            assert panel.bar.bar["state"] == "finished"

        with busy_session() as session, busy_session() as untouched:
            run_in_turns(work())
            untouched.run()
            assert tokens(session) == tokens(untouched)

    @pytest.mark.parametrize("missing", ["anywidget", "ipywidgets"])
    def test_without_the_notebooks_packages_the_remedy_is_told(
        self, missing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain: Callable[..., Any] = builtins.__import__

        def without(name: str, *args: Any, **options: Any) -> Any:
            if name.split(".")[0] == missing:
                raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
            return plain(name, *args, **options)

        for name in list(sys.modules):
            if name.startswith(("workbench.panel.panel", "workbench.panel.figure_shelf", "workbench.widgets")):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(builtins, "__import__", without)
        with busy_session() as session, pytest.raises(SessionError, match=f"a panel needs {missing}; install .*pip"):
            session.panel()
        assert sys.modules.get("workbench.panel.panel") is None


def bundle(panel: Panel) -> dict[str, Any]:
    """As a notebook asks for it."""
    found = panel._repr_mimebundle_(include=None, exclude=None)
    data: dict[str, Any] = found[0] if isinstance(found, tuple) else found
    return data
