"""Whose fault is a bubble: each one divided over what the host did meanwhile. ``docs/metrics.md`` has the definitions.

A pure function of the records; their order never matters. The parts of a bubble sum to it exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tracing.by_number import IterationsByNumber
from tracing.edges import judged
from tracing.host_line import HostKind, HostPiece, host_lines, moments
from tracing.records import COMPUTE_LANE, Category, IterationRecord, Span
from tracing.windows import bubbles_in, device_union

LAUNCH_LATENCY = "launch latency"
UNKNOWN = "unknown"
"""Order and reason of device work whose iteration left no record."""

_GROUPS = {"publish": "forward"}
"""Device work that is enqueued in one go with other work, by whose name the whole goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """A stretch of measured time in which the compute lane stood idle, between two pieces of its work."""

    index: int
    """Counted from 0, in the order of time."""
    start_ns: int
    end_ns: int
    before: str
    """Name of the device work that ended it."""
    iteration: int
    """The one that enqueued that work; ``order`` and ``reason`` are its."""
    order: str
    reason: str
    late_ns: int
    """From its start until the host had enqueued that work. The rest is launch latency."""

    @property
    def time_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns

    @property
    def launch_ns(self) -> int:
        """The device had work and had not begun it."""
        return self.time_ns - self.late_ns

    @property
    def kind(self) -> str:
        """``launch latency`` where the host was not late at all, else before which work of which order."""
        if not self.late_ns:
            return LAUNCH_LATENCY
        return f"before {_GROUPS.get(self.before, self.before)}, {self.order}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameRow:
    """A part of one bubble in which the host did one thing. The parts of a bubble adjoin and fill it."""

    bubble: int
    start_ns: int
    end_ns: int
    iteration: int
    """The one the host was in, or before; ``order`` and ``reason`` are its."""
    order: str
    reason: str
    cause: str
    """A phase's name, a wait's name, ``wake-up``, ``between phases`` or ``outside iterations``."""
    kind: HostKind
    is_late: bool
    """Whether the device had nothing to do yet: False during launch latency."""

    @property
    def label(self) -> str:
        """The cause as tables name it."""
        return label_of(self.kind, self.cause)

    @property
    def time_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


def label_of(kind: HostKind, cause: str) -> str:
    """A wait says that it is one, by whatever name."""
    return f"wait for {cause}" if kind is HostKind.WAIT else cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """All bubbles of a run and what they are made of, in the order of time."""

    bubbles: tuple[Bubble, ...]
    rows: tuple[BlameRow, ...]


def blame_bubbles(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> Blame:
    """Find the bubbles of measured time and divide each; none where the trace has no device work."""
    records = judged(spans, iterations)
    compute, ended_by, by_number = device_union(spans), _work_by_start(spans), IterationsByNumber(records)
    bubbles: list[Bubble] = []
    rows: list[BlameRow] = []
    for line in host_lines(spans, records):
        gaps = bubbles_in([(line.records[0].begin_ns, line.records[-1].end_ns)], compute)
        found = [
            _bubble(index, start_ns, end_ns, ended_by[end_ns], by_number)
            for index, (start_ns, end_ns) in enumerate(gaps, start=len(bubbles))
        ]
        bubbles += found
        rows += _rows(found, moments(line.pieces))
    return Blame(bubbles=tuple(bubbles), rows=tuple(rows))


def _work_by_start(spans: Iterable[Span]) -> dict[int, Span]:
    """Compute work that takes time; the one that was enqueued first where several begin at once."""
    found: dict[int, Span] = {}
    for span in spans:
        if span.category is Category.DEVICE and span.lane == COMPUTE_LANE and span.duration_ns > 0:
            known = found.get(span.start_ns)
            if known is None or _rank(span) < _rank(known):
                found[span.start_ns] = span
    return found


def _rank(span: Span) -> tuple[int, int, str, int]:
    return span.noted_ns, span.end_ns, span.name, span.iteration


def _bubble(index: int, start_ns: int, end_ns: int, work: Span, by_number: IterationsByNumber) -> Bubble:
    record = by_number.of(work)
    return Bubble(
        index=index,
        start_ns=start_ns,
        end_ns=end_ns,
        before=work.name,
        iteration=work.iteration,
        order=UNKNOWN if record is None else record.order,
        reason=UNKNOWN if record is None else record.reason,
        late_ns=min(max(work.noted_ns, start_ns), end_ns) - start_ns,
    )


def _rows(bubbles: Iterable[Bubble], pieces: Iterator[HostPiece]) -> Iterator[BlameRow]:
    """Walk along both: the pieces fill measured time, so they fill every bubble."""
    piece = next(pieces, None)
    for bubble in bubbles:
        launch_from_ns = bubble.start_ns + bubble.late_ns
        at_ns = bubble.start_ns
        while piece is not None and at_ns < bubble.end_ns:
            if piece.end_ns <= at_ns:
                piece = next(pieces, None)
                continue
            is_late = at_ns < launch_from_ns
            until_ns = min(piece.end_ns, launch_from_ns if is_late else bubble.end_ns)
            yield _row(bubble, at_ns, until_ns, piece, is_late)
            at_ns = until_ns


def _row(bubble: Bubble, start_ns: int, end_ns: int, piece: HostPiece, is_late: bool) -> BlameRow:
    return BlameRow(
        bubble=bubble.index,
        start_ns=start_ns,
        end_ns=end_ns,
        iteration=piece.record.iteration,
        order=piece.record.order,
        reason=piece.record.reason,
        cause=piece.cause,
        kind=piece.kind,
        is_late=is_late,
    )
