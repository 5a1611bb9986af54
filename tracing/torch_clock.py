"""Lays ``torch.profiler``'s clock on ours. It keeps Unix time, read from the processor's counter between two readings.

``noting_clock`` puts pairs of both clocks into a trace while it is made. A trace without them can be placed by the
ranges of ours that it holds as annotations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from tracing.importing import ImportedKind, ImportedTrace, TraceImportError
from tracing.records import Category, Span

CLOCK_KEY = "workbench_clock"
"""Where the pairs stand in a trace."""

_TRIES = 32
_COMPARED = 2_000
_ON_HOST = frozenset({Category.PHASE, Category.DETAIL, Category.WAIT})


@dataclass(frozen=True, slots=True)
class ClockPair:
    """One moment on two clocks."""

    unix_ns: int
    host_ns: int
    """``time.perf_counter_ns``."""
    half_width_ns: int
    """The moment lies at most so far from ``host_ns``."""

    @property
    def offset_ns(self) -> int:
        """Added to Unix time, gives ours."""
        return self.host_ns - self.unix_ns


class TakesMetadata(Protocol):
    """A running ``torch.profiler.profile``."""

    def add_metadata_json(self, key: str, value: str) -> None: ...


def read_clock_pair() -> ClockPair:
    """Both clocks now, by the narrowest of some readings."""
    pairs = []
    for _ in range(_TRIES):
        before_ns = time.perf_counter_ns()
        unix_ns = time.time_ns()
        width_ns = time.perf_counter_ns() - before_ns
        pairs.append(ClockPair(unix_ns, before_ns + width_ns // 2, (width_ns + 1) // 2))
    return min(pairs, key=lambda pair: pair.half_width_ns)


@contextmanager
def noting_clock(profile: TakesMetadata) -> Iterator[None]:
    """Put both clocks, now and at the end, into the trace that ``profile`` makes.

    To be left before the profile is: ``with profile(..) as p, noting_clock(p): ..``.
    """
    start = read_clock_pair()
    yield
    profile.add_metadata_json(CLOCK_KEY, json.dumps([astuple(start), astuple(read_clock_pair())]))


@dataclass(frozen=True, slots=True)
class ClockLine:
    """Unix time as our time. Between its ends the offset changes evenly; it does where somebody set the clock."""

    first: ClockPair
    last: ClockPair

    def host_ns(self, unix_ns: int) -> int:
        """A moment of Unix time on our clock."""
        between_ns = self.last.unix_ns - self.first.unix_ns
        drift_ns = self.last.offset_ns - self.first.offset_ns
        share_ns = drift_ns * (unix_ns - self.first.unix_ns) // between_ns if between_ns > 0 else 0
        return unix_ns + self.first.offset_ns + share_ns

    @property
    def error_ns(self) -> int:
        """How far a moment may be misplaced, apart from what the profiler's own clock is off Unix time."""
        widest_ns = max(self.first.half_width_ns, self.last.half_width_ns)
        return widest_ns + abs(self.last.offset_ns - self.first.offset_ns)


def noted_line(value: Any) -> ClockLine | None:
    """What a trace holds under ``CLOCK_KEY``; None where it holds nothing.

    Raises:
        ValueError: it is damaged.
    """
    if value is None:
        return None
    try:
        first, last = (ClockPair(*(int(number) for number in pair)) for pair in value)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return ClockLine(first, last)


def offset_by_ranges(trace: ImportedTrace, spans: Sequence[Span]) -> int:
    """What must be added to a trace's times so that its annotations lie where our host spans of those names do.

    One of the two may hold only a stretch of what the other holds: of all places where the names agree, the one is
    taken where the distances differ least from each other, for no two steps are equally long.

    Raises:
        TraceImportError: the names agree nowhere, or there are none.
    """
    annotations = trace.of(ImportedKind.RANGE)
    common = {one.name for one in annotations} & {span.name for span in spans if span.category in _ON_HOST}
    theirs = [(one.name, one.start_ns) for one in annotations if one.name in common]
    ours = [(span.name, span.start_ns) for span in spans if span.category in _ON_HOST and span.name in common]
    is_ours_longer = len(ours) >= len(theirs)
    found = _best_place(ours, theirs) if is_ours_longer else _best_place(theirs, ours)
    if found is None:
        raise TraceImportError(
            f"a trace of {trace.source} does not hold our ranges, so its clock cannot be laid on ours; "
            "make it with tracing.torch_clock.noting_clock"
        )
    return found if is_ours_longer else -found


def _best_place(longer: Sequence[tuple[str, int]], shorter: Sequence[tuple[str, int]]) -> int | None:
    """Distance of the longer list from the shorter one where that fits best; None where it fits nowhere."""
    shorter = shorter[:_COMPARED]
    names = {name: code for code, name in enumerate(dict.fromkeys(name for name, _ in (*longer, *shorter)))}
    long_names, short_names = (np.array([names[name] for name, _ in part], int) for part in (longer, shorter))
    long_ns, short_ns = (np.array([start for _, start in part], np.int64) for part in (longer, shorter))
    best: tuple[float, int] | None = None
    for shift in range(len(longer) - len(shorter) + 1 if shorter else 0):
        if not np.array_equal(long_names[shift : shift + len(shorter)], short_names):
            continue
        distances = long_ns[shift : shift + len(shorter)] - short_ns
        middle = int(np.median(distances))
        spread = float(np.median(np.abs(distances - middle)))
        if best is None or spread < best[0]:
            best = (spread, middle)
    return None if best is None else best[1]
