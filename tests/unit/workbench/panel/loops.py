"""Event loops whose clock is their own: a test waits for nothing, and tells time by turns."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any

_TURN_S = 0.01
"""What a turn of a busy loop takes: the longest slice of a run in the background."""


class TurnsLoop(asyncio.SelectorEventLoop):
    """A rest is over at once, and each turn takes 10 ms of ``time()``; so does whatever calls :meth:`work`."""

    def __init__(self) -> None:
        super().__init__(_NeverWaits(self))
        self._now_s = 0.0

    def time(self) -> float:
        """Seconds since it was made."""
        return self._now_s

    def work(self, duration_s: float) -> None:
        """Let so much time pass."""
        self._now_s += duration_s


class _NeverWaits(selectors.BaseSelector):
    def __init__(self, loop: TurnsLoop) -> None:
        self._loop, self._real = loop, selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return self._real.select(timeout)  # nothing is to come by time: only another thread can wake it
        self._loop.work(max(timeout, _TURN_S))
        return self._real.select(0)

    def register(self, *args: Any, **options: Any) -> Any:
        return self._real.register(*args, **options)

    def unregister(self, fileobj: Any) -> Any:
        return self._real.unregister(fileobj)

    def modify(self, *args: Any, **options: Any) -> Any:
        return self._real.modify(*args, **options)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, Any]:
        return self._real.get_map()


def run_in_turns(work: Coroutine[Any, Any, Any]) -> Any:
    """``asyncio.run`` on such a loop."""
    with asyncio.Runner(loop_factory=TurnsLoop) as runner:
        return runner.run(work)


def turns_loop() -> TurnsLoop:
    """The one that runs now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, TurnsLoop)
    return loop
