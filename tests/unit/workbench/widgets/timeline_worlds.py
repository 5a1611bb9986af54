"""Traces for the timeline's tests, and messages read as the browser reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracing.columns import CATEGORIES, SpanColumns
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
    def num_recorded(self) -> int:
        return len(self.recorded) + len(self.works)

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

    def newest_columns(self, newest: int) -> SpanColumns:
        return columns_of(self.spans(newest))

    def spans_recorded(self, begin_ns: int, end_ns: int) -> list[Span]:
        return [span for span in self.spans() if begin_ns <= recorded_ns(span) <= end_ns]

    def running(self) -> list[UnfinishedWork]:
        return list(self.works)

    def iterations(self, newest: int | None = None) -> list[IterationRecord]:
        kept = list(self.records) if newest is None else self.records[-newest:]
        self.iterations_read += len(kept)
        return kept

    def clear(self) -> None:
        self.recorded, self.records, self.works = [], [], []


def columns_of(spans: Sequence[Span]) -> SpanColumns:
    """The same as columns, as a recorder gives them."""
    names = sorted({name for span in spans for name in (span.name, span.lane, span.phase) if name is not None})

    def column(values: Iterable[int]) -> Any:
        return np.array(list(values), dtype=np.int64)

    return SpanColumns(
        names=names,
        name=column(names.index(span.name) for span in spans),
        category=column(CATEGORIES.index(span.category) for span in spans),
        lane=column(names.index(span.lane) for span in spans),
        start_ns=column(span.start_ns for span in spans),
        end_ns=column(span.end_ns for span in spans),
        iteration=column(span.iteration for span in spans),
        depth=column(span.depth for span in spans),
        phase=column(-1 if span.phase is None else names.index(span.phase) for span in spans),
        enqueued_ns=column(span.enqueued_ns or 0 for span in spans),
        args={place: span.args for place, span in enumerate(spans) if span.args},
        values={place: span.value for place, span in enumerate(spans) if span.value is not None},
    )


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
        self.causes: list[tuple[float, str, float]] = []
        """What is to blame for bubbles: start of the bubble, label and time."""
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
            num_bubbles, num_causes = (len(self.tables.get(name, [])) for name in ("bubbles", "blame"))
            for name, header in content["tables"].items():
                columns = {}
                for column, kind in header["columns"]:
                    size = header["rows"] * np.dtype(kind).itemsize
                    columns[column], left = self._values(column, kind, left[:size]), left[size:]
                rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
                assert len(rows) == header["rows"]
                self.tables.setdefault(name, []).extend(rows)
            assert not left
            for row in self.tables.get("blame", [])[num_causes:]:
                bubble = self.tables["bubbles"][num_bubbles + row["bubble"]]
                self.causes.append((bubble["start"], row["label"], row["time"]))
        return self

    def _values(self, column: str, kind: str, buffer: Any) -> list[Any]:
        values = np.frombuffer(buffer, dtype=f"<{kind}").tolist()
        if column not in self.TEXTS:
            return values
        return [None if value < 0 else self.texts[value] for value in values]

    def column(self, table: str, name: str) -> list[Any]:
        return [row[name] for row in self.tables.get(table, [])]
