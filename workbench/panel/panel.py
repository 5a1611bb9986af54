"""``session.panel()``: the control bar, the timeline, and everything there is to see, in one place of a notebook.

The widgets hold what is seen; what clicks do is in :mod:`workbench.panel.commands`, and what is shown is made by
:mod:`workbench.panel.views`. Nothing here runs on another thread: a click is answered between two turns of the
session, and a ticker redraws what changed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.events import Event
from workbench.panel.commands import Commands
from workbench.panel.figure_shelf import FigureShelf, close_all
from workbench.panel.messages import TABS, Notice
from workbench.panel.shown_cells import ShownCells
from workbench.panel.ticker import Ticker
from workbench.panel.views import Views
from workbench.widgets.panel_bar import PanelBar
from workbench.widgets.panel_panes import PanelPanes
from workbench.widgets.timeline import TimelineWidget

if TYPE_CHECKING:
    from workbench.session import Session

log = logging.getLogger(__name__)

_FILLED_SPANS = 20_000
"""When a run ends, what the timeline left out meanwhile is sent if there are no more spans than this: 0.2 s."""
_SLOW_S = 0.85
"""In a run why requests wait, who holds which block and such are shown so often, at the first look behind it: once a
second, since that costs twice what a redraw in passing does."""
_shown: set[Panel] = set()
"""Panels that a page may show: they live until they are closed or off the page, whoever else holds them."""
_cells = ShownCells()


class Panel:
    """The notebook application of one session. Show it as the last line of a cell; several cells may show the same.

    Args:
        session: What it drives and shows. Cells may drive it as well; the panel follows.
        max_spans: The most that its timeline keeps; the newest win.
    """

    def __init__(self, session: Session, *, max_spans: int = 100_000) -> None:
        self.session = session
        self.commands = Commands(session, self._told)
        self.views = Views(session, self.commands)
        self.bar = PanelBar()
        self.timeline = TimelineWidget(session, max_spans=max_spans)
        self.panes = PanelPanes(tabs=[tab for tab in TABS if tab != "experts" or session._experts.layers])
        self.figures: FigureShelf | None = None
        self._shelf_box = ipywidgets.VBox()
        self.box = ipywidgets.VBox([self.bar, self.timeline, self.panes, self._shelf_box])
        self.box.add_class("wb-panel-whole")
        self.is_closed = False
        self._is_off_page = False
        self._run_ended = False
        self._whole_s = float("-inf")
        self._ticker = Ticker(self._stamp, self._look_again)
        self._listen()
        self.redraw()

    def _listen(self) -> None:
        for widget in (self.bar, self.panes):
            widget.on_command(_weakly(self._heard))
        self.panes.observe(_weakly(self._open), names="tab")
        self.timeline.observe(_weakly(self._selected), names="selected_iteration")
        self.timeline.observe(_weakly(self._themed), names="theme")
        self.timeline.observe(_weakly(self._resized), names="width")
        self._stop_listening = weakref.finalize(self, self.session.events.listen(_weakly(self._noted)))

    def do(self, name: str, args: dict[str, Any] | None = None) -> Notice:
        """What a click or a key does, and its picture at once. Never raises: what goes wrong is in the notice."""
        notice = self.commands.run(name, args)
        try:
            self._told(notice)
        except Exception:
            log.exception("the panel could not be redrawn")
        return notice

    def redraw(self, *, in_passing: bool = False) -> None:
        """Show the session as it stands; between iterations or phases only. A closed panel shows nothing.

        Args:
            in_passing: Without what changes slowly: panes but that of the requests, and there only the rows that run.
        """
        if self.is_closed:
            return
        if not self._is_off_page:
            self._ticker.start()  # a panel made without a loop begins to look once there is one
        # Even if nothing happens from now on, the ticker has to come again for what is left out.
        stamp = None if in_passing else self._stamp()
        self._follow_choice()
        if in_passing:
            self._show_in_passing()
        else:
            self._show_whole()
        self._ticker.shown, self._ticker.is_behind = stamp, in_passing or self.timeline.is_behind
        if self._run_ended and self.session.state != "running":
            self._run_ended = False
            self._catch_up()

    def _show_whole(self) -> None:
        with self.bar.hold_sync():
            self._show_bar()
            view = self.views.pane(self.panes.tab)
            if view is not None:
                self.panes.show(self.panes.tab, view)
        self.timeline.update()

    def _show_in_passing(self) -> None:
        """In one message and one frame of the page; what it says is said again when all is shown."""
        with self.bar.handed_on() as carried:
            self._show_bar()
        if self.panes.tab == "requests":
            carried |= self._running_rows()
        self.timeline.update(carried=carried)

    def _show_bar(self) -> None:
        self.bar.bar, self.bar.strip = dict(self.views.bar()), dict(self.views.strip())
        self.bar.pace = self.commands.pace_per_s

    def _running_rows(self) -> dict[str, Any]:
        """For the bar's trait that takes them to the panes; there is no news to a picture that was never sent."""
        rows = self.views.running_rows()
        news = self.panes.rows_in_passing(rows)
        if news is None:
            self.panes.show("requests", rows)
            return {}
        return {"rows": news}

    def _look_again(self) -> None:
        """The ticker saw something new. In a run what changes slowly is shown once a second."""
        now_s = asyncio.get_running_loop().time()
        in_passing = self.session.state == "running" and now_s - self._whole_s < _SLOW_S
        if not in_passing:
            self._whole_s = now_s
        self.redraw(in_passing=in_passing)

    def close(self) -> None:
        """Take it off the page. The session goes on, and another panel can be made."""
        if self.is_closed:
            return
        self.is_closed = True
        self._ticker.stop()
        self._stop_listening()
        close_all([self.box])
        _shown.discard(self)

    def leave_page(self) -> None:
        """The cell that showed it was run again: look no more, until a cell shows it anew. Nothing is closed."""
        self._is_off_page = True
        self._ticker.stop()
        _shown.discard(self)

    def _stamp(self) -> Hashable:
        return self.views.stamp()

    def _follow_choice(self) -> None:
        """Every view shows the iteration that was chosen; one that a cell has reset away is chosen no longer."""
        chosen = self.commands.chosen
        if chosen is not None and chosen >= self.session.engine.controller.next_index:
            chosen = self.commands.chosen = None
        if self.timeline.selected_iteration != chosen:
            self.timeline.selected_iteration = chosen

    def _catch_up(self) -> None:
        """A run has ended: show what was left out so that the run went fast."""
        if self.timeline.left_out and len(self.session.recorder.spans(_FILLED_SPANS + 1)) <= _FILLED_SPANS:
            self.timeline.load()
        if self.figures is not None:
            self.figures.mark_stale()
            if self.panes.tab == "figures":
                self.figures.refresh()

    # -- what is heard ---------------------------------------------------------------------------------------------

    def _heard(self, name: str, args: dict[str, Any]) -> None:
        self.do(name, args)

    def _told(self, notice: Notice) -> None:
        """Something was done, or a run in the background has ended."""
        self.bar.notice = dict(notice)
        self.redraw()

    def _noted(self, event: Event) -> None:
        """An event of the session, told while it is driven: what there is to do is done at the next redraw."""
        self._run_ended |= event.kind in ("stopped", "failed")

    def _selected(self, change: Any) -> None:
        """A click in the timeline chooses an iteration for the other views."""
        if change.new != self.commands.chosen:
            self.do("choose", {"iteration": change.new})

    def _open(self, change: Any) -> None:
        if change.new == "figures":
            if self.figures is None:
                self.figures = FigureShelf(self.session)
                self.figures.show_in(self.timeline.theme)
                self.figures.fit(self.timeline.width)
                self._shelf_box.children = [self.figures.box]
            self.figures.refresh()
        self._shelf_box.layout.display = None if change.new == "figures" else "none"
        self.redraw()

    def _themed(self, change: Any) -> None:
        if self.figures is not None:
            self.figures.show_in(change.new)

    def _resized(self, change: Any) -> None:
        if self.figures is not None:
            self.figures.fit(change.new)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        if self.is_closed:
            return {"text/plain": repr(self)}
        _shown.add(self)
        _cells.show(self)
        self._is_off_page = False
        self.redraw()
        return self.box._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        return f"<{'closed panel' if self.is_closed else 'Panel'} of {self.session!r}>"


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """``method`` for those who would keep its panel for ever: ipywidgets keeps every widget until it is closed."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = held()
        if found is not None:
            found(*args)

    return call
