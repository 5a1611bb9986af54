"""A recorder as a stream of messages for the timeline's front-end; needs neither a browser nor a widget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tracing.blame import BlameRow, Bubble, blame_bubbles
from tracing.intervals import Interval
from tracing.records import COMPUTE_LANE, Category, IterationRecord, Span, UnfinishedWork
from workbench.widgets.timeline_bubbles import BubbleFinder
from workbench.widgets.timeline_data import (
    AppendMessage,
    Buffer,
    InHandEntry,
    Packed,
    ResetMessage,
    Texts,
    message,
    pack_blame,
    pack_bubbles,
    pack_iterations,
    pack_span_columns,
    pack_spans,
    pack_stretches,
    unfinished_entries,
)
from workbench.widgets.timeline_feed import Glimpse, News, PauseFinder, TraceFeed, TraceSource

if TYPE_CHECKING:
    from tracing.ranks import CollectiveSpan, RanksTrace
    from workbench.report import RunView

_MOST_LATER = 20_000
"""Iterations kept to be told when a run has ended, the newest: 50 ms."""

_LATER_IN_A_RUN = 200
"""Of those, told at once while a run goes on that is slow for a moment: 1 ms."""
_MOST_ISLANDS = 500
"""Glimpses kept whose bubbles are told when a run has ended, the newest: of a minute and a half."""
_ISLANDS_AT_ONCE = 32
"""Of those, told in one message: 20 ms."""
_Found = tuple[list[Bubble], list[BlameRow]]
"""Bubbles and what they are made of."""

Outgoing = tuple[AppendMessage | ResetMessage, list[Buffer]]
"""Content and buffers of a message."""


class InHand(NamedTuple):
    """The iteration that has begun and not ended."""

    iteration: int
    order: str
    reason: str


class _Island(NamedTuple):
    """What a glimpse has told, between stretches of which nothing was."""

    recorded: Interval
    iterations: list[IterationRecord]
    skipped: Interval

    def bubbles(self, source: TraceSource, finder: BubbleFinder) -> _Found:
        """Found now, in spans that are read once more; what the recorder has lost has none."""
        return finder.add(source.spans_recorded(*self.recorded), self.iterations, self.skipped)


@dataclass(slots=True)
class _Told:
    """What the messages since the last reset have said."""

    feed: TraceFeed
    pauses: PauseFinder = field(default_factory=PauseFinder)
    bubbles: BubbleFinder = field(default_factory=BubbleFinder)
    texts: Texts = field(default_factory=Texts)
    origin_ns: int | None = None
    """The first moment that was seen; all times are sent relative to it."""
    num_appended: int = 0
    left_out: bool = False
    """Whether a stretch was skipped."""
    standing: tuple[list[UnfinishedWork], InHand | None] | None = None
    """What was in hand at the last message."""
    begun: tuple[int, int] | None = None
    """The iteration in hand, and when it began."""
    islands: deque[_Island] = field(default_factory=lambda: deque(maxlen=_MOST_ISLANDS))
    """Glimpses whose bubbles are told when the run has ended."""
    is_on_island: bool = False
    """Whether the last message was the newest of those."""
    later: deque[IterationRecord] = field(default_factory=lambda: deque(maxlen=_MOST_LATER))
    """Iterations of skipped stretches that are told when the run has ended."""


class TimelineStream:
    """Follows one recorder from the first message to the newest.

    Args:
        source: The recorder.
        in_hand: Tells which iteration has begun and not ended, if any.
    """

    def __init__(self, source: TraceSource, in_hand: Callable[[], InHand | None] = lambda: None) -> None:
        self._source = source
        self._in_hand = in_hand
        self._told = _Told(TraceFeed(source))

    @property
    def left_out(self) -> bool:
        """Whether a stretch was skipped since the last reset."""
        return self._told.left_out

    def restart(self, most: int) -> list[Outgoing]:
        """Everything anew: a reset, and the newest ``most`` spans."""
        self._told = _Told(TraceFeed(self._source))
        news = self._told.feed.look(most)
        return [(ResetMessage(kind="reset", groups=[""]), []), self._append(news, news.iterations)]

    def follow(self, most: int, *, is_running: bool = False) -> list[Outgoing]:
        """What is new, at most the newest ``most`` spans; nothing if nothing has changed.

        Args:
            most: Spans at most.
            is_running: Tell none of the bubbles that :meth:`glimpse` has left out, and few of the iterations.
        """
        told = self._told
        news = told.feed.look(most)
        if news.is_new_trace:
            return self.restart(most)
        is_same = news.is_empty and told.standing == (news.unfinished, self._in_hand())
        if is_same and (is_running or not (told.later or told.islands)):
            return []
        later = _some_of(told.later, _LATER_IN_A_RUN if is_running else None)
        return [self._append(news, [*later, *news.iterations], is_running)]

    @property
    def is_behind(self) -> bool:
        """Whether :meth:`follow` has more to tell though nothing is recorded any more."""
        return bool(self._told.islands or self._told.later)

    def glimpse(self, most: int) -> list[Outgoing]:
        """The newest ``most`` spans of a run that has recorded more since the last message, for a third of the time.

        Iterations of the stretch before them and the bubbles in them come by :meth:`follow` when nothing runs: a quick
        engine has a hundred iterations between two looks, of which the page shows the newest few.
        """
        told = self._told
        seen = told.feed.glimpse(most)
        if seen is None:
            return self.follow(most, is_running=True)
        told.later += seen.earlier
        told.islands.append(_Island(seen.recorded, seen.iterations, seen.skipped))
        told.is_on_island = told.left_out = True
        spans = pack_span_columns(seen.spans, _origin(told, seen), told.texts)
        return [self._message(seen, spans, seen.iterations, [])]

    def _append(self, news: News, iterations: Sequence[IterationRecord], is_running: bool = False) -> Outgoing:
        told = self._told
        found = []
        if told.is_on_island:  # what is new may go on from there
            found.append(told.islands.pop().bubbles(self._source, told.bubbles))
            told.is_on_island = False
        found.append(told.bubbles.add(news.spans, news.iterations, news.skipped))
        for _ in range(0 if is_running else min(_ISLANDS_AT_ONCE, len(told.islands))):
            found.append(told.islands.pop().bubbles(self._source, BubbleFinder()))
        told.left_out |= news.skipped is not None and news.skipped[0] < news.skipped[1]
        return self._message(news, pack_spans(news.spans, _origin(told, news), told.texts), iterations, found)

    def _message(
        self, news: News | Glimpse, spans: Packed, iterations: Sequence[IterationRecord], found: Sequence[_Found]
    ) -> Outgoing:
        told, current = self._told, self._in_hand()
        origin_ns = _origin(told, news)
        tables = {"spans": spans, "iterations": pack_iterations(iterations, origin_ns, told.texts)}
        if any(bubbles for bubbles, _ in found):
            tables["bubbles"] = pack_bubbles([one for bubbles, _ in found for one in bubbles], origin_ns, told.texts)
            tables["blame"] = pack_blame(found, told.texts)
        tables["pauses"] = pack_stretches(told.pauses.add(news), origin_ns)
        tables["skipped"] = pack_stretches([news.skipped] if news.skipped else [], origin_ns)
        told.standing = (news.unfinished, current)
        told.num_appended += 1
        return message(
            tables,
            seq=told.num_appended - 1,
            group=0,
            texts=told.texts.take_new(),
            unfinished=unfinished_entries(news.unfinished, origin_ns),
            inHand=_in_hand_entry(told, current, news, origin_ns),
            now=news.now_ns - origin_ns,
        )


def _some_of(later: deque[IterationRecord], most: int | None) -> list[IterationRecord]:
    """Take the oldest of them; None: all."""
    return [later.popleft() for _ in range(len(later) if most is None else min(most, len(later)))]


def _origin(told: _Told, news: News | Glimpse) -> int:
    """The trace's first moment, as far as it was seen; it never changes afterwards."""
    if told.origin_ns is None:
        assert isinstance(news, News), "a glimpse comes behind a look"
        starts = [span.start_ns for span in news.spans] + [record.begin_ns for record in news.iterations]
        starts += [work.enqueued_ns for work in news.unfinished]
        if not starts:
            return news.now_ns
        told.origin_ns = min(starts)
    return told.origin_ns


def _in_hand_entry(told: _Told, current: InHand | None, news: News | Glimpse, origin_ns: int) -> InHandEntry | None:
    if current is None:
        told.begun = None
        return None
    if told.begun is None or told.begun[0] != current.iteration:
        told.begun = (current.iteration, news.begin_of(current.iteration))
    return InHandEntry(
        iteration=current.iteration, order=current.order, reason=current.reason, begin=told.begun[1] - origin_ns
    )


def run_messages(runs: Sequence[RunView], most: int) -> list[Outgoing]:
    """Finished runs, one below the other, each from its first moment on; the newest ``most`` spans of them together."""
    kept = [_newest(run.spans, run.iterations, most // len(runs)) for run in runs]
    return _group_messages([run.name for run in runs], kept, [_first_moment([one]) for one in kept])


def rank_messages(ranks: RanksTrace, most: int) -> list[Outgoing]:
    """Ranks, one below the other, each when it did what it did; the newest ``most`` spans of them together."""
    share = most // len(ranks.traces)
    collectives = ranks.collectives or ((),) * len(ranks.traces)
    kept = [
        _newest([*one.records.spans, *_as_waits(rows, one.records.spans)], one.records.iterations, share)
        for one, rows in zip(ranks.traces, collectives, strict=True)
    ]
    bound = f" ± {ranks.error_ns / 1e3:,.1f} µs" if ranks.error_ns else ""
    names = [f"rank {trace.rank}{bound}" for trace in ranks.traces]
    return _group_messages(names, kept, [_first_moment(kept)] * len(kept))


def _as_waits(collectives: Iterable[CollectiveSpan], spans: Sequence[Span]) -> list[Span]:
    """Collectives of a trace's time as waits of the device; nothing else is a wait there."""
    begin_ns = min((span.start_ns for span in spans), default=0)
    return [
        Span(
            name=one.kind,
            category=Category.WAIT,
            lane=COMPUTE_LANE,
            start_ns=one.begin_ns,
            end_ns=one.end_ns,
            iteration=one.iteration,
            phase=one.purpose,
        )
        for one in collectives
        if spans and one.begin_ns >= begin_ns
    ]


def _is_collective(span: Span) -> bool:
    return span.category is Category.WAIT and span.lane == COMPUTE_LANE


_Kept = tuple[list[Span], list[IterationRecord]]


def _newest(spans: Iterable[Span], iterations: Iterable[IterationRecord], most: int) -> _Kept:
    shown = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.depth))[-most:]
    return shown, [record for record in iterations if shown and record.end_ns >= shown[0].start_ns]


def _first_moment(groups: Iterable[_Kept]) -> int:
    starts = [span.start_ns for spans, _ in groups for span in spans[:1]]
    return min(starts + [record.begin_ns for _, records in groups for record in records], default=0)


def _group_messages(names: list[str], groups: Sequence[_Kept], origins_ns: Sequence[int]) -> list[Outgoing]:
    """A group a name; its times are told relative to its origin."""
    sent: list[Outgoing] = [(ResetMessage(kind="reset", groups=names), [])]
    texts = Texts()
    for group, ((spans, records), origin_ns) in enumerate(zip(groups, origins_ns, strict=True)):
        blame = blame_bubbles([span for span in spans if not _is_collective(span)], records)
        tables = {
            "spans": pack_spans(spans, origin_ns, texts),
            "iterations": pack_iterations(records, origin_ns, texts),
            "bubbles": pack_bubbles(blame.bubbles, origin_ns, texts),
            "blame": pack_blame([(blame.bubbles, blame.rows)], texts),
        }
        rest = {"seq": group, "group": group, "unfinished": [], "inHand": None, "now": 0.0}
        sent.append(message(tables, texts=texts.take_new(), **rest))
    return sent
