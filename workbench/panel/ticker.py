"""Looks at a session a few times a second, and has what shows it redrawn when something has changed.

A coroutine on the loop that runs the session, so that it looks between iterations or phases only, and never from
another thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any

log = logging.getLogger(__name__)

PERIOD_S = 0.18
"""From look to look, however late each came: five a second and a few to spare, since each costs the engine."""
_LEAST_REST_S = PERIOD_S / 2
"""Behind a redraw, however long it waited for a core."""
COST = 0.025
"""Share of a core that redrawing may take. Waiting for a core or for the interpreter, which the device's thread may
hold, is not redrawing: were it counted, a busy machine would be shown once a second."""
_CREDIT_S = COST * PERIOD_S
"""What cheap redraws have left over is spent on the next dear one, such as those that show what changes slowly too; but
no more than a period's worth."""
LONGEST_S = 1.0
"""Between two looks, however long redrawing takes."""


class Ticker:
    """Calls ``redraw`` while ``stamp`` keeps changing.

    Args:
        stamp: A cheap value that differs where there is something new to see.
        redraw: Shows it. What it raises is logged once for each stamp, and the ticker goes on.
        spent_s: Reads the time that this thread has worked.

    Neither of the two keeps a method's object: the ticker of a panel that nobody holds any more ends.
    """

    def __init__(
        self,
        stamp: Callable[[], Hashable],
        redraw: Callable[[], None],
        spent_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._stamp, self._redraw = _weak(stamp), _weak(redraw)
        self._spent_s = spent_s
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.shown: Hashable = None
        """The stamp of what is shown; whoever draws beside the ticker sets it, and the ticker need not draw that."""
        self.is_behind = False
        """What is shown is known not to be all: draw at the next look, whatever the stamp says, and make none."""

    def start(self) -> bool:
        """Begin to look, if a loop is running; whether it does now."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self.is_running
        if not self.is_running:
            self._loop, self._task = loop, loop.create_task(self._look())
        return True

    @property
    def is_running(self) -> bool:
        """Whether it looks: a loop that was closed runs nothing any more."""
        return self._task is not None and not self._task.done() and not self._is_loop_closed()

    def stop(self) -> None:
        """Look no more."""
        if self.is_running:
            assert self._task is not None
            self._task.cancel()
        self._task = self._loop = None

    def _is_loop_closed(self) -> bool:
        return self._loop is None or self._loop.is_closed()

    async def _look(self) -> None:
        """Until the panel is gone."""
        time_s = asyncio.get_running_loop().time
        due_s, nap_s, saved_s = time_s() + PERIOD_S, PERIOD_S, 0.0
        while True:
            await asyncio.sleep(nap_s)
            stamp, redraw = self._stamp(), self._redraw()
            if stamp is None or redraw is None:
                return
            begin_s = self._spent_s()
            try:
                now = None if self.is_behind else stamp()
                if self.is_behind or now != self.shown:
                    self.is_behind, self.shown = False, now
                    redraw()
            except Exception:
                log.exception("the panel could not be redrawn")
            cost_s = self._spent_s() - begin_s
            now_s = time_s()
            rest_s = min(max(_LEAST_REST_S, (cost_s - saved_s) / COST), LONGEST_S)
            due_s = max(due_s + PERIOD_S, now_s + rest_s)
            nap_s = due_s - now_s
            saved_s = min(max(0.0, saved_s + COST * nap_s - cost_s), _CREDIT_S)
            del stamp, redraw


def _weak(function: Callable[[], Any]) -> Callable[[], Callable[[], Any] | None]:
    return weakref.WeakMethod(function) if hasattr(function, "__self__") else lambda: function
