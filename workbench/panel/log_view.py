"""What happened to a session, the newest first."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from workbench.panel.messages import EventRow, LogPane

if TYPE_CHECKING:
    from workbench.session import Session

MOST_ROWS = 200
"""Events shown unless more are asked for."""


def log_view(session: Session, limit: int = MOST_ROWS) -> LogPane:
    """The newest events, at most ``limit``."""
    events = session.events
    newest = islice((events[-place] for place in range(1, len(events) + 1)), limit)
    rows = [EventRow(iteration=event.iterations_begun, kind=event.kind, text=event.text) for event in newest]
    return LogPane(
        rows=rows,
        left_out=len(events) - len(rows),
        hint="" if rows else "Nothing happened yet: submit a request, then step or run.",
    )
