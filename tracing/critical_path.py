"""What determined the time of an iteration or of a stretch: the chain of host work and device work that ends last.

Walked back from the end: whatever runs then was held up by one thing, that by another, and so on. The segments cover
the interval without gaps. Pure functions of the records; ``docs/metrics.md`` has the rules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from html import escape
from typing import Any

from tracing.blame import LAUNCH_LATENCY
from tracing.device_line import DeviceLine, Limit
from tracing.edges import judged
from tracing.host_line import WAKE_UP, HostLine, HostPiece, host_lines
from tracing.records import HOST_LANE, IterationRecord, Span


class PathKind(Enum):
    """What a segment of the path is."""

    PHASE = "phase"
    WAIT = "wait"
    WAKE_UP = "wake-up"
    BETWEEN = "between"
    OUTSIDE = "outside"
    DEVICE = "device"  # a piece of device work
    LAUNCH = "launch"  # that work could have begun and had not


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSegment:
    """One link of the chain."""

    cause: str
    """A phase, a wait, device work, or ``wake-up``, ``between phases``, ``outside iterations``, ``launch latency``."""
    kind: PathKind
    lane: str
    """``host``, or the stream."""
    start_ns: int
    end_ns: int
    iteration: int
    """Of the host's phase, or the one that enqueued the work."""

    @property
    def time_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PathShare:
    """How much of a path has one cause."""

    cause: str
    lane: str
    time_ns: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CriticalPath:
    """The chain through one interval, or through several one after the other."""

    start_ns: int
    end_ns: int
    num_iterations: int
    segments: tuple[PathSegment, ...]
    """In the order of time, none of length zero. They adjoin, but between two intervals."""

    @property
    def time_ns(self) -> int:
        """Length of the intervals together."""
        return sum(segment.time_ns for segment in self.segments)

    @property
    def shares(self) -> tuple[PathShare, ...]:
        """By cause and lane, largest first; sums to the whole interval."""
        totals: dict[tuple[str, str], int] = defaultdict(int)
        for segment in self.segments:
            totals[segment.cause, segment.lane] += segment.time_ns
        whole = self.time_ns
        found = [
            PathShare(cause=cause, lane=lane, time_ns=time_ns, share=time_ns / whole)
            for (cause, lane), time_ns in totals.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.time_ns, one.lane, one.cause)))

    @property
    def device_share(self) -> float | None:
        """Part of it that is device work, launch latency left out; None for an empty interval."""
        whole = self.time_ns
        work = sum(segment.time_ns for segment in self.segments if segment.kind is PathKind.DEVICE)
        return work / whole if whole else None

    def __str__(self) -> str:
        plural = "" if self.num_iterations == 1 else "s"
        head = f"critical path of {self.num_iterations} iteration{plural}, {self.time_ns / 1e6:,.3f} ms"
        rows = [
            f"  {share.cause:<20} {share.lane:<8} {share.time_ns / 1e3:>12,.1f} µs {100 * share.share:>6.1f} %"
            for share in self.shares
        ]
        return "\n".join([head, *rows])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Shares and their sum, as plain values for JSON."""
        shares = [asdict(share) for share in self.shares]
        return {"num_iterations": self.num_iterations, "time_ns": self.time_ns, "shares": shares}


def stretch_paths(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> tuple[CriticalPath, ...]:
    """The path of each measured stretch: what bounds throughput. Pass steady iterations alone to look at those."""
    device = DeviceLine(spans)
    return tuple(
        _path(line, device, line.records[0].begin_ns, line.records[-1].end_ns, len(line.records))
        for line in host_lines(spans, judged(spans, iterations))
    )


def whole_path(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> CriticalPath:
    """The paths of all measured stretches, one after the other; empty where nothing was measured."""
    paths = stretch_paths(spans, iterations)
    return CriticalPath(
        start_ns=min((path.start_ns for path in paths), default=0),
        end_ns=max((path.end_ns for path in paths), default=0),
        num_iterations=sum(path.num_iterations for path in paths),
        segments=tuple(segment for path in paths for segment in path.segments),
    )


def iteration_path(spans: Sequence[Span], iterations: Iterable[IterationRecord], iteration: int) -> CriticalPath:
    """The path to the end of one timed iteration, cut where the iteration begins.

    Raises:
        ValueError: there is no timed iteration of that number.
    """
    device = DeviceLine(spans)
    for line in host_lines(spans, judged(spans, iterations)):
        for record in line.records:
            if record.iteration == iteration:
                return _path(line, device, record.begin_ns, record.end_ns, 1)
    raise ValueError(f"iteration must be a timed one of the trace, got {iteration}")


def _path(line: HostLine, device: DeviceLine, start_ns: int, end_ns: int, count: int) -> CriticalPath:
    found = list(_Walk(line, device).back(start_ns, end_ns))
    found.reverse()
    return CriticalPath(start_ns=start_ns, end_ns=end_ns, num_iterations=count, segments=tuple(found))


class _Walk:
    """From the end of an interval back to its start, link by link."""

    def __init__(self, line: HostLine, device: DeviceLine) -> None:
        self._pieces = line.pieces
        self._starts = [piece.start_ns for piece in line.pieces]
        self._line = device

    def back(self, start_ns: int, end_ns: int) -> Iterator[PathSegment]:
        """The segments, last first."""
        at_ns, work = end_ns, None
        while at_ns > start_ns:
            segments, next_work = self._host(at_ns) if work is None else self._device(work, at_ns)
            for segment in segments:
                if segment.end_ns > max(segment.start_ns, start_ns):
                    yield segment if segment.start_ns >= start_ns else _cut(segment, start_ns)
                at_ns = segment.start_ns
            work = next_work

    def _host(self, at_ns: int) -> tuple[list[PathSegment], int | None]:
        """The host's piece that ends at or around a moment. A wait goes on at the work it waited for."""
        piece = self._pieces[max(0, bisect_left(self._starts, at_ns) - 1)]
        release = piece.release
        if release is None or release.end_ns <= piece.start_ns:
            return [_host_segment(piece, piece.start_ns, at_ns)], None
        woken_ns = min(release.end_ns, at_ns)
        woken = _host_segment(piece, woken_ns, at_ns, WAKE_UP, PathKind.WAKE_UP)
        return [woken], self._line.place(release)

    def _device(self, place: int, at_ns: int) -> tuple[list[PathSegment], int | None]:
        """A piece of device work, and how long it was held up for nothing; goes on at what held it up last."""
        work, hold = self._line.works[place], self._line.holds[place]
        start_ns = min(work.span.start_ns, at_ns)
        held_ns = min(hold.until_ns, start_ns)
        segments = [
            _device_segment(work.span, work.span.name, PathKind.DEVICE, start_ns, at_ns),
            _device_segment(work.span, LAUNCH_LATENCY, PathKind.LAUNCH, held_ns, start_ns),
        ]
        return segments, {Limit.ENQUEUE: None, Limit.STREAM: work.after, Limit.BEHIND: work.behind}[hold.limit]


def _host_segment(
    piece: HostPiece, start_ns: int, end_ns: int, cause: str | None = None, kind: PathKind | None = None
) -> PathSegment:
    return PathSegment(
        cause=cause or piece.cause,
        kind=kind or PathKind(piece.kind.value),
        lane=HOST_LANE,
        start_ns=start_ns,
        end_ns=end_ns,
        iteration=piece.record.iteration,
    )


def _device_segment(span: Span, cause: str, kind: PathKind, start_ns: int, end_ns: int) -> PathSegment:
    return PathSegment(
        cause=cause, kind=kind, lane=span.lane, start_ns=start_ns, end_ns=end_ns, iteration=span.iteration
    )


def _cut(segment: PathSegment, start_ns: int) -> PathSegment:
    return PathSegment(
        cause=segment.cause,
        kind=segment.kind,
        lane=segment.lane,
        start_ns=start_ns,
        end_ns=segment.end_ns,
        iteration=segment.iteration,
    )
