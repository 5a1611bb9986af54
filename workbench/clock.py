"""When requests arrive: by real time, by engine time that stands still while nothing runs, or by iteration number.

Only a closed loop (everything arrives at the start) and the iterations clock give two runs equal schedules of
arrivals. On the other two an iteration that takes longer lets more requests in.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, get_args

from engine.errors import ConfigError

ClockName = Literal["virtual", "iterations", "wall"]
Unit = Literal["s", "iterations"]


class Clock(ABC):
    """Reads 0 at the start; never goes back but by :meth:`reset`."""

    name: ClockName
    unit: Unit
    stands_still: bool = True
    """Whether it does so while nobody drives the engine."""

    @abstractmethod
    def now(self) -> float:
        """The reading, in ``unit``."""

    @abstractmethod
    def skip_to(self, when: float) -> None:
        """The engine has nothing to do before ``when``: be there. Blocks on the wall clock only."""

    def wait_s(self, when: float) -> float:
        """Real seconds that :meth:`skip_to` would block."""
        return 0.0

    def ran(self, duration_ns: int) -> None:  # noqa: B027 (most clocks have nothing to do)
        """An iteration that was not stepped by hand took this long."""

    @abstractmethod
    def reset(self) -> None:
        """Read 0 again."""


class VirtualClock(Clock):
    """Seconds the engine ran by itself. Thinking, stepping by hand and idling take no time on it.

    When the engine is idle it jumps to the next arrival, so a run never waits.
    """

    name: ClockName = "virtual"
    unit: Unit = "s"

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def skip_to(self, when: float) -> None:
        self._now_s = max(self._now_s, when)

    def ran(self, duration_ns: int) -> None:
        self._now_s += duration_ns * 1e-9

    def reset(self) -> None:
        self._now_s = 0.0


class IterationsClock(Clock):
    """Engine iterations begun, plus those skipped while idle: a request of arrival k comes before iteration k begins.

    Forward k is launched by iteration k in both modes, so both see the same arrivals before the same forward. An
    async iteration k > 0 samples forward k - 1 where a legacy one samples forward k: tokens, and what their ends
    free, come one iteration later.
    """

    name: ClockName = "iterations"
    unit: Unit = "iterations"

    def __init__(self, begun: Callable[[], int]) -> None:
        self._begun = begun
        self._skipped = 0.0

    def now(self) -> float:
        return self._begun() + self._skipped

    def skip_to(self, when: float) -> None:
        self._skipped = max(self._skipped, when - self._begun())

    def reset(self) -> None:
        self._skipped = 0.0


class WallClock(Clock):
    """Real seconds since it was made or reset."""

    name: ClockName = "wall"
    unit: Unit = "s"
    stands_still = False

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def now(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) * 1e-9

    def skip_to(self, when: float) -> None:
        while (left := self.wait_s(when)) > 0:
            time.sleep(left)

    def wait_s(self, when: float) -> float:
        return max(0.0, when - self.now())

    def reset(self) -> None:
        self._start_ns = time.perf_counter_ns()


def make_clock(name: str, begun: Callable[[], int]) -> Clock:
    """The clock called ``name``; ``begun`` gives the engine's iterations begun.

    Raises:
        ConfigError: there is no such clock.
    """
    if name == "virtual":
        return VirtualClock()
    if name == "iterations":
        return IterationsClock(begun)
    if name == "wall":
        return WallClock()
    raise ConfigError(f"clock must be one of {', '.join(get_args(ClockName))}; got {name!r}")
