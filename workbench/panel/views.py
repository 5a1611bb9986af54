"""What a panel shows of its session: one view a part of the page, and a stamp that says whether any of it is new."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.panel.bar_view import bar_view
from workbench.panel.blocks_view import blocks_view
from workbench.panel.changes_view import PhaseCards
from workbench.panel.commands import Commands
from workbench.panel.graphs_view import GraphTally
from workbench.panel.history_view_model import PastFacts
from workbench.panel.log_view import log_view
from workbench.panel.messages import BarView, StripView
from workbench.panel.requests_view import RequestRows
from workbench.panel.stops_view import stops_view
from workbench.panel.strip_view import strip_view

if TYPE_CHECKING:
    from workbench.session import Session


class Views:
    """Made from a session at a border; looks at nothing on the device, and changes nothing."""

    def __init__(self, session: Session, commands: Commands) -> None:
        self._session = session
        self._commands = commands
        cards, facts = PhaseCards(session), PastFacts(session)
        self._panes: dict[str, Callable[[], Mapping[str, Any]]] = {
            "requests": RequestRows(session).view,
            "blocks": lambda: blocks_view(session),
            "graphs": GraphTally(session).view,
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

    def stamp(self) -> Hashable:
        """Differs where a view may differ; takes microseconds."""
        session, engine, commands = self._session, self._session.engine, self._commands
        in_hand, events = engine.in_hand, session.events
        return (
            session.state,
            engine.is_closed,
            engine.controller.next_index,
            None if in_hand is None else (in_hand.index, engine.next_phase, len(in_hand.void_reasons)),
            sum(1 for _ in session.recorder.running()),
            engine.controller.wanted_mode,
            events[-1].time_ns if len(events) else 0,
            len(session.submissions),
            tuple((stop.id, stop.enabled, stop.hits) for stop in session.breakpoints),
            session.record_changes,
            session.pace_s,
            commands.chosen,
            commands.device_value,
        )
