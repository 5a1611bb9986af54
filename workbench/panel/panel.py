"""``session.panel()``: the control bar, the timeline, and everything there is to see, in one place of a notebook.

The widgets hold what is seen; what clicks do is in :mod:`workbench.panel.commands`, and what is shown is made by
:mod:`workbench.panel.views`. Nothing here runs on another thread: a click is answered between two turns of the
session, and a ticker redraws what changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from workbench.panel.commands import Commands
from workbench.panel.figure_shelf import FigureShelf
from workbench.panel.messages import Notice
from workbench.panel.ticker import Ticker
from workbench.panel.views import Views
from workbench.widgets.panel_bar import PanelBar
from workbench.widgets.panel_panes import PanelPanes
from workbench.widgets.timeline import TimelineWidget

if TYPE_CHECKING:
    from workbench.session import Session

_FILLED_SPANS = 20_000
"""When a run ends, what the timeline left out meanwhile is sent if there are no more spans than this: 0.2 s."""


class Panel:
    """The notebook application of one session. Show it as the last line of a cell; several cells may show the same.

    Args:
        session: What it drives and shows. Cells may drive it as well; the panel follows.
        max_spans: The most that its timeline keeps; the newest win.
    """

    def __init__(self, session: Session, *, max_spans: int = 100_000) -> None:
        import ipywidgets

        self.session = session
        self.commands = Commands(session, self._told)
        self.views = Views(session, self.commands)
        self.bar = PanelBar()
        self.timeline = TimelineWidget(session, max_spans=max_spans)
        self.panes = PanelPanes()
        self.figures: FigureShelf | None = None
        self._shelf_box = ipywidgets.VBox()
        self.box = ipywidgets.VBox([self.bar, self.timeline, self.panes, self._shelf_box])
        self.box.add_class("wb-panel-whole")
        self._was_running = False
        for widget in (self.bar, self.panes):
            widget.on_command(self._heard)
        self.panes.observe(lambda change: self._open(change.new), names="tab")
        self.timeline.observe(lambda change: self._selected(change.new), names="selected_iteration")
        self.timeline.observe(lambda change: self._themed(change.new), names="theme")
        self.timeline.observe(lambda change: self._resized(change.new), names="width")
        self._ticker = Ticker(self._stamp, self.redraw)
        self.redraw()
        self._ticker.start()

    def do(self, name: str, args: dict[str, Any] | None = None) -> Notice:
        """What a click or a key does, and its picture at once. Never raises: what goes wrong is in the notice."""
        notice = self.commands.run(name, args)
        self._told(notice)
        return notice

    def _heard(self, name: str, args: dict[str, Any]) -> None:
        self.do(name, args)

    def redraw(self) -> None:
        """Show the session as it stands; between iterations or phases only."""
        self._ticker.start()  # a panel made without a loop begins to look once there is one
        with self.bar.hold_sync():
            self.bar.bar, self.bar.strip = dict(self.views.bar()), dict(self.views.strip())
            self.bar.pace = self.commands.pace_per_s
        pane = self.views.pane(self.panes.tab)
        if pane is not None:
            self.panes.show(self.panes.tab, pane)
        self.timeline.update()
        self._at_end_of_run()

    def close(self) -> None:
        """Take it off the page. The session goes on, and another panel can be made."""
        self._ticker.stop()
        for widget in (self.box, self.bar, self.timeline, self.panes, self._shelf_box):
            widget.close()

    def _stamp(self) -> Hashable:
        return self.views.stamp()

    def _told(self, notice: Notice) -> None:
        self.bar.notice = dict(notice)
        if self.timeline.selected_iteration != self.commands.chosen:
            self.timeline.selected_iteration = self.commands.chosen
        self.redraw()

    def _at_end_of_run(self) -> None:
        is_running = self.session.state == "running"
        if self._was_running and not is_running:
            if len(self.session.recorder.spans(_FILLED_SPANS + 1)) <= _FILLED_SPANS:
                self.timeline.load()
            if self.figures is not None and self.figures.is_drawn and self.panes.tab == "figures":
                self.figures.draw()
        self._was_running = is_running

    def _selected(self, iteration: int | None) -> None:
        """A click in the timeline chooses an iteration for the other views."""
        if iteration != self.commands.chosen:
            self.do("choose", {"iteration": iteration})

    def _open(self, tab: str) -> None:
        if tab == "figures" and self.figures is None:
            self.figures = FigureShelf(self.session)
            self.figures.template = self.timeline.theme
            self.figures.fit(self.timeline.width)
            self._shelf_box.children = [self.figures.box]
        self._shelf_box.layout.display = None if tab == "figures" else "none"
        self.redraw()

    def _themed(self, theme: str) -> None:
        if self.figures is not None and self.figures.template != theme:
            self.figures.template = theme
            if self.figures.is_drawn:
                self.figures.draw()

    def _resized(self, width: int) -> None:
        if self.figures is not None:
            self.figures.fit(width)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        self.redraw()
        return self.box._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        return f"<Panel of {self.session!r}>"
