"""Traces of several ranks on one clock, and what each of them did in the same stretch of time.

``docs/metrics.md`` (Other ranks) defines the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import NamedTuple

from tracing.analysis import dummy_work, is_rank_wait
from tracing.canonical import sorted_spans
from tracing.chrome import write_chrome_trace
from tracing.intervals import Interval, intersect, length, merge
from tracing.records import DUMMY_ORDERS, Category, IterationRecord, RequestRecord, Span
from tracing.text_table import aligned
from tracing.trace import Records, Trace
from tracing.windows import device_union

_WORK = frozenset({Category.PHASE, Category.WAIT, Category.DEVICE})


class RoundTrip(NamedTuple):
    """One question to another rank and its answer; each time on the clock of who took it."""

    sent_ns: int
    remote_ns: int
    received_ns: int


class ClockOffset(NamedTuple):
    """What to add to another rank's times."""

    offset_ns: int
    error_ns: int
    """It is off by no more than this."""


def clock_offset(round_trips: Iterable[tuple[int, int, int]]) -> ClockOffset:
    """What to add to the other clock, by the shortest of some round trips.

    The other one read its clock at some moment of the trip, we do not know which: taking the middle is off by half the
    trip at most, whatever the two ways took.

    Args:
        round_trips: (sent here, read there, received here), in nanoseconds.

    Raises:
        ValueError: there is none, or one was received before it was sent.
    """
    trips = [RoundTrip(*trip) for trip in round_trips]
    if not trips:
        raise ValueError("round_trips must hold at least one, got none")
    if any(trip.received_ns < trip.sent_ns for trip in trips):
        raise ValueError("round_trips must be received after they are sent, got one that was received before")
    best = min(trips, key=lambda trip: trip.received_ns - trip.sent_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    return ClockOffset(middle_ns - best.remote_ns, (best.received_ns - best.sent_ns + 1) // 2)


class CollectiveSpan(NamedTuple):
    """What a rank's device spent in one thing that all ranks do together, from coming to it until going on."""

    begin_ns: int
    end_ns: int
    kind: str
    """``gather``, ``sum``, ``exchange``."""
    purpose: str
    """What it belongs to: ``forward`` or ``draft``."""
    iteration: int


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank recorded, and how its clock lies to rank 0's."""

    rank: int
    trace: Trace
    offset_ns: int = 0
    """To be added to its times. Ranks of one machine share CLOCK_MONOTONIC: 0."""
    error_ns: int = 0
    """Bound on what the offset is off by."""
    collectives: Sequence[tuple[int, int, str, str, int]] = ()
    """Those inside its device's work, each a :class:`CollectiveSpan` or its values, on its own clock. None: their times
    are not known, as on CUDA."""


@dataclass(frozen=True, repr=False)
class RanksTrace:
    """Traces of several ranks on rank 0's clock; made by :func:`on_one_clock`."""

    traces: tuple[Trace, ...]
    """A rank each, by rank; their times are rank 0's."""
    error_ns: int
    """Bound on what any of them is off by; device lanes besides by their own ``device_clock_error_ns``."""
    collectives: tuple[tuple[CollectiveSpan, ...], ...] = ()
    """Of each rank, by begin, on rank 0's clock; empty where nothing is known."""

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Of all ranks, by start; lanes are called ``rank 0 · host`` and so on."""
        return sorted_spans(
            replace(span, lane=rank_lane(trace.rank, span.lane))
            for trace in self.traces
            for span in trace.records.spans
        )

    @cached_property
    def summary(self) -> RanksSummary:
        """What each rank did."""
        return ranks_summary(self)

    def write_chrome(self, path: str | Path) -> Path:
        """As Chrome JSON, a process a rank; errors as :func:`tracing.chrome.write_chrome_trace`."""
        return write_chrome_trace(self.traces, path, ranks_clock_error_ns=self.error_ns)

    def __repr__(self) -> str:
        return f"<RanksTrace: {len(self.traces)} ranks on one clock, within {self.error_ns / 1e3:,.1f} µs>"


def rank_lane(rank: int, lane: str) -> str:
    """Name of a rank's lane among those of others."""
    return f"rank {rank} · {lane}"


def on_one_clock(ranks: Iterable[RankTrace]) -> RanksTrace:
    """Put traces of several ranks on rank 0's clock; the error is the largest of theirs.

    Raises:
        ValueError: there is none, or a rank comes twice.
    """
    ordered = sorted(ranks, key=lambda one: one.rank)
    numbers = [one.rank for one in ordered]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"ranks must be one trace of each rank, got those of {numbers or 'none'}")
    return RanksTrace(
        traces=tuple(map(_shifted, ordered)),
        error_ns=max(one.error_ns for one in ordered),
        collectives=tuple(map(_shifted_collectives, ordered)),
    )


def _shifted(one: RankTrace) -> Trace:
    if not one.offset_ns:
        return one.trace if one.trace.rank == one.rank else replace(one.trace, rank=one.rank)
    by_ns, records = one.offset_ns, one.trace.records
    moved = Records(
        spans=[_shifted_span(span, by_ns) for span in records.spans],
        iterations=[_shifted_iteration(record, by_ns) for record in records.iterations],
        requests=[_shifted_request(request, by_ns) for request in records.requests],
    )
    return replace(one.trace, records=moved, rank=one.rank)


def _shifted_span(span: Span, by_ns: int) -> Span:
    enqueued_ns = None if span.enqueued_ns is None else span.enqueued_ns + by_ns
    return replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns, enqueued_ns=enqueued_ns)


def _shifted_collectives(one: RankTrace) -> tuple[CollectiveSpan, ...]:
    begun = sorted(CollectiveSpan(*row) for row in one.collectives)
    by_ns = one.offset_ns
    return tuple(row._replace(begin_ns=row.begin_ns + by_ns, end_ns=row.end_ns + by_ns) for row in begun)


def _shifted_iteration(record: IterationRecord, by_ns: int) -> IterationRecord:
    return replace(record, begin_ns=record.begin_ns + by_ns, end_ns=record.end_ns + by_ns)


def _shifted_request(request: RequestRecord, by_ns: int) -> RequestRecord:
    def moved(at_ns: int | None) -> int | None:
        return None if at_ns is None else at_ns + by_ns

    return replace(
        request,
        arrival_ns=request.arrival_ns + by_ns,
        admitted_ns=moved(request.admitted_ns),
        first_token_ns=moved(request.first_token_ns),
        finished_ns=moved(request.finished_ns),
        token_times_ns=tuple(at_ns + by_ns for at_ns in request.token_times_ns),
    )


# -- what each of them did ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank over the stretch of all of them; void iterations count."""

    rank: int
    busy_share: float | None
    """Device compute, dummy work included; None where the trace has no device work."""
    dummy_share: float | None
    """Device compute without rows of the rank."""
    wait_share: float
    """The host waits for other ranks."""
    collective_share: float | None
    """Of the time that device compute is busy: inside collectives. None where their times are not known."""
    tokens: int
    """Given to the rank's requests."""
    num_iterations: int
    num_dummy: int
    """Iterations in which it did nothing but what other ranks need."""


@dataclass(frozen=True, slots=True, repr=False)
class RanksSummary:
    """Ranks side by side; shows itself as a table."""

    stretch_ns: int
    """From the first to the last moment of any rank's work: what shares are of."""
    error_ns: int
    rows: tuple[RankRow, ...]

    def __str__(self) -> str:
        has_collectives = any(row.collective_share is not None for row in self.rows)
        shares = ["busy %", "dummy %", "waits for ranks %", *(["in collectives %"] if has_collectives else [])]
        head = ["", *shares, "tokens", "iterations", "dummy iterations"]
        lines = aligned([head, *([f"rank {row.rank}", *_cells(row, has_collectives)] for row in self.rows)], words=1)
        foot = f"of {self.stretch_ns / 1e6:,.3f} ms, from the first to the last work of any rank"
        of_busy = ["in collectives: of the time that the rank's device is busy"] if has_collectives else []
        return "\n".join([*lines, f"{foot}; clocks agree within {self.error_ns / 1e3:,.1f} µs", *of_busy])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre style='white-space:pre;overflow-x:auto;font-size:12px'>{escape(str(self))}</pre>"


def ranks_summary(merged: RanksTrace) -> RanksSummary:
    """Busy, dummy and waiting shares, and tokens, by rank."""
    moments = [moment for trace in merged.traces for moment in _ends(trace)]
    stretch_ns = max(moments, default=0) - min(moments, default=0)
    collectives = merged.collectives or ((),) * len(merged.traces)
    ranks = zip(merged.traces, collectives, strict=True)
    rows = tuple(_row(trace, rows, max(stretch_ns, 1)) for trace, rows in ranks)
    return RanksSummary(stretch_ns, merged.error_ns, rows)


def _ends(trace: Trace) -> list[int]:
    """First and last moment of a trace's work; nothing if it has none."""
    found: list[Interval] = [(span.start_ns, span.end_ns) for span in trace.records.spans if span.category in _WORK] + [
        (record.begin_ns, record.end_ns) for record in trace.records.iterations
    ]
    return [min(start for start, _ in found), max(end for _, end in found)] if found else []


def _row(trace: Trace, collectives: Sequence[CollectiveSpan], stretch_ns: int) -> RankRow:
    spans, records = trace.records.spans, trace.records.iterations
    compute = device_union(spans)
    waits = merge((span.start_ns, span.end_ns) for span in spans if is_rank_wait(span))
    return RankRow(
        rank=trace.rank,
        busy_share=length(compute) / stretch_ns if compute else None,
        dummy_share=length(dummy_work(spans)) / stretch_ns if compute else None,
        wait_share=length(waits) / stretch_ns,
        collective_share=_collective_share(compute, collectives),
        tokens=sum(record.new_tokens for record in records),
        num_iterations=len(records),
        num_dummy=sum(record.order in DUMMY_ORDERS for record in records),
    )


def _collective_share(compute: Sequence[Interval], collectives: Sequence[CollectiveSpan]) -> float | None:
    if not compute or not collectives:
        return None
    inside = intersect(compute, merge((one.begin_ns, one.end_ns) for one in collectives))
    return length(inside) / length(compute)


def _cells(row: RankRow, has_collectives: bool) -> Sequence[str]:
    shares = [row.busy_share, row.dummy_share, row.wait_share, *([row.collective_share] if has_collectives else [])]
    return [
        *("no samples" if share is None else f"{100 * share:.1f}" for share in shares),
        *(f"{count:,}" for count in (row.tokens, row.num_iterations, row.num_dummy)),
    ]
