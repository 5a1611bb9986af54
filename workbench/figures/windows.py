"""Timed iterations cut into windows that follow each other, so that sums over windows are sums over the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracing.records import IterationRecord
from tracing.windows import measured_stretches
from workbench.figures.errors import FigureError

_WINDOWS = 60
"""About so many a run, unless a caller says how long they are."""


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring timed iterations of one stretch of measured time."""

    stretch: int
    """Windows of one stretch adjoin."""
    records: tuple[IterationRecord, ...]
    start_ns: int
    end_ns: int
    """The next window's start; the end of the last iteration in the last window of a stretch."""


def windows_of(iterations: Sequence[IterationRecord], length: int | None = None) -> list[Window]:
    """Windows of ``length`` iterations, the last one of a stretch may be shorter; together they are measured time.

    Args:
        iterations: Sorted by begin, judged.
        length: None: so that there are about sixty.

    Raises:
        FigureError: ``length`` is no positive number.
    """
    if length is not None and length < 1:
        raise FigureError(f"window must be at least 1 iteration, got {length}")
    stretches = measured_stretches(iterations)
    length = length or -(-sum(map(len, stretches)) // _WINDOWS) or 1
    windows = []
    for number, stretch in enumerate(stretches):
        for first in range(0, len(stretch), length):
            members = tuple(stretch[first : first + length])
            is_last = first + length >= len(stretch)
            end_ns = members[-1].end_ns if is_last else stretch[first + length].begin_ns
            windows.append(Window(number, members, members[0].begin_ns, end_ns))
    return windows
