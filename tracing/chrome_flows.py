"""Arrows of a Chrome trace: from a phase to the device work it launched, from a copy to the host that waits for it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tracing.by_number import IterationsByNumber
from tracing.importing import DEVICE_KINDS, ImportedKind, ImportedSpan
from tracing.records import COPY_LANE, RANKS_WAIT, RELEASED_BY, Category, IterationRecord, Span

Record = Span | ImportedSpan

_ON_HOST = frozenset({Category.PHASE, Category.DETAIL, Category.WAIT, Category.INSTANT})


class Flow(NamedTuple):
    """An arrow. Each moment lies inside its slice, and the second is not before the first, or viewers refuse it."""

    name: str
    source: Record
    source_ns: int
    target: Record
    target_ns: int


def trace_flows(spans: Sequence[Span], iterations: Iterable[IterationRecord] = ()) -> Iterator[Flow]:
    """``launch`` from phases to device work, ``result`` from copies to waits. What cannot be joined has no arrow.

    Args:
        spans: By start.
        iterations: Their records, which tell the iterations of one number apart.
    """
    device = [span for span in spans if span.category is Category.DEVICE and span.enqueued_ns is not None]
    yield from _launches(device, [span for span in spans if span.category in _ON_HOST])
    copies = [span for span in device if span.lane == COPY_LANE]
    waits = [span for span in spans if span.category is Category.WAIT and span.name != RANKS_WAIT]
    yield from _results(copies, waits, IterationsByNumber(iterations))


def imported_flows(spans: Sequence[ImportedSpan]) -> Iterator[Flow]:
    """From a call of the runtime to the first piece of device work it launched; a graph has one arrow.

    Args:
        spans: By start.
    """
    first: dict[int, ImportedSpan] = {}
    for span in spans:
        if span.kind in DEVICE_KINDS and span.correlation is not None:
            first.setdefault(span.correlation, span)
    for span in spans:
        work = first.get(span.correlation) if span.correlation is not None else None
        if span.kind is ImportedKind.RUNTIME and work is not None:
            yield from _joined("launch", span, span.end_ns, work)


def _launches(device: Iterable[Span], host: Sequence[Span]) -> Iterator[Flow]:
    phases = [span for span in host if span.category is Category.PHASE]
    phase_starts, host_starts = [span.start_ns for span in phases], [span.start_ns for span in host]
    for work in device:
        assert work.enqueued_ns is not None
        # A device may begin before the host has noted that it enqueued; the arrow leaves before that.
        at_ns = min(work.enqueued_ns, work.start_ns)
        phase = _last(phases, phase_starts, work.enqueued_ns)
        if phase is None or work.enqueued_ns > phase.end_ns:
            continue
        # Perfetto ties an arrow's end to what began last on the track, ended or not.
        began_last = _last(host, host_starts, at_ns)
        is_open = began_last is not None and at_ns < began_last.end_ns
        yield from _joined("launch", phase, at_ns if is_open else phase.start_ns, work)


def _last(spans: Sequence[Span], starts: Sequence[int], at_ns: int) -> Span | None:
    """The one that began last by then."""
    at = bisect_right(starts, at_ns) - 1
    return spans[at] if at >= 0 else None


def _results(copies: Iterable[Span], waits: Iterable[Span], index: IterationsByNumber) -> Iterator[Flow]:
    """To the first wait of the same iteration that the copy can end and that began after it was enqueued."""
    named = set(RELEASED_BY.values())

    def joint_of(span: Span, released_by: str | None) -> tuple[int, int, str | None]:
        return span.iteration, id(index.of(span)), released_by  # without a record by its number alone

    by_joint: dict[tuple[int, int, str | None], list[Span]] = defaultdict(list)
    for wait in waits:
        by_joint[joint_of(wait, RELEASED_BY.get(wait.name))].append(wait)
    starts = {joint: [wait.start_ns for wait in members] for joint, members in by_joint.items()}
    for copy in copies:
        assert copy.enqueued_ns is not None
        joint = joint_of(copy, copy.name if copy.name in named else None)
        members = by_joint.get(joint, [])
        at = bisect_left(starts.get(joint, []), copy.enqueued_ns)
        if at < len(members):
            yield from _joined("result", copy, copy.end_ns, members[at])


def _joined(name: str, source: Record, at_ns: int, target: Record) -> Iterator[Flow]:
    """An arrow that leaves ``source`` near ``at_ns``; none to or from what takes no time or ended before."""
    if source.duration_ns <= 0 or target.duration_ns <= 0:
        return
    source_ns = max(source.start_ns, min(at_ns, source.end_ns - 1, target.end_ns - 1))
    target_ns = max(source_ns, target.start_ns)
    if target_ns < target.end_ns:
        yield Flow(name, source, source_ns, target, target_ns)
