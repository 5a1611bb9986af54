"""Breakpoints, and what a new one may name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.phases import Phase, Reason
from workbench.panel.messages import StopRow, StopsPane
from workbench.stops import Stop, StopCause

if TYPE_CHECKING:
    from workbench.session import Session


def stops_view(session: Session) -> StopsPane:
    """All breakpoints, in the order they were made."""
    stopped = stop_in_hand(session)
    standing = None if stopped is None else stopped.breakpoint
    rows = [
        StopRow(id=one.id, text=str(one.wanted), enabled=one.enabled, hits=one.hits, is_hit=one.id == standing)
        for one in session.breakpoints
    ]
    return StopsPane(
        rows=rows,
        phases=[phase.value for phase in Phase],
        reasons=[[reason.name, reason.value] for reason in Reason],
        hint="" if rows else "No breakpoint: name a phase, a request, a reason or a condition, and runs stop there.",
    )


def stop_in_hand(session: Session) -> Stop | None:
    """Why the last run stopped, while the session still stands there: it may have gone on since, or started over."""
    stopped, engine = session.stopped, session.engine
    if stopped is None or stopped.iterations_begun != engine.controller.next_index:
        return None
    if stopped.cause is StopCause.FINISHED and not session.finished:
        return None  # a request was submitted since
    next_phase = None if engine.next_phase is None else engine.next_phase.value
    return stopped if stopped.phase == next_phase else None
