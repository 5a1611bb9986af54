"""Which of a tool's kernels and copies belong to which piece of device work that we enqueued.

By launches, where the tool recorded calls of the runtime: a launch belongs to the first piece that we noted after it,
and what carries its correlation is that piece's work. By time otherwise: what lies nearest on a stream of its lane.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tracing.importing import DEVICE_KINDS, ImportedKind, ImportedSpan, ImportedTrace
from tracing.intervals import Interval, intersect, length, merge
from tracing.records import Category, Span

_EARLY_NS = 10_000  # a launch may lie so far before its phase: clocks are off, and a phase begins before it launches


@dataclass(frozen=True, slots=True)
class ToolGroup:
    """One piece of our device work, and what the tool saw of it."""

    span: Span
    work: tuple[ImportedSpan, ...]
    """By start; at least one."""
    launched_ns: int | None = None
    """When the last call that launched it returned; None where the tool does not tell."""

    @property
    def start_ns(self) -> int:
        """The first kernel's start."""
        return self.work[0].start_ns

    @property
    def end_ns(self) -> int:
        """The last kernel's end."""
        return max(piece.end_ns for piece in self.work)

    @property
    def inner_gap_ns(self) -> int | None:
        """Time inside it in which nothing ran; None where the tool shows a graph as one piece."""
        if any(piece.kind is ImportedKind.GRAPH for piece in self.work):
            return None
        return self.end_ns - self.start_ns - length(merge((piece.start_ns, piece.end_ns) for piece in self.work))


@dataclass(frozen=True, slots=True)
class ToolGroups:
    """Every piece of ours with the tool's, as far as they were found."""

    groups: tuple[ToolGroup, ...]
    """By start of ours."""
    missing: tuple[Span, ...]
    """Ours, of which the tool shows nothing."""
    strange: tuple[ImportedSpan, ...]
    """What the tool shows and belongs to none of ours."""
    is_by_launches: bool


def group_work(spans: Iterable[Span], imported: ImportedTrace) -> ToolGroups:
    """Match device work.

    Args:
        spans: Ours, by start; host phases among them keep launches from outside away.
        imported: The tool's, on our clock.
    """
    ours = list(spans)
    device = [span for span in ours if span.category is Category.DEVICE]
    work = imported.of(*DEVICE_KINDS)
    owners = _owners_by_launch(device, ours, _launch_calls(imported, work), work) or _owners_by_time(device, work)
    pieces: dict[int, list[ImportedSpan]] = defaultdict(list)
    for piece, owner in zip(work, owners.of_piece, strict=True):
        if owner is not None:
            pieces[id(owner)].append(piece)
    return ToolGroups(
        groups=tuple(
            ToolGroup(span, tuple(pieces[id(span)]), owners.launched.get(id(span)))
            for span in device
            if id(span) in pieces
        ),
        missing=tuple(span for span in device if id(span) not in pieces),
        strange=tuple(piece for piece, owner in zip(work, owners.of_piece, strict=True) if owner is None),
        is_by_launches=owners.is_by_launches,
    )


class _Owners(NamedTuple):
    """Whose each piece of the tool's work is."""

    of_piece: list[Span | None]
    launched: dict[int, int]
    """When the last launch of a span of ours returned, by the span's identity."""
    is_by_launches: bool


def _launch_calls(imported: ImportedTrace, work: Iterable[ImportedSpan]) -> list[ImportedSpan]:
    """Calls that put something on a device."""
    correlations = {piece.correlation for piece in work} - {None}
    return [call for call in imported.of(ImportedKind.RUNTIME) if call.correlation in correlations]


def _owners_by_launch(
    device: Sequence[Span], ours: Iterable[Span], calls: Sequence[ImportedSpan], work: Iterable[ImportedSpan]
) -> _Owners | None:
    """None where the tool shows no launches, or we did not note when we enqueued.

    A piece is noted right after its launch, and the next launch begins some microseconds later: the middle of a call
    is far from both notes, so that clocks may be a little off.
    """
    if not calls or any(span.enqueued_ns is None for span in device):
        return None
    noted = sorted(device, key=_enqueued)
    times = [_enqueued(span) for span in noted]
    earliest = _phase_starts(noted, [span for span in ours if span.category is Category.PHASE])
    owner_of: dict[int | None, Span] = {}
    launched: dict[int, int] = {}
    for call in calls:
        middle_ns = (call.start_ns + call.end_ns) // 2
        at = bisect_left(times, middle_ns)
        if at < len(times) and middle_ns >= earliest[at] - _EARLY_NS:
            owner_of[call.correlation] = noted[at]
            launched[id(noted[at])] = max(call.end_ns, launched.get(id(noted[at]), call.end_ns))
    return _Owners([owner_of.get(piece.correlation) for piece in work], launched, is_by_launches=True)


def _phase_starts(noted: Sequence[Span], phases: Sequence[Span]) -> list[int]:
    """When the phase began in which each piece was noted; without one, the moment of the note before."""
    starts = [phase.start_ns for phase in phases]
    found = []
    for number, span in enumerate(noted):
        at = bisect_right(starts, _enqueued(span)) - 1
        is_inside = at >= 0 and _enqueued(span) <= phases[at].end_ns
        before_ns = _enqueued(noted[number - 1]) if number else min(span.start_ns, _enqueued(span))
        found.append(starts[at] if is_inside else before_ns)
    return found


def _owners_by_time(device: Sequence[Span], work: Sequence[ImportedSpan]) -> _Owners:
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in device:
        lanes[span.lane].append(span)
    lane_of = _lanes_of_streams(lanes, work)
    borders = {lane: _borders(spans) for lane, spans in lanes.items()}
    owners: list[Span | None] = []
    for piece in work:
        lane = lane_of.get(piece.stream)
        if lane is None:
            owners.append(None)
            continue
        at = bisect_right(borders[lane], (piece.start_ns + piece.end_ns) // 2) - 1
        owners.append(lanes[lane][at] if 0 <= at < len(lanes[lane]) else None)
    return _Owners(owners, {}, is_by_launches=False)


def _lanes_of_streams(lanes: Mapping[str, Sequence[Span]], work: Iterable[ImportedSpan]) -> dict[int | None, str]:
    """The lane whose work each stream's work coincides with most; a stream that meets none has no lane."""
    busy = {lane: merge((span.start_ns, span.end_ns) for span in spans) for lane, spans in lanes.items()}
    streams: dict[int | None, list[Interval]] = defaultdict(list)
    for piece in work:
        streams[piece.stream].append((piece.start_ns, piece.end_ns))
    found = {}
    for stream, pieces in streams.items():
        common = {lane: length(intersect(merge(pieces), stretches)) for lane, stretches in busy.items()}
        lane = max(common, key=lambda name: common[name], default=None)
        if lane is not None and common[lane]:
            found[stream] = lane
    return found


def _borders(spans: Sequence[Span]) -> list[int]:
    """Where one piece's time begins: half-way between two, and a piece's length before the first and after the last."""
    first, last = spans[0], spans[-1]
    middles = [(left.end_ns + right.start_ns) // 2 for left, right in pairwise(spans)]
    return [first.start_ns - first.duration_ns, *middles, last.end_ns + last.duration_ns]


def _enqueued(span: Span) -> int:
    assert span.enqueued_ns is not None
    return span.enqueued_ns
