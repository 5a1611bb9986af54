"""Why a run stood still, as a value that text, tests and panels read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from html import escape

from engine.engine import Engine
from engine.request import RequestOutput


class StopCause(Enum):
    """What kind of thing ended a run."""

    COUNT = "count"  # as many iterations as asked for
    FINISHED = "finished"  # nothing is left to do
    CONDITION = "condition"  # what was waited for is true
    BREAKPOINT = "breakpoint"
    PAUSE = "pause"  # somebody asked, or the task was cancelled
    FAILURE = "failure"  # an exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where and why a run stood still."""

    cause: StopCause
    text: str
    """One line."""
    iteration: int | None
    """The one in hand; None between iterations."""
    phase: str | None
    """The phase it stands before; None between iterations."""
    iterations_begun: int
    breakpoint: int | None = None
    """Number of the breakpoint that was hit."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Stop: {self.text}>"


class RunOutcome(list[RequestOutput]):
    """The requests that ended during a run, and why it stopped; a prompt shows it in one line."""

    def __init__(self, outputs: Iterable[RequestOutput] = ()) -> None:
        super().__init__(outputs)
        self.iterations = 0
        """Iterations that ended."""
        self.stopped: Stop | None = None
        """None while it runs."""

    def __repr__(self) -> str:
        ended = f"{len(self)} request{'' if len(self) == 1 else 's'} ended in {self.iterations} iterations"
        return f"<{ended}; {self.stopped.text if self.stopped is not None else 'runs'}>"

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self)[1:-1])}</div>"


def make_stop(engine: Engine, cause: StopCause, text: str, breakpoint_id: int | None = None) -> Stop:
    """A stop where the engine stands now."""
    current, phase = engine.in_hand, engine.next_phase
    return Stop(
        cause=cause,
        text=text,
        iteration=current.index if current is not None else None,
        phase=phase.value if phase is not None else None,
        iterations_begun=engine.controller.next_index,
        breakpoint=breakpoint_id,
    )


def place_text(engine: Engine) -> str:
    """Where the engine stands, for the end of a sentence."""
    if engine.in_hand is None:
        begun = engine.controller.next_index
        return f"behind iteration {begun - 1}" if begun else "before the first iteration"
    phase = engine.next_phase
    return f"before {phase.value if phase else 'a phase'} of iteration {engine.in_hand.index}"
