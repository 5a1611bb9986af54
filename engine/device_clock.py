"""Device event times on the host's clock: anchors taken again and again, and a measured bound on their error.

An event tells its distance to another event, in float32 milliseconds: after a hundred seconds that is 8 µs coarse, and
the two clocks drift apart besides. So an anchor, an event whose host time is known to within a bracket, is taken every
second between two iterations, on a stream of its own, where nothing is ever in front of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import DeviceError

EVERY_NS = 1_000_000_000
PATIENCE_NS = 1_000_000
"""An anchor that has not passed by then says nothing, and is not waited for."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event and when the host says it passed."""

    event: Any
    host_ns: int
    half_width_ns: int
    """The event passed at most so much before or after ``host_ns``."""
    rate: float
    """Host nanoseconds of a device nanosecond, as far as known when it was taken."""


class EventClock:
    """Keeps anchors of one device.

    Args:
        make_event: Makes a timing event and records it on an idle stream: has ``query()`` and ``elapsed_time(other)``.
        now_ns: The host's clock.

    Raises:
        DeviceError: events do not pass even on an idle stream.
    """

    def __init__(self, make_event: Callable[[], Any], now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._make_event = make_event
        self._now_ns = now_ns
        self._rate = 1.0
        self._first: Anchor | None = None
        self._largest_miss_ns = 0
        self._widest_ns = 0
        self.anchor = self._take(8)
        self._first = self.anchor

    @property
    def error_ns(self) -> int:
        """Bound on the error of a placed time, as measured: the widest bracket, and how far the next anchor was off."""
        return self._widest_ns + self._largest_miss_ns

    def keep(self) -> None:
        """Take a new anchor if the last one is old; costs some 20 µs then, and a comparison otherwise."""
        if self._now_ns() - self.anchor.host_ns >= EVERY_NS:
            self._renew()

    def _renew(self) -> None:
        before = self.anchor
        after = self._take(3)
        if after is before:
            return
        # Times are placed within about a second of their anchor, however long the engine stood still meanwhile.
        share = min(1.0, EVERY_NS / (after.host_ns - before.host_ns))
        miss_ns = round(share * abs(self.place(before, after.event) - after.host_ns))
        # What both brackets allow is no miss.
        self._largest_miss_ns = max(self._largest_miss_ns, miss_ns - before.half_width_ns - after.half_width_ns)
        assert self._first is not None
        device_ns = self._first.event.elapsed_time(after.event) * 1e6
        if device_ns >= EVERY_NS:
            self._rate = (after.host_ns - self._first.host_ns) / device_ns
        self.anchor = Anchor(after.event, after.host_ns, after.half_width_ns, self._rate)

    def _take(self, tries: int) -> Anchor:
        """The narrowest of some brackets; the present anchor where none can be had."""
        found = [bracket for bracket in (self._bracket() for _ in range(tries)) if bracket is not None]
        if not found and self._first is None:
            raise DeviceError("no event passed within a millisecond on an idle stream; device times mean nothing then")
        best = min(found, key=lambda anchor: anchor.half_width_ns, default=None)
        if best is None:
            return self.anchor
        self._widest_ns = max(self._widest_ns, best.half_width_ns)
        return best

    def _bracket(self) -> Anchor | None:
        before_ns = self._now_ns()
        event = self._make_event()
        while not event.query():
            if self._now_ns() - before_ns > PATIENCE_NS:
                return None
        width_ns = self._now_ns() - before_ns
        return Anchor(event, before_ns + width_ns // 2, (width_ns + 1) // 2, self._rate)

    @staticmethod
    def place(anchor: Anchor, event: Any) -> int:
        """Host time of an event that has passed, by the anchor in force when it was recorded."""
        elapsed_ms: float = anchor.event.elapsed_time(event)
        return anchor.host_ns + round(elapsed_ms * 1e6 * anchor.rate)
