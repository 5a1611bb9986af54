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

PERIOD_S = 0.15
"""Between two looks at a running session; at least five a second, drawing included."""
COST = 0.02
"""Share of the loop's time that redrawing may take."""
LONGEST_S = 1.0
"""Between two looks, however long redrawing takes."""


class Ticker:
    """Calls ``redraw`` while ``stamp`` keeps changing.

    Args:
        stamp: A cheap value that differs where there is something new to see.
        redraw: Shows it. What it raises is logged, and the ticker goes on.
    """

    def __init__(self, stamp: Callable[[], Hashable], redraw: Callable[[], None]) -> None:
        self._stamp, self._redraw = _weak(stamp), _weak(redraw)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> bool:
        """Begin to look, if a loop is running; whether it does now."""
        if self.is_running:
            return True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        self._task = loop.create_task(_look(self._stamp, self._redraw))
        return True

    @property
    def is_running(self) -> bool:
        """Whether it looks."""
        return self._task is not None and not self._task.done()

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


def _weak(function: Callable[[], Any]) -> Callable[[], Callable[[], Any] | None]:
    """A reference that does not keep a method's object: a panel that nobody holds any more is let go of."""
    return weakref.WeakMethod(function) if hasattr(function, "__self__") else lambda: function


async def _look(
    stamp: Callable[[], Callable[[], Hashable] | None], redraw: Callable[[], Callable[[], None] | None]
) -> None:
    """Until the panel is gone."""
    seen: Hashable = None
    nap_s = PERIOD_S
    while True:
        await asyncio.sleep(nap_s)
        look, draw = stamp(), redraw()
        if look is None or draw is None:
            return
        begin_s = time.perf_counter()
        try:
            now = look()
            if now != seen:
                seen = now
                draw()
        except Exception:
            log.exception("the panel could not be redrawn")
        nap_s = min(max(PERIOD_S, (time.perf_counter() - begin_s) / COST), LONGEST_S)
        del look, draw
