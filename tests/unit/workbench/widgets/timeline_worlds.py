"""Traces for the timeline's tests, and messages read as the browser reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracing.records import IterationRecord, Span, UnfinishedWork
from workbench.widgets.timeline_feed import recorded_ns
from workbench.widgets.timeline_stream import Outgoing


@dataclass
class HandTrace:
    """Stands for a recorder whose records are made by hand, in the order in which they were recorded."""

    recorded: list[Span] = field(default_factory=list)
    records: list[IterationRecord] = field(default_factory=list)
    works: list[UnfinishedWork] = field(default_factory=list)
    capacity: int = 10_000
    spans_read: int = 0
    """How many spans were asked of it, all in all."""
    iterations_read: int = 0
    """And how many records of iterations."""

    @property
    def lost_spans(self) -> int:
        return max(0, len(self.recorded) - self.capacity)

    def spans(self, newest: int | None = None) -> list[Span]:
        """As the recorder does: device work that has not ended counts among the newest and is left out."""
        made = sorted([*self.recorded, *self.works], key=_noted)[-self.capacity :]
        kept = made if newest is None else made[-newest:]
        found = [one for one in kept if isinstance(one, Span)]
        self.spans_read += len(found)
        return sorted(found, key=lambda span: (span.start_ns, -span.end_ns, span.depth))

    def running(self) -> list[UnfinishedWork]:
        return list(self.works)

    def iterations(self, newest: int | None = None) -> list[IterationRecord]:
        kept = list(self.records) if newest is None else self.records[-newest:]
        self.iterations_read += len(kept)
        return kept

    def clear(self) -> None:
        self.recorded, self.records, self.works = [], [], []


def _noted(one: Span | UnfinishedWork) -> int:
    return recorded_ns(one) if isinstance(one, Span) else one.enqueued_ns


def work(name: str, enqueued_ns: int, *, lane: str = "compute", iteration: int = 0) -> UnfinishedWork:
    return UnfinishedWork(name=name, lane=lane, iteration=iteration, enqueued_ns=enqueued_ns)


class Reader:
    """The browser's side: tables by name, each a list of rows, with texts in place of their numbers."""

    TEXTS = frozenset(
        ("name", "phase", "lane", "note", "order", "reason", "mode", "graph", "wasted", "void", "before", "label")
    )
    """Columns that hold numbers of texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.seqs: list[int] = []
        self.last: Any = None

    def read(self, messages: Sequence[Outgoing]) -> Reader:
        for content, buffers in messages:
            if content["kind"] == "reset":
                self.__init__()  # type: ignore[misc]
                continue
            self.last = content
            self.seqs.append(content["seq"])
            self.texts += content["texts"]
            left = b"".join(buffers)
            for name, header in content["tables"].items():
                columns = {}
                for column, kind in header["columns"]:
                    size = header["rows"] * np.dtype(kind).itemsize
                    columns[column], left = self._values(column, kind, left[:size]), left[size:]
                rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
                assert len(rows) == header["rows"]
                self.tables.setdefault(name, []).extend(rows)
            assert not left
        return self

    def _values(self, column: str, kind: str, buffer: Any) -> list[Any]:
        values = np.frombuffer(buffer, dtype=f"<{kind}").tolist()
        if column not in self.TEXTS:
            return values
        return [None if value < 0 else self.texts[value] for value in values]

    def column(self, table: str, name: str) -> list[Any]:
        return [row[name] for row in self.tables.get(table, [])]
