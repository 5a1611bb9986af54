"""Looking at a session as its panel does: every view at once, checked to be plain JSON."""

from __future__ import annotations

import json
from typing import Any

from workbench.panel.bar_view import bar_view
from workbench.panel.blocks_view import BlockMap
from workbench.panel.changes_view import PhaseCards
from workbench.panel.graphs_view import GraphTally
from workbench.panel.history_view_model import PastFacts
from workbench.panel.log_view import log_view
from workbench.panel.requests_view import RequestRows
from workbench.panel.stops_view import stops_view
from workbench.panel.strip_view import strip_view
from workbench.session import Session


class Panel:
    """All views of one session, as long-lived as a panel's."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rows = RequestRows(session)
        self.blocks = BlockMap(session)
        self.tally = GraphTally(session)
        self.cards = PhaseCards(session)
        self.past = PastFacts(session)

    def look(self, chosen: int | None = None) -> dict[str, Any]:
        """Every view, after a way through JSON and back that must change nothing."""
        views: dict[str, Any] = {
            "bar": bar_view(self.session),
            "strip": strip_view(self.session),
            "requests": self.rows.view(),
            "blocks": self.blocks.view(),
            "graphs": self.tally.view(),
            "changes": self.cards.view(chosen),
            "history": self.past.view(chosen),
            "stops": stops_view(self.session),
            "log": log_view(self.session),
        }
        assert json.loads(json.dumps(views, allow_nan=False)) == views
        return views
