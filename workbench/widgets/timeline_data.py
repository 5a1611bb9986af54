"""Records as the messages that the timeline's front-end reads: named columns of numbers, and texts that are sent once.

Times are nanoseconds since the group's origin, as float64: exact for a hundred days.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from tracing.blame import BlameRow, Bubble
from tracing.columns import CATEGORIES, SpanColumns
from tracing.intervals import Interval
from tracing.records import BatchInfo, Category, GraphUse, IterationRecord, Span, UnfinishedWork
from tracing.void_words import void_words

NONE = -1
"""Index of a text that is not there, and count of a batch that is not there."""
KINDS = (Category.PHASE, Category.DETAIL, Category.WAIT, Category.DEVICE, Category.INSTANT)
"""What the timeline draws; a span's kind is its place here. Counters are left out."""

_KIND_CODE = {category: code for code, category in enumerate(KINDS)}
_KIND_OF_CATEGORY = np.array([_KIND_CODE.get(category, NONE) for category in CATEGORIES])

_OF_A_SPAN = ("start_ns", "end_ns", "enqueued_ns", "iteration", "name", "phase", "lane", "category", "depth")
_OF_AN_ITERATION = (
    *("iteration", "begin_ns", "end_ns", "order", "reason", "mode"),
    *("consumed", "launched", "graph", "new_tokens"),
)
_OF_A_BATCH = ("iteration", "num_tokens", "num_prefill", "num_decode")
_NO_BATCH = BatchInfo(iteration=NONE, num_tokens=0, num_prefill=0, num_decode=0, request_ids=())

_FORMATS = {"f8": "d", "i4": "i", "u1": "B"}
"""Of :mod:`struct`: for columns of some hundred values it takes a third of numpy's time."""

Buffer = memoryview
"""All columns of a message one behind the other, little-endian. In one piece: each buffer is a frame of its own, which
the kernel's threads and the browser take up singly."""


class TableHeader(TypedDict):
    """One table of a message; its columns are the next bytes of the buffer, in this order."""

    rows: int
    columns: list[tuple[str, str]]
    """Name, and ``f8``, ``i4`` or ``u1``."""


class UnfinishedEntry(TypedDict):
    """Device work whose end is not known yet."""

    name: str
    lane: str
    iteration: int
    enqueued: float
    runs: bool
    """False: it stands in line."""


class InHandEntry(TypedDict):
    """The iteration that has begun and not ended."""

    iteration: int
    order: str
    reason: str
    begin: float


class AppendMessage(TypedDict):
    """What is new since the message before."""

    kind: Literal["append"]
    seq: int
    """One more than in the message before; 0 follows a reset."""
    group: int
    """Place in the reset's list of groups."""
    texts: list[str]
    """New ones; indices in all tables count through all messages since the reset."""
    tables: dict[str, TableHeader]
    unfinished: list[UnfinishedEntry]
    """All of it, in the order it was enqueued."""
    inHand: InHandEntry | None
    now: float
    """When it was looked at."""


class ResetMessage(TypedDict):
    """Forget everything; what comes next is whole."""

    kind: Literal["reset"]
    groups: list[str]
    """Names of what is shown one below the other: runs or ranks. A single one may be nameless."""


@dataclass(slots=True)
class Texts:
    """Numbers for texts, in the order they first came."""

    known: dict[str, int] = field(default_factory=dict)
    _sent: int = 0
    _of_names: NDArray[np.int32] = field(default_factory=lambda: np.full(1, NONE, dtype=np.int32))
    """Numbers of a recorder's names by place, and ``NONE`` behind them."""

    def indices(self, texts: Sequence[str | None]) -> list[int]:
        """The number of each text; ``NONE`` for None."""
        known = self.known
        for text in dict.fromkeys(texts):
            if text is not None:
                known.setdefault(text, len(known))
        get: Callable[[Any, int], int] = known.get
        return [get(text, NONE) for text in texts]

    def of_names(self, names: Sequence[str]) -> NDArray[np.int32]:
        """The number of each of a recorder's names by its place there; at -1 ``NONE``. Names only grow."""
        if len(self._of_names) <= len(names):
            self._of_names = np.array([*self.indices(names), NONE], dtype=np.int32)
        return self._of_names

    def take_new(self) -> list[str]:
        """Those that came since the last call."""
        if self._sent == len(self.known):
            return []
        new = list(self.known)[self._sent :]
        self._sent = len(self.known)
        return new


@dataclass(frozen=True, slots=True)
class Packed:
    """A table as columns."""

    header: TableHeader
    columns: list[bytes]


def pack_spans(spans: Iterable[Span], origin_ns: int, texts: Texts) -> Packed:
    """Host and device spans; ``enqueued`` is NaN where there is none, ``note`` holds an instant's arguments."""
    shown = [span for span in spans if span.category in _KIND_CODE]
    start, end, enqueued, iteration, name, phase, lane, category, depth = _turned(shown, _OF_A_SPAN)
    indices = texts.indices
    return _packed(
        len(shown),
        start=("f8", [moment - origin_ns for moment in start]),
        end=("f8", [moment - origin_ns for moment in end]),
        enqueued=("f8", [_relative(moment, origin_ns) for moment in enqueued]),
        iteration=("i4", iteration),
        name=("i4", indices(name)),
        phase=("i4", indices(phase)),
        lane=("i4", indices(lane)),
        note=("i4", indices([_note(span) if span.args else None for span in shown])),
        kind=("u1", [_KIND_CODE[one] for one in category]),
        depth=("u1", [min(one, 255) for one in depth]),
    )


def pack_span_columns(spans: SpanColumns, origin_ns: int, texts: Texts) -> Packed:
    """What :func:`pack_spans` makes of the same spans."""
    kind = _KIND_OF_CATEGORY[spans.category]
    shown = np.flatnonzero(kind != NONE)
    number, notes = texts.of_names(spans.names), np.full(len(spans), NONE, dtype=np.int32)
    for place, args in spans.args.items():
        notes[place] = texts.indices([_args_text(args)])[0]
    columns: dict[str, tuple[str, NDArray[Any]]] = {
        "start": ("f8", spans.start_ns - origin_ns),
        "end": ("f8", spans.end_ns - origin_ns),
        "enqueued": ("f8", np.where(spans.is_device, spans.enqueued_ns - origin_ns, np.nan)),
        "iteration": ("i4", spans.iteration),
        "name": ("i4", number[spans.name]),
        "phase": ("i4", number[spans.phase]),
        "lane": ("i4", number[spans.lane]),
        "note": ("i4", notes),
        "kind": ("u1", kind),
        "depth": ("u1", np.minimum(spans.depth, 255)),
    }
    header = TableHeader(rows=len(shown), columns=[(name, kind) for name, (kind, _) in columns.items()])
    return Packed(header, [values[shown].astype(f"<{kind}").tobytes() for kind, values in columns.values()])


def pack_iterations(records: Sequence[IterationRecord], origin_ns: int, texts: Texts) -> Packed:
    """Records of iterations; of a batch that is not there ``...From`` is ``NONE``."""
    number, start, end, order, reason, mode, consumed, launched, graph, new_tokens = _turned(records, _OF_AN_ITERATION)
    indices = texts.indices
    return _packed(
        len(records),
        number=("i4", number),
        start=("f8", [moment - origin_ns for moment in start]),
        end=("f8", [moment - origin_ns for moment in end]),
        order=("i4", indices(order)),
        reason=("i4", indices(reason)),
        mode=("i4", indices(mode)),
        **_batch_columns("consumed", consumed),
        **_batch_columns("launched", launched),
        graph=("i4", indices([graph_text(use) for use in graph])),
        padding=("i4", [use.padding_tokens if use else 0 for use in graph]),
        newTokens=("i4", new_tokens),
        wasted=("i4", indices([_wasted_text(record) if record.wasted_rows else None for record in records])),
        void=("i4", indices([void_words(record.void_reasons) or None for record in records])),
    )


def pack_bubbles(bubbles: Sequence[Bubble], origin_ns: int, texts: Texts) -> Packed:
    """Bubbles; ``late`` is how long nothing was enqueued, the rest of it is launch latency."""
    indices = texts.indices
    return _packed(
        len(bubbles),
        start=("f8", [bubble.start_ns - origin_ns for bubble in bubbles]),
        end=("f8", [bubble.end_ns - origin_ns for bubble in bubbles]),
        late=("f8", [bubble.late_ns for bubble in bubbles]),
        before=("i4", indices([bubble.before for bubble in bubbles])),
        iteration=("i4", [bubble.iteration for bubble in bubbles]),
        order=("i4", indices([bubble.order for bubble in bubbles])),
        reason=("i4", indices([bubble.reason for bubble in bubbles])),
    )


def pack_blame(groups: Iterable[tuple[Sequence[Bubble], Iterable[BlameRow]]], texts: Texts) -> Packed:
    """What the host did while nothing was enqueued, summed by label, longest first.

    ``bubble`` is a place in the message's bubbles, those of all groups one behind the other.
    """
    sums: dict[tuple[int, str], int] = {}
    num_before = 0
    for bubbles, rows in groups:
        place = {bubble.index: at for at, bubble in enumerate(bubbles, start=num_before)}
        num_before += len(bubbles)
        for row in rows:
            if row.is_late:
                key = (place[row.bubble], row.label)
                sums[key] = sums.get(key, 0) + row.time_ns
    parts = sorted(sums.items(), key=lambda part: (part[0][0], -part[1], part[0][1]))
    return _packed(
        len(parts),
        bubble=("i4", [bubble for (bubble, _), _ in parts]),
        label=("i4", texts.indices([label for (_, label), _ in parts])),
        time=("f8", [time_ns for _, time_ns in parts]),
    )


def pack_stretches(stretches: Sequence[Interval], origin_ns: int) -> Packed:
    """Stretches of time."""
    return _packed(
        len(stretches),
        start=("f8", [start - origin_ns for start, _ in stretches]),
        end=("f8", [end - origin_ns for _, end in stretches]),
    )


def unfinished_entries(works: Sequence[UnfinishedWork], origin_ns: int) -> list[UnfinishedEntry]:
    """Only what was enqueued first runs for sure: streams wait for one another, so all lanes count."""
    first_ns = min((work.enqueued_ns for work in works), default=0)
    return [
        UnfinishedEntry(
            name=work.name,
            lane=work.lane,
            iteration=work.iteration,
            enqueued=work.enqueued_ns - origin_ns,
            runs=work.enqueued_ns == first_ns,
        )
        for work in works
    ]


def graph_text(use: GraphUse | None) -> str | None:
    """How a forward ran, in words; None without one. Padding is told apart, so that few texts are needed."""
    if use is None:
        return None
    if not use.hit:
        return f"{use.label}: {use.miss_reason or 'unknown'}"
    return use.label if use.dims is None else f"{use.label} of {use.dims[0]} tokens"


def message(tables: dict[str, Packed], **rest: Any) -> tuple[AppendMessage, list[Buffer]]:
    """Content and buffer of one message, in the order of its tables; tables without rows are left out."""
    full = {name: table for name, table in tables.items() if table.header["rows"]}
    content: Any = {"kind": "append", "tables": {name: table.header for name, table in full.items()}, **rest}
    columns = [column for table in full.values() for column in table.columns]
    return content, [memoryview(b"".join(columns))] if columns else []


def _packed(rows: int, **columns: tuple[str, Sequence[float]]) -> Packed:
    packed = [struct.pack(f"<{rows}{_FORMATS[kind]}", *values) for kind, values in columns.values()]
    return Packed(TableHeader(rows=rows, columns=[(name, kind) for name, (kind, _) in columns.items()]), packed)


def _batch_columns(name: str, batches: Sequence[BatchInfo | None]) -> dict[str, tuple[str, Sequence[float]]]:
    turned = _turned([batch or _NO_BATCH for batch in batches], _OF_A_BATCH)
    columns = zip(("From", "Tokens", "Prefill", "Decode"), turned, strict=True)
    return {f"{name}{of}": ("i4", column) for of, column in columns}


def _turned(records: Sequence[Any], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """A column an attribute of the records: one look at each record takes half the time of one for each attribute."""
    return list(zip(*map(attrgetter(*names), records), strict=True)) or [()] * len(names)


def _relative(time_ns: int | None, origin_ns: int) -> float:
    return float("nan") if time_ns is None else time_ns - origin_ns


def _note(span: Span) -> str | None:
    return _args_text(span.args) if span.args else None


def _args_text(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in args.items())


def _wasted_text(record: IterationRecord) -> str | None:
    return ", ".join(f"{cause} {count}" for cause, count in record.wasted_rows.items()) or None
