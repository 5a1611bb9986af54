"""Records spans at under 2 µs each, into a ring that is allocated once, and emits them to NVTX.

One thread records: the engine's. Read from that thread too, or while it stands still. Device work is
entered when it is enqueued, and its times are read when they have long been known: nothing here waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import numpy as np

from tracing.capture import CaptureRange
from tracing.columns import CATEGORIES, SpanColumns
from tracing.nvtx_ranges import CAPTURE, CATEGORY_OF_DETAIL, SESSION_SHIFT, NoRanges, RangeSink, colour_of, open_ranges
from tracing.records import (
    HOST_LANE,
    NO_ITERATION,
    TRACE_EDGE,
    BatchInfo,
    Category,
    DeviceTiming,
    GraphUse,
    IterationRecord,
    Span,
    UnfinishedWork,
)

_CODE = {category: code for code, category in enumerate(CATEGORIES)}
_PHASE, _DETAIL, _WAIT = _CODE[Category.PHASE], _CODE[Category.DETAIL], _CODE[Category.WAIT]
_DEVICE, _INSTANT, _COUNTER = _CODE[Category.DEVICE], _CODE[Category.INSTANT], _CODE[Category.COUNTER]
assert max(_CODE.values()) == _COUNTER == _INSTANT + 1, "the two that carry something besides their times come last"
_OFF: AbstractContextManager[None] = nullcontext()
_NO_NAME = -1
_UNREAD_KEPT = 64  # device timings left unread before a new iteration starts to read finished ones
_UNREAD_BATCH = 32  # and how many it reads at most, so that no iteration pays for many


class _Columns:
    """The ring. Slot = record number modulo capacity; pages of zeros are only touched when they are written."""

    def __init__(self, capacity: int) -> None:
        self.rows = np.zeros((9, capacity), dtype=np.int64)
        """The same memory, a row a column, in the order of the names below."""
        self.name, self.category, self.lane, self.start, self.end, *others = (row.data for row in self.rows)
        self.iteration, self.depth, self.phase, self.enqueued = others
        self.extra: list[Any] = [None] * capacity
        """DeviceTiming until it is read, value of a counter, args of an instant."""


class _HostSpan:
    """The reusable context manager of one name; its state lives on the recorder's stack, so it nests."""

    __slots__ = ("_code", "_inner", "_name", "_outer", "_recorder")

    def __init__(self, recorder: Recorder, name: int, code: int, outer: Any, inner: Any) -> None:
        self._recorder = recorder
        self._name = name
        self._code = code
        self._outer = outer
        """NVTX attributes at depth 0; None: nothing is emitted."""
        self._inner = inner
        """The same inside another span."""

    def __enter__(self) -> None:
        recorder = self._recorder
        stack = recorder._stack
        attributes = self._inner if stack else self._outer
        if attributes is not None:
            recorder._pushed += 1  # before the push: an interrupt in between costs a pop too many, which tools ignore
            recorder._sink.push(attributes, recorder._payload)
        if not stack:
            recorder._phase = self._name
        stack.append(perf_counter_ns())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = perf_counter_ns()
        recorder = self._recorder
        stack = recorder._stack
        start = stack.pop()
        depth = len(stack)
        if (self._inner if depth else self._outer) is not None:
            recorder._sink.pop()
            recorder._pushed -= 1
        columns = recorder._columns
        slot = recorder._count % recorder._capacity
        recorder._count += 1
        columns.name[slot] = self._name
        columns.category[slot] = _DETAIL if depth and self._code == _PHASE else self._code
        columns.start[slot] = start
        columns.end[slot] = end
        columns.iteration[slot] = recorder._iteration
        columns.depth[slot] = depth
        columns.phase[slot] = recorder._phase
        columns.lane[slot] = 0
        if not depth:
            recorder._phase = _NO_NAME


class Recorder:
    """The engine's instrument.

    Args:
        enabled: Record from the start. ``recorder.enabled`` may be set at any time.
        nvtx: Emit NVTX ranges (nothing happens where the package is missing or ``NVTX_DISABLE`` is set),
            or a sink of your own.
        capacity: Spans kept; the newest win. About 80 bytes each, touched only when used.
        session_id: In the payload of every range, above the iteration's 40 bits, so that
            two sessions in one process can be told apart.

    Raises:
        ValueError: ``capacity`` is below 1, or ``session_id`` is not in [0, 2**23).
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        nvtx: bool | RangeSink = True,
        capacity: int = 200_000,
        session_id: int = 0,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 span, got {capacity}")
        if not 0 <= session_id < 1 << 23:
            raise ValueError(f"session_id must be in [0, 2**23) to fit the NVTX payload, got {session_id}")
        self._enabled = enabled
        self.session_id = session_id
        self.num_abandoned = 0
        """Iterations begun and given up since the last clear."""
        self.lost_iterations = 0
        """Records dropped since the last clear, because spans of theirs were overwritten."""
        self._sink: RangeSink = nvtx if not isinstance(nvtx, bool) else open_ranges() if nvtx else NoRanges()
        self._capacity = capacity
        self._columns = _Columns(capacity)
        self._count = 0
        self._names: list[str] = [HOST_LANE]
        self._name_ids: dict[str, int] = {HOST_LANE: 0}
        self._host_spans: dict[str, _HostSpan] = {}
        self._waits: dict[str, _HostSpan] = {}
        self._attributes: dict[tuple[str, str], Any] = {}
        self._stack: list[int] = []
        self._pushed = 0
        self._phase = _NO_NAME
        self._unread: deque[int] = deque()
        self._iteration = NO_ITERATION
        self._payload = session_id << SESSION_SHIFT
        self._num_device = 0
        self._is_partial = False
        """Something of the open iteration, or of the one before it, was not recorded."""
        self._open: tuple[int, str, str, str, int] | None = None
        self._range: Any = None
        self._iterations: deque[IterationRecord] = deque(maxlen=capacity)

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded; may be set at any time.

        An iteration in which it was set, or before which one ran unrecorded, is void: ``trace_edge``.
        """
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if enabled != self._enabled and self._open is not None:
            self._is_partial = True
        self._enabled = enabled

    @property
    def num_recorded(self) -> int:
        """Spans recorded since the last clear, lost ones and device work that has not ended included."""
        return self._count

    @property
    def lost_spans(self) -> int:
        """Spans overwritten since the last clear, because the ring was full."""
        return max(0, self._count - self._capacity)

    @property
    def nvtx_status(self) -> str:
        """One line: whether ranges are emitted and a tool listens, or why not."""
        return str(getattr(self._sink, "status", "own sink"))

    def begin_iteration(self, iteration: int, order: str, reason: str, mode: str) -> None:
        """Open an iteration; spans carry its number until it ends. Its NVTX range is named by its order.

        Raises:
            RuntimeError: the one before is still open.
        """
        if not self._enabled:
            self._is_partial = True
            return
        if self._open is not None:
            raise RuntimeError(
                f"iteration {self._open[0]} is still open: call end_iteration or abandon_iteration before {iteration}"
            )
        if len(self._unread) > _UNREAD_KEPT:
            self._read_oldest(_UNREAD_BATCH)
        self._iteration = iteration
        self._payload = self.session_id << SESSION_SHIFT | iteration
        attributes = self._attributes_of(order, "iteration")
        if attributes is not None:
            self._range = self._sink.start(attributes, self._payload)
        self._num_device = 0
        self._open = (iteration, order, reason, mode, perf_counter_ns())

    def end_iteration(
        self,
        *,
        consumed: BatchInfo | None = None,
        launched: BatchInfo | None = None,
        outputs: int = 0,
        new_tokens: int = 0,
        wasted_rows: Mapping[str, int] | None = None,
        graph: GraphUse | None = None,
        rows_released: int = 0,
        rows_moved: int = 0,
        void_reasons: tuple[str, ...] = (),
        free_blocks: int = 0,
        num_waiting: int = 0,
        num_active: int = 0,
    ) -> None:
        """Close the open iteration and keep its record; the fields are those of :class:`IterationRecord`.

        Does nothing if none is open (recording was off when it began).
        """
        if self._open is None:
            return
        end_ns = perf_counter_ns()
        iteration, order, reason, mode, begin_ns = self._open
        if self._is_partial:
            void_reasons = tuple(sorted({*void_reasons, TRACE_EDGE}))
        self._close_iteration()
        self._drop_incomplete()
        self._iterations.append(
            IterationRecord(
                iteration=iteration,
                mode=mode,
                order=order,
                reason=reason,
                begin_ns=begin_ns,
                end_ns=end_ns,
                consumed=consumed,
                launched=launched,
                outputs=outputs,
                new_tokens=new_tokens,
                wasted_rows=dict(wasted_rows or {}),
                graph=graph,
                rows_released=rows_released,
                rows_moved=rows_moved,
                void_reasons=void_reasons,
                free_blocks=free_blocks,
                num_waiting=num_waiting,
                num_active=num_active,
                num_device=self._num_device,
            )
        )

    def abandon_iteration(self) -> None:
        """Close the open iteration without a record, after a reset or a failure. Its spans stay, unattributed."""
        self._stack.clear()  # an interrupt between a span's bookkeeping and its body leaves it open
        self._phase = _NO_NAME
        while self._pushed > 0:
            self._pushed -= 1
            self._sink.pop()
        if self._open is not None:
            self._close_iteration()
            self.num_abandoned += 1

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A host span. At depth 0 it is a phase, inside another span a detail of it. It must not cross a yield."""
        if not self._enabled:
            return _OFF
        return self._host_spans.get(name) or self._new_host_span(name)

    def wait(self, name: str) -> AbstractContextManager[None]:
        """A host span in which the host is blocked on a device event."""
        if not self._enabled:
            return _OFF
        return self._waits.get(name) or self._new_wait(name)

    def device(self, name: str, stream: str, iteration: int, timing: DeviceTiming) -> None:
        """Note device work enqueued now. Its times are read once ``timing`` is done, and never waited for.

        Args:
            name: What it does: a phase's name, or a copy's.
            stream: Lane: ``compute`` or ``copy``.
            iteration: The iteration that enqueued it.
            timing: Kept until it has been read.
        """
        if not self._enabled:
            return
        slot = self._moment(name, _DEVICE, timing)
        columns = self._columns
        columns.lane[slot] = self._name_id(stream)
        columns.iteration[slot] = iteration
        columns.enqueued[slot] = columns.start[slot]
        self._unread.append(self._count - 1)
        self._num_device += iteration == self._iteration

    def instant(self, name: str, **args: Any) -> None:
        """Note a moment; emitted as an NVTX mark."""
        if not self._enabled:
            return
        self._moment(name, _INSTANT, args)
        attributes = self._attributes_of(name, "instant")
        if attributes is not None:
            self._sink.mark(attributes, self._payload)

    def counter(self, name: str, value: float) -> None:
        """Note a number at a moment."""
        if self._enabled:
            self._moment(name, _COUNTER, value)

    def capture(self) -> CaptureRange:
        """What an attached tool waits for: an NVTX range ``capture``, and on CUDA the profiler's start and stop.

        For ``nsys profile --capture-range=nvtx --nvtx-capture=capture@engine`` (or ``cudaProfilerApi``): only what
        runs inside the ``with`` block is recorded. It may cross iterations, and be entered while recording is off.
        Device work is recorded while it runs, so wait for the device before leaving.
        """
        return CaptureRange(self._sink, self._attributes_of(CAPTURE, CAPTURE), self.session_id << SESSION_SHIFT)

    def spans(self, newest: int | None = None) -> list[Span]:
        """The spans kept, sorted by start.

        Device work whose times are not known yet is left out and comes with a later call.

        Args:
            newest: Only the last so many that were recorded, so that a look at a long trace costs little.
        """
        self._read_finished()
        first = max(0, self._count - self._capacity)
        kept = range(first if newest is None else max(first, self._count - newest), self._count)
        unread = set(self._unread)
        return _by_start(self._span(number % self._capacity) for number in kept if number not in unread)

    def newest_columns(self, newest: int) -> SpanColumns:
        """What :meth:`spans` gives of the last so many that were recorded, as columns: for 60 a fifth of the time."""
        self._read_finished()
        first = max(0, self._count - self._capacity, self._count - newest)
        is_known = np.ones(self._count - first, dtype=np.bool_)
        is_known[[number - first for number in self._unread if number >= first]] = False
        slots = (np.arange(first, self._count) % self._capacity)[is_known]
        rows = self._columns.rows[:, slots]
        by_start = np.lexsort((rows[6], -rows[4], rows[3]))
        name, category, lane, start, end, iteration, depth, phase, enqueued = rows[:, by_start]
        extras = {
            place: self._columns.extra[slots[by_start[place]]]
            for place in np.flatnonzero(category >= _INSTANT).tolist()
        }
        return SpanColumns(
            names=self._names,
            name=name,
            category=category,
            lane=lane,
            start_ns=start,
            end_ns=end,
            iteration=iteration,
            depth=depth,
            phase=phase,
            enqueued_ns=enqueued,
            args={place: extra for place, extra in extras.items() if category[place] == _INSTANT and extra},
            values={place: float(extra) for place, extra in extras.items() if category[place] == _COUNTER},
        )

    def spans_recorded(self, begin_ns: int, end_ns: int) -> list[Span]:
        """The spans recorded in a stretch of time, both ends included, sorted by start.

        Host spans are recorded when they end, device work when it is enqueued. A look costs what it finds, however
        long the trace is; device work whose times are not known yet is left out, as in :meth:`spans`.
        """
        self._read_finished()
        kept = range(max(0, self._count - self._capacity), self._count)
        first = bisect_left(kept, begin_ns, key=lambda number: self._recorded_ns(number % self._capacity))
        last = bisect_right(kept, end_ns, key=lambda number: self._recorded_ns(number % self._capacity))
        unread = set(self._unread)
        return _by_start(self._span(number % self._capacity) for number in kept[first:last] if number not in unread)

    def running(self) -> list[UnfinishedWork]:
        """Device work that has not ended, in the order it was enqueued; asks the device and waits for nothing.

        What ends meanwhile comes with a later :meth:`spans`: ask here first to miss none.
        """
        oldest, columns = self._count - self._capacity, self._columns
        slots = [number % self._capacity for number in self._unread if number >= oldest]
        return [
            UnfinishedWork(
                name=self._names[columns.name[slot]],
                lane=self._names[columns.lane[slot]],
                iteration=columns.iteration[slot],
                enqueued_ns=columns.enqueued[slot],
            )
            for slot in slots
            if not columns.extra[slot].done()
        ]

    def iterations(self, newest: int | None = None) -> list[IterationRecord]:
        """Records of the iterations of which no span was lost, oldest first.

        Device work beside the newest may not have ended: :func:`tracing.edges.judged` says which of them that concerns.

        Args:
            newest: Only the last so many, so that a look at a long trace costs what it brings.
        """
        self._drop_incomplete()
        if newest is None:
            return list(self._iterations)
        return list(islice(reversed(self._iterations), max(newest, 0)))[::-1]

    @property
    def num_iterations(self) -> int:
        """How many :meth:`iterations` are there."""
        self._drop_incomplete()
        return len(self._iterations)

    @property
    def oldest_iteration(self) -> IterationRecord | None:
        """The first of them."""
        self._drop_incomplete()
        return self._iterations[0] if self._iterations else None

    def clear(self) -> None:
        """Forget everything recorded. An open iteration stays open; device work in flight is forgotten too.

        So an open iteration becomes void, and the one that consumes a forgotten forward: ``trace_edge``.
        """
        self._is_partial |= self._open is not None
        self._columns.extra = [None] * self._capacity
        self._count = 0
        self._unread.clear()
        self._iterations.clear()
        self.num_abandoned = self.lost_iterations = 0

    def _close_iteration(self) -> None:
        if self._range is not None:
            self._sink.end(self._range)
        self._range = None
        self._open = None
        self._is_partial = not self._enabled
        self._iteration = NO_ITERATION
        self._payload = self.session_id << SESSION_SHIFT

    def _name_id(self, name: str) -> int:
        name_id = self._name_ids.get(name)
        if name_id is None:
            name_id = self._name_ids[name] = len(self._names)
            self._names.append(name)
        return name_id

    def _attributes_of(self, name: str, category: str) -> Any:
        key = (name, category)
        if key not in self._attributes:
            self._attributes[key] = self._sink.attributes(name, category, colour_of(name, category))
        return self._attributes[key]

    def _new_host_span(self, name: str) -> _HostSpan:
        outer = self._attributes_of(name, "phase")
        inner = self._attributes_of(name, CATEGORY_OF_DETAIL.get(name, "detail"))
        span = _HostSpan(self, self._name_id(name), _PHASE, outer, inner)
        self._host_spans[name] = span
        return span

    def _new_wait(self, name: str) -> _HostSpan:
        attributes = self._attributes_of(name, "wait")
        span = _HostSpan(self, self._name_id(name), _WAIT, attributes, attributes)
        self._waits[name] = span
        return span

    def _moment(self, name: str, code: int, extra: Any) -> int:
        """Write a record that starts and ends now; returns its slot."""
        columns = self._columns
        slot = self._count % self._capacity
        self._count += 1
        columns.name[slot] = self._name_id(name)
        columns.category[slot] = code
        columns.start[slot] = columns.end[slot] = perf_counter_ns()
        columns.iteration[slot] = self._iteration
        columns.depth[slot] = len(self._stack)
        columns.phase[slot] = self._phase
        columns.lane[slot] = 0
        columns.extra[slot] = extra
        return slot

    def _read_oldest(self, most: int) -> None:
        """Read the oldest device times, up to the first that is not known yet."""
        for _ in range(most):
            if not self._unread or not self._read(self._unread[0]):
                return
            self._unread.popleft()

    def _read_finished(self) -> None:
        """Read all device times that are known."""
        self._unread = deque(number for number in self._unread if not self._read(number))

    def _read(self, number: int) -> bool:
        """Take a device record's times and let go of its events. False: not known yet."""
        if number < self._count - self._capacity:
            return True  # overwritten before anyone read it: counted in lost_spans
        columns = self._columns
        slot = number % self._capacity
        timing: DeviceTiming | None = columns.extra[slot]
        if timing is None:
            return True  # read before, and an interrupt came before it was noted
        if not timing.done():
            return False
        columns.start[slot] = timing.start_ns
        columns.end[slot] = timing.end_ns
        columns.extra[slot] = None
        return True

    def _drop_incomplete(self) -> None:
        """Forget iterations of which a span was overwritten: their phases would no longer sum up."""
        if self._count <= self._capacity:
            return
        whole_from = self._recorded_ns(self._count % self._capacity)
        while self._iterations and self._iterations[0].begin_ns < whole_from:
            self._iterations.popleft()
            self.lost_iterations += 1

    def _recorded_ns(self, slot: int) -> int:
        """When the record in ``slot`` was written."""
        is_device = self._columns.category[slot] == _DEVICE
        return self._columns.enqueued[slot] if is_device else self._columns.end[slot]

    def _span(self, slot: int) -> Span:
        columns = self._columns
        category = CATEGORIES[columns.category[slot]]
        extra = columns.extra[slot]
        phase = columns.phase[slot]
        return Span(
            name=self._names[columns.name[slot]],
            category=category,
            lane=self._names[columns.lane[slot]],
            start_ns=columns.start[slot],
            end_ns=columns.end[slot],
            iteration=columns.iteration[slot],
            depth=columns.depth[slot],
            phase=None if phase == _NO_NAME else self._names[phase],
            enqueued_ns=columns.enqueued[slot] if category is Category.DEVICE else None,
            value=float(extra) if category is Category.COUNTER else None,
            args=extra if category is Category.INSTANT else {},
        )


def _by_start(spans: Iterable[Span]) -> list[Span]:
    """Outer spans first where starts are equal: they end later and lie less deep."""
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.depth))
