"""Panels and the cells that show them: what a cell showed before it was run again is off the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("anywidget")

from tests.unit.workbench.panel.loops import run_in_turns
from tests.unit.workbench.worlds import make_session
from workbench.panel import panel as panel_module
from workbench.panel import shown_cells
from workbench.panel.panel import Panel
from workbench.panel.shown_cells import ShownCells
from workbench.session import Session


class Notebook:
    """Stands for IPython: runs cells by name and says so behind each."""

    def __init__(self) -> None:
        self._functions: list[Callable[[Any], None]] = []
        self.events = SimpleNamespace(register=lambda name, function: self._functions.append(function))

    def run(self, cell: str | None, *shown: Panel) -> None:
        for panel in shown:
            panel._repr_mimebundle_()
        for function in self._functions:
            function(SimpleNamespace(info=SimpleNamespace(cell_id=cell)))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    monkeypatch.setattr(shown_cells, "get_ipython", lambda: made)
    monkeypatch.setattr(panel_module, "_cells", ShownCells())
    return made


def on_a_loop(work: Callable[[Session], None]) -> None:
    async def run() -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            work(session)
            await asyncio.sleep(0.5)

    run_in_turns(run())


class TestACellRunAgain:
    def test_ends_the_looking_of_the_panel_it_showed_before(self, notebook: Notebook) -> None:
        """The old one went on being redrawn, several times a second in a run, for nobody."""

        def work(session: Session) -> None:
            old, new = Panel(session), Panel(session)
            notebook.run("a", old)
            assert old._ticker.is_running
            notebook.run("a", new)
            assert new._ticker.is_running
            assert not old._ticker.is_running
            assert old not in panel_module._shown
            old.redraw()  # a run in the background that it began tells it of its end
            assert not old._ticker.is_running

        on_a_loop(work)

    def test_leaves_a_panel_that_another_cell_shows_too(self, notebook: Notebook) -> None:
        def work(session: Session) -> None:
            panel = Panel(session)
            notebook.run("a", panel)
            notebook.run("b", panel)
            notebook.run("a")
            assert panel._ticker.is_running
            notebook.run("b")
            assert not panel._ticker.is_running

        on_a_loop(work)

    def test_leaves_the_panel_that_it_shows_again(self, notebook: Notebook) -> None:
        def work(session: Session) -> None:
            panel = Panel(session)
            for _ in range(3):
                notebook.run("a", panel)
                assert panel._ticker.is_running

        on_a_loop(work)

    def test_brings_back_one_that_was_off_the_page(self, notebook: Notebook) -> None:
        def work(session: Session) -> None:
            panel = Panel(session)
            notebook.run("a", panel)
            notebook.run("a")
            notebook.run("b", panel)
            assert panel._ticker.is_running
            assert panel in panel_module._shown

        on_a_loop(work)

    @pytest.mark.parametrize("cell", [None, "another"])
    def test_of_another_name_or_of_none_ends_nothing(self, notebook: Notebook, cell: str | None) -> None:
        def work(session: Session) -> None:
            panel = Panel(session)
            notebook.run("a" if cell else None, panel)
            notebook.run(cell)
            assert panel._ticker.is_running

        on_a_loop(work)


def test_outside_ipython_nothing_is_known_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_cells, "get_ipython", lambda: None)
    monkeypatch.setattr(panel_module, "_cells", ShownCells())
    on_a_loop(lambda session: Panel(session)._repr_mimebundle_() and None)
