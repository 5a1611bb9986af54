"""What is new in a recorder since the last look, without waiting for a device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

from tracing.columns import CATEGORIES, SpanColumns
from tracing.intervals import Interval
from tracing.records import HOST_LANE, Category, IterationRecord, Span, UnfinishedWork

_FIRST_LOOK = 64
"""Newest records asked for at first; doubled until they reach back to what is known."""


class TraceSource(Protocol):
    """The part of :class:`tracing.recorder.Recorder` that is read."""

    @property
    def lost_spans(self) -> int: ...

    def spans(self, newest: int | None = None) -> list[Span]: ...

    def newest_columns(self, newest: int) -> SpanColumns: ...

    def spans_recorded(self, begin_ns: int, end_ns: int) -> list[Span]: ...

    def running(self) -> list[UnfinishedWork]: ...

    def iterations(self, newest: int | None = None) -> list[IterationRecord]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What came since the last look."""

    is_new_trace: bool
    """The recorder was cleared: forget what came before."""
    spans: list[Span]
    """By start. Device work comes when its end is known, whenever it began."""
    iterations: list[IterationRecord]
    unfinished: list[UnfinishedWork]
    """All device work that has not ended."""
    now_ns: int
    skipped: Interval | None
    """A stretch of which no span comes any more: more was recorded than was asked for, or the recorder lost it.
    Empty at the first look: there is more before it."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all was recorded."""
        return not (self.spans or self.iterations)

    def busy(self) -> list[Interval]:
        """What was spent on work, on any lane."""
        return [(span.start_ns, span.end_ns) for span in self.spans if span.category is not Category.COUNTER]

    def begin_of(self, iteration: int) -> int:
        """When the host began with it, as far as is told here; else now."""
        begins = (span.start_ns for span in self.spans if span.lane == HOST_LANE and span.iteration == iteration)
        return min(begins, default=self.now_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """The newest of a run that records more than is read of it."""

    spans: SpanColumns
    iterations: list[IterationRecord]
    """Those that ended behind the stretch that is left out."""
    earlier: list[IterationRecord]
    """Those that ended in it."""
    unfinished: list[UnfinishedWork]
    now_ns: int
    skipped: Interval
    """No span of this stretch comes any more."""
    recorded: Interval
    """When the first and the last of the spans were recorded."""
    is_new_trace: Literal[False] = False
    """As of :class:`News`: of a trace begun anew there is none."""

    def busy(self) -> list[Interval]:
        """As of :class:`News`."""
        spans = self.spans
        is_work = spans.category != CATEGORIES.index(Category.COUNTER)
        return list(zip(spans.start_ns[is_work].tolist(), spans.end_ns[is_work].tolist(), strict=True))

    def begin_of(self, iteration: int) -> int:
        """As of :class:`News`."""
        spans = self.spans
        begins = spans.start_ns[(spans.iteration == iteration) & ~spans.is_device]
        return int(begins.min()) if begins.size else self.now_ns


class _Window(NamedTuple):
    """The newest records."""

    spans: list[Span]
    moments: list[int]
    """When each of them was recorded."""
    oldest_ns: int | None
    """When the oldest of them was recorded; None: there are none."""
    is_all: bool
    """Whether the recorder holds no older ones."""


class TraceFeed:
    """A place in a recorder's trace that moves on with each look.

    Records are made in the order of time: a host span at its end, device work when it was enqueued.
    """

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self._last_ns: int | None = None
        """When the newest known record was made."""
        self._begins = True
        """Whether nothing has been looked at yet, not even that nothing is there."""
        self._at_last: list[Span] = []
        """The known records of that very moment."""
        self._awaited: set[tuple[str, str, int, int | None]] = set()
        """Device work that is known and whose times are not."""
        self._first_awaited_ns: int | None = None
        self._last_iteration: IterationRecord | None = None
        self._want = _FIRST_LOOK

    def look(self, most: int) -> News:
        """Take what is new, but no more than the newest ``most`` spans. Waits for nothing."""
        unfinished = self._source.running()  # before the spans: what ends in between is then in both
        now_ns = time.perf_counter_ns()
        window = self._window(most, len(unfinished))
        iterations = self._new_iterations()
        is_new_trace = self._was_cleared(window, iterations)
        if is_new_trace:
            self._forget()
            iterations = self._source.iterations()
        if self._begins and not window.is_all:  # of an old trace those of its newest spans; of a first run all
            iterations = [record for record in iterations if record.end_ns >= (window.oldest_ns or 0)]
        self._begins = False
        skipped = self._skipped(window)
        new = window if skipped is not None else self._new_of(window)  # behind a skipped stretch all is new
        spans = new.spans
        ended = {_key(span) for span in spans if span.enqueued_ns is not None}
        unfinished = [work for work in unfinished if _key(work) not in ended]
        self._note(new, iterations, unfinished)
        return News(
            is_new_trace=is_new_trace,
            spans=spans,
            iterations=iterations,
            unfinished=unfinished,
            now_ns=now_ns,
            skipped=skipped,
        )

    def glimpse(self, most: int) -> Glimpse | None:
        """Take the newest ``most`` spans where more than these were recorded since the last look; waits for nothing.

        Costs a third of a look at as many.

        Returns:
            None where :meth:`look` has to tell: nothing was known before, or the trace was begun anew.
        """
        if self._last_ns is None:
            return None
        unfinished = self._source.running()
        now_ns = time.perf_counter_ns()
        spans = self._source.newest_columns(most)
        iterations, moments = self._new_iterations(), spans.recorded_ns
        last = self._last_iteration
        if not len(spans) or (last is not None and iterations and iterations[0].iteration <= last.iteration):
            return None
        oldest_ns, newest_ns = int(moments.min()), int(moments.max())
        if oldest_ns <= self._last_ns:
            return None
        skipped, ended = (self._last_ns, oldest_ns), {*spans.enqueued_ns[spans.is_device].tolist()}
        unfinished = [work for work in unfinished if work.enqueued_ns not in ended]
        num_earlier = sum(1 for _ in takewhile(lambda record: record.end_ns < oldest_ns, iterations))
        self._last_ns = newest_ns
        self._at_last = [spans.span(place) for place in (moments == newest_ns).nonzero()[0].tolist()]
        self._note_rest(iterations, unfinished, len(spans))
        return Glimpse(
            spans=spans,
            iterations=iterations[num_earlier:],
            earlier=iterations[:num_earlier],
            unfinished=unfinished,
            now_ns=now_ns,
            skipped=skipped,
            recorded=(oldest_ns, newest_ns),
        )

    def _window(self, most: int, num_unfinished: int) -> _Window:
        """Enough of the newest records to reach back to all that is known, or ``most`` of them."""
        known = [moment for moment in (self._last_ns, self._first_awaited_ns) if moment is not None]
        want = min(self._want, most)
        while True:
            spans = self._source.spans(want)
            moments = list(map(recorded_ns, spans))
            oldest_ns = min(moments, default=None)
            is_all = len(spans) + num_unfinished < want  # times that are not known yet are left out of the newest
            is_enough = bool(known) and oldest_ns is not None and oldest_ns <= min(known)
            if is_all or is_enough or want == most:
                return _Window(spans, moments, oldest_ns, is_all)
            want = min(4 * want, most)

    def _was_cleared(self, window: _Window, iterations: Sequence[IterationRecord]) -> bool:
        """Nothing that is known is there any more though nothing was lost, or the iterations are counted anew."""
        if self._last_ns is None:
            return False
        last = self._last_iteration
        if last is not None and iterations and iterations[0].iteration <= last.iteration:
            return True
        if not window.is_all or self._source.lost_spans:
            return False
        return window.oldest_ns is None or window.oldest_ns > self._last_ns

    def _skipped(self, window: _Window) -> Interval | None:
        if window.oldest_ns is None:
            return None
        if self._last_ns is None:
            return None if window.is_all else (window.oldest_ns, window.oldest_ns)
        return (self._last_ns, window.oldest_ns) if window.oldest_ns > self._last_ns else None

    def _new_of(self, window: _Window) -> _Window:
        at = [place for place, both in enumerate(zip(window.spans, window.moments, strict=True)) if self._is_new(*both)]
        return window._replace(spans=[window.spans[one] for one in at], moments=[window.moments[one] for one in at])

    def _is_new(self, span: Span, moment: int) -> bool:
        if self._last_ns is None:
            return True
        if moment > self._last_ns or _key(span) in self._awaited:
            return True
        return moment == self._last_ns and span not in self._at_last

    def _new_iterations(self) -> list[IterationRecord]:
        last, want = self._last_iteration, _FIRST_LOOK
        if last is None:
            return self._source.iterations()
        while True:
            records = self._source.iterations(want)
            newer = list(takewhile(lambda record: record.end_ns > last.end_ns, reversed(records)))[::-1]
            if len(newer) < len(records) or len(records) < want:
                return newer
            want *= 4

    def _note(self, new: _Window, iterations: Sequence[IterationRecord], unfinished: Sequence[UnfinishedWork]) -> None:
        newest_ns = max(new.moments, default=None)
        if newest_ns is not None and (self._last_ns is None or newest_ns >= self._last_ns):
            known = self._at_last if newest_ns == self._last_ns else []
            self._at_last = [
                *known,
                *(span for span, moment in zip(new.spans, new.moments, strict=True) if moment == newest_ns),
            ]
            self._last_ns = newest_ns
        self._note_rest(iterations, unfinished, len(new.spans))

    def _note_rest(
        self, iterations: Sequence[IterationRecord], unfinished: Sequence[UnfinishedWork], num_spans: int
    ) -> None:
        if iterations:
            self._last_iteration = iterations[-1]
        self._awaited = {_key(work) for work in unfinished}
        self._first_awaited_ns = min((work.enqueued_ns for work in unfinished), default=None)
        self._want = max(_FIRST_LOOK, 2 * num_spans)

    def _forget(self) -> None:
        self._begins = True
        self._last_ns = self._first_awaited_ns = self._last_iteration = None
        self._at_last, self._awaited = [], set()


@dataclass(slots=True)
class PauseFinder:
    """Stretches in which nothing happened on any lane: a person was looking, or no request was there."""

    least_ns: int = 5_000_000
    """Shorter ones belong to the schedule."""
    _busy_until_ns: int | None = field(default=None, init=False)

    def add(self, news: News | Glimpse) -> list[Interval]:
        """The pauses that ended with what is new, in order. A stretch that was skipped is not one."""
        busy = news.busy()
        if news.unfinished:
            busy.append((min(work.enqueued_ns for work in news.unfinished), news.now_ns))
        if news.is_new_trace:
            self._busy_until_ns = None
        until_ns = self._busy_until_ns
        if news.skipped is not None:
            until_ns = max(until_ns or 0, news.skipped[1])
        pauses = []
        for start_ns, end_ns in sorted(busy):
            if until_ns is not None and start_ns - until_ns >= self.least_ns:
                pauses.append((until_ns, start_ns))
            until_ns = end_ns if until_ns is None else max(until_ns, end_ns)
        self._busy_until_ns = until_ns
        return pauses


def recorded_ns(span: Span) -> int:
    """When the recorder made the record."""
    return span.enqueued_ns if span.enqueued_ns is not None else span.end_ns


def _key(work: Span | UnfinishedWork) -> tuple[str, str, int, int | None]:
    return work.name, work.lane, work.iteration, work.enqueued_ns
