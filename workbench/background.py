"""Runs a session on an event loop, in turns with whatever else the loop has to do: cells, clicks, other sessions.

No thread of its own: the engine runs between turns, on the loop's thread. A turn comes between two iterations once the
slice is used up, and in the middle of an iteration whose next phase would wait long for the device.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

from engine.controller import Border
from engine.device import Event
from engine.phases import Phase
from workbench.driver import Driver, Predicate, Turn, check_count
from workbench.peek import SessionError
from workbench.seat import Claim
from workbench.stops import RunOutcome, StopCause, place_text

log = logging.getLogger(__name__)

SLICE_NS = 4_000_000
"""The engine runs so long, and to the end of the iteration it is in, before others get a turn."""
_LONGEST_SLICE_NS = 10_000_000
_SLICE_OF_TURNS = 50
"""A slice is at least so many times what a turn takes in which nobody has work, so that turns cost 2 %."""
_LONG_WAIT_NS = 10_000_000
"""Waits for the device from this length on are spent on the loop."""
_SPENT_ON_LOOP = 0.75
"""Of the wait that is expected: the rest is waited for in the phase itself, so that no wake-up comes late."""
_NAP_S = 0.003
_IDLE_NAP_S = 0.02
_REST_NAP_S = 0.01
"""While a pace rests: a pause, a reset and another pace act within this."""
_WHO = "a run in the background"
_LATE_NS = 1_000_000
"""A turn that ends so much later than it should, while the device has finished, makes the iteration's times void."""


class BackgroundRun:
    """A run that goes on by itself. ``await`` it for its outcome; what it raises is raised there too."""

    def __init__(self, task: asyncio.Task[RunOutcome], describe: Callable[[], str]) -> None:
        self._task = task
        self._describe = describe

    @property
    def done(self) -> bool:
        """Whether it has stopped."""
        return self._task.done()

    def when_done(self, tell: Callable[[RunOutcome | BaseException], None]) -> None:
        """Have ``tell`` called on the loop when it has stopped, with its outcome or with what it raised."""

        def ended(task: asyncio.Task[RunOutcome]) -> None:
            if task.cancelled():
                tell(asyncio.CancelledError())
            else:
                tell(task.exception() or task.result())

        self._task.add_done_callback(ended)

    def __await__(self) -> Generator[Any, None, RunOutcome]:
        return asyncio.shield(self._task).__await__()

    def __repr__(self) -> str:
        return f"<background run: {self._describe()}>"


class Background:
    """Advances a driver in turns with an event loop."""

    def __init__(
        self, driver: Driver, describe: Callable[[], str], show_error: Callable[[BaseException], None]
    ) -> None:
        self._driver = driver
        self._describe = describe
        self._show_error = show_error
        self.pace_s = 0.0
        self._has_rested = False
        """Before the iteration that begins next, or is in hand: the device stood still for nobody's fault."""
        """A rest of so long behind each iteration; read anew at each."""
        self._pause_asked = False
        self._generation = 0
        """Changes when a run in progress must not touch the engine any more."""
        self._tasks: set[asyncio.Task[RunOutcome]] = set()
        """Held here, for a loop holds its tasks weakly."""
        self._asked: tuple[Phase, int] | None = None
        """The phase that may wait long, and when it was come to."""
        self._last_wait_ns: dict[Phase, int] = {}
        self._idle_turn_ns = SLICE_NS
        self._awaited: tuple[Border, Event] | None = None

    async def run(self, n: int | None, until: Predicate | None) -> RunOutcome:
        """See :meth:`workbench.session.Session.run_async`."""
        check_count(n)
        claim = self._driver.seat.claim(_WHO)
        self._pause_asked = False
        try:
            return await self._run(n, until, self._generation)
        finally:
            self._driver.seat.release(claim)

    def start(self, n: int | None, until: Predicate | None) -> BackgroundRun:
        """See :meth:`workbench.session.Session.start`."""
        check_count(n)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise SessionError(
                "start() needs a running event loop, as a notebook has one; without a loop call run()"
            ) from None
        claim = self._driver.seat.claim(_WHO, lambda: not loop.is_closed())
        self._pause_asked = False
        task = loop.create_task(self._run(n, until, self._generation))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, claim))
        return BackgroundRun(task, self._describe)

    def pause(self) -> None:
        """Stop at the end of the iteration in hand; nothing happens if nothing runs."""
        self._pause_asked = True

    def cancel(self) -> None:
        """The engine is to be reset or closed: a run in progress ends at its next turn without touching it."""
        self._generation += 1
        self._driver.seat.take_away()

    def _ended(self, task: asyncio.Task[RunOutcome], claim: Claim) -> None:
        self._tasks.discard(task)
        self._driver.seat.release(claim)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._show_error(error)

    async def _run(self, n: int | None, until: Predicate | None, generation: int) -> RunOutcome:
        outcome = RunOutcome()
        if generation != self._generation:
            return outcome  # cancelled before the loop came to it
        self._asked = None
        slice_end_ns = time.perf_counter_ns() + SLICE_NS
        try:
            for turn in self._driver.go(outcome, n, until, self._waits):
                if turn is Turn.BETWEEN:
                    self._note_wait()
                self._has_rested &= turn is Turn.WAITING
                if turn is Turn.WAITING:
                    await self._turn_while_waiting()
                elif turn is Turn.IDLE:
                    await asyncio.sleep(min(self._driver.desk.idle_s, _IDLE_NAP_S))
                elif self.pace_s and not self._driver.desk.finished and outcome.iterations != n:
                    await self._rest(generation)
                    self._has_rested = True
                elif time.perf_counter_ns() >= slice_end_ns:
                    slice_end_ns = await self._turn()
                if generation != self._generation:
                    return outcome
                if self._pause_asked and turn is not Turn.WAITING:
                    self._driver.stop(outcome, StopCause.PAUSE, f"paused {self._place()}")
                    break
        except asyncio.CancelledError:
            if generation == self._generation:
                if self._driver.engine.in_hand is not None:
                    self._driver.engine.in_hand.void_reasons.add("hand_stepped")
                self._driver.stop(outcome, StopCause.PAUSE, f"the task was cancelled {self._place()}")
            raise
        return outcome

    async def _rest(self, generation: int) -> None:
        """Leave the loop to others for the pace behind an iteration; whatever ends or changes it acts at once."""
        begin = time.perf_counter()
        while not self._pause_asked and generation == self._generation:
            left_s = self.pace_s - (time.perf_counter() - begin)
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, _REST_NAP_S))

    async def _turn(self) -> int:
        """Let others have their turn; returns when the next one is due."""
        begin_ns = time.perf_counter_ns()
        await asyncio.sleep(0)
        now_ns = time.perf_counter_ns()
        # A turn with work in it is long; the shortest of late is what turns cost the engine.
        self._idle_turn_ns = min(now_ns - begin_ns, self._idle_turn_ns + self._idle_turn_ns // 8 + 1)
        return now_ns + min(max(SLICE_NS, _SLICE_OF_TURNS * self._idle_turn_ns), max(SLICE_NS, _LONGEST_SLICE_NS))

    def _place(self) -> str:
        return place_text(self._driver.engine)

    # -- waiting for the device on the loop ------------------------------------------------------------------------

    def _waits(self, border: Border) -> bool:
        """Whether the phase before which an iteration stands would wait long for the device."""
        if self.pace_s or self._has_rested:
            border.iteration.void_reasons.add("paced")
        self._note_wait()
        ready = _awaited_by(border)
        if ready is None:
            return False
        self._asked = border.phase, time.perf_counter_ns()
        if self._last_wait_ns.get(border.phase, 0) < _LONG_WAIT_NS or ready.done():
            return False
        self._awaited = border, ready
        return True

    def _note_wait(self) -> None:
        """How long the phase took before which the device was waited for: what its next wait may take."""
        if self._asked is not None:
            phase, asked_ns = self._asked
            self._last_wait_ns[phase] = time.perf_counter_ns() - asked_ns
            self._asked = None

    async def _turn_while_waiting(self) -> None:
        assert self._awaited is not None
        assert self._asked is not None
        border, ready = self._awaited
        until_ns = self._asked[1] + int(self._last_wait_ns[border.phase] * _SPENT_ON_LOOP)
        while not ready.done() and (now_ns := time.perf_counter_ns()) < until_ns:
            await asyncio.sleep(_NAP_S)
            late_ns = time.perf_counter_ns() - now_ns - int(_NAP_S * 1e9)
            if late_ns > _LATE_NS and ready.done():
                border.iteration.void_reasons.add("event_loop")


def _awaited_by(border: Border) -> Event | None:
    """What the phase before which an iteration stands would wait for; None for a phase that waits for nothing."""
    sampled, verified = border.iteration.sampled, border.iteration.verified
    if border.phase is Phase.REWIND and verified is not None:
        return verified.accepted_ready
    if border.phase is not Phase.RESOLVE:
        return None
    if verified is not None:
        return verified.ready
    return None if sampled is None else sampled.ready


def show_error(error: BaseException) -> None:
    """Show what a run in the background raised, as a notebook shows a cell's error; ``%debug`` then works on it."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_shell() if get_shell is not None else None
    if shell is not None:
        shell.showtraceback((type(error), error, error.__traceback__))
    else:
        log.error("a run in the background failed", exc_info=error)
