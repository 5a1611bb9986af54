from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.any_trace import Trace, any_trace
from tests.unit.tracing.simulated import Lengths, simulate
from tests.unit.tracing.traces import device, phase, record, wait
from tracing.critical_path import CriticalPath, PathKind, iteration_path, stretch_paths
from tracing.records import Category


def links(path: CriticalPath) -> list[tuple[str, str, int]]:
    return [(segment.cause, segment.lane, segment.time_ns) for segment in path.segments]


def times(path: CriticalPath) -> dict[tuple[str, str], int]:
    return {(share.cause, share.lane): share.time_ns for share in path.shares}


def check_covers(path: CriticalPath) -> None:
    """Segments adjoin, take time, and reach from end to end."""
    ends = [segment.end_ns for segment in path.segments]
    assert [path.start_ns, *ends] == [*(segment.start_ns for segment in path.segments), path.end_ns]
    assert all(segment.time_ns > 0 for segment in path.segments)
    assert sum(share.time_ns for share in path.shares) == path.end_ns - path.start_ns


class TestLegacy:
    def test_step_is_host_then_device_then_host(self) -> None:
        spans, records = simulate("legacy", 4, Lengths(launch=5, wake=7))
        assert links(iteration_path(spans, records, 2)) == [
            ("admit", "host", 20),
            ("between phases", "host", 10),
            ("prepare", "host", 100),
            ("between phases", "host", 10),
            ("forward", "host", 40),
            ("launch latency", "compute", 5),
            ("forward", "compute", 1000),
            ("launch latency", "compute", 5),
            ("sample", "compute", 100),
            ("launch latency", "copy", 5),
            ("fetch", "copy", 10),
            ("wake-up", "host", 7),
            ("resolve", "host", 80),
            ("between phases", "host", 10),
            ("emit", "host", 60),
            ("between phases", "host", 10),
        ]

    def test_stretch_is_the_steps_and_what_lies_between_them(self) -> None:
        spans, records = simulate("legacy", 4, Lengths())
        (path,) = stretch_paths(spans, records)
        check_covers(path)
        assert path.num_iterations == 4
        assert times(path)["forward", "compute"] == 4 * 1000
        assert times(path)["outside iterations", "host"] == 3 * 30
        assert times(path)["resolve", "host"] == 4 * 80


class TestAsync:
    def test_stretch_that_the_device_bounds_is_device_work(self) -> None:
        spans, records = simulate("async", 8, Lengths())
        (path,) = stretch_paths(spans, records)
        check_covers(path)
        found = times(path)
        assert found["forward", "compute"] == 9 * 1000
        assert found["sample", "compute"] == 9 * 100
        assert found["prepare", "host"] == 100, "of the primer"
        assert found["resolve", "host"] == found["emit", "host"] / 60 * 80 == 80, "behind the last step"
        assert path.device_share is not None
        assert path.device_share > 0.95

    def test_step_that_the_device_bounds_is_cut_where_it_begins(self) -> None:
        spans, records = simulate("async", 8, Lengths())
        path = iteration_path(spans, records, 5)
        check_covers(path)
        first, second, *_ = path.segments
        assert (first.cause, first.iteration, first.start_ns) == ("forward", 4, records[5].begin_ns)
        assert (second.cause, second.iteration) == ("sample", 5)
        assert [cause for cause, _, _ in links(path)[2:]] == [
            "fetch",
            "resolve",
            "between phases",
            "emit",
            "between phases",
        ]

    def test_stretch_that_the_host_bounds_is_host_work(self) -> None:
        spans, records = simulate("async", 8, Lengths().with_host(resolve=3000))
        (path,) = stretch_paths(spans, records)
        check_covers(path)
        found = times(path)
        assert found["resolve", "host"] == 9 * 3000
        assert found["sample", "compute"] == 9 * 100, "the host waits for it, as nothing else goes on"
        assert found["forward", "compute"] == 1000, "the first, which nothing hides"


class TestHandMade:
    def test_no_device_work_leaves_the_host(self) -> None:
        path = iteration_path([phase("prepare", 5, 15), wait(7, 9)], [record(0, 0, 20)], 0)
        assert links(path) == [
            ("between phases", "host", 5),
            ("prepare", "host", 2),
            ("results", "host", 2),
            ("prepare", "host", 6),
            ("between phases", "host", 5),
        ]
        assert path.device_share == 0

    def test_a_wait_that_did_not_block_is_the_hosts_own(self) -> None:
        spans = [device("fetch", 1, 2, lane="copy", enqueued=1), phase("resolve", 5, 15), wait(7, 9)]
        assert ("results", "host", 2) in links(iteration_path(spans, [record(0, 0, 20)], 0))

    def test_waits_and_work_of_length_zero_are_no_links(self) -> None:
        spans = [phase("resolve", 5, 15), wait(15, 15), phase("emit", 15, 15), device("forward", 6, 6, enqueued=6)]
        assert links(iteration_path(spans, [record(0, 0, 20)], 0)) == [
            ("between phases", "host", 5),
            ("resolve", "host", 10),
            ("between phases", "host", 5),
        ]

    def test_work_from_before_the_stretch_is_cut(self) -> None:
        spans = [
            device("forward", 50, 120, 0, enqueued=40),
            device("sample", 120, 130, 1, enqueued=105),
            device("fetch", 132, 135, 1, lane="copy", enqueued=106),
            phase("resolve", 107, 150, 1),
            wait(108, 140, 1),
        ]
        (path,) = stretch_paths(spans, [record(1, 100, 150)])
        assert links(path) == [
            ("forward", "compute", 20),
            ("sample", "compute", 10),
            ("launch latency", "copy", 2),
            ("fetch", "copy", 3),
            ("wake-up", "host", 5),
            ("resolve", "host", 10),
        ]

    def test_work_enqueued_as_its_lane_became_free_was_held_up_by_the_lane(self) -> None:
        spans = [
            device("forward", 4, 10, enqueued=2),
            device("sample", 10, 20, enqueued=10),
            device("fetch", 20, 25, lane="copy", enqueued=20),
            phase("resolve", 20, 40),
            wait(20, 30),
        ]
        path = iteration_path(spans, [record(0, 0, 40)], 0)
        assert links(path) == [
            ("between phases", "host", 2),
            ("launch latency", "compute", 2),
            ("forward", "compute", 6),
            ("sample", "compute", 10),
            ("fetch", "copy", 5),
            ("wake-up", "host", 5),
            ("resolve", "host", 10),
        ]
        assert [segment.kind for segment in path.segments][:3] == [
            PathKind.BETWEEN,
            PathKind.LAUNCH,
            PathKind.DEVICE,
        ]

    def test_an_empty_trace_has_none(self) -> None:
        assert stretch_paths([], []) == ()

    def test_a_void_or_missing_iteration_is_refused(self) -> None:
        records = [record(0, 0, 5), record(1, 5, 10, void_reasons=("debugger",))]
        for number in (1, 2):
            with pytest.raises(ValueError, match=f"must be a timed one of the trace, got {number}"):
                iteration_path([], records, number)

    def test_an_iteration_without_length_has_no_share(self) -> None:
        path = iteration_path([], [record(0, 5, 5)], 0)
        assert (path.segments, path.shares, path.device_share) == ((), (), None)

    def test_shows_itself_as_a_table(self) -> None:
        text = str(stretch_paths(*simulate("legacy", 2, Lengths()))[0])
        assert text.splitlines()[0] == "critical path of 2 iterations, 0.003 ms"
        assert text.splitlines()[1].split() == ["forward", "compute", "2.0", "µs", "68.3", "%"]


class TestClockDrift:
    @pytest.mark.parametrize("drift", [-4, -2, 2, 4])
    def test_below_the_margin_between_two_limits_moves_each_cause_by_no_more_than_itself_a_border(
        self, drift: int
    ) -> None:
        spans, records = simulate("legacy", 5, Lengths(launch=5, wake=7))
        drifted = [
            replace(span, start_ns=span.start_ns + drift, end_ns=span.end_ns + drift)
            if span.category is Category.DEVICE
            else span
            for span in spans
        ]
        (true,), (seen,) = stretch_paths(spans, records), stretch_paths(drifted, records)
        check_covers(seen)
        for key in {*times(true), *times(seen)}:
            assert abs(times(seen).get(key, 0) - times(true).get(key, 0)) <= 5 * 2 * abs(drift), key


class TestAnyTrace:
    @given(any_trace())
    def test_paths_cover_their_intervals(self, trace: Trace) -> None:
        for path in stretch_paths(*trace):
            check_covers(path)
        for one in trace[1]:
            if not one.is_void:
                check_covers(iteration_path(*trace, one.iteration))

    @given(any_trace(), st.randoms(use_true_random=False))
    def test_the_order_of_records_does_not_matter(self, trace: Trace, shuffle: random.Random) -> None:
        expected = stretch_paths(*trace)
        spans, records = list(trace[0]), list(trace[1])
        shuffle.shuffle(spans)
        shuffle.shuffle(records)
        assert stretch_paths(spans, records) == expected
