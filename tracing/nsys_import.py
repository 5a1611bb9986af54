"""Reads what Nsight Systems exports as SQLite: NVTX ranges, CUDA calls, kernels, copies, fills and graphs.

``nsys export --type sqlite REPORT.nsys-rep`` makes such a file. Its tables differ from version to version and exist
only where they have rows, so every table and column is looked up first: what is missing is None, and a table that
nobody here knows becomes a note. Times count from the start of the recording; :mod:`tracing.nvtx_match` lays them
on our clock.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, TraceImportError, by_start
from tracing.nsys_nvtx import nvtx_spans
from tracing.nsys_tables import Database, Row, process_of, thread_of

_SILENT = re.compile(
    r"ENUM_|META_DATA_|TARGET_INFO_|ANALYSIS_|DIAGNOSTIC_|sqlite_|"
    r"StringIds|ThreadNames|Process|PROCESSES|PROFILER_OVERHEAD"
)
"""Tables about the machine, the tool or the names of things: read where needed, and no loss otherwise."""


class _Reader(NamedTuple):
    """How one table becomes spans."""

    kind: ImportedKind
    required: tuple[str, ...]
    name: Callable[[Database, Row], str]


def read_nsys(path: str | Path) -> ImportedTrace:
    """Read an SQLite export; changes nothing.

    Returns:
        Its spans on its own clock, where 0 is the start of the recording. ``notes`` tells what was left out.

    Raises:
        TraceImportError: it is missing, empty, truncated, damaged, or no such export.
    """
    source = Path(path)
    _check_file(source)
    try:
        with closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            return _read(Database(connection), source)
    except sqlite3.DatabaseError as error:
        raise TraceImportError(f"{source} cannot be read as SQLite: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TraceImportError):
            raise
        raise TraceImportError(f"{source} is damaged: a column holds what it should not ({error})") from error


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(100)
        size = path.stat().st_size
    except OSError as error:
        raise TraceImportError(f"{path} cannot be read: {error.strerror or error}") from error
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise TraceImportError(f"{path} is a report, not its export: nsys export --type sqlite {path}")
    if not size:
        raise TraceImportError(f"{path} is empty")
    if not head.startswith(b"SQLite format 3\0") or len(head) < 100:
        raise TraceImportError(f"{path} is no SQLite file; nsys export --type sqlite makes one from a report")
    page_size = int.from_bytes(head[16:18], "big")
    expected = int.from_bytes(head[28:32], "big") * (65536 if page_size == 1 else page_size)
    if size < expected:
        raise TraceImportError(f"{path} is truncated: {size:,} of {expected:,} bytes are there")


def _read(database: Database, path: Path) -> ImportedTrace:
    if "META_DATA_EXPORT" not in database.tables and "StringIds" not in database.tables:
        raise TraceImportError(f"{path} is an SQLite file, but no export of Nsight Systems")
    spans = nvtx_spans(database)
    for table, reader in _READERS.items():
        if database.can_read(table, reader.required):
            spans.extend(_spans(database, table, reader))
    for table in sorted(database.tables - _READERS.keys() - {"NVTX_EVENTS"}):
        if not _SILENT.match(table) and (rows := database.count(table)):
            database.notes.append(f"table {table} ({rows:,} rows) is not read")
    if not spans:
        database.notes.append("it holds no event of a kind that is read")
    return ImportedTrace(
        source=f"Nsight Systems {database.about('EXPORT_PRODUCT_VERSION') or 'of unknown version'}",
        spans=by_start(spans),
        notes=tuple(database.notes),
        start_epoch_ns=_start_epoch_ns(database),
    )


def _start_epoch_ns(database: Database) -> int | None:
    table = "TARGET_INFO_SESSION_START_TIME"
    if table not in database.tables or "utcEpochNs" not in database.columns(table):
        return None
    row = next(database.rows(table), None)
    return None if row is None else _whole(row.get("utcEpochNs"))


def _spans(database: Database, table: str, reader: _Reader) -> Iterator[ImportedSpan]:
    num_open = 0
    for row in database.rows(table):
        if row["start"] is None or row["end"] is None:
            num_open += 1
            continue
        yield _span(database, row, reader)
    if num_open:
        database.notes.append(f"table {table}: {num_open:,} rows without a start or an end are left out")


def _span(database: Database, row: Row, reader: _Reader) -> ImportedSpan:
    thread, process = row.get("globalTid"), row.get("globalPid")
    graph = row.get("graphExecId")
    return ImportedSpan(
        kind=reader.kind,
        name=reader.name(database, row),
        start_ns=int(row["start"]),
        end_ns=int(row["end"]),
        process=process_of(process if process is not None else thread),
        thread=thread_of(thread),
        device=_whole(row.get("deviceId")),
        stream=_whole(row.get("streamId")),
        correlation=_whole(row.get("correlationId")),
        graph=_whole(graph if graph is not None else row.get("graphId")),
        graph_node=_whole(row.get("graphNodeId")),
        bytes=_whole(row.get("bytes")),
    )


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _kernel_name(database: Database, row: Row) -> str:
    for column in ("shortName", "demangledName", "mangledName"):
        name = database.text(row.get(column))
        if name is not None:
            return name
    return "kernel"


def _call_name(database: Database, row: Row) -> str:
    return re.sub(r"_v\d+$", "", database.text(row.get("nameId")) or "call")


def _copy_name(database: Database, row: Row) -> str:
    return database.label("ENUM_CUDA_MEMCPY_OPER", row.get("copyKind")) or "memcpy"


_DEVICE_COLUMNS = ("start", "end", "streamId")
_READERS: Mapping[str, _Reader] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": _Reader(ImportedKind.KERNEL, _DEVICE_COLUMNS, _kernel_name),
    "CUPTI_ACTIVITY_KIND_MEMCPY": _Reader(ImportedKind.MEMCPY, _DEVICE_COLUMNS, _copy_name),
    "CUPTI_ACTIVITY_KIND_MEMSET": _Reader(ImportedKind.MEMSET, _DEVICE_COLUMNS, lambda database, row: "memset"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _Reader(ImportedKind.GRAPH, _DEVICE_COLUMNS, lambda database, row: "graph"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": _Reader(ImportedKind.RUNTIME, ("start", "end", "nameId"), _call_name),
    "CUPTI_ACTIVITY_KIND_DRIVER": _Reader(ImportedKind.RUNTIME, ("start", "end", "nameId"), _call_name),
}
"""Every table that is read; :mod:`tracing.nsys_nvtx` reads ``NVTX_EVENTS``."""
