"""Bubbles as they become known, for breakpoints: the definition of ``docs/metrics.md``, looked at step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tracing.recorder import Recorder
from tracing.records import COMPUTE_LANE, Category, Span

_NEWEST_SPANS = 64
_ITERATIONS_KEPT = 32


@dataclass(frozen=True, slots=True)
class SeenBubble:
    """A gap between two neighbouring pieces of device work."""

    start_ns: int
    end_ns: int
    before: str
    """Name of the work that ended it."""
    iteration: int
    """The one that enqueued that work."""

    @property
    def time_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns

    @property
    def text(self) -> str:
        """In a few words."""
        return f"a bubble of {self.time_ns / 1e3:.0f} µs before {self.before} {self.iteration}"


class BubbleWatch:
    """Finds each bubble once. Device work is known when it has ended, so one is seen about an iteration late."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen_ns = 0
        self._ends: dict[int, _End] = {}

    def note(self, iteration: int, *, is_void: bool, left_work: bool) -> None:
        """An iteration ended; whether it left anything queued or active."""
        self._ends[iteration] = _End(is_void, left_work)
        self._ends.pop(iteration - _ITERATIONS_KEPT, None)

    def new(self) -> list[SeenBubble]:
        """Bubbles that became known since the last call, in the order of time."""
        found: list[SeenBubble] = []
        last: Span | None = None
        for span in self._recorder.spans(_NEWEST_SPANS):
            if span.category is not Category.DEVICE or span.lane != COMPUTE_LANE or span.end_ns <= span.start_ns:
                continue
            if last is not None and span.start_ns > max(last.end_ns, self._seen_ns) and self._is_measured(last, span):
                found.append(SeenBubble(last.end_ns, span.start_ns, span.name, span.iteration))
            if last is None or span.end_ns > last.end_ns:
                last = span
        if last is not None:
            self._seen_ns = max(self._seen_ns, last.start_ns)
        return found

    def _is_measured(self, left: Span, right: Span) -> bool:
        """Whether time went on counting between two pieces of work: no void iteration, no engine without work."""
        if not left.iteration <= right.iteration <= left.iteration + 1:
            return False
        before, after = self._ends.get(left.iteration, _COUNTS), self._ends.get(right.iteration, _COUNTS)
        if before.is_void or after.is_void:
            return False
        return before.left_work or left.iteration == right.iteration

    def clear(self) -> None:
        """Forget all."""
        self._seen_ns = 0
        self._ends.clear()


class _End(NamedTuple):
    """How an iteration ended."""

    is_void: bool
    left_work: bool


_COUNTS = _End(is_void=False, left_work=True)
"""An iteration still in hand."""
