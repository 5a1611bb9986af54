"""Where a trace begins or ends in the middle of device work: iterations whose times it cannot tell.

Host work counts as exposed where no device work is known beside it. So an iteration counts only if all device work
that may have run beside it is in the trace; the others are void, with the reason ``trace_edge``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tracing.by_number import IterationsByNumber
from tracing.canonical import sorted_iterations
from tracing.records import COMPUTE_LANE, TRACE_EDGE, IterationRecord, Span

_FORWARD = "forward"
"""The device work that runs on when its iteration has ended."""


def judged(spans: Iterable[Span], iterations: Iterable[IterationRecord]) -> tuple[IterationRecord, ...]:
    """The records by begin; void where device work is missing from ``spans``. What is judged stays as it is.

    Missing is work that the iteration noted (it had not ended when the trace was read), or the forward that it
    consumed (the trace was cleared, the recorder off or its ring full when that was noted). Records that do not say how
    much they noted are left alone: there is nothing to judge them by.
    """
    records = sorted_iterations(iterations)
    if all(record.num_device is None for record in records):
        return records
    known = _Known(spans, records)
    return tuple(
        _void(record) if known.is_edge(record, before) else record
        for before, record in zip((None, *records), records, strict=False)
    )


class _Known:
    """The device work that is in a trace."""

    def __init__(self, spans: Iterable[Span], records: Sequence[IterationRecord]) -> None:
        index = IterationsByNumber(records)
        self._pieces: Counter[int] = Counter()
        self._forwards: dict[int, list[int]] = defaultdict(list)
        for span in spans:
            if not span.is_device or span.enqueued_ns is None:
                continue
            record = index.of(span)
            if record is not None:
                self._pieces[id(record)] += 1
            if span.name == _FORWARD and span.lane == COMPUTE_LANE:
                self._forwards[span.iteration].append(span.enqueued_ns)
        for moments in self._forwards.values():
            moments.sort()

    def is_edge(self, record: IterationRecord, before: IterationRecord | None) -> bool:
        """Whether work is missing that ``record`` noted, or the forward that it consumed."""
        if record.num_device is None:
            return False
        if self._pieces[id(record)] < record.num_device:
            return True
        consumed = record.consumed
        if consumed is None or consumed.iteration == record.iteration:
            return False
        moments = self._forwards.get(consumed.iteration, [])
        at = bisect_right(moments, record.begin_ns) - 1
        # An older one of that number belongs to a run before a reset.
        return at < 0 or (before is not None and moments[at] < before.begin_ns)


def _void(record: IterationRecord) -> IterationRecord:
    return replace(record, void_reasons=tuple(sorted({*record.void_reasons, TRACE_EDGE})))
