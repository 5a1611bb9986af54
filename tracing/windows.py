"""Measured time and its bubbles: which stretches of a run count, and where the device stood idle in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tracing.intervals import Interval, gaps, intersect, merge, subtract
from tracing.records import COMPUTE_LANE, Category, IterationRecord, Span


def measured_stretches(records: Sequence[IterationRecord]) -> list[list[IterationRecord]]:
    """Timed iterations that follow each other directly.

    A stretch ends before a void iteration, where an iteration number is missing (one was abandoned), and where
    an iteration left nothing queued or active (the engine then had no work: that is no bubble).

    Args:
        records: Sorted by begin.
    """
    stretches: list[list[IterationRecord]] = []
    last: IterationRecord | None = None
    for record in records:
        if record.is_void:
            last = None
            continue
        goes_on = (
            last is not None and record.iteration == last.iteration + 1 and bool(last.num_waiting + last.num_active)
        )
        if goes_on:
            stretches[-1].append(record)
        else:
            stretches.append([record])
        last = record
    return stretches


def measured_windows(records: Sequence[IterationRecord]) -> list[Interval]:
    """Stretches of wall time that count: from the begin of a timed iteration to the end of the last that follows it.

    Args:
        records: Sorted by begin.
    """
    return [(stretch[0].begin_ns, stretch[-1].end_ns) for stretch in measured_stretches(records)]


def device_union(spans: Iterable[Span], lane: str = COMPUTE_LANE) -> list[Interval]:
    """When a device lane was busy."""
    return merge(
        (span.start_ns, span.end_ns) for span in spans if span.category is Category.DEVICE and span.lane == lane
    )


def bubbles_in(windows: Iterable[Interval], compute: Sequence[Interval]) -> list[Interval]:
    """Gaps between neighbouring pieces of device work inside one stretch, sorted.

    Taken inside each stretch, so that what lies between two stretches is never a bubble.
    """
    return [gap for window in windows for gap in gaps(intersect([window], compute))]


def host_work(spans: Iterable[Span]) -> list[Interval]:
    """When the host worked in a phase and did not wait."""
    of_category: dict[Category, list[Interval]] = defaultdict(list)
    for span in spans:
        of_category[span.category].append((span.start_ns, span.end_ns))
    return subtract(merge(of_category[Category.PHASE]), merge(of_category[Category.WAIT]))
