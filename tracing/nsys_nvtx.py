"""NVTX ranges and marks of an Nsight Systems export, with the names of their domains and categories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracing.importing import ImportedKind, ImportedSpan
from tracing.nsys_tables import Database, Row, process_of, thread_of

_TABLE = "NVTX_EVENTS"
_REQUIRED = ("start", "end", "eventType", "globalTid")
_NUMBERS = {
    "NvtxCategory": 33,
    "NvtxMark": 34,
    "NvtxPushPopRange": 59,
    "NvtxStartEndRange": 60,
    "NvtxDomainCreate": 75,
}
"""Event types where the export has no ``ENUM_NSYS_EVENT_TYPE`` to name them."""
_PAYLOADS = ("int64Value", "uint64Value", "int32Value", "uint32Value", "doubleValue", "floatValue")

_Names = Mapping[tuple[Any, ...], str]


def nvtx_spans(database: Database) -> list[ImportedSpan]:
    """Every range and mark. Ranges that were open when the recording stopped become a note."""
    if not database.can_read(_TABLE, _REQUIRED):
        return []
    numbers = {**_NUMBERS, **database.numbers("ENUM_NSYS_EVENT_TYPE")}
    rows = list(database.rows(_TABLE))
    domains = _domain_names(database, rows, numbers["NvtxDomainCreate"])
    categories = _category_names(database, rows, numbers["NvtxCategory"])
    ranges = {numbers["NvtxPushPopRange"], numbers["NvtxStartEndRange"]}
    spans = []
    num_open = 0
    for row in rows:
        if row["eventType"] == numbers["NvtxMark"]:
            spans.append(_span(database, row, ImportedKind.MARK, row["start"], domains, categories))
        elif row["eventType"] in ranges and row["end"] is not None:
            spans.append(_span(database, row, ImportedKind.RANGE, row["end"], domains, categories))
        else:
            num_open += row["eventType"] in ranges
    if num_open:
        database.notes.append(f"{num_open:,} NVTX ranges were open when the recording stopped: they are left out")
    return spans


def _span(
    database: Database, row: Row, kind: ImportedKind, end: Any, domains: _Names, categories: _Names
) -> ImportedSpan:
    process, domain, category = process_of(row["globalTid"]), row.get("domainId"), row.get("category")
    return ImportedSpan(
        kind=kind,
        name=_text(database, row) or "",
        start_ns=int(row["start"]),
        end_ns=int(end),
        domain=domains.get((process, domain)),
        category=categories.get((process, domain, category), None if category is None else str(category)),
        payload=next((row[name] for name in _PAYLOADS if row.get(name) is not None), None),
        process=process,
        thread=thread_of(row["globalTid"]),
    )


def _domain_names(database: Database, rows: list[Row], event_type: int) -> _Names:
    created = (row for row in rows if row["eventType"] == event_type)
    return {(process_of(row["globalTid"]), row.get("domainId")): _text(database, row) or "" for row in created}


def _category_names(database: Database, rows: list[Row], event_type: int) -> _Names:
    named = (row for row in rows if row["eventType"] == event_type)
    return {
        (process_of(row["globalTid"]), row.get("domainId"), row.get("category")): _text(database, row) or ""
        for row in named
    }


def _text(database: Database, row: Row) -> str | None:
    """A registered string stands in ``StringIds``, any other in the row."""
    text = row.get("text")
    return database.text(row.get("textId")) if text is None else str(text)
