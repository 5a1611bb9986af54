"""Traces as Chrome JSON, the format that Perfetto and ``chrome://tracing`` open; docs/metrics.md says what is in it."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tracing.chrome_args import SpanArgs, imported_args, instant_args, iteration_args, plain, request_args
from tracing.chrome_events import EventWriter, Track
from tracing.chrome_flows import Flow, imported_flows, trace_flows
from tracing.chrome_tracks import nested_tracks, separate_tracks
from tracing.importing import DEVICE_KINDS, ImportedKind, ImportedSpan, ImportedTrace, by_start
from tracing.intervals import Interval
from tracing.nvtx_ranges import colour_of
from tracing.records import COMPUTE_LANE, COPY_LANE, HOST_LANE, PHASE_COLOURS, Category, RequestRecord, Span
from tracing.trace import Trace

_LANES = {HOST_LANE: "host", COMPUTE_LANE: "device compute", COPY_LANE: "device copy"}
_NAMED_COLOURS = {
    PHASE_COLOURS["admit"]: "thread_state_uninterruptible",
    PHASE_COLOURS["prepare"]: "thread_state_iowait",
    PHASE_COLOURS["forward"]: "rail_response",
    PHASE_COLOURS["sample"]: "rail_load",
    PHASE_COLOURS["verify"]: "olive",
    PHASE_COLOURS["draft"]: "background_memory_dump",
    PHASE_COLOURS["rewind"]: "detailed_memory_dump",
    PHASE_COLOURS["resolve"]: "rail_animation",
    PHASE_COLOURS["emit"]: "thread_state_runnable",
    PHASE_COLOURS["dummy_forward"]: "cq_build_abandoned",
    PHASE_COLOURS["dummy_draft"]: "cq_build_abandoned",
    PHASE_COLOURS["ranks"]: "yellow",
    PHASE_COLOURS["copy"]: "light_memory_dump",
    PHASE_COLOURS["iteration"]: "generic_work",
}
"""The nearest that the format has a name for, in ``chrome://tracing``; Perfetto goes by the slice's name alone."""
_OTHER_COLOUR = "grey"

_Tracks = dict[int, Track]
"""Where a slice is that an arrow may touch, by the identity of its record."""


def write_chrome_trace(
    traces: Trace | Sequence[Trace],
    path: str | Path,
    *,
    imported: Sequence[ImportedTrace] = (),
    aligned: bool = False,
    ranks_clock_error_ns: int | None = None,
) -> Path:
    """Write traces into one file, a process each; folders on the way are made.

    Events are written one by one, so that what stands in memory are the records and little more.

    Args:
        traces: One run, or several: ranks, or runs that are to be compared.
        path: Ends in ``.json``, or in ``.json.gz`` to be compressed. A file that is there is replaced at the end.
        imported: What other tools saw, on the clock of the traces; a process each.
        aligned: Let every trace begin at 0, one below the other, rather than when it did: for runs that are to be
            compared, or that are not of one clock.
        ranks_clock_error_ns: Of ranks on one clock, what it is off by at most; noted beside the events.

    Returns:
        The path written.

    Raises:
        ValueError: the name ends in something else, there is nothing to write, or imported traces cannot be aligned.
        OSError: the disk refuses.
    """
    target, runs = Path(path), [traces] if isinstance(traces, Trace) else list(traces)
    if not target.name.endswith((".json", ".json.gz")):
        raise ValueError(f"a Chrome trace ends in .json or .json.gz, or viewers do not open it; got {target.name!r}")
    if not runs and not imported:
        raise ValueError("there is nothing to write: neither traces nor imported ones were given")
    if imported and aligned:
        raise ValueError(
            "an imported trace lies on the clock of ours and cannot be aligned by itself; leave aligned out"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.partial")
    try:
        with _open(unfinished, is_compressed=target.suffix == ".gz") as file:
            _write(file, runs, imported, aligned=aligned, ranks_clock_error_ns=ranks_clock_error_ns)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


@contextmanager
def _open(path: Path, *, is_compressed: bool) -> Iterator[TextIO]:
    """Text that goes to ``path``; equal text makes equal bytes."""
    with path.open("wb") as raw:
        if not is_compressed:
            with io.TextIOWrapper(raw, encoding="ascii", newline="\n") as text:
                yield text
            return
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=4, mtime=0)
        with packed, io.TextIOWrapper(packed, encoding="ascii", newline="\n") as text:
            yield text


def _write(
    file: TextIO,
    traces: Sequence[Trace],
    imported: Sequence[ImportedTrace],
    *,
    aligned: bool,
    ranks_clock_error_ns: int | None,
) -> None:
    firsts = [_first(trace) for trace in traces]
    first = min([*firsts, *(span.start_ns for one in imported for span in one.spans)], default=0)
    origins = firsts if aligned else [first] * len(traces)
    head = {
        "tool": "inference-workbench",
        "clock": "time.perf_counter_ns",
        "ranks_clock_error_ns": ranks_clock_error_ns,
        "traces": [_head_of(trace, origin) for trace, origin in zip(traces, origins, strict=True)],
        "imported": [{"source": one.source, "origin_ns": first, "notes": one.notes} for one in imported],
    }
    writer = EventWriter(file, plain(head))
    for trace, writer.origin_ns in zip(traces, origins, strict=True):
        _write_trace(writer, trace)
    writer.origin_ns = first
    for one in imported:
        _write_imported(writer, one)
    writer.close()


def _head_of(trace: Trace, origin_ns: int) -> dict[str, Any]:
    names = ("name", "rank", "device_clock_error_ns", "lost_iterations", "config", "environment", "workload")
    return {**{name: getattr(trace, name) for name in names}, "origin_ns": origin_ns}


def _write_trace(writer: EventWriter, trace: Trace) -> None:
    records, tracks = trace.records, _Tracks()
    process = writer.process(f"rank {trace.rank}: {trace.name}")
    times = [(record.begin_ns, record.end_ns) for record in records.iterations]
    for record, stretch, track in _placed(writer, process, "iterations", records.iterations, times):
        writer.slice(track, record.order, "iteration", stretch, iteration_args(record), _colour("", "iteration"))
    lanes: dict[str, list[Span]] = {HOST_LANE: [], COMPUTE_LANE: [], COPY_LANE: []}
    for span in records.spans:
        lanes.setdefault(span.lane, []).append(span)
    args = SpanArgs(records.iterations, writer.origin_ns)
    for lane, spans in lanes.items():
        times = [(span.start_ns, span.end_ns) for span in spans]
        for span, stretch, track in _placed(writer, process, _LANES.get(lane, f"device {lane}"), spans, times):
            tracks[id(span)] = track
            _write_span(writer, track, span, stretch, args)
    _write_requests(writer, process, records.requests, _end(trace))
    _write_counters(writer, process, trace)
    _write_flows(writer, trace_flows(records.spans, records.iterations), tracks)


def _write_span(writer: EventWriter, track: Track, span: Span, stretch: Interval, args: SpanArgs) -> None:
    category = span.category.value
    if span.category is Category.COUNTER:
        writer.counter(track, span.name, "value", span.start_ns, float("nan") if span.value is None else span.value)
    elif span.category is Category.INSTANT:
        writer.instant(track, span.name, span.start_ns, instant_args(span))
    else:
        writer.slice(track, span.name, category, stretch, args.of(span), _colour(span.name, category))


def _write_requests(writer: EventWriter, process: int, requests: Sequence[RequestRecord], end_ns: int) -> None:
    """A slice a request, with its stages inside; one still running lasts to the end of the trace."""
    stages = [_stages(request, end_ns) for request in requests]
    stretches = [(parts[0][1][0], parts[-1][1][1]) for parts in stages]
    tracks = writer.tracks(process, "requests", separate_tracks(stretches))
    for request, parts, stretch, track in zip(requests, stages, stretches, tracks, strict=True):
        writer.slice(track, request.request_id, "request", stretch, request_args(request))
        for name, part in parts:
            writer.slice(track, name, "request", part, "{}")


def _stages(request: RequestRecord, end_ns: int) -> list[tuple[str, Interval]]:
    """``queued``, ``prefill`` and ``decode``, as far as it came; they touch, and none ends before it starts."""
    end_ns = max(request.arrival_ns, end_ns if request.finished_ns is None else request.finished_ns)
    reached = [("queued", request.arrival_ns)]
    for name, at_ns in (("prefill", request.admitted_ns), ("decode", request.first_token_ns)):
        if at_ns is not None:
            reached.append((name, min(end_ns, max(at_ns, reached[-1][1]))))
    ends = [at_ns for _, at_ns in reached[1:]] + [end_ns]
    return [(name, (start_ns, stop_ns)) for (name, start_ns), stop_ns in zip(reached, ends, strict=True)]


def _write_counters(writer: EventWriter, process: int, trace: Trace) -> None:
    """At the end of every iteration."""
    track = Track(process, 0)
    for record in trace.records.iterations:
        writer.counter(track, "KV blocks", "free", record.end_ns, record.free_blocks)
        writer.counter(track, "requests", "waiting", record.end_ns, record.num_waiting)
        writer.counter(track, "requests", "active", record.end_ns, record.num_active)


def _write_imported(writer: EventWriter, imported: ImportedTrace) -> None:
    """A track a stream and a host thread."""
    process, tracks = writer.process(imported.source), _Tracks()
    ordered = by_start(imported.spans)
    lanes: dict[tuple[bool, str], list[ImportedSpan]] = {}
    for span in ordered:
        lanes.setdefault(_imported_lane(span), []).append(span)
    for (_, lane), spans in sorted(lanes.items(), key=lambda item: item[0]):
        times = [(span.start_ns, span.end_ns) for span in spans]
        for span, stretch, track in _placed(writer, process, lane, spans, times):
            tracks[id(span)] = track
            if span.kind is ImportedKind.MARK:
                writer.instant(track, span.name, span.start_ns, imported_args(span))
            else:
                writer.slice(track, span.name, span.kind.value, stretch, imported_args(span))
    _write_flows(writer, imported_flows(ordered), tracks)


def _imported_lane(span: ImportedSpan) -> tuple[bool, str]:
    """Host threads first."""
    if span.kind in DEVICE_KINDS:
        return True, f"device {span.device or 0}, stream {'?' if span.stream is None else span.stream}"
    return False, f"thread {'?' if span.thread is None else span.thread}"


def _write_flows(writer: EventWriter, flows: Iterable[Flow], tracks: _Tracks) -> None:
    for flow in flows:
        source, target = tracks[id(flow.source)], tracks[id(flow.target)]
        writer.flow(flow.name, source, flow.source_ns, target, flow.target_ns)


def _placed(
    writer: EventWriter, process: int, name: str, records: Sequence[Any], stretches: Sequence[Interval]
) -> Iterator[tuple[Any, Interval, Track]]:
    """Each record with its times and its track; what would overlap in part goes to another track of that name."""
    tracks = writer.tracks(process, name, nested_tracks(stretches))
    return zip(records, stretches, tracks, strict=True)


def _colour(name: str, category: str) -> str:
    return _NAMED_COLOURS.get(colour_of(name, category), _OTHER_COLOUR)


def _first(trace: Trace) -> int:
    """The first moment of a trace."""
    records = trace.records
    firsts = [span.start_ns for span in records.spans[:1]] + [record.begin_ns for record in records.iterations[:1]]
    return min(firsts + [request.arrival_ns for request in records.requests[:1]], default=0)


def _end(trace: Trace) -> int:
    """The last moment of a trace."""
    records = trace.records
    lasts = [span.end_ns for span in records.spans] + [record.end_ns for record in records.iterations]
    return max(lasts + [request.arrival_ns for request in records.requests], default=0)
