from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, TraceImportError
from tracing.nvtx_match import EmittedRange, RangePair, differences, emitted_ranges, fit_clock, match_ranges
from tracing.records import Category, IterationRecord, Span

SESSION = 2 << 40


def emitted(name: str, start: int, end: int, category: str = "phase", payload: int = SESSION) -> EmittedRange:
    return EmittedRange(name, category, payload, start, end)


def seen(name: str, start: int, end: int, category: str = "phase", payload: int = SESSION) -> ImportedSpan:
    return ImportedSpan(
        kind=ImportedKind.RANGE,
        name=name,
        start_ns=start,
        end_ns=end,
        domain="engine",
        category=category,
        payload=payload,
    )


def trace(*spans: ImportedSpan) -> ImportedTrace:
    return ImportedTrace(source="a tool", spans=spans)


def pairs(*offsets: int, lengths: int = 10) -> list[RangePair]:
    """Ours lie ``offset`` behind theirs, a pair each."""
    return [
        RangePair(
            emitted("prepare", 100 * n + offset, 100 * n + offset + 10), seen("prepare", 100 * n, 100 * n + lengths)
        )
        for n, offset in enumerate(offsets)
    ]


class TestEmitted:
    def test_spans_and_iterations_become_the_ranges_that_the_recorder_emits(self) -> None:
        spans = [
            Span(name="resolve", category=Category.PHASE, lane="host", start_ns=2, end_ns=9, iteration=4),
            Span(name="samples", category=Category.WAIT, lane="host", start_ns=3, end_ns=5, iteration=4, depth=1),
            Span(name="compact", category=Category.DETAIL, lane="host", start_ns=6, end_ns=7, iteration=4, depth=1),
            Span(name="other", category=Category.DETAIL, lane="host", start_ns=7, end_ns=8, iteration=-1, depth=1),
            Span(name="forward", category=Category.DEVICE, lane="compute", start_ns=0, end_ns=9, iteration=4),
            Span(name="abort", category=Category.INSTANT, lane="host", start_ns=4, end_ns=4, iteration=4),
        ]
        record = IterationRecord(iteration=4, mode="async", order="overlap", reason="", begin_ns=1, end_ns=10)

        assert emitted_ranges(spans, [record], session_id=2) == [
            ("overlap", "iteration", SESSION + 4, 1, 10),
            ("resolve", "phase", SESSION + 4, 2, 9),
            ("samples", "wait", SESSION + 4, 3, 5),
            ("compact", "copy", SESSION + 4, 6, 7),
            ("other", "detail", SESSION, 7, 8),
        ]


class TestMatch:
    def test_a_range_is_known_by_name_category_and_payload(self) -> None:
        ours = [emitted("sample", 1, 2), emitted("sample", 3, 4, "wait"), emitted("sample", 5, 6, payload=SESSION + 1)]
        theirs = [seen("sample", 5, 6, payload=SESSION + 1), seen("sample", 3, 4, "wait"), seen("sample", 1, 2)]

        match = match_ranges(ours, trace(*theirs))
        assert [pair.theirs.start_ns for pair in match.pairs] == [1, 3, 5]
        assert (match.missing, match.unknown) == ((), ())

    def test_equal_ranges_are_matched_in_their_order(self) -> None:
        match = match_ranges(
            [emitted("publish", 1, 2), emitted("publish", 5, 6)],
            trace(seen("publish", 11, 12), seen("publish", 15, 16)),
        )

        assert [pair.theirs.start_ns - pair.ours.start_ns for pair in match.pairs] == [10, 10]

    def test_what_is_on_one_side_alone_is_told(self) -> None:
        other_domain = replace(seen("emit", 1, 2), domain="mine")
        match = match_ranges([emitted("emit", 1, 2)], trace(seen("capture", 0, 9, "capture"), other_domain))

        assert [one.name for one in match.missing] == ["emit"]
        assert [one.name for one in match.unknown] == ["capture"]


class TestClock:
    def test_is_the_median_offset(self) -> None:
        fit = fit_clock(pairs(1000, 1001, 5000))

        assert (fit.offset_ns, fit.count) == (1001, 3)
        assert (fit.residual_p50_ns, fit.drift_ns) == (1.0, 4000.0)

    def test_without_a_pair_is_an_error(self) -> None:
        with pytest.raises(TraceImportError, match="holds no range of the run"):
            fit_clock([])

    @given(st.lists(st.integers(-(2**50), 2**50), min_size=1, max_size=30), st.integers(-(2**60), 2**60))
    def test_a_constant_shift_moves_the_offset_and_nothing_else(self, offsets: list[int], shift: int) -> None:
        before, after = fit_clock(pairs(*offsets)), fit_clock(pairs(*(offset + shift for offset in offsets)))

        assert after.offset_ns == before.offset_ns + shift
        assert after.residual_p99_ns == before.residual_p99_ns


class TestDifferences:
    def test_are_absolute_and_taken_by_category_and_name(self) -> None:
        wait = RangePair(emitted("samples", 0, 50, "wait"), seen("samples", -7, 60, "wait"))

        host, waits = differences([*pairs(10, 12, 14, lengths=13), wait], 12)
        assert (host.category, host.name, host.count) == ("phase", "prepare", 3)
        assert (host.start_p50_ns, host.length_p50_ns, host.length_p99_ns) == (2.0, 3.0, 3.0)
        assert (waits.category, waits.start_p50_ns, waits.length_p50_ns) == ("wait", 5.0, 17.0)
