"""SQLite exports like those of Nsight Systems, written table by table: only what a test puts in is there."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

PROCESS, THREAD = 4000, 4001
GLOBAL_PID = PROCESS << 24
GLOBAL_TID = GLOBAL_PID | THREAD

NVTX_2023 = [
    "start",
    "end",
    "eventType",
    "rangeId",
    "category",
    "color",
    "text",
    "globalTid",
    "endGlobalTid",
    "textId",
    "domainId",
    "uint64Value",
    "int64Value",
    "doubleValue",
    "uint32Value",
    "int32Value",
    "floatValue",
    "jsonTextId",
    "jsonText",
]
KERNEL_2023 = [
    "start",
    "end",
    "deviceId",
    "contextId",
    "streamId",
    "correlationId",
    "globalPid",
    "demangledName",
    "shortName",
    "mangledName",
    "launchType",
    "gridX",
    "blockX",
    "graphNodeId",
]
MEMCPY_2023 = [
    "start",
    "end",
    "deviceId",
    "contextId",
    "streamId",
    "correlationId",
    "globalPid",
    "bytes",
    "copyKind",
    "graphNodeId",
]
MEMSET_2023 = [
    "start",
    "end",
    "deviceId",
    "contextId",
    "streamId",
    "correlationId",
    "globalPid",
    "value",
    "bytes",
    "graphNodeId",
]
RUNTIME_2023 = ["start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue", "callchainId"]
GRAPH_2023 = [
    "start",
    "end",
    "deviceId",
    "contextId",
    "streamId",
    "correlationId",
    "globalPid",
    "graphId",
    "graphExecId",
]

Row = Mapping[str, Any]


def write_tables(path: Path, tables: Mapping[str, tuple[Iterable[str], Iterable[Row]]]) -> Path:
    """Write a database of tables: their columns and rows; a column that a row does not name is NULL."""
    with closing(sqlite3.connect(path)) as connection:
        for name, (columns, rows) in tables.items():
            listed = list(columns)
            quoted = [f'"{column}"' for column in listed]
            connection.execute(f"CREATE TABLE {name} ({', '.join(quoted)})")
            for row in rows:
                values = [row.get(column) for column in listed]
                connection.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(listed))})", values)
        connection.commit()
    return path


def about(version: str = "2023.4.4.54", start_epoch_ns: int = 1_795_000_000_000_000_000) -> dict[str, Any]:
    """The tables every export has."""
    return {
        "META_DATA_EXPORT": (
            ["name", "value"],
            [{"name": "EXPORT_PRODUCT_VERSION", "value": version}],
        ),
        "TARGET_INFO_SESSION_START_TIME": (["utcEpochNs"], [{"utcEpochNs": start_epoch_ns}]),
    }


def strings(*texts: str) -> dict[str, Any]:
    """``StringIds``; the first text has id 1."""
    return {"StringIds": (["id", "value"], [{"id": n, "value": text} for n, text in enumerate(texts, 1)])}


def nvtx_names() -> list[Row]:
    """Domain 1 is ``engine``, with the categories 1 ``iteration`` and 2 ``phase``."""
    common = {"globalTid": GLOBAL_TID, "domainId": 1, "start": -5}
    return [
        {**common, "eventType": 75, "text": "engine"},
        {**common, "eventType": 33, "category": 1, "text": "iteration"},
        {**common, "eventType": 33, "category": 2, "text": "phase"},
    ]


def nvtx_range(start: int, end: int | None, **fields: Any) -> Row:
    """A push/pop range of our domain and the category ``phase``, unless ``fields`` say otherwise."""
    usual = {"eventType": 59, "globalTid": GLOBAL_TID, "domainId": 1, "category": 2}
    return {**usual, "start": start, "end": end, **fields}
