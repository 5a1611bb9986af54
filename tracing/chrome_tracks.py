"""Tracks of a Chrome trace. On one of them two slices nest or lie apart: viewers drop a slice that overlaps in part."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tracing.intervals import Interval


def nested_tracks(stretches: Iterable[Interval]) -> list[int]:
    """The track of each stretch, counted from 0: the first on which it nests or stands alone.

    Args:
        stretches: By start, outer ones first where starts are equal.
    """
    open_ends: list[list[int]] = []
    tracks = []
    for start, end in stretches:
        track = next((n for n, ends in enumerate(open_ends) if _has_room(ends, start, end)), len(open_ends))
        if track == len(open_ends):
            open_ends.append([])
        open_ends[track].append(end)
        tracks.append(track)
    return tracks


def separate_tracks(stretches: Iterable[Interval]) -> list[int]:
    """The track of each stretch, counted from 0: the first that is free when it starts, so that none nests.

    Args:
        stretches: By start.
    """
    free: list[int] = []
    busy: list[Interval] = []
    tracks = []
    for start, end in stretches:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        track = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, track))
        tracks.append(track)
    return tracks


def _has_room(open_ends: list[int], start: int, end: int) -> bool:
    """Whether [start, end) fits on a track, of which everything that has ended by ``start`` is let go."""
    while open_ends and open_ends[-1] <= start:
        open_ends.pop()
    return not open_ends or end <= open_ends[-1]
