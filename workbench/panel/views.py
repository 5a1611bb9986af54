"""What a panel shows of its session: one view a part of the page, and a stamp that says whether any of it is new."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.panel.bar_view import bar_view
from workbench.panel.blocks_view import BlockMap
from workbench.panel.changes_view import PhaseCards
from workbench.panel.commands import Commands
from workbench.panel.experts_view import experts_view
from workbench.panel.graphs_view import GraphTally
from workbench.panel.history_view_model import PastFacts
from workbench.panel.log_view import log_view
from workbench.panel.messages import BarView, RequestsView, StripView
from workbench.panel.requests_view import RequestRows
from workbench.panel.stops_view import stops_view
from workbench.panel.strip_view import strip_view
from workbench.watch import debugger_attached

if TYPE_CHECKING:
    from workbench.session import Session


class Views:
    """Made from a session at a border; looks at nothing on the device, and changes nothing."""

    def __init__(self, session: Session, commands: Commands) -> None:
        self._session = session
        self._commands = commands
        cards, facts = PhaseCards(session), PastFacts(session)
        self._rows = RequestRows(session)
        self._panes: dict[str, Callable[[], Mapping[str, Any]]] = {
            "requests": self._rows.view,
            "blocks": BlockMap(session).view,
            "graphs": GraphTally(session).view,
            "experts": lambda: experts_view(session),
            "changes": lambda: cards.view(commands.chosen, commands.device_value),
            "history": lambda: facts.view(commands.chosen),
            "stops": lambda: stops_view(session),
            "log": lambda: log_view(session),
        }

    def bar(self) -> BarView:
        """The control bar."""
        return bar_view(self._session)

    def strip(self) -> StripView:
        """The order strip."""
        return strip_view(self._session)

    def pane(self, tab: str) -> Mapping[str, Any] | None:
        """The pane of a tab; None for ``figures``, which is drawn otherwise."""
        make = self._panes.get(tab)
        return None if make is None else make()

    def running_rows(self) -> RequestsView:
        """The pane of the requests, of which those that do not run may be as they were when it was made last."""
        return self._rows.view(in_passing=True)

    def stamp(self) -> Hashable:
        """Differs where a view may differ, but for the reading of a wall clock; takes microseconds."""
        session, engine, commands = self._session, self._session.engine, self._commands
        in_hand, events, recorder = engine.in_hand, session.events, session.recorder
        newest = recorder.spans(1)  # none: the trace was cleared
        return (
            session.state,
            session.stopped,
            engine.is_closed,
            engine.controller.next_index,
            None if in_hand is None else (in_hand.index, engine.next_phase, len(in_hand.void_reasons)),
            newest[0].end_ns if newest else None,
            len(recorder.running()),
            recorder.enabled,
            engine.controller.wanted_mode,
            id(engine.controller.policy),
            engine.queue.num_waiting,
            events[-1].time_ns if len(events) else 0,
            len(session.submissions),
            len(session._desk.arrivals),
            tuple((stop.id, stop.enabled, stop.hits) for stop in session.breakpoints),
            session.record_changes,
            session.pace_s,
            tuple(session.watches),
            tuple(session._delays.recorded_s.items()),
            debugger_attached(),
            commands.chosen,
            commands.device_value,
        )
