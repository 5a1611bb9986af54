"""Timed iterations cut into windows that follow each other, so that sums over windows are sums over the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tracing.intervals import Interval, gaps, merge
from tracing.records import Category, IterationRecord, Span
from tracing.windows import measured_stretches
from workbench.figures.errors import FigureError

_WINDOWS = 60
"""About so many a run, unless a caller says how long they are."""
PAUSE_NS = 5_000_000
"""Nothing happened for so long, on any lane: nobody ran the engine. The timeline cuts the same stretches out."""


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring timed iterations of one stretch of measured time."""

    stretch: int
    """Windows of one stretch adjoin."""
    records: tuple[IterationRecord, ...]
    start_ns: int
    end_ns: int
    """The next window's start; the end of the last iteration in the last window of a stretch."""


def windows_of(
    iterations: Sequence[IterationRecord], length: int | None = None, pauses: Sequence[Interval] = ()
) -> list[Window]:
    """Windows of ``length`` iterations, the last one of a stretch may be shorter; together they are measured time.

    Args:
        iterations: Sorted by begin, judged.
        length: None: so that there are about sixty.
        pauses: Of :func:`pauses_in`; a stretch ends before each, so that no window holds one. The device may have
            worked on into a pause: that time is left out, and so is the iteration that finds its tokens ready.

    Raises:
        FigureError: ``length`` is no positive number.
    """
    if length is not None and length < 1:
        raise FigureError(f"window must be at least 1 iteration, got {length}")
    stretches = [part for stretch in measured_stretches(iterations) for part in _cut(stretch, pauses)]
    length = length or -(-sum(map(len, stretches)) // _WINDOWS) or 1
    windows = []
    for number, stretch in enumerate(stretches):
        for first in range(0, len(stretch), length):
            members = tuple(stretch[first : first + length])
            is_last = first + length >= len(stretch)
            end_ns = members[-1].end_ns if is_last else stretch[first + length].begin_ns
            windows.append(Window(number, members, members[0].begin_ns, end_ns))
    return windows


def pauses_in(spans: Sequence[Span], iterations: Sequence[IterationRecord]) -> list[Interval]:
    """Stretches between iterations of :data:`PAUSE_NS` or more in which host and device did nothing; sorted."""
    busy = [(span.start_ns, span.end_ns) for span in spans if span.category is not Category.COUNTER]
    busy += [(record.begin_ns, record.end_ns) for record in iterations]
    return [(start, end) for start, end in gaps(merge(busy)) if end - start >= PAUSE_NS]


def _cut(stretch: Sequence[IterationRecord], pauses: Sequence[Interval]) -> list[list[IterationRecord]]:
    parts = [[stretch[0]]]
    for last, record in pairwise(stretch):
        pause = next((pause for pause in pauses if last.end_ns <= pause[0] and pause[1] <= record.begin_ns), None)
        if pause is None:
            parts[-1].append(record)
        elif pause[0] > last.end_ns:  # its forward ran while nobody waited
            parts.append([])
        else:
            parts.append([record])
    return [part for part in parts if part]
