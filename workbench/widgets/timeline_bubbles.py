"""Bubbles and their blame while a run goes on: each is told once, when the work that ended it has ended itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tracing.blame import BlameRow, Bubble, blame_bubbles
from tracing.intervals import Interval
from tracing.records import COMPUTE_LANE, Category, IterationRecord, Span

_BEFORE = 2
"""Iterations kept before the one in which the newest device work ended."""


@dataclass(slots=True)
class BubbleFinder:
    """Divides what is new as :func:`tracing.blame.blame_bubbles` divides a whole run, with the same result.

    Keeps the spans and records that a bubble to come may still reach into: about three iterations.
    """

    _spans: list[Span] = field(default_factory=list, init=False)
    _records: list[IterationRecord] = field(default_factory=list, init=False)
    _told_until_ns: int = field(default=-1, init=False)

    def add(
        self, spans: Sequence[Span], records: Sequence[IterationRecord], skipped: Interval | None = None
    ) -> tuple[list[Bubble], list[BlameRow]]:
        """The bubbles that have become known, and the parts of each.

        Args:
            spans: What was recorded since the last call.
            records: The iterations that ended since.
            skipped: Spans of this stretch are missing, so nothing is known of it, nor of the time behind it until
                device work begins whose forerunners are all there.
        """
        if skipped is not None:
            self.clear()
            records = _known_whole(spans, records, skipped[1])
        self._spans += spans
        self._records += records
        blame = blame_bubbles(self._spans, self._records)
        new = [bubble for bubble in blame.bubbles if bubble.end_ns > self._told_until_ns]
        places = {bubble.index for bubble in new}
        if new:
            self._told_until_ns = new[-1].end_ns
        self._keep_what_is_open()
        return new, [row for row in blame.rows if row.bubble in places]

    def clear(self) -> None:
        """Start anew, with the next call."""
        self._spans, self._records, self._told_until_ns = [], [], -1

    def _keep_what_is_open(self) -> None:
        """Forget what no bubble to come can reach.

        The next one begins where the newest known device work ended. What ends it may have been launched by an
        iteration before that moment's.
        """
        ends = [span.end_ns for span in self._spans if _is_compute(span)]
        last_end_ns = max(ends, default=-1)
        begun = [at for at, record in enumerate(self._records) if record.begin_ns < last_end_ns]
        if not begun:
            return
        self._records = self._records[max(0, begun[-1] - _BEFORE) :]
        from_ns = self._records[0].begin_ns
        self._spans = [span for span in self._spans if span.end_ns >= from_ns]


def _known_whole(spans: Sequence[Span], records: Sequence[IterationRecord], from_ns: int) -> list[IterationRecord]:
    """Those that began after compute work that is there: a stream works in order, so none behind it is missing."""
    starts = [span.start_ns for span in spans if _is_compute(span)]
    return [record for record in records if starts and record.begin_ns >= max(from_ns, min(starts))]


def _is_compute(span: Span) -> bool:
    return span.category is Category.DEVICE and span.lane == COMPUTE_LANE
