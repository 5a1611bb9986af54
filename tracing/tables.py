"""From records to Arrow tables: pure functions. :mod:`tracing.schemas` lists the columns, ``docs/metrics.md`` explains.

The order of the records never matters, and no records make a table without rows and with the same columns.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tracing import schemas
from tracing.analysis import batch_kind, disturbed_times, is_void_request, iteration_table
from tracing.blame import blame_bubbles
from tracing.by_number import IterationsByNumber
from tracing.canonical import sorted_requests, sorted_spans
from tracing.edges import judged
from tracing.intervals import Interval
from tracing.records import COMPUTE_LANE, BatchInfo, Category, IterationRecord, RequestRecord, Span


def spans_table(spans: Iterable[Span]) -> pa.Table:
    """Every span, by start; args as JSON text, null without args.

    Raises:
        TypeError: a span's args hold what JSON cannot.
    """
    rows = sorted_spans(spans)
    return _table(
        schemas.SPANS,
        {
            "name": [span.name for span in rows],
            "category": [span.category.value for span in rows],
            "lane": [span.lane for span in rows],
            "start_ns": [span.start_ns for span in rows],
            "end_ns": [span.end_ns for span in rows],
            "duration_ns": [span.duration_ns for span in rows],
            "iteration": [span.iteration for span in rows],
            "depth": [span.depth for span in rows],
            "phase": [span.phase for span in rows],
            "enqueued_ns": [span.enqueued_ns for span in rows],
            "value": [span.value for span in rows],
            "args": [json.dumps(span.args, sort_keys=True) if span.args else None for span in rows],
        },
    )


def iterations_table(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> pa.Table:
    """Every iteration, by begin: the record with its batches and graph spread out, and where its wall time went."""
    rows = judged(spans, iterations)
    times = iteration_table(spans, rows)
    has_device = _has_device(spans)
    plain = ("iteration", "mode", "order", "reason", "begin_ns", "end_ns", "duration_ns", "is_void")
    made = ("outputs", "new_tokens", "rows_released", "rows_moved", "num_device")
    left = ("free_blocks", "num_waiting", "num_active")
    return _table(
        schemas.ITERATIONS,
        {
            **{name: [getattr(row, name) for row in rows] for name in (*plain, *made, *left)},
            **{name: [getattr(time, name) for time in times] for name in ("host_ns", "wait_ns", "other_ns")},
            **{
                name: [getattr(time, name) if has_device else None for time in times]
                for name in ("hidden_ns", "exposed_ns", "busy_ns")
            },
            "void_reasons": [row.void_reasons for row in rows],
            "wasted_rows": [sorted(row.wasted_rows.items()) for row in rows],
            **_batch_columns("consumed", [row.consumed for row in rows]),
            **_batch_columns("launched", [row.launched for row in rows]),
            **_graph_columns(rows),
        },
    )


def requests_table(requests: Iterable[RequestRecord], iterations: Iterable[IterationRecord] = ()) -> pa.Table:
    """Every request, by arrival: the record, and the times its caller felt."""
    rows = sorted_requests(requests)
    disturbed = disturbed_times(iterations)
    kept = ("request_id", "arrival_ns", "admitted_ns", "first_token_ns", "finished_ns", "token_times_ns")
    counts = ("num_prompt_tokens", "num_output_tokens", "finish_reason")
    lists = ("void_reasons", "drafts_proposed", "drafts_accepted")
    return _table(
        schemas.REQUESTS,
        {
            **{name: [getattr(row, name) for row in rows] for name in (*kept, *counts)},
            "queue_delay_ns": [_between(row.arrival_ns, row.admitted_ns) for row in rows],
            "ttft_ns": [_between(row.arrival_ns, row.first_token_ns) for row in rows],
            "tpot_ns": [_tpot(row) for row in rows],
            "e2e_ns": [_between(row.arrival_ns, row.finished_ns) for row in rows],
            "is_void": [is_void_request(row, disturbed) for row in rows],
            **{name: [getattr(row, name) for row in rows] for name in lists},
        },
    )


def phases_table(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> pa.Table:
    """One row a phase of an iteration, by start. Phases of abandoned iterations are in no row."""
    records = judged(spans, iterations)
    has_device = _has_device(spans)
    extents = _phase_extents(spans, IterationsByNumber(records))
    rows: list[dict[str, Any]] = []
    for record, times in zip(records, iteration_table(spans, records), strict=True):
        for name, part in times.phases.items():
            inside = extents[id(record), name]
            rows.append(
                {
                    "iteration": record.iteration,
                    "phase": name,
                    "batch": batch_kind(name, record),
                    "mode": record.mode,
                    "order": record.order,
                    "reason": record.reason,
                    "start_ns": min(start for start, _ in inside),
                    "end_ns": max(end for _, end in inside),
                    "host_ns": part.host_ns,
                    "wait_ns": part.wait_ns,
                    "hidden_ns": part.hidden_ns if has_device else None,
                    "exposed_ns": part.host_ns - part.hidden_ns if has_device else None,
                    "is_void": record.is_void,
                }
            )
    return _table_of_rows(schemas.PHASES, rows, by=("start_ns", "end_ns", "iteration", "phase"))


def bubbles_table(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> pa.Table:
    """One row a bubble, by start: what ended it, and how much of it the device had work and had not begun."""
    rows = blame_bubbles(spans, iterations).bubbles
    names = ("before", "iteration", "order", "reason", "kind", "start_ns", "end_ns", "late_ns", "launch_ns")
    return _table(
        schemas.BUBBLES,
        {
            **{name: [getattr(row, name) for row in rows] for name in names},
            "bubble": [row.index for row in rows],
            "duration_ns": [row.time_ns for row in rows],
        },
    )


def blame_table(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> pa.Table:
    """One row a part of a bubble in which the host did one thing, by start. A bubble's parts adjoin and fill it."""
    rows = blame_bubbles(spans, iterations).rows
    names = ("bubble", "cause", "iteration", "order", "reason", "start_ns", "end_ns", "is_late")
    return _table(
        schemas.BLAME,
        {
            **{name: [getattr(row, name) for row in rows] for name in names},
            "kind": [row.kind.value for row in rows],
            "duration_ns": [row.time_ns for row in rows],
        },
    )


def device_table(spans: Sequence[Span], iterations: Iterable[IterationRecord]) -> pa.Table:
    """One row a piece of device work, by start."""
    index = IterationsByNumber(judged(spans, iterations))
    rows: list[dict[str, Any]] = []
    for span in spans:
        if not span.is_device:
            continue
        record = index.of(span)
        rows.append(
            {
                "iteration": span.iteration,
                "name": span.name,
                "lane": span.lane,
                "batch": "-" if record is None else batch_kind(span.name, record),
                "enqueued_ns": span.enqueued_ns,
                "start_ns": span.start_ns,
                "end_ns": span.end_ns,
                "duration_ns": span.duration_ns,
                "is_void": None if record is None else record.is_void,
            }
        )
    return _table_of_rows(schemas.DEVICE, rows, by=("start_ns", "end_ns", "lane", "name", "iteration"))


def _batch_columns(side: str, batches: Sequence[BatchInfo | None]) -> dict[str, list[Any]]:
    names = ("iteration", "kind", "num_tokens", "num_prefill", "num_decode", "request_ids")
    return {f"{side}_{name}": [None if batch is None else getattr(batch, name) for batch in batches] for name in names}


def _graph_columns(rows: Sequence[IterationRecord]) -> dict[str, list[Any]]:
    uses = [row.graph for row in rows]
    dims = [(None, None, None) if use is None or use.dims is None else use.dims for use in uses]
    return {
        **{
            f"graph_{name}": [None if use is None else getattr(use, name) for use in uses]
            for name in ("label", "hit", "miss_reason", "padding_tokens")
        },
        **{
            f"graph_{name}": [dim[place] for dim in dims]
            for place, name in enumerate(("num_tokens", "num_prefill", "num_decode"))
        },
    }


def _phase_extents(spans: Iterable[Span], index: IterationsByNumber) -> Mapping[tuple[int, str], list[Interval]]:
    """The spans of each phase of each iteration, by the identity of its record."""
    extents: dict[tuple[int, str], list[Interval]] = defaultdict(list)
    for span in spans:
        if span.category is Category.PHASE and (record := index.of(span)) is not None:
            extents[id(record), span.name].append((span.start_ns, span.end_ns))
    return extents


def _has_device(spans: Iterable[Span]) -> bool:
    return any(span.category is Category.DEVICE and span.lane == COMPUTE_LANE for span in spans)


def _between(start_ns: int, end_ns: int | None) -> int | None:
    return None if end_ns is None else end_ns - start_ns


def _tpot(request: RequestRecord) -> float | None:
    first_ns, last_ns, count = request.first_token_ns, request.finished_ns, request.num_output_tokens
    return None if first_ns is None or last_ns is None or count < 2 else (last_ns - first_ns) / (count - 1)


def _table(schema: pa.Schema, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    return pa.Table.from_arrays([pa.array(columns[field.name], type=field.type) for field in schema], schema=schema)


def _table_of_rows(schema: pa.Schema, rows: Iterable[Mapping[str, Any]], *, by: Sequence[str]) -> pa.Table:
    """Sorted by the columns ``by``, and by all others where those are equal."""
    names = [*by, *(name for name in schema.names if name not in by)]
    found = sorted(rows, key=lambda row: [(row[name] is not None, row[name]) for name in names])
    return _table(schema, {name: [row[name] for row in found] for name in schema.names})
