"""From Arrow tables back to the records they were made of; columns that were worked out from others are not read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa

from tracing import schemas
from tracing.records import BatchInfo, Category, GraphUse, IterationRecord, RequestRecord, Span

_DERIVED = frozenset(
    {
        *("duration_ns", "host_ns", "wait_ns", "other_ns", "hidden_ns", "exposed_ns", "busy_ns", "is_void"),
        *("consumed_kind", "launched_kind"),
        *("queue_delay_ns", "ttft_ns", "tpot_ns", "e2e_ns"),
    }
)
"""Columns that follow from others: a table without them is read all the same."""

_ADDED: dict[str, Any] = {"num_device": None, "void_reasons": [], "drafts_proposed": [], "drafts_accepted": []}
"""Columns that runs of earlier versions lack, and what stands for them: ``void_reasons`` of requests."""


class TableError(ValueError):
    """A table is not one of ours; the message names the column at fault."""


def spans_of(table: pa.Table) -> list[Span]:
    """The spans of a table made by :func:`tracing.tables.spans_table`.

    Raises:
        TableError: a column is missing, of another type, or holds what it must not.
    """
    columns = _columns(table, schemas.SPANS)
    categories = {category.value: category for category in Category}
    unknown = set(columns["category"]) - set(categories)
    if unknown:
        raise TableError(f"column category holds {min(unknown)!r}; known are {', '.join(categories)}")
    return [
        Span(
            name=name,
            category=categories[category],
            lane=lane,
            start_ns=start,
            end_ns=end,
            iteration=iteration,
            depth=depth,
            phase=phase,
            enqueued_ns=enqueued,
            value=value,
            args={} if args is None else _args(args),
        )
        for name, category, lane, start, end, iteration, depth, phase, enqueued, value, args in _zipped(
            columns,
            "name category lane start_ns end_ns iteration depth phase enqueued_ns value args",
        )
    ]


def iterations_of(table: pa.Table) -> list[IterationRecord]:
    """The records of a table made by :func:`tracing.tables.iterations_table`.

    Raises:
        TableError: as for :func:`spans_of`.
    """
    columns = _columns(_completed(table, schemas.ITERATIONS, "num_device"), schemas.ITERATIONS)
    plain = "iteration mode order reason begin_ns end_ns outputs new_tokens"
    counts = "rows_released rows_moved free_blocks num_waiting num_active num_device"
    names = f"{plain} {counts}".split()
    found = zip(
        _zipped(columns, f"{plain} {counts}"),
        _batches(columns, "consumed"),
        _batches(columns, "launched"),
        _graphs(columns),
        columns["wasted_rows"],
        columns["void_reasons"],
        strict=True,
    )
    return [
        IterationRecord(
            **dict(zip(names, values, strict=True)),
            consumed=consumed,
            launched=launched,
            graph=graph,
            wasted_rows=dict(wasted_rows),
            void_reasons=tuple(void_reasons),
        )
        for values, consumed, launched, graph, wasted_rows, void_reasons in found
    ]


def requests_of(table: pa.Table) -> list[RequestRecord]:
    """The records of a table made by :func:`tracing.tables.requests_table`.

    Raises:
        TableError: as for :func:`spans_of`.
    """
    lists = ("token_times_ns", "void_reasons", "drafts_proposed", "drafts_accepted")
    for name in lists[1:]:
        table = _completed(table, schemas.REQUESTS, name)
    columns = _columns(table, schemas.REQUESTS)
    names = (
        "request_id arrival_ns admitted_ns first_token_ns finished_ns num_prompt_tokens num_output_tokens finish_reason"
    )
    found = zip(_zipped(columns, names), *(columns[name] for name in lists), strict=True)
    return [
        RequestRecord(
            **dict(zip(names.split(), values, strict=True)),
            token_times_ns=tuple(token_times),
            void_reasons=tuple(void_reasons),
            drafts_proposed=tuple(proposed),
            drafts_accepted=tuple(accepted),
        )
        for values, token_times, void_reasons, proposed, accepted in found
    ]


READERS: dict[str, Callable[[pa.Table], list[Any]]] = {
    "spans": spans_of,
    "iterations": iterations_of,
    "requests": requests_of,
}
"""By the name of the table."""


def _batches(columns: dict[str, list[Any]], side: str) -> list[BatchInfo | None]:
    names = ("iteration", "num_tokens", "num_prefill", "num_decode", "request_ids")
    _together(columns, f"{side}_iteration", [f"{side}_{name}" for name in names[1:]])
    return [
        None
        if iteration is None
        else BatchInfo(
            iteration=iteration,
            num_tokens=num_tokens,
            num_prefill=num_prefill,
            num_decode=num_decode,
            request_ids=tuple(request_ids),
        )
        for iteration, num_tokens, num_prefill, num_decode, request_ids in _zipped(
            columns, " ".join(f"{side}_{name}" for name in names)
        )
    ]


def _graphs(columns: dict[str, list[Any]]) -> list[GraphUse | None]:
    _together(columns, "graph_label", ["graph_hit", "graph_padding_tokens"])
    _together(columns, "graph_num_tokens", ["graph_num_prefill", "graph_num_decode"])
    return [
        None
        if label is None
        else GraphUse(
            label=label,
            hit=hit,
            dims=None if tokens is None else (tokens, prefill, decode),
            miss_reason=miss_reason,
            padding_tokens=padding_tokens,
        )
        for label, hit, tokens, prefill, decode, miss_reason, padding_tokens in _zipped(
            columns,
            "graph_label graph_hit graph_num_tokens graph_num_prefill graph_num_decode graph_miss_reason "
            "graph_padding_tokens",
        )
    ]


def _together(columns: dict[str, list[Any]], leader: str, names: list[str]) -> None:
    """A value in ``leader`` needs one in each of ``names``."""
    for name in names:
        for row, (lead, value) in enumerate(zip(columns[leader], columns[name], strict=True)):
            if lead is not None and value is None:
                raise TableError(f"column {name} holds a null in row {row}, where {leader} holds {lead!r}")


def _zipped(columns: dict[str, list[Any]], names: str) -> zip[tuple[Any, ...]]:
    return zip(*(columns[name] for name in names.split()), strict=True)


def _completed(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """With a column that earlier versions did not write."""
    if name in table.column_names:
        return table
    field = schema.field(name)
    return table.append_column(field, pa.array([_ADDED[name]] * table.num_rows, type=field.type))


def _columns(table: pa.Table, schema: pa.Schema) -> dict[str, list[Any]]:
    wanted = [field for field in schema if field.name not in _DERIVED]
    for field in wanted:
        if field.name not in table.column_names:
            raise TableError(f"column {field.name} is missing")
        column = table.column(field.name)
        if column.type != field.type:
            raise TableError(f"column {field.name} must be {field.type}, is {column.type}")
        if column.null_count and not field.nullable:
            raise TableError(f"column {field.name} must hold no nulls, has {column.null_count}")
        try:
            column.validate(full=True)  # indices, offsets and text that a damaged file leaves out of bounds
        except pa.ArrowInvalid as error:
            raise TableError(f"column {field.name} is damaged: {error}") from error
    return {field.name: _values(table.column(field.name)) for field in wanted}


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Its values; of strings that come again and again one object a string, not one a row."""
    if pa.types.is_dictionary(column.type):
        return [value for chunk in column.chunks for value in _shared(chunk)]
    if column.type == schemas.NAMES:
        return [names for chunk in column.chunks for names in _lists(chunk)]
    return list(column.to_pylist())


def _shared(words: pa.DictionaryArray) -> list[str | None]:
    known = words.dictionary.to_pylist()
    return [None if index is None else known[index] for index in words.indices.to_pylist()]


def _lists(chunk: pa.ListArray) -> Iterator[list[str | None] | None]:
    names, offsets = _shared(chunk.values.dictionary_encode()), chunk.offsets.to_pylist()
    for is_there, (start, end) in zip(chunk.is_valid().to_pylist(), pairwise(offsets), strict=True):
        yield names[start:end] if is_there else None


def _args(text: str) -> dict[str, Any]:
    try:
        args = json.loads(text)
    except ValueError as error:
        raise TableError(f"column args holds {text[:40]!r}, which is not JSON: {error}") from error
    if not isinstance(args, dict):
        raise TableError(f"column args holds {text[:40]!r}, which is no JSON object")
    return args
