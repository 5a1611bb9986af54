"""The shelf of figures: drawn when asked, as the page looks, saved where a person says, and nothing raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("anywidget")
pytest.importorskip("plotly")

from engine.phases import Phase
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.worlds import make_session, spread_workload
from workbench.figures import FIGURES
from workbench.panel.figure_shelf import FigureShelf
from workbench.session import Session


def run_session() -> Session:
    session = make_session(clock="iterations", device="cpu")
    session.submit_workload(spread_workload())
    session.run()
    return session


def drawn(shelf: FigureShelf) -> Any:
    """The plotly widget that is shown."""
    (widget,) = shelf.box.children[2:]
    return widget


def failed(session: Session) -> None:
    session.submit_workload(spread_workload())
    session.run(3)
    fail_in(session, Phase.RESOLVE)
    with pytest.raises(ZeroDivisionError):
        session.run()


def in_hand(session: Session) -> None:
    session.submit_workload(spread_workload())
    session.run(4)
    session.step_phase()


STATES: dict[str, Callable[[Session], object]] = {
    "empty": lambda session: None,
    "in hand": in_hand,
    "failed": failed,
    "finished": lambda session: (session.submit_workload(spread_workload()), session.run()),
    "closed": lambda session: (session.submit_workload(spread_workload()), session.run(), session.close()),
}


class TestDrawing:
    def test_nothing_is_drawn_before_somebody_asks(self) -> None:
        with run_session() as session:
            shelf = FigureShelf(session)
            assert not shelf.is_drawn
            assert shelf.save_button.disabled
            assert "press Draw" in shelf.line.value
            shelf.refresh()
            shelf.show_in("dark")
            assert not shelf.is_drawn

    def test_each_choice_is_drawn_at_once(self) -> None:
        with run_session() as session:
            shelf = FigureShelf(session)
            titles = set()
            for name in reversed(FIGURES):
                shelf.choice.value = name
                titles.add(drawn(shelf).layout.title.text)
                assert shelf.line.value == ""
            assert len(titles) == len(FIGURES)

    @pytest.mark.parametrize("state", list(STATES))
    @pytest.mark.parametrize("name", list(FIGURES))
    def test_of_any_session_it_is_drawn_or_says_why_not(self, name: str, state: str) -> None:
        with make_session(clock="iterations", device="cpu") as session:
            STATES[state](session)
            shelf = FigureShelf(session)
            shelf.choice.value = name
            shelf.draw_button.click()
            assert shelf.is_drawn or shelf.line.value.startswith("not drawn: ")

    def test_it_looks_as_the_page_does(self) -> None:
        with run_session() as session:
            shelf = FigureShelf(session)
            shelf.draw()
            light = drawn(shelf).layout.template.layout.paper_bgcolor
            shelf.show_in("dark")
            assert drawn(shelf).layout.template.layout.paper_bgcolor != light
            shelf.fit(1_100)
            assert drawn(shelf).layout.width == 1_100
            shelf.fit(100)
            assert drawn(shelf).layout.width == 480
            shelf.fit(900)
            shelf.draw()
            assert drawn(shelf).layout.width == 900

    def test_it_is_drawn_again_where_a_run_has_ended_and_only_then(self) -> None:
        with run_session() as session:
            shelf = FigureShelf(session)
            shelf.draw()
            first = drawn(shelf)
            shelf.refresh()
            assert drawn(shelf) is first
            shelf.mark_stale()
            shelf.refresh()
            assert drawn(shelf) is not first

    def test_a_figure_that_could_not_be_shown_is_not_the_one_that_is_saved(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The figure was kept before its widget was made: Save then wrote one that nobody had seen."""
        from workbench.figures import Figure, FigureImportError

        def fail(figure: Figure) -> None:
            raise FigureImportError("a figure among widgets needs anywidget")

        with run_session() as session:
            shelf = FigureShelf(session)
            shelf.choice.value = "throughput"
            shown = drawn(shelf)
            monkeypatch.setattr(Figure, "widget", fail)
            shelf.choice.value = "hidden"
            assert shelf.line.value == "not drawn: a figure among widgets needs anywidget"
            assert drawn(shelf) is shown
            assert shelf._figure.chart.title == shown.layout.title.text.split("<")[0]


class TestSaving:
    @pytest.mark.parametrize("suffix", ["svg", "html"])
    def test_a_figure_is_written_where_the_line_says(self, suffix: str, tmp_path: Path) -> None:
        with run_session() as session:
            shelf = FigureShelf(session)
            shelf.draw()
            shelf.path.value = str(tmp_path / "new" / f"figure.{suffix}")
            shelf.save_button.click()
        assert shelf.line.value == f"saved: {tmp_path / 'new' / f'figure.{suffix}'}"
        assert (tmp_path / "new" / f"figure.{suffix}").stat().st_size > 1_000

    @pytest.mark.parametrize("name", ["figure.gif", "figure", "", "in-the-way/figure.svg"])
    def test_what_cannot_be_written_is_said(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "in-the-way").write_text("")
        with run_session() as session:
            shelf = FigureShelf(session)
            shelf.draw()
            shelf.path.value = name
            shelf.save_button.click()
        assert shelf.line.value.startswith("not saved: ")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in-the-way"]


class TestClosing:
    def test_no_widget_is_left_behind(self) -> None:
        """A figure's old widget was dropped from the page, and its layout kept by ipywidgets for ever."""
        from ipywidgets.widgets.widget import _instances

        before = set(_instances)
        with run_session() as session:
            shelf = FigureShelf(session)
            for _ in range(3):
                shelf.draw()
            shelf.close()
        assert set(_instances) == before
