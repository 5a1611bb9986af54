from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tracing.intervals import Interval, gaps, intersect, length, merge, subtract

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))))


def moments(intervals: list[Interval]) -> set[int]:
    """The unit stretches [m, m+1) that are covered."""
    return {moment for start, end in intervals for moment in range(start, end)}


def check_normal(intervals: list[Interval]) -> None:
    assert all(start < end for start, end in intervals)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(intervals))


class TestAgainstSets:
    @given(INTERVALS)
    def test_merge_covers_the_same_moments(self, intervals: list[Interval]) -> None:
        merged = merge(intervals)
        check_normal(merged)
        assert moments(merged) == moments(intervals)
        assert length(merged) == len(moments(intervals))

    @given(INTERVALS, INTERVALS)
    def test_intersect_and_subtract_split_the_left_side(self, left: list[Interval], right: list[Interval]) -> None:
        both, rest = intersect(merge(left), merge(right)), subtract(merge(left), merge(right))
        check_normal(rest)
        assert moments(both) == moments(left) & moments(right)
        assert moments(rest) == moments(left) - moments(right)

    @given(INTERVALS)
    def test_gaps_fill_what_lies_between(self, intervals: list[Interval]) -> None:
        merged = merge(intervals)
        whole = set(range(merged[0][0], merged[-1][1])) if merged else set()
        assert moments(gaps(merged)) == whole - moments(merged)
