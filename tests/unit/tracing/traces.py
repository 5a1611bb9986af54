"""Hand-made traces: times are small numbers, so that a test's expected values can be added up in the head."""

from __future__ import annotations

from typing import Any

from tracing.records import BatchInfo, Category, IterationRecord, Span


def phase(name: str, start: int, end: int, iteration: int = 0) -> Span:
    return Span(
        name=name, category=Category.PHASE, lane="host", start_ns=start, end_ns=end, iteration=iteration, phase=name
    )


def wait(start: int, end: int, iteration: int = 0, name: str = "results") -> Span:
    return Span(
        name=name, category=Category.WAIT, lane="host", start_ns=start, end_ns=end, iteration=iteration, depth=1
    )


def detail(name: str, start: int, end: int, iteration: int = 0) -> Span:
    return Span(
        name=name, category=Category.DETAIL, lane="host", start_ns=start, end_ns=end, iteration=iteration, depth=1
    )


def device(
    name: str, start: int, end: int, iteration: int = 0, *, lane: str = "compute", enqueued: int | None = None
) -> Span:
    return Span(
        name=name,
        category=Category.DEVICE,
        lane=lane,
        start_ns=start,
        end_ns=end,
        iteration=iteration,
        enqueued_ns=enqueued,
    )


def record(iteration: int, begin: int, end: int, **fields: Any) -> IterationRecord:
    defaults: dict[str, Any] = {"mode": "async", "order": "OVERLAP", "reason": "decode only", "num_active": 1}
    return IterationRecord(iteration=iteration, begin_ns=begin, end_ns=end, **(defaults | fields))


def batch(iteration: int = 0, *, prefill: int = 0, decode: int = 1) -> BatchInfo:
    rows = prefill + decode
    return BatchInfo(
        iteration=iteration,
        num_tokens=decode + 10 * prefill,
        num_prefill=prefill,
        num_decode=decode,
        request_ids=tuple(f"r{row}" for row in range(rows)),
    )
