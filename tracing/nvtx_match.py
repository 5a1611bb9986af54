"""Which of our ranges a tool recorded, what clock it keeps, and how far its times are from ours.

A range is known by its name, category and payload; where several share these, by their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import numpy as np

from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, TraceImportError
from tracing.nvtx_ranges import CATEGORY_OF_DETAIL, DOMAIN, SESSION_SHIFT
from tracing.records import NO_ITERATION, Category, IterationRecord, Span


class EmittedRange(NamedTuple):
    """A range that the recorder emitted, and when it says that was."""

    name: str
    category: str
    payload: int
    start_ns: int
    end_ns: int

    @property
    def iteration(self) -> int:
        """The iteration in its payload; 0 outside any."""
        return self.payload & ((1 << SESSION_SHIFT) - 1)


class RangePair(NamedTuple):
    """One range as we and as the tool saw it."""

    ours: EmittedRange
    theirs: ImportedSpan


@dataclass(frozen=True, slots=True)
class RangeMatch:
    """What was found of what was emitted."""

    pairs: tuple[RangePair, ...]
    missing: tuple[EmittedRange, ...]
    """Emitted, and not in the tool's trace."""
    unknown: tuple[ImportedSpan, ...]
    """In the tool's trace with our domain, and not among the emitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFit:
    """How a tool's clock was laid on ours: one offset, the median over all pairs."""

    offset_ns: int
    """Added to the tool's times."""
    count: int
    """Pairs it was made from."""
    residual_p50_ns: float
    """Distances of start from start that remain: their median,"""
    residual_p99_ns: float
    """and their 99th percentile."""
    drift_ns: float
    """By how much the offset of the last tenth of the pairs differs from that of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far two records of the same things are apart; absolute values in nanoseconds."""

    category: str
    name: str
    count: int
    start_p50_ns: float
    start_p99_ns: float
    length_p50_ns: float
    length_p99_ns: float


def emitted_ranges(
    spans: Iterable[Span], iterations: Iterable[IterationRecord], *, session_id: int
) -> list[EmittedRange]:
    """The ranges behind a session's records, by start: those of finished iterations, phases, details and waits."""
    ranges = [_of_iteration(record, session_id) for record in iterations]
    ranges += [_of_span(span, session_id) for span in spans if span.category in _HOST]
    return sorted(ranges, key=lambda one: (one.start_ns, -one.end_ns))


def match_ranges(emitted: Sequence[EmittedRange], trace: ImportedTrace, *, domain: str = DOMAIN) -> RangeMatch:
    """Find each emitted range among the trace's ranges of our domain."""
    seen: dict[tuple[object, ...], list[ImportedSpan]] = defaultdict(list)
    for span in trace.of(ImportedKind.RANGE):
        if span.domain == domain:
            seen[span.name, span.category, span.payload].append(span)
    pairs, missing = [], []
    for ours in emitted:
        candidates = seen.get((ours.name, ours.category, ours.payload))
        if candidates:
            pairs.append(RangePair(ours, candidates.pop(0)))
        else:
            missing.append(ours)
    unknown = sorted((span for left in seen.values() for span in left), key=lambda span: span.start_ns)
    return RangeMatch(tuple(pairs), tuple(missing), tuple(unknown))


def fit_clock(pairs: Sequence[RangePair]) -> ClockFit:
    """The offset that lays the tool's starts on ours, in the median.

    Raises:
        TraceImportError: there is no pair to make it from.
    """
    if not pairs:
        raise TraceImportError("the trace holds no range of the run: its clock cannot be laid on ours")
    offsets = np.array([pair.ours.start_ns - pair.theirs.start_ns for pair in pairs], dtype=np.int64)
    offset_ns = median_low(offsets.tolist())  # exact, where a mean of two large numbers would be rounded
    distances = np.abs(offsets - offset_ns)
    tenth = max(1, len(pairs) // 10)
    return ClockFit(
        offset_ns=offset_ns,
        count=len(pairs),
        residual_p50_ns=float(np.percentile(distances, 50)),
        residual_p99_ns=float(np.percentile(distances, 99)),
        drift_ns=float(np.median(offsets[-tenth:] - offset_ns) - np.median(offsets[:tenth] - offset_ns)),
    )


def differences(pairs: Iterable[RangePair], offset_ns: int) -> list[Difference]:
    """One row a category and name, in the order they first appear; ``offset_ns`` lays the tool's clock on ours."""
    groups: dict[tuple[str, str], list[RangePair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.ours.category, pair.ours.name].append(pair)
    return [_difference(category, name, group, offset_ns) for (category, name), group in groups.items()]


def _difference(category: str, name: str, pairs: Sequence[RangePair], offset_ns: int) -> Difference:
    starts = [abs(ours.start_ns - theirs.start_ns - offset_ns) for ours, theirs in pairs]
    lengths = [abs(ours.end_ns - ours.start_ns - theirs.duration_ns) for ours, theirs in pairs]
    return Difference(
        category=category,
        name=name,
        count=len(pairs),
        start_p50_ns=float(np.percentile(starts, 50)),
        start_p99_ns=float(np.percentile(starts, 99)),
        length_p50_ns=float(np.percentile(lengths, 50)),
        length_p99_ns=float(np.percentile(lengths, 99)),
    )


_HOST = (Category.PHASE, Category.DETAIL, Category.WAIT)


def _of_iteration(record: IterationRecord, session_id: int) -> EmittedRange:
    payload = session_id << SESSION_SHIFT | record.iteration
    return EmittedRange(record.order, "iteration", payload, record.begin_ns, record.end_ns)


def _of_span(span: Span, session_id: int) -> EmittedRange:
    category = span.category.value
    if span.category is Category.DETAIL:
        category = CATEGORY_OF_DETAIL.get(span.name, category)
    iteration = 0 if span.iteration == NO_ITERATION else span.iteration
    return EmittedRange(span.name, category, session_id << SESSION_SHIFT | iteration, span.start_ns, span.end_ns)
