"""Breakpoints: where a run is to stand still, and whether it is there.

A breakpoint has one *place*: before a phase, behind an iteration, or at any border. All that it names must hold there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import TYPE_CHECKING

from engine.controller import Border, Iteration
from engine.phases import Phase, Reason
from engine.request import RequestState
from workbench.book import RequestBook
from workbench.bubble_watch import BubbleWatch, SeenBubble
from workbench.peek import SessionError, as_phase, as_reason
from workbench.stops import place_text

if TYPE_CHECKING:
    from workbench.session import Session

Condition = Callable[["Session"], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a breakpoint asks for; None and False ask for nothing."""

    phase: Phase | None = None
    when: Condition | None = None
    request: str | None = None
    reason: Reason | None = None
    graph_miss: bool = False
    bubble_ns: int | None = None

    def __str__(self) -> str:
        parts = [f"before {self.phase.value}"] if self.phase is not None else []
        parts += [f"for {self.request}"] if self.request is not None else []
        parts += [f"reason {self.reason.name}"] if self.reason is not None else []
        parts += ["graph miss"] if self.graph_miss else []
        parts += [f"bubble longer than {self.bubble_ns / 1e3:g} µs"] if self.bubble_ns is not None else []
        parts += [f"when {getattr(self.when, '__name__', 'condition')}"] if self.when is not None else []
        return ", ".join(parts)


class Place(Enum):
    """Where a breakpoint is looked at."""

    PHASE = "before its phase"
    FIRST = "before the first phase of an iteration"
    FORWARD = "before forward"
    END = "behind an iteration"
    ANY = "at any border, when what it asks for becomes true"


class Breakpoint:
    """One of them; ``session.break_on`` makes it."""

    def __init__(self, number: int, wanted: Wanted, owner: Breakpoints) -> None:
        self.id = number
        self.wanted = wanted
        self.enabled = True
        self.hits = 0
        """How often it was hit since it was made, or since the session was reset."""
        self.since_ns = time.perf_counter_ns()
        """When it was made, or the session was driven on after its last stop: older bubbles do not concern it."""
        self.was_true = False
        """At the last border looked at; for a condition that has to become true."""
        self.last_state: RequestState | None = None
        """Of its request, at the last border looked at."""
        self._owner = owner

    @property
    def place(self) -> Place:
        """Where it is looked at: where all that it asks for is known."""
        wanted = self.wanted
        if wanted.phase is not None:
            return Place.PHASE
        if wanted.bubble_ns is not None:
            return Place.END
        if wanted.graph_miss:
            return Place.FORWARD
        return Place.FIRST if wanted.reason is not None else Place.ANY

    def enable(self) -> None:
        """Let it stop runs again."""
        self.enabled = True

    def disable(self) -> None:
        """Keep it, and let it stop nothing."""
        self.enabled = False

    def remove(self) -> None:
        """Take it away."""
        self._owner.remove(self)

    def __str__(self) -> str:
        return f"breakpoint {self.id} ({self.wanted})"

    def __repr__(self) -> str:
        hits = f"{self.hits} hit{'' if self.hits == 1 else 's'}"
        return f"<{self}: {hits}{'' if self.enabled else ', disabled'}>"

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self)[1:-1])}</div>"


class Breakpoints:
    """All breakpoints of a session, in the order they were made."""

    def __init__(self, session: Session, book: RequestBook) -> None:
        self._session = session
        self._book = book
        self._all: list[Breakpoint] = []
        self._next_number = 1
        self._bubbles = BubbleWatch(session.recorder)
        self._newest_bubbles: list[SeenBubble] = []

    def add(
        self,
        *,
        phase: Phase | str | None,
        when: Condition | None,
        request: str | None,
        reason: Reason | str | None,
        graph_miss: bool,
        bubble_longer_than_us: float | None,
    ) -> Breakpoint:
        """See :meth:`workbench.session.Session.break_on`."""
        wanted = Wanted(
            phase=None if phase is None else as_phase(phase),
            when=when,
            request=request,
            reason=None if reason is None else as_reason(reason),
            graph_miss=graph_miss,
            bubble_ns=None if bubble_longer_than_us is None else round(bubble_longer_than_us * 1e3),
        )
        self._check(wanted)
        made = Breakpoint(self._next_number, wanted, self)
        made.last_state = self._state(wanted.request)
        self._next_number += 1
        self._all.append(made)
        return made

    def _check(self, wanted: Wanted) -> None:
        session = self._session
        if wanted == Wanted():
            raise SessionError(
                "break_on needs something to stop at: phase, when, request, reason, graph_miss or bubble_longer_than_us"
            )
        if wanted.when is not None and not callable(wanted.when):
            raise SessionError(f"when must be a function of the session, got {wanted.when!r}")
        if wanted.graph_miss and not session.engine.runner.graphs:
            raise SessionError("graph_miss: this engine captures no graphs, so none can be missed; set graphs=")
        if wanted.graph_miss and wanted.phase in (Phase.ADMIT, Phase.PREPARE):
            raise SessionError("graph_miss is known behind prepare; leave phase out, or name one that comes later")
        if wanted.bubble_ns is not None and wanted.bubble_ns <= 0:
            raise SessionError(f"bubble_longer_than_us must be above 0, got {wanted.bubble_ns / 1e3:g}")
        if wanted.bubble_ns is not None and session.config.device == "inline":
            raise SessionError("the inline device has no bubbles: it computes on the host's thread; use device='cpu'")

    def remove(self, one: Breakpoint) -> None:
        """Take it away; nothing happens if it is gone already."""
        if one in self._all:
            self._all.remove(one)

    def clear(self) -> None:
        """Take all away."""
        self._all.clear()

    def start_over(self) -> None:
        """Nothing was hit yet."""
        self._bubbles.clear()
        self.resume()
        for one in self._all:
            one.hits, one.was_true, one.last_state = 0, False, self._state(one.wanted.request)

    def resume(self) -> None:
        """The session is driven on after a stop: idle time until now was seen then, or was a person's."""
        now_ns = time.perf_counter_ns()
        for one in self._all:
            one.since_ns = now_ns

    @property
    def watch_borders(self) -> bool:
        """Whether any has to be looked at inside iterations."""
        return any(one.enabled and one.place is not Place.END for one in self._all)

    # -- looking ---------------------------------------------------------------------------------------------------

    def at_border(self, border: Border) -> Breakpoint | None:
        """The first breakpoint that is hit before a phase; all that are hit count it."""
        return self._look(border.iteration, border.phase)

    def at_end(self, iteration: Iteration) -> Breakpoint | None:
        """The first one that is hit behind an iteration that ended just now."""
        if not self._all:
            return None
        if any(one.wanted.bubble_ns is not None for one in self._all):
            engine = self._session.engine
            left_work = bool(engine.queue.num_waiting + engine.table.num_active)
            self._bubbles.note(iteration.index, is_void=bool(iteration.void_reasons), left_work=left_work)
            self._newest_bubbles = self._bubbles.new()
        return self._look(iteration, None)

    def why(self, hit: Breakpoint) -> str:
        """One line for the stop at a hit."""
        seen = self._long_bubbles(hit)
        what = f": {seen[0].text}" if seen else ""
        return f"{hit}{what}, {place_text(self._session.engine)}"

    def _look(self, iteration: Iteration, phase: Phase | None) -> Breakpoint | None:
        hit: Breakpoint | None = None
        for one in tuple(self._all):
            if (
                one.enabled
                and _is_there(one.place, one.wanted, iteration, phase)
                and self._holds(one, iteration, phase)
            ):
                one.hits += 1
                hit = hit or one
        return hit

    def _holds(self, one: Breakpoint, iteration: Iteration, phase: Phase | None) -> bool:
        wanted = one.wanted
        holds = self._facts_hold(one, iteration, phase)
        if holds and wanted.when is not None:
            try:
                holds = bool(wanted.when(self._session))
            except Exception as error:
                raise SessionError(
                    f"the condition of {one} raised {type(error).__name__}: {error}; disable it or mend it to go on"
                ) from error
        if one.place is not Place.ANY or wanted.request is not None:
            return holds
        became_true, one.was_true = holds and not one.was_true, holds
        return became_true

    def _facts_hold(self, one: Breakpoint, iteration: Iteration, phase: Phase | None) -> bool:
        wanted = one.wanted
        if wanted.reason is not None and iteration.reason is not wanted.reason:
            return False
        if wanted.graph_miss and (iteration.plan is None or iteration.plan.graph is not None):
            return False
        if wanted.bubble_ns is not None and not self._long_bubbles(one):
            return False
        if wanted.request is None:
            return True
        if one.place is Place.ANY:
            state, before = self._state(wanted.request), one.last_state
            one.last_state = state
            return state is not before
        return phase is None or self._concerns(wanted.request, phase, iteration)

    def _long_bubbles(self, one: Breakpoint) -> list[SeenBubble]:
        """Those that a breakpoint asks for, of the newest ones."""
        least_ns = one.wanted.bubble_ns
        if least_ns is None:
            return []
        return [seen for seen in self._newest_bubbles if seen.time_ns > least_ns and seen.start_ns >= one.since_ns]

    def _state(self, request_id: str | None) -> RequestState | None:
        request = None if request_id is None else self._book.request(request_id)
        if request is None:
            return None
        return RequestState.FINISHED if request.finish_reason is not None else request.state

    def _concerns(self, request_id: str, phase: Phase, iteration: Iteration) -> bool:
        """Whether the phase about to run works on a request."""
        request, pending = self._book.request(request_id), self._session.engine.pending
        if request is None:
            return False
        if phase is Phase.ADMIT:
            return request.state is RequestState.WAITING and request.finish_reason is None
        if phase is Phase.PREPARE:
            return request.row is not None
        if phase is Phase.FORWARD:
            return iteration.plan is not None and request_id in iteration.plan.request_ids
        if phase in (Phase.SAMPLE, Phase.VERIFY):
            return pending is not None and request_id in pending.request_ids
        if phase in (Phase.DRAFT, Phase.REWIND, Phase.RESOLVE):
            return iteration.consumed is not None and request_id in iteration.consumed.request_ids
        return request in iteration.advanced or request in iteration.ended

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(tuple(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._all)) or "no breakpoints; session.break_on(...) makes one"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def _is_there(place: Place, wanted: Wanted, iteration: Iteration, phase: Phase | None) -> bool:
    if place is Place.ANY:
        return True
    if place is Place.END or phase is None:
        return place is Place.END and phase is None
    if place is Place.FIRST:
        return phase is iteration.order.phases[0]
    return phase is (Phase.FORWARD if place is Place.FORWARD else wanted.phase)
