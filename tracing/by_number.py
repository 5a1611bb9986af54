"""Which iteration a span belongs to: by its number and its time, for ``engine.reset()`` starts the numbers anew."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from tracing.canonical import sorted_iterations
from tracing.records import IterationRecord, Span


class IterationsByNumber:
    """Records of one trace, in which a number may come again and again.

    Args:
        iterations: In any order.
    """

    def __init__(self, iterations: Iterable[IterationRecord]) -> None:
        self._by_number: dict[int, list[IterationRecord]] = defaultdict(list)
        for record in sorted_iterations(iterations):
            self._by_number[record.iteration].append(record)

    def of(self, span: Span) -> IterationRecord | None:
        """The record with the span's number in which it lies; device work lies where it was noted.

        None where there is no such record: the iteration was abandoned, or its record is lost. Device work that does
        not say when it was noted (imports) belongs to the newest that had begun by its start, or else to the first.
        """
        members = self._by_number.get(span.iteration)
        if members is None:
            return None
        newest = members[max(0, bisect_right(members, span.noted_ns, key=_begin) - 1)]
        return newest if _holds(newest, span) else None


def _begin(record: IterationRecord) -> int:
    return record.begin_ns


def _holds(record: IterationRecord, span: Span) -> bool:
    if not span.is_device:
        return record.begin_ns <= span.start_ns and span.end_ns <= record.end_ns
    return span.enqueued_ns is None or record.begin_ns <= span.enqueued_ns <= record.end_ns
