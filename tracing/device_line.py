"""Device work in the order it was enqueued, and what each piece of it could not begin before."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from tracing.records import COMPUTE_LANE, Category, Span


class Limit(Enum):
    """What kept a piece of device work from beginning earlier."""

    ENQUEUE = "enqueue"  # the host had not enqueued it
    STREAM = "stream"  # the work before it on its lane ran
    BEHIND = "behind"  # a copy: the compute work it copies from ran


class Work(NamedTuple):
    """One piece of device work; the neighbours are indices into the list it stands in."""

    span: Span
    noted_ns: int
    """When the host had enqueued all of it; its start where that is not known."""
    after: int | None
    """The work before it on its lane."""
    behind: int | None
    """For a copy the compute work of its iteration that was enqueued last before it: a copy waits for that."""

    @property
    def enqueued_ns(self) -> int:
        """No later than this it was enqueued: a device may begin before the host has noted it."""
        return min(self.noted_ns, self.span.start_ns)


class Hold(NamedTuple):
    """What held work up last."""

    limit: Limit
    until_ns: int
    """May lie behind the work's start, by the error of the device's clock."""


class DeviceLine:
    """All device work that has ended.

    Args:
        spans: In any order; only those of devices are taken.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.works = _works(spans)
        """In the order of enqueueing; neighbours stand before those that name them."""
        self.holds = [self._hold(work) for work in self.works]
        """What held up each of them."""
        self._noted = [work.noted_ns for work in self.works]
        self._place = {id(work.span): place for place, work in enumerate(self.works)}

    def place(self, span: Span) -> int:
        """Where a span stands; it must be one of those given."""
        return self._place[id(span)]

    def noted_in(self, begin_ns: int, end_ns: int) -> range:
        """Places of the work whose enqueueing was noted in a stretch, both ends included."""
        return range(bisect_left(self._noted, begin_ns), bisect_right(self._noted, end_ns))

    def _hold(self, work: Work) -> Hold:
        after = None if work.after is None else self.works[work.after].span.end_ns
        behind = None if work.behind is None else self.works[work.behind].span.end_ns
        return last_hold(work.enqueued_ns, after, behind)


def last_hold(enqueued_ns: int, after_ns: int | None, behind_ns: int | None) -> Hold:
    """The last of the limits that there are; the device's own where one ties with the host's."""
    hold = Hold(Limit.ENQUEUE, enqueued_ns)
    if after_ns is not None and after_ns >= hold.until_ns:
        hold = Hold(Limit.STREAM, after_ns)
    if behind_ns is not None and behind_ns >= hold.until_ns:
        hold = Hold(Limit.BEHIND, behind_ns)
    return hold


def _works(spans: Iterable[Span]) -> list[Work]:
    works: list[Work] = []
    newest_on: dict[str, int] = {}
    newest_compute_of: dict[int, int] = {}
    for span in sorted((span for span in spans if span.category is Category.DEVICE), key=_order):
        is_compute = span.lane == COMPUTE_LANE
        works.append(
            Work(
                span=span,
                noted_ns=span.noted_ns,
                after=newest_on.get(span.lane),
                behind=None if is_compute else newest_compute_of.get(span.iteration),
            )
        )
        newest_on[span.lane] = len(works) - 1
        if is_compute:
            newest_compute_of[span.iteration] = len(works) - 1
    return works


def _order(span: Span) -> tuple[int, int, int, bool, str, int]:
    return span.noted_ns, span.start_ns, span.end_ns, span.lane != COMPUTE_LANE, span.name, span.iteration
