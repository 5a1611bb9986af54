"""Device event times on the host's clock: anchors taken again and again, and a bound on the error of what they place.

An event tells its distance to another event, in float32 milliseconds: after a hundred seconds that is 8 µs coarse, and
the two clocks drift apart besides. So an anchor, an event whose host time is known to within a bracket, is taken again
and again between two iterations, on a stream of its own, where nothing is ever in front of it.

The bound. Let an anchor be off by at most *w*, half its bracket. What is placed *e* after it is off by at most
*w + r e* as long as the next anchor is not there, where *r* bounds how far the clocks' pace is from what it is taken to
be: ``DRIFT`` at first, later what the last two anchors leave open. The next anchor, *T* later, with half width *v*,
shows that this one had gone *m* wrong by then; with the share *x = e / T* of the way that was used, what was placed is
then off by at most *|1 - x| w + x (|m| + v)*, if the pace held still in between. So drift counts from the first anchor
on, as assumed while nothing is known and as measured afterwards, and only as far as times were really placed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import DeviceError

FIRST_NS = 10_000_000
"""The first anchor is renewed after this, each later one after as long as there have been anchors before it."""
EVERY_NS = 1_000_000_000
"""But no later than this."""
PATIENCE_NS = 1_000_000
"""An anchor that has not passed by then says nothing, and is not waited for."""
FIRST_PATIENCE_NS = 2_000_000_000
"""But one there must be. Where other processes use the device too, it may serve them for some milliseconds first."""
DRIFT = 600e-6
"""How far the paces of the two clocks may lie apart before it is measured. An assumption: PCI Express allows the clock
at each end of a link 300 ppm (Base Specification, reference clock), and the host and the device stand at its two ends.
Ordinary crystals are within a tenth of that. It is what the bound rests on until the first anchor is renewed."""
COARSE = 2.0**-23
"""Rounding of a distance in float32, in parts of it: half a unit for what is placed, half a unit for the anchors."""


@dataclass(slots=True)
class Anchor:
    """An event and when the host says it passed."""

    event: Any
    host_ns: int
    half_width_ns: int
    """The event passed at most so much before or after ``host_ns``."""
    rate: float
    """Host nanoseconds of a device nanosecond, as far as known when it was taken."""
    doubt: float
    """``rate`` is off by at most so much."""
    reach_ns: int = 0
    """The longest way from it to an event placed by it."""
    lasted_ns: int = 0
    """From it to the next one; 0: there is none yet. Numbers, so that no anchor keeps the later ones alive."""
    end_error_ns: int = 0
    """It was off by at most so much by then."""

    @property
    def error_ns(self) -> int:
        """Bound on the error of what it placed."""
        coarse_ns = COARSE * self.reach_ns
        if not self.lasted_ns:
            return round(self.half_width_ns + self.doubt * self.reach_ns + coarse_ns)
        share = self.reach_ns / self.lasted_ns
        return round(abs(1 - share) * self.half_width_ns + share * self.end_error_ns + coarse_ns)


class EventClock:
    """Keeps anchors of one device.

    Args:
        make_event: Makes a timing event and records it on an idle stream: has ``query()`` and ``elapsed_time(other)``.
        now_ns: The host's clock.

    Raises:
        DeviceError: in two seconds no event passes within a millisecond, even on an idle stream.
    """

    def __init__(self, make_event: Callable[[], Any], now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._make_event = make_event
        self._now_ns = now_ns
        self._rate = 1.0
        self._first: Anchor | None = None
        self._largest_ns = 0
        """Of the errors of anchors that another one has followed."""
        self.anchor = self._take(8)
        self._first = self.anchor

    @property
    def error_ns(self) -> int:
        """Bound on the error of every time placed so far; that of the present anchor before the first."""
        return max(self._largest_ns, self.anchor.error_ns)

    def keep(self) -> None:
        """Take a new anchor if the last one is old; costs some 20 µs then, and a comparison otherwise."""
        assert self._first is not None
        anchor = self.anchor
        due_ns = min(EVERY_NS, max(FIRST_NS, anchor.host_ns - self._first.host_ns))
        if self._now_ns() - anchor.host_ns >= due_ns:
            self._renew()

    def place(self, anchor: Anchor, event: Any) -> int:
        """Host time of an event that has passed, by the anchor in force when it was recorded."""
        way_ns = _way_ns(anchor, event)
        reach_ns = abs(round(way_ns))
        if reach_ns > anchor.reach_ns:
            anchor.reach_ns = reach_ns
            if anchor is not self.anchor:
                self._largest_ns = max(self._largest_ns, anchor.error_ns)
        return anchor.host_ns + round(way_ns)

    def _renew(self) -> None:
        before = self.anchor
        after = self._take(3)
        if after is before:
            return
        assert self._first is not None
        lasted_ns = before.lasted_ns = after.host_ns - before.host_ns
        missed_ns = abs(round(_way_ns(before, after.event)) - lasted_ns)
        before.end_error_ns = missed_ns + after.half_width_ns
        self._largest_ns = max(self._largest_ns, before.error_ns)
        since_first_ns = after.host_ns - self._first.host_ns
        if since_first_ns >= EVERY_NS:
            self._rate = since_first_ns / _device_ns(self._first, after.event)
        after.rate = self._rate
        # By the new pace, so that what is known by now is not doubted; the pace goes on as it went.
        left_ns = abs(_device_ns(before, after.event) * after.rate - lasted_ns)
        after.doubt = (left_ns + before.half_width_ns + after.half_width_ns) / lasted_ns
        self.anchor = after

    def _take(self, tries: int) -> Anchor:
        """The narrowest of some brackets; the present anchor where none can be had."""
        found = self._brackets(tries)
        given_up_ns = self._now_ns() + FIRST_PATIENCE_NS
        while not found and self._first is None:
            if self._now_ns() > given_up_ns:
                raise DeviceError(
                    "for two seconds no event passed within a millisecond on an idle stream, so device times would "
                    "mean nothing: the GPU is busy with other processes; use another one, or wait for them"
                )
            found = self._brackets(tries)
        return min(found, key=lambda anchor: anchor.half_width_ns) if found else self.anchor

    def _brackets(self, tries: int) -> list[Anchor]:
        return [bracket for bracket in (self._bracket() for _ in range(tries)) if bracket is not None]

    def _bracket(self) -> Anchor | None:
        before_ns = self._now_ns()
        event = self._make_event()
        while not event.query():
            if self._now_ns() - before_ns > PATIENCE_NS:
                return None
        width_ns = self._now_ns() - before_ns
        return Anchor(event, before_ns + width_ns // 2, (width_ns + 1) // 2, self._rate, DRIFT)


def _device_ns(anchor: Anchor, event: Any) -> float:
    """From the anchor's event to another, on the device's clock."""
    elapsed_ms: float = anchor.event.elapsed_time(event)
    return elapsed_ms * 1e6


def _way_ns(anchor: Anchor, event: Any) -> float:
    """The same on the host's clock, as far as the anchor knows its pace."""
    return _device_ns(anchor, event) * anchor.rate
