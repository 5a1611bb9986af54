"""Drives a session's engine at any grain: a phase, an iteration, many. Breakpoints are looked at on the way.

``run`` exhausts :meth:`Driver.go`; a run in the background advances it between turns of its event loop. Both are the
engine's one code path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from engine.controller import Border, Iteration
from engine.engine import Engine
from engine.phases import Phase
from engine.request import RequestOutput
from workbench.breakpoints import Breakpoint, Breakpoints
from workbench.desk import Desk
from workbench.drafted import Drafted
from workbench.events import EventLog, room_events
from workbench.expressions import Expressions
from workbench.peek import SessionError, as_phase, coming_phases
from workbench.seat import Seat
from workbench.snapshot import failure_text
from workbench.stops import RunOutcome, Stop, StopCause, make_stop, place_text
from workbench.watch import BorderWatch

if TYPE_CHECKING:
    from workbench.session import Session

Predicate = Callable[["Session"], object]

LEFT_NS = 50_000_000
"""Between two calls that drive, with requests running: what lies between was a person's time, or other code's."""


class Turn(Enum):
    """Where a run may be left for a while."""

    BETWEEN = "between iterations"
    WAITING = "in an iteration, whose next phase would wait for the device"
    IDLE = "between iterations, and nothing arrives for a while"


class Script:
    """What is done to the session between iterations by itself; this one does nothing."""

    def begin(self) -> None:
        """The session starts over."""

    def before(self, index: int) -> None:
        """Iteration ``index`` may begin next; called at least once before it does."""

    def after(self, iteration: Iteration) -> None:
        """An iteration ended and its outputs are kept."""


class Driver:
    """The only place from which a session's engine is advanced."""

    def __init__(
        self,
        session: Session,
        desk: Desk,
        watch: BorderWatch,
        breakpoints: Breakpoints,
        expressions: Expressions,
        events: EventLog,
    ) -> None:
        self._session = session
        self.engine: Engine = session.engine
        self.desk = desk
        self._watch = watch
        watch.behind_admit = self._admit_ran
        watch.behind_rewind = self._rewind_ran
        self._breakpoints = breakpoints
        self._expressions = expressions
        self._events = events
        self.script = Script()
        self.stopped: Stop | None = None
        """Why the last run stopped; after a step only where a breakpoint was hit."""
        self.seat = Seat()
        self._hit: Breakpoint | None = None
        self._begin_ns = 0
        self._ended_ns = 0
        """When the last iteration ended."""

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """A call that drives: nothing is known yet of why it stops."""
        claim = self.seat.claim("a call in progress")
        self._begin()
        try:
            yield
        finally:
            self.seat.release(claim)

    # -- grains ----------------------------------------------------------------------------------------------------

    def step_phase(self) -> Border | None:
        """See :meth:`workbench.session.Session.step_phase`."""
        with self._driving():
            return self._step_phase()

    def _step_phase(self) -> Border | None:
        if not self.ready():
            return None
        held = self._begin_iteration()
        if held is not None:
            return held
        with self._telling_failures():
            border = self.engine.step_phase()
        if border is not None and self.engine.in_hand is None:
            self._end(border.iteration.outputs)
        elif border is not None and self.engine.next_phase is not None and self._breakpoints.watch_borders:
            self._look(Border(self.engine.next_phase, "before", border.iteration))
        return border

    def _begin_iteration(self) -> Border | None:
        """Choose the next order where none is in hand, and look before its first phase.

        Returns:
            That border where a breakpoint holds it, else None.
        """
        if self.engine.in_hand is not None or not self._breakpoints.watch_borders:
            return None
        border = self._come_to_first_phase()
        return border if border is not None and self._look(border) else None

    def begin_iteration(self) -> Border | None:
        """See :meth:`workbench.session.Session.begin_iteration`."""
        with self._driving():
            if self.engine.in_hand is not None or not self.ready():
                return None
            border = self._come_to_first_phase()
            if border is not None:
                border.iteration.void_reasons.add("hand_stepped")
                self._look(border)
            return border

    def _come_to_first_phase(self) -> Border | None:
        borders: list[Border] = []

        def stands(border: Border) -> bool:
            borders.append(border)
            return True

        with self._telling_failures():
            self.engine.step(stands)
        return borders[0] if borders else None

    def step(self) -> list[RequestOutput]:
        """See :meth:`workbench.session.Session.step`."""
        with self._driving():
            return self._step()

    def _begin(self) -> None:
        if self.stopped is not None:
            self._breakpoints.resume()
        self.stopped = self._hit = None
        is_between = self.engine.in_hand is None and self.engine.table.num_active > 0
        if is_between and time.perf_counter_ns() - self._ended_ns > LEFT_NS:
            self._watch.engine_was_left()

    def _step(self, waits: Callable[[Border], bool] | None = None) -> list[RequestOutput]:
        """One iteration, or the rest of the one in hand, or up to where a breakpoint or ``waits`` holds it."""
        if not self.ready():
            return []
        engine = self.engine
        is_new, index = engine.in_hand is None, engine.controller.next_index
        if is_new:
            self._begin_ns = time.perf_counter_ns()
        with self._telling_failures():
            outputs = engine.step(self._holds(waits))
        # Where ranks find that nobody has work, none has begun.
        if engine.in_hand is None and not (is_new and engine.controller.next_index == index):
            self._end(outputs)
        return outputs

    @contextmanager
    def _telling_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            text = failure_text(self.engine) or f"{type(error).__name__}, {place_text(self.engine)}: {error}"
            self.stopped = make_stop(self.engine, StopCause.FAILURE, text)
            self._events.tell("failed", text)
            raise

    def _holds(self, waits: Callable[[Border], bool] | None) -> Callable[[Border], bool] | None:
        if not self._breakpoints.watch_borders:
            return waits
        return lambda border: self._look(border) or (waits is not None and waits(border))

    def _look(self, border: Border) -> bool:
        hit = self._breakpoints.at_border(border)
        if hit is None:
            return False
        border.iteration.void_reasons.add("hand_stepped")
        self._stop_at(hit)
        return True

    def _stop_at(self, hit: Breakpoint) -> None:
        self._hit = hit
        self.stopped = make_stop(self.engine, StopCause.BREAKPOINT, self._breakpoints.why(hit), hit.id)
        self._events.tell("stopped", self.stopped.text)

    def _end(self, outputs: list[RequestOutput]) -> None:
        """An iteration ended."""
        self._ended_ns = time.perf_counter_ns()
        iteration = self._watch.last
        if iteration is None or "hand_stepped" not in iteration.void_reasons:
            self.desk.clock.ran(time.perf_counter_ns() - self._begin_ns)
        self.desk.book.keep(outputs)
        for output in outputs:
            if output.finished:
                tokens = len(output.token_ids)
                self._events.tell("ended", f"{output.request_id}: {output.finish_reason}, {tokens} tokens")
        if iteration is not None:  # None: somebody put another watcher in the place of ours
            with self._telling_failures():
                self._note(iteration)

    def _admit_ran(self, iteration: Iteration) -> None:
        self.desk.admissions.note(iteration)
        if iteration.room is not None:
            free = self.engine.pool.num_free
            for kind, text in room_events(iteration.room, free):
                self._events.tell(kind, text)

    def _rewind_ran(self, drafted: Drafted) -> None:
        """A mark in the trace; none where only prompts were read."""
        if drafted.num_verified:
            self.engine.recorder.instant("rewind", accepted=drafted.num_accepted, drafts=drafted.num_verified)

    def _note(self, iteration: Iteration) -> None:
        if self._expressions:
            self._expressions.note(self._session, iteration.index)
        try:
            hit = self._breakpoints.at_end(iteration)
            if hit is not None:
                self._stop_at(hit)
        finally:
            self.script.after(iteration)

    def ready(self) -> bool:
        """Let what is due arrive; whether there is anything to do."""
        if self.engine.in_hand is None:
            self.script.before(self.engine.controller.next_index)
        return self.desk.ready()

    # -- many ------------------------------------------------------------------------------------------------------

    def go(
        self,
        outcome: RunOutcome,
        n: int | None,
        until: Predicate | None = None,
        waits: Callable[[Border], bool] | None = None,
    ) -> Iterator[Turn]:
        """Run iterations, and say where the run may be left for a while; ``outcome`` tells what came of it.

        Args:
            outcome: Filled on the way; its ``stopped`` is set at the end.
            n: The most iterations; None: as many as it takes.
            until: Asked between iterations, before the first one too.
            waits: Asked at phase borders; True makes a turn there.
        """
        self._begin()
        while (end := self._end_of_run(outcome, n, until)) is None:
            if waits is not None and self.desk.idle_s > 0:
                yield Turn.IDLE
                continue
            was_in_hand, index = self.engine.in_hand is not None, self.engine.controller.next_index
            while True:
                outputs = self._step(waits)
                if self.engine.in_hand is None or self._hit is not None:
                    break
                yield Turn.WAITING
            outcome.extend(output for output in outputs if output.finished)
            outcome.iterations += self.engine.in_hand is None and (
                was_in_hand or self.engine.controller.next_index > index
            )
            if self._hit is not None:
                outcome.stopped = self.stopped
                return
            yield Turn.BETWEEN
        self.stop(outcome, *end)

    def _end_of_run(self, outcome: RunOutcome, n: int | None, until: Predicate | None) -> tuple[StopCause, str] | None:
        with self._telling_failures():
            is_true = until is not None and self.engine.in_hand is None and bool(until(self._session))
        if is_true:
            return StopCause.CONDITION, f"the condition is true {place_text(self.engine)}"
        if self.desk.finished:
            return StopCause.FINISHED, "nothing is left to do"
        if outcome.iterations == n:
            return StopCause.COUNT, f"ran {n} iteration{'' if n == 1 else 's'}"
        return None

    def stop(self, outcome: RunOutcome, cause: StopCause, text: str) -> None:
        """Say why a run stops here."""
        outcome.stopped = self.stopped = make_stop(self.engine, cause, text)
        self._events.tell("stopped", text)

    def run(self, n: int | None) -> RunOutcome:
        """See :meth:`workbench.session.Session.run`."""
        check_count(n)
        outcome = RunOutcome()
        with self._driving():
            for _ in self.go(outcome, n):
                pass
        return outcome

    def run_until(self, predicate: Predicate, limit: int) -> int:
        """See :meth:`workbench.session.Session.run_until`."""
        outcome = RunOutcome()
        with self._driving():
            if self.engine.in_hand is not None:
                self._step()
                if self._hit is not None:
                    return 0
            for _ in self.go(outcome, limit, predicate):
                pass
        taken, stop = outcome.iterations, outcome.stopped
        if stop is not None and stop.cause is StopCause.FINISHED:
            raise SessionError(f"run_until: not true after {taken} iterations, and nothing is left to do")
        if stop is not None and stop.cause is StopCause.COUNT:
            raise SessionError(f"run_until: not true after {limit} iterations; raise limit if it takes longer")
        return taken

    def run_to(self, phase: Phase | str, limit: int) -> None:
        """See :meth:`workbench.session.Session.run_to`."""
        with self._driving():
            self._run_to(as_phase(phase), limit)

    def _run_to(self, wanted: Phase, limit: int) -> None:
        for _ in range(limit + 1):
            if not self.ready():
                raise SessionError(f"run_to: no {wanted.value} is to come, and nothing is left to do")
            coming = coming_phases(self.engine)
            if wanted in coming:
                self._step_phases(coming.index(wanted))
                if self._hit is None:
                    where = place_text(self.engine)
                    text = f"stands {where}" + ("" if self.engine.in_hand else f", next is {wanted.value}")
                    self.stopped = make_stop(self.engine, StopCause.CONDITION, text)
                return
            self._step()
            if self._hit is not None:
                return
        raise SessionError(f"run_to: no {wanted.value} within {limit} iterations; raise limit if it takes longer")

    def _step_phases(self, count: int) -> None:
        for _ in range(count):
            self._step_phase()
            if self._hit is not None:
                return


def check_count(n: int | None) -> None:
    """Refuse a number of iterations that is none.

    Raises:
        SessionError: it is negative.
    """
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise SessionError(f"run(n) takes a number of iterations, at least 0; got {n!r}")
