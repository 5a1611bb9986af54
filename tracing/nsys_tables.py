"""Looking into an SQLite export whose tables and columns vary from version to version."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

Row = Mapping[str, Any]


class Database:
    """One export. ``notes`` collects what could not be read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.row_factory = sqlite3.Row
        self.tables = frozenset(name for (name,) in self._all("SELECT name FROM sqlite_master WHERE type = 'table'"))
        self.notes: list[str] = []
        self.columns = cache(self._columns)
        self._strings = self._pairs("StringIds", "id", "value")
        self._facts = self._pairs("META_DATA_EXPORT", "name", "value")
        self._labels = cache(self._labels_of)

    def can_read(self, table: str, required: tuple[str, ...]) -> bool:
        """Whether ``table`` is there with its columns; a note if only some of them are."""
        if table not in self.tables:
            return False
        lacking = [name for name in required if name not in self.columns(table)]
        if lacking:
            self.notes.append(f"table {table} lacks the column {lacking[0]}: it is not read")
        return not lacking

    def rows(self, table: str) -> Iterator[Row]:
        """Every row, by column name."""
        for row in self._connection.execute(f'SELECT * FROM "{table}"'):
            yield {name: row[name] for name in row.keys()}  # noqa: SIM118 - a Row iterates over its values

    def count(self, table: str) -> int:
        """Number of rows."""
        return int(self._all(f'SELECT count(*) FROM "{table}"')[0][0])

    def text(self, string_id: Any) -> str | None:
        """The string that an id stands for; None without one."""
        text = None if string_id is None else self._strings.get(string_id)
        return None if text is None else str(text)

    def about(self, name: str) -> str | None:
        """What the export says of itself, such as ``EXPORT_PRODUCT_VERSION``."""
        return self._facts.get(name)

    def label(self, enum: str, number: Any) -> str | None:
        """What the export calls a number of one of its ``ENUM_`` tables."""
        return self._labels(enum).get(number)

    def numbers(self, enum: str) -> Mapping[str, int]:
        """The numbers of an ``ENUM_`` table by their names."""
        return {name: number for number, name in self._pairs(enum, "id", "name").items()}

    def _labels_of(self, enum: str) -> dict[Any, str]:
        return self._pairs(enum, "id", "label") or self._pairs(enum, "id", "name")

    def _pairs(self, table: str, key: str, value: str) -> dict[Any, str]:
        if table not in self.tables or not {key, value} <= self.columns(table):
            return {}
        return {row[0]: row[1] for row in self._all(f'SELECT "{key}", "{value}" FROM "{table}"')}

    def _columns(self, table: str) -> frozenset[str]:
        return frozenset(row["name"] for row in self._all(f'PRAGMA table_info("{table}")'))

    def _all(self, query: str) -> list[sqlite3.Row]:
        return self._connection.execute(query).fetchall()


def process_of(global_id: Any) -> int | None:
    """The process id in a ``globalTid`` or ``globalPid``."""
    return None if global_id is None else int(global_id) >> 24 & 0xFFFFFF


def thread_of(global_id: Any) -> int | None:
    """The thread id in a ``globalTid``."""
    return None if global_id is None else int(global_id) & 0xFFFFFF
