"""Pages' messages that come on another thread, as a kernel with subshells delivers them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("anywidget")

from tests.unit.workbench.worlds import make_session
from workbench.own_thread import on_own_thread
from workbench.panel.panel import Panel
from workbench.widgets.panel_bar import PanelBar
from workbench.widgets.panel_panes import PanelPanes
from workbench.widgets.timeline import TimelineWidget


def on_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def command(name: str) -> dict[str, Any]:
    content = {"kind": "command", "name": name, "args": {}}
    return {"content": {"data": {"method": "custom", "content": content}}, "buffers": []}


def traits(**state: Any) -> dict[str, Any]:
    return {"content": {"data": {"method": "update", "state": state}}, "buffers": []}


class TestAFunction:
    def test_called_elsewhere_runs_in_a_turn_of_its_own_loop(self) -> None:
        ran: list[tuple[int, int]] = []

        async def cell() -> None:
            wrapped = on_own_thread(lambda number: ran.append((number, threading.get_ident())))
            on_another_thread(lambda: [wrapped(1), wrapped(2)])
            assert ran == []
            await asyncio.sleep(0)

        asyncio.run(cell())
        assert ran == [(1, threading.get_ident()), (2, threading.get_ident())]

    def test_called_on_its_own_thread_runs_at_once(self) -> None:
        ran: list[int] = []

        async def cell() -> None:
            on_own_thread(ran.append)(1)
            assert ran == [1]

        asyncio.run(cell())

    def test_without_a_loop_or_behind_its_end_runs_at_once(self) -> None:
        ran: list[int] = []

        async def cell() -> Callable[..., None]:
            return on_own_thread(ran.append)

        for wrapped in (on_own_thread(ran.append), asyncio.run(cell())):
            on_another_thread(lambda wrapped=wrapped: wrapped(1))

        assert ran == [1, 1]


class TestAWidget:
    @pytest.mark.parametrize("make", [PanelBar, PanelPanes])
    def test_hears_commands_on_the_thread_that_made_it(self, make: Callable[[], Any]) -> None:
        heard: list[tuple[str, int]] = []

        async def cell() -> None:
            widget = make()
            widget.on_command(lambda name, args: heard.append((name, threading.get_ident())))
            on_another_thread(lambda: [widget._handle_msg(command("step")), widget._handle_msg(command("pause"))])
            await asyncio.sleep(0)

        asyncio.run(cell())
        assert heard == [("step", threading.get_ident()), ("pause", threading.get_ident())]

    def test_takes_traits_there_too(self) -> None:
        seen: list[tuple[int, int]] = []

        async def cell() -> None:
            timeline = TimelineWidget()
            timeline.observe(lambda change: seen.append((change.new, threading.get_ident())), names="width")
            on_another_thread(lambda: timeline._handle_msg(traits(width=900)))
            await asyncio.sleep(0)

        asyncio.run(cell())
        assert seen == [(900, threading.get_ident())]


class TestAPanel:
    def test_begins_a_run_on_the_loop_of_its_cell(self) -> None:
        """On a subshell's loop it would run beside cells, and what the page is told would come in any order."""
        session, threads = make_session(), set[int]()
        session.watch("thread", lambda session: threads.add(threading.get_ident()))

        async def cell() -> None:
            panel = Panel(session)
            session.submit([1], max_tokens=8, ignore_eos=True)
            on_another_thread(lambda: panel.bar._handle_msg(command("run")))
            while session.engine.has_unfinished():
                await asyncio.sleep(0.001)
            panel.close()

        with session:
            asyncio.run(asyncio.wait_for(cell(), 60))
        assert threads == {threading.get_ident()}
