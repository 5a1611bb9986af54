"""Stretches of time as sorted, disjoint lists of (start, end) integers. Empty stretches take no time and vanish."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, sorted and disjoint; stretches that touch become one."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Time covered by disjoint stretches."""
    return sum(end - start for start, end in intervals)


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What lies in both; both sorted and disjoint. Fast when ``left`` is short, however long ``right`` is."""
    common: list[Interval] = []
    for start, end in left:
        # The last stretch that starts at or before `start` may reach into it; earlier ones cannot.
        at = max(0, bisect_right(right, start, key=_start) - 1)
        while at < len(right) and right[at][0] < end:
            low, high = max(start, right[at][0]), min(end, right[at][1])
            if low < high:
                common.append((low, high))
            at += 1
    return common


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What lies in ``left`` only; both sorted and disjoint."""
    rest: list[Interval] = []
    for start, end in left:
        for low, high in intersect([(start, end)], right):
            if start < low:
                rest.append((start, low))
            start = high
        if start < end:
            rest.append((start, end))
    return rest


def gaps(intervals: Sequence[Interval]) -> list[Interval]:
    """The stretches between neighbours; nothing before the first or after the last."""
    return [(left[1], right[0]) for left, right in pairwise(intervals)]


def _start(interval: Interval) -> int:
    return interval[0]
