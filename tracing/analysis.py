"""From records to tables: pure functions, defined number by number in ``docs/metrics.md``.

The order of the records never matters. Void iterations are counted, and left out of every time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tracing.blame import blame_bubbles
from tracing.blame_totals import BlameTotals, blame_totals
from tracing.by_number import IterationsByNumber
from tracing.comparison import format_comparison
from tracing.edges import judged
from tracing.intervals import Interval, intersect, length, merge, subtract
from tracing.records import (
    BATCH_OF,
    COMPUTE_LANE,
    COPY_LANE,
    DUMMY_WORK,
    PHASES,
    RANKS_WAIT,
    Category,
    IterationRecord,
    RequestRecord,
    Span,
)
from tracing.summary import (
    DevicePhase,
    DeviceTimes,
    DraftTable,
    GraphTable,
    HostPhase,
    HostTimes,
    IterationTimes,
    OrderRow,
    PhaseSlice,
    RequestLatency,
    Spread,
    Summary,
    WastedRows,
)
from tracing.windows import bubbles_in, device_union, measured_windows

__all__ = ["format_comparison", "iteration_table", "measured_windows", "request_latency", "summarise"]

_NS_PER_S = 1e9


def summarise(
    spans: Sequence[Span], iterations: Sequence[IterationRecord], requests: Sequence[RequestRecord] = ()
) -> Summary:
    """All numbers of one run.

    Iterations beside which device work is missing from ``spans`` are void (:mod:`tracing.edges`): wait for the device
    before reading a run's last iterations, and they count.
    """
    records = judged(spans, iterations)
    timed = [record for record in records if not record.is_void]
    windows = measured_windows(records)
    measured_ns = length(windows)
    new_tokens = sum(record.new_tokens for record in timed)
    return Summary(
        num_iterations=len(records),
        num_void=len(records) - len(timed),
        void_reasons=_by_count(Counter(reason for record in records for reason in record.void_reasons)),
        measured_ns=measured_ns,
        new_tokens=new_tokens,
        tokens_per_s=_ratio(new_tokens * _NS_PER_S, measured_ns),
        step=Spread.of(record.duration_ns for record in timed),
        step_by_batch=_step_by_batch(timed),
        orders=_order_rows(records),
        host=_host_times(spans, timed, windows),
        device=_device_times(spans, timed, windows),
        blame=_blame(spans, records),
        graphs=_graph_table(records),
        wasted_rows=_wasted_rows(records),
        requests=request_latency(requests, records),
        drafts=draft_table(requests),
    )


def iteration_table(spans: Sequence[Span], iterations: Sequence[IterationRecord]) -> list[IterationTimes]:
    """Where the wall time of each iteration went, void ones included; sorted by begin.

    A host span counts for the record with its number that it lies in, so what an abandoned iteration
    left behind is never charged to the one that took its number.
    """
    records = judged(spans, iterations)
    busy, index = device_union(spans, COMPUTE_LANE), IterationsByNumber(records)
    inside: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.category in (Category.PHASE, Category.WAIT) and (record := index.of(span)) is not None:
            inside[id(record)].append(span)
    return [_iteration_times(record, inside[id(record)], busy) for record in records]


def request_latency(requests: Sequence[RequestRecord], records: Sequence[IterationRecord] = ()) -> RequestLatency:
    """Queue delay, TTFT, TPOT, ITL and end-to-end time of requests; those that met a void iteration are left out.

    A request says itself whether it did; where it says nothing, ``records`` tell, as far as they are left.
    """
    disturbed = disturbed_times(records)
    timed = [request for request in requests if not is_void_request(request, disturbed)]
    return RequestLatency(
        count=len(timed),
        num_void=len(requests) - len(timed),
        finish_reasons=_by_count(Counter(request.finish_reason or "unfinished" for request in requests)),
        queue_delay=Spread.of(r.admitted_ns - r.arrival_ns for r in timed if r.admitted_ns is not None),
        ttft=Spread.of(r.first_token_ns - r.arrival_ns for r in timed if r.first_token_ns is not None),
        tpot=Spread.of(
            (r.finished_ns - r.first_token_ns) / (r.num_output_tokens - 1)
            for r in timed
            if r.finished_ns is not None and r.first_token_ns is not None and r.num_output_tokens > 1
        ),
        itl=Spread.of(later - sooner for r in timed for sooner, later in pairwise(r.token_times_ns)),
        e2e=Spread.of(r.finished_ns - r.arrival_ns for r in timed if r.finished_ns is not None),
    )


def draft_table(requests: Iterable[RequestRecord]) -> DraftTable | None:
    """Acceptance by place; None where nothing was drafted."""
    rows = [request for request in requests if request.drafts_proposed]
    if not rows:
        return None
    places = range(max(len(row.drafts_proposed) for row in rows))
    proposed, accepted = (
        tuple(sum(counts[place] for counts in table if place < len(counts)) for place in places)
        for table in ([row.drafts_proposed for row in rows], [row.drafts_accepted for row in rows])
    )
    return DraftTable(
        proposed=proposed,
        accepted=accepted,
        acceptance=tuple(part / whole for part, whole in zip(accepted, proposed, strict=True)),
        acceptance_rate=sum(accepted) / sum(proposed),
        verified_rows=proposed[0],
        tokens_per_row=1 + sum(accepted) / proposed[0],
    )


def _iteration_times(record: IterationRecord, inside: Sequence[Span], busy: Sequence[Interval]) -> IterationTimes:
    waits = merge(_interval(span) for span in inside if span.category is Category.WAIT)
    by_name: dict[str, list[Interval]] = defaultdict(list)
    for span in inside:
        if span.category is Category.PHASE:
            by_name[span.name].append(_interval(span))
    phases = {name: _phase_slice(merge(by_name[name]), waits, busy) for name in sorted(by_name, key=_phase_rank)}
    host_ns = sum(phase.host_ns for phase in phases.values())
    wait_ns = sum(phase.wait_ns for phase in phases.values())
    hidden_ns = sum(phase.hidden_ns for phase in phases.values())
    return IterationTimes(
        iteration=record.iteration,
        order=record.order,
        duration_ns=record.duration_ns,
        host_ns=host_ns,
        wait_ns=wait_ns,
        other_ns=record.duration_ns - host_ns - wait_ns,
        hidden_ns=hidden_ns,
        exposed_ns=host_ns - hidden_ns,
        busy_ns=length(intersect([(record.begin_ns, record.end_ns)], busy)),
        phases=phases,
    )


def _phase_slice(phase: list[Interval], waits: list[Interval], busy: Sequence[Interval]) -> PhaseSlice:
    work = subtract(phase, waits)
    return PhaseSlice(
        host_ns=length(work), wait_ns=length(phase) - length(work), hidden_ns=length(intersect(work, busy))
    )


def _host_times(spans: Sequence[Span], timed: Sequence[IterationRecord], windows: Sequence[Interval]) -> HostTimes:
    table = iteration_table(spans, timed)
    ranks = intersect(windows, merge(_interval(span) for span in spans if is_rank_wait(span)))
    between = subtract(windows, merge((record.begin_ns, record.end_ns) for record in timed))
    has_device = any(span.category is Category.DEVICE and span.lane == COMPUTE_LANE for span in spans)
    work_ns = sum(row.host_ns for row in table)
    hidden_ns = sum(row.hidden_ns for row in table)
    names = sorted({name for row in table for name in row.phases}, key=_phase_rank)
    return HostTimes(
        work_ns=work_ns,
        wait_ns=sum(row.wait_ns for row in table),
        other_ns=sum(row.other_ns for row in table),
        between_ns=length(windows) - sum(row.duration_ns for row in table) - length(intersect(between, ranks)),
        ranks_ns=length(ranks),
        hidden_ns=hidden_ns if has_device else None,
        exposed_ns=work_ns - hidden_ns if has_device else None,
        hidden_share=_ratio(hidden_ns, work_ns) if has_device else None,
        phases=tuple(_host_phase(name, table, has_device) for name in names),
    )


def _host_phase(name: str, table: Sequence[IterationTimes], has_device: bool) -> HostPhase:
    slices = [row.phases[name] for row in table if name in row.phases]
    host = Spread.of(part.host_ns for part in slices)
    assert host is not None, f"no iteration has phase {name}"
    hidden_ns = sum(part.hidden_ns for part in slices)
    return HostPhase(
        name=name,
        host=host,
        wait_ns=sum(part.wait_ns for part in slices),
        hidden_ns=hidden_ns if has_device else None,
        exposed_ns=sum(part.host_ns for part in slices) - hidden_ns if has_device else None,
    )


def _device_times(spans: Sequence[Span], timed: Sequence[IterationRecord], windows: Sequence[Interval]) -> DeviceTimes:
    compute = device_union(spans, COMPUTE_LANE)
    bubbles = bubbles_in(windows, compute)
    busy_ns = length(intersect(windows, compute)) if compute else None
    bubble_ns = length(bubbles) if compute else None
    copies = device_union(spans, COPY_LANE)
    dummy_ns = length(intersect(windows, dummy_work(spans))) if compute else None
    measured_ns = length(windows)
    return DeviceTimes(
        busy_ns=busy_ns,
        busy_share=None if busy_ns is None else _ratio(busy_ns, measured_ns),
        dummy_ns=dummy_ns,
        dummy_share=None if dummy_ns is None else _ratio(dummy_ns, measured_ns),
        bubble_ns=bubble_ns,
        bubble_share=None if bubble_ns is None else _ratio(bubble_ns, measured_ns),
        bubbles=Spread.of(end - start for start, end in bubbles),
        copy_ns=length(intersect(windows, copies)) if copies else None,
        phases=_device_phases(spans, timed),
    )


def dummy_work(spans: Iterable[Span]) -> list[Interval]:
    """When the device was busy without a row of this rank, and with none of its own work beside."""
    names = [span for span in spans if span.category is Category.DEVICE and span.lane == COMPUTE_LANE]
    own = merge(_interval(span) for span in names if span.name not in DUMMY_WORK)
    return subtract(merge(_interval(span) for span in names if span.name in DUMMY_WORK), own)


def is_rank_wait(span: Span) -> bool:
    """Whether the host waits for other ranks in it."""
    return span.category is Category.WAIT and span.name == RANKS_WAIT


def _blame(spans: Sequence[Span], records: Sequence[IterationRecord]) -> BlameTotals | None:
    if not device_union(spans, COMPUTE_LANE):
        return None
    return blame_totals(blame_bubbles(spans, records), sum(not record.is_void for record in records))


def _device_phases(spans: Iterable[Span], timed: Iterable[IterationRecord]) -> tuple[DevicePhase, ...]:
    index = IterationsByNumber(timed)
    totals: dict[tuple[str, str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in spans:
        record = index.of(span) if span.is_device else None
        if record is not None:
            totals[span.name, span.lane, batch_kind(span.name, record)][id(record)] += span.duration_ns
    rows = []
    for name, lane, batch in sorted(totals, key=lambda key: (key[1] != COMPUTE_LANE, _phase_rank(key[0]), key[2])):
        time = Spread.of(totals[name, lane, batch].values())
        assert time is not None
        rows.append(DevicePhase(name=name, lane=lane, batch=batch, time=time))
    return tuple(rows)


def batch_kind(name: str, record: IterationRecord) -> str:
    side = BATCH_OF.get(name)
    batch = record.consumed if side == "consumed" else record.launched if side == "launched" else None
    return "-" if batch is None else batch.kind


def _step_by_batch(timed: Sequence[IterationRecord]) -> dict[str, Spread | None]:
    return {
        kind: Spread.of(r.duration_ns for r in timed if r.launched is not None and r.launched.kind == kind)
        for kind in ("decode", "prefill", "mixed")
    }


def _order_rows(records: Sequence[IterationRecord]) -> tuple[OrderRow, ...]:
    by_order: dict[str, list[IterationRecord]] = defaultdict(list)
    for record in records:
        by_order[record.order].append(record)
    rows = [
        OrderRow(
            order=order,
            count=len(members),
            share=len(members) / len(records),
            reasons=_by_count(Counter(member.reason for member in members)),
            step=Spread.of(member.duration_ns for member in members if not member.is_void),
        )
        for order, members in by_order.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.count, row.order)))


def _graph_table(records: Sequence[IterationRecord]) -> GraphTable:
    forwards = [(record.graph, record.launched) for record in records if record.graph is not None]
    uses = [use for use, _ in forwards]
    hits = sum(use.hit for use in uses)
    padding = sum(use.padding_tokens for use in uses)
    real = sum(batch.num_tokens for _, batch in forwards if batch is not None)
    return GraphTable(
        hits=hits,
        misses=_by_count(Counter(use.miss_reason or "unknown" for use in uses if not use.hit)),
        labels=_by_count(Counter(use.label for use in uses)),
        hit_rate=_ratio(hits, len(uses)),
        padding_tokens=padding,
        padding_share=_ratio(padding, padding + real),
    )


def _wasted_rows(records: Sequence[IterationRecord]) -> WastedRows:
    by_cause: Counter[str] = Counter()
    for record in records:
        by_cause.update(record.wasted_rows)
    rows = sum(record.consumed.num_rows for record in records if record.consumed is not None)
    total = by_cause.total()
    return WastedRows(by_cause=_by_count(by_cause), total=total, consumed_rows=rows, share=_ratio(total, rows))


def disturbed_times(records: Iterable[IterationRecord]) -> list[Interval]:
    """When iterations ran that voided the times of requests too."""
    return merge((record.begin_ns, record.end_ns) for record in records if record.is_disturbed)


def is_void_request(request: RequestRecord, disturbed: Sequence[Interval]) -> bool:
    """Whether an iteration that voids its times ran while the request lived."""
    if request.void_reasons or not disturbed:
        return bool(request.void_reasons)
    end_ns = disturbed[-1][1] if request.finished_ns is None else request.finished_ns
    return bool(intersect([(request.arrival_ns, max(end_ns, request.arrival_ns + 1))], disturbed))


def _interval(span: Span) -> Interval:
    return span.start_ns, span.end_ns


def _phase_rank(name: str) -> tuple[int, str]:
    return (PHASES.index(name) if name in PHASES else len(PHASES), name)


def _by_count(counts: Counter[str]) -> dict[str, int]:
    """Largest first, then by name, so that any order of records gives the same table."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
