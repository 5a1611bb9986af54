"""A recorder as a stream of messages for the timeline's front-end; needs neither a browser nor a widget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tracing.blame import blame_bubbles
from tracing.records import COMPUTE_LANE, HOST_LANE, Category, IterationRecord, Span, UnfinishedWork
from workbench.widgets.timeline_bubbles import BubbleFinder
from workbench.widgets.timeline_data import (
    AppendMessage,
    Buffer,
    InHandEntry,
    ResetMessage,
    Texts,
    message,
    pack_blame,
    pack_bubbles,
    pack_iterations,
    pack_spans,
    pack_stretches,
    unfinished_entries,
)
from workbench.widgets.timeline_feed import News, PauseFinder, TraceFeed, TraceSource

if TYPE_CHECKING:
    from tracing.ranks import CollectiveSpan, RanksTrace
    from workbench.report import RunView

Outgoing = tuple[AppendMessage | ResetMessage, list[Buffer]]
"""Content and buffers of a message."""


class InHand(NamedTuple):
    """The iteration that has begun and not ended."""

    iteration: int
    order: str
    reason: str


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
        return [(ResetMessage(kind="reset", groups=[""]), []), self._append(self._told.feed.look(most))]

    def follow(self, most: int) -> list[Outgoing]:
        """What is new, at most the newest ``most`` spans; nothing if nothing has changed."""
        news = self._told.feed.look(most)
        if news.is_new_trace:
            return self.restart(most)
        if news.is_empty and self._told.standing == (news.unfinished, self._in_hand()):
            return []
        return [self._append(news)]

    def _append(self, news: News) -> Outgoing:
        told, current = self._told, self._in_hand()
        origin_ns = _origin(told, news)
        bubbles, blame = told.bubbles.add(news.spans, news.iterations, news.skipped)
        tables = {
            "spans": pack_spans(news.spans, origin_ns, told.texts),
            "iterations": pack_iterations(news.iterations, origin_ns, told.texts),
            "bubbles": pack_bubbles(bubbles, origin_ns, told.texts),
            "blame": pack_blame(bubbles, blame, told.texts),
            "pauses": pack_stretches(told.pauses.add(news), origin_ns),
            "skipped": pack_stretches([news.skipped] if news.skipped else [], origin_ns),
        }
        told.standing = (news.unfinished, current)
        told.num_appended += 1
        told.left_out |= news.skipped is not None and news.skipped[0] < news.skipped[1]
        return message(
            tables,
            seq=told.num_appended - 1,
            group=0,
            texts=told.texts.take_new(),
            unfinished=unfinished_entries(news.unfinished, origin_ns),
            inHand=_in_hand_entry(told, current, news, origin_ns),
            now=news.now_ns - origin_ns,
        )


def _origin(told: _Told, news: News) -> int:
    """The trace's first moment, as far as it was seen; it never changes afterwards."""
    if told.origin_ns is None:
        starts = [span.start_ns for span in news.spans] + [record.begin_ns for record in news.iterations]
        starts += [work.enqueued_ns for work in news.unfinished]
        if not starts:
            return news.now_ns
        told.origin_ns = min(starts)
    return told.origin_ns


def _in_hand_entry(told: _Told, current: InHand | None, news: News, origin_ns: int) -> InHandEntry | None:
    if current is None:
        told.begun = None
        return None
    if told.begun is None or told.begun[0] != current.iteration:
        told.begun = (current.iteration, _begin_of(current.iteration, news))
    return InHandEntry(
        iteration=current.iteration, order=current.order, reason=current.reason, begin=told.begun[1] - origin_ns
    )


def _begin_of(iteration: int, news: News) -> int:
    def is_its(span: Span) -> bool:
        return span.lane == HOST_LANE and span.iteration == iteration

    return min((span.start_ns for span in news.spans if is_its(span)), default=news.now_ns)


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
            "blame": pack_blame(blame.bubbles, blame.rows, texts),
        }
        rest = {"seq": group, "group": group, "unfinished": [], "inHand": None, "now": 0.0}
        sent.append(message(tables, texts=texts.take_new(), **rest))
    return sent
