"""What the host did at each moment of measured time: pieces that adjoin, so that any sum over them is exact."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from tracing.records import COPY_LANE, NO_ITERATION, RANKS_WAIT, RELEASED_BY, Category, IterationRecord, Span
from tracing.windows import measured_stretches

BETWEEN_PHASES = "between phases"
OUTSIDE_ITERATIONS = "outside iterations"
WAKE_UP = "wake-up"


class HostKind(Enum):
    """What kind of thing the host did."""

    PHASE = "phase"  # worked in a phase
    WAIT = "wait"  # was blocked on device work that had not ended, or on other ranks
    WAKE_UP = "wake-up"  # was still blocked, though that work had ended
    BETWEEN = "between"  # inside an iteration, in no phase
    OUTSIDE = "outside"  # between two iterations of a stretch: the caller's code


class HostPiece(NamedTuple):
    """One thing the host did; times in nanoseconds."""

    start_ns: int
    end_ns: int
    kind: HostKind
    cause: str
    """The phase's or the wait's name, or what this module calls the rest."""
    record: IterationRecord
    """The iteration it belongs to; for the time outside iterations the one that follows."""
    phase: str | None = None
    """The phase around it."""
    release: Span | None = None
    """The device work that a wait waits for, where the trace tells."""

    @property
    def is_inside(self) -> bool:
        """Whether it lies in its iteration; the caller's code and what is waited for in it lie before."""
        return self.kind is not HostKind.OUTSIDE and not (self.kind is HostKind.WAIT and self.phase is None)


class HostLine(NamedTuple):
    """One measured stretch."""

    pieces: list[HostPiece]
    """Adjoining, from the stretch's start to its end. Some are empty: a wait that did not block is one too."""
    records: list[IterationRecord]


def host_lines(spans: Iterable[Span], records: Sequence[IterationRecord]) -> list[HostLine]:
    """One line a measured stretch.

    Args:
        spans: In any order.
        records: Sorted by begin.
    """
    index = _HostSpans(spans)
    return [HostLine(list(_pieces(stretch, index)), stretch) for stretch in measured_stretches(records)]


def moments(pieces: Iterable[HostPiece]) -> Iterator[HostPiece]:
    """The pieces that take time; a wait in two: until what it waits for had ended, and the wake-up behind."""
    for piece in pieces:
        woken_ns = piece.end_ns
        if piece.release is not None:
            woken_ns = min(max(piece.release.end_ns, piece.start_ns), piece.end_ns)
        if woken_ns > piece.start_ns:
            yield piece if woken_ns == piece.end_ns else piece._replace(end_ns=woken_ns)
        if piece.end_ns > woken_ns:
            yield piece._replace(start_ns=woken_ns, kind=HostKind.WAKE_UP, cause=WAKE_UP)


class _HostSpans:
    """Phases, waits and copies by iteration."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.phases: dict[int, list[Span]] = defaultdict(list)
        self.waits: dict[int, list[Span]] = defaultdict(list)
        self.copies: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if span.category is Category.PHASE:
                self.phases[span.iteration].append(span)
            elif span.category is Category.WAIT:
                self.waits[span.iteration].append(span)
            elif span.category is Category.DEVICE and span.lane == COPY_LANE:
                self.copies[span.iteration].append(span)
        for group in (self.phases, self.waits, self.copies):
            for members in group.values():
                members.sort(key=_order)
        self._between = [span for span in self.waits.get(NO_ITERATION, ()) if span.name == RANKS_WAIT]
        self._between_starts = [span.start_ns for span in self._between]

    def between(self, begin_ns: int, end_ns: int) -> list[Span]:
        """Waits for other ranks between two iterations."""
        first = bisect_left(self._between_starts, begin_ns)
        found = self._between[first : bisect_left(self._between_starts, end_ns)]
        return [wait for wait in found if wait.end_ns <= end_ns]

    def release(self, wait: Span, record: IterationRecord) -> Span | None:
        """What a wait waits for: the copy that its iteration enqueued last before it, of those that can end it."""
        if wait.name == RANKS_WAIT:
            return None
        found, named = None, RELEASED_BY.get(wait.name)
        for copy in self.copies.get(record.iteration, ()):
            if named is not None and copy.name != named:
                continue
            if copy.enqueued_ns is not None and record.begin_ns <= copy.enqueued_ns <= wait.start_ns:
                found = copy
        return found


def _order(span: Span) -> tuple[int, int, str]:
    return span.start_ns, span.end_ns, span.name


def _pieces(stretch: Sequence[IterationRecord], index: _HostSpans) -> Iterator[HostPiece]:
    at_ns = stretch[0].begin_ns
    for record in stretch:
        if record.begin_ns > at_ns:
            yield from _outside_pieces(at_ns, record, index)
        yield from _iteration_pieces(record, max(at_ns, record.begin_ns), index)
        at_ns = max(at_ns, record.end_ns)


def _outside_pieces(at_ns: int, record: IterationRecord, index: _HostSpans) -> Iterator[HostPiece]:
    """The caller's code before an iteration, and what the host waits for other ranks in it."""
    for wait in index.between(at_ns, record.begin_ns):
        if wait.start_ns > at_ns:
            yield HostPiece(at_ns, wait.start_ns, HostKind.OUTSIDE, OUTSIDE_ITERATIONS, record)
        yield HostPiece(max(at_ns, wait.start_ns), wait.end_ns, HostKind.WAIT, wait.name, record)
        at_ns = wait.end_ns
    if record.begin_ns > at_ns:
        yield HostPiece(at_ns, record.begin_ns, HostKind.OUTSIDE, OUTSIDE_ITERATIONS, record)


def _iteration_pieces(record: IterationRecord, begin_ns: int, index: _HostSpans) -> Iterator[HostPiece]:
    """At least one, so that every iteration has a place on the line."""
    at_ns = begin_ns
    waits = [span for span in index.waits.get(record.iteration, ()) if _is_inside(span, record)]
    for span in index.phases.get(record.iteration, ()):
        if not _is_inside(span, record) or span.end_ns < at_ns:
            continue
        start_ns = max(at_ns, span.start_ns)
        if start_ns > at_ns:
            yield HostPiece(at_ns, start_ns, HostKind.BETWEEN, BETWEEN_PHASES, record)
        yield from _phase_pieces(span, start_ns, waits, record, index)
        at_ns = span.end_ns
    if record.end_ns > at_ns or at_ns == begin_ns:
        yield HostPiece(at_ns, max(at_ns, record.end_ns), HostKind.BETWEEN, BETWEEN_PHASES, record)


def _phase_pieces(
    phase: Span, at_ns: int, waits: list[Span], record: IterationRecord, index: _HostSpans
) -> Iterator[HostPiece]:
    """Work and waits in turn; the last piece is work, and may be empty. Takes its waits off ``waits``."""
    for wait in waits:
        start_ns, end_ns = max(at_ns, wait.start_ns), min(wait.end_ns, phase.end_ns)
        if end_ns < start_ns or (end_ns == start_ns and wait.duration_ns):
            continue
        if start_ns > at_ns:
            yield HostPiece(at_ns, start_ns, HostKind.PHASE, phase.name, record, phase.name)
        yield HostPiece(start_ns, end_ns, HostKind.WAIT, wait.name, record, phase.name, index.release(wait, record))
        at_ns = end_ns
    waits[:] = [wait for wait in waits if wait.end_ns > phase.end_ns]
    yield HostPiece(at_ns, phase.end_ns, HostKind.PHASE, phase.name, record, phase.name)


def _is_inside(span: Span, record: IterationRecord) -> bool:
    return record.begin_ns <= span.start_ns and span.end_ns <= record.end_ns
