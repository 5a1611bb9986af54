"""Whether an imported trace was recorded while a run ran: a trace of another run must not be laid beside it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, TraceImportError
from tracing.records import Category, Span

_MOST_APART_NS = 200_000
"""A range of ours and the tool's own, around the same work, begin within microseconds of each other in the median."""
_LEAST_APART_NS = 20_000
_SHARE_OF_STEP = 0.1
"""Ranges of another run fall anywhere in ours: a quarter of a step away in the median."""
_FEW = 4
"""So few ranges may fit by chance."""
_ON_HOST = frozenset({Category.PHASE, Category.DETAIL, Category.WAIT})


def belonging_note(trace: ImportedTrace, spans: Sequence[Span]) -> str:
    """What shows that a trace belongs to a run, in words.

    Args:
        trace: On the run's clock.
        spans: Of the run.

    Raises:
        TraceImportError: it was recorded at another time, or its ranges of our names do not lie where ours do.
    """
    _check_time(trace, spans)
    apart_ns, num_ranges, step_ns = _distance_of_names(trace, spans)
    if not num_ranges:
        return "recorded while the run ran; it holds no ranges of our names that could show more"
    allowed_ns = min(_MOST_APART_NS, max(_LEAST_APART_NS, _SHARE_OF_STEP * step_ns))
    if num_ranges >= _FEW and apart_ns > allowed_ns:
        raise TraceImportError(
            f"the trace is of another run: its {num_ranges:,} ranges of our names begin {apart_ns / 1e3:,.0f} µs from "
            "ours in the median; name the one that was made during this run"
        )
    few = "; so few may fit by chance" if num_ranges < _FEW else ""
    return f"its {num_ranges:,} ranges of our names begin {apart_ns / 1e3:,.1f} µs from ours in the median{few}"


def _check_time(trace: ImportedTrace, spans: Sequence[Span]) -> None:
    if not spans or not trace.spans:
        raise TraceImportError("the run or the trace holds no spans, so nothing shows that they belong together")
    ours, theirs = _extent(spans), _extent(trace.spans)
    gap_ns = max(ours[0] - theirs[1], theirs[0] - ours[1])
    if gap_ns > 0:
        where = "before the run began" if theirs[1] < ours[0] else "after the run had ended"
        raise TraceImportError(
            f"the trace is of another run: it was recorded {gap_ns / 1e9:,.6f} s {where}; "
            "name the one that was made during this run"
        )


def _extent(spans: Sequence[Span] | Sequence[ImportedSpan]) -> tuple[int, int]:
    return min(span.start_ns for span in spans), max(span.end_ns for span in spans)


def _distance_of_names(trace: ImportedTrace, spans: Sequence[Span]) -> tuple[float, int, float]:
    """Median distance of its ranges from the nearest of ours of that name, their number, and our median step.

    Ranges outside the time that both cover do not count: one of the two may have begun earlier.
    """
    ours: dict[str, list[int]] = defaultdict(list)
    for span in spans:
        if span.category in _ON_HOST:
            ours[span.name].append(span.start_ns)
    starts = {name: sorted(found) for name, found in ours.items()}
    distances = [
        _nearest(starts[one.name], one.start_ns)
        for one in trace.of(ImportedKind.RANGE)
        if one.name in starts and starts[one.name][0] <= one.end_ns and one.start_ns <= starts[one.name][-1]
    ]
    steps = [right - left for found in starts.values() for left, right in pairwise(found)]
    return (median(distances) if distances else 0.0), len(distances), (median(steps) if steps else 0.0)


def _nearest(starts: Sequence[int], at_ns: int) -> int:
    place = bisect_left(starts, at_ns)
    return min(abs(start - at_ns) for start in starts[max(0, place - 1) : place + 1])
