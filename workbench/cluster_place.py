"""What a rank of a cluster says of itself: plain values, for another process to read."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands, and what it knows of work to come."""

    rank: int
    iteration: int | None = None
    """The one in hand; None: between iterations."""
    order: str | None = None
    reason: str | None = None
    ran: str | None = None
    """The phase that the last move ran, if it was one phase."""
    next_phase: str | None = None
    """Of the iteration in hand."""
    begun: int = 0
    """Iterations begun."""
    has_work: bool = False
    """Somebody may have, for all that is known here."""
    is_settled: bool = True
    """It is agreed what arrives next at any rank."""
    next_arrival: float | None = None
    """On the clock, at this rank."""
    mode: str = "async"
    state: str = "running"
    """``running``, ``paused``, ``suspended``, ``failed``; to a cluster also ``lost``."""
    held: str | None = None
    """Why a breakpoint holds it."""
    num_waiting: int = 0
    num_live: int = 0

    @property
    def is_between(self) -> bool:
        """Whether no iteration is in hand."""
        return self.iteration is None


@dataclass(frozen=True, slots=True)
class Moved:
    """What came of a move."""

    place: Place
    ended: tuple[RequestOutput, ...] = ()
    """Last outputs of the requests that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """A request as a table shows it."""

    rank: int
    request_id: str
    state: str
    """``to come``, ``waiting``, ``prefill``, ``decode``, ``paused``, or why it ended."""
    num_prompt: int
    num_output: int
    text: str
