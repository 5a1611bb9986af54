"""One sequence for equal sets of records, so that the order they come in shows in no table, file or comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeVar

from tracing.records import IterationRecord, RequestRecord, Span

_Record = TypeVar("_Record", Span, IterationRecord, RequestRecord)


def sorted_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """By start; outer spans first where starts are equal."""
    return _sorted(spans, lambda span: (span.start_ns, -span.end_ns, span.depth, span.lane, span.name))


def sorted_iterations(iterations: Iterable[IterationRecord]) -> tuple[IterationRecord, ...]:
    """By begin."""
    return _sorted(iterations, lambda record: (record.begin_ns, record.iteration))


def sorted_requests(requests: Iterable[RequestRecord]) -> tuple[RequestRecord, ...]:
    """By arrival."""
    return _sorted(requests, lambda request: (request.arrival_ns, request.request_id))


def _sorted(records: Iterable[_Record], key: Callable[[_Record], tuple[Any, ...]]) -> tuple[_Record, ...]:
    """Sorted by ``key``; where that is equal, which is rare, by all they hold."""

    def in_order() -> Iterator[_Record]:
        for _, group in groupby(sorted(records, key=key), key=key):
            members = list(group)
            yield from members if len(members) == 1 else sorted(members, key=_text)

    return tuple(in_order())


def _text(record: Span | IterationRecord | RequestRecord) -> str:
    """Everything in it, mappings by key."""
    values = (getattr(record, name) for name in record.__slots__)
    return repr([sorted(value.items()) if isinstance(value, Mapping) else value for value in values])
