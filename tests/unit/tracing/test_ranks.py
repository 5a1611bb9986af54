"""Several ranks' traces: one clock, one file, one table; and what other ranks cost a rank in its own numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.parallel.fleet import WAIT
from engine.phases import Order
from tests.unit.tracing.chrome_files import ChromeFile
from tests.unit.tracing.rank_traces import busy_rank, idle_rank, two_ranks
from tests.unit.tracing.traces import device, phase, record, wait
from tracing.analysis import summarise
from tracing.blame import blame_bubbles
from tracing.comparison import comparison_rows
from tracing.critical_path import whole_path
from tracing.ranks import RankTrace, clock_offset, on_one_clock, ranks_summary
from tracing.records import DUMMY_ORDERS, NO_ITERATION, RANKS_WAIT
from tracing.trace import Records
from tracing.what_if import what_if


class TestClockOffset:
    def test_is_off_by_no_more_than_it_says_however_unlike_the_ways_are(self) -> None:
        chance = random.Random(7)
        for _ in range(200):
            true_ns, trips = chance.randrange(-(10**12), 10**12), []
            for _ in range(chance.randrange(1, 9)):
                sent_ns, out_ns, back_ns = chance.randrange(10**9), chance.randrange(50_000), chance.randrange(50_000)
                trips.append((sent_ns, sent_ns + out_ns - true_ns, sent_ns + out_ns + back_ns))
            offset_ns, error_ns = clock_offset(trips)
            assert abs(offset_ns - true_ns) <= error_ns

    def test_goes_by_the_shortest_trip(self) -> None:
        assert clock_offset([(0, 900, 1_000), (5_000, 5_002, 5_010), (0, 0, 400)]) == (3, 5)

    def test_needs_a_trip_that_ended_behind_its_begin(self) -> None:
        with pytest.raises(ValueError, match="got none"):
            clock_offset([])
        with pytest.raises(ValueError, match="received"):
            clock_offset([(10, 5, 9)])


class TestOneClock:
    def test_every_time_of_a_rank_is_moved_by_its_offset(self) -> None:
        far, near = busy_rank(-(10**9)), busy_rank()
        (moved,) = on_one_clock([RankTrace(0, far, 10**9)]).traces

        assert moved.records.spans == near.records.spans
        assert moved.records.iterations == near.records.iterations
        assert moved.records.requests == near.records.requests

    def test_the_error_is_the_largest_of_the_ranks(self) -> None:
        merged = on_one_clock(
            [RankTrace(0, busy_rank()), RankTrace(2, idle_rank(), 5, 90), RankTrace(1, idle_rank(), 0, 40)]
        )
        assert merged.error_ns == 90
        assert [trace.rank for trace in merged.traces] == [0, 1, 2]

    def test_lanes_say_whose_they_are_and_spans_of_all_stand_in_one_order(self) -> None:
        merged = on_one_clock(two_ranks(offset_ns=77))
        starts = [span.start_ns for span in merged.spans]
        lanes = {span.lane for span in merged.spans}

        assert lanes == {"rank 0 · host", "rank 0 · compute", "rank 1 · host", "rank 1 · compute"}
        assert starts == sorted(starts)
        (dummy,) = [span for span in merged.spans if span.name == "dummy_forward"]
        assert (dummy.start_ns, dummy.enqueued_ns) == (30, 16)

    def test_collectives_move_with_their_rank(self) -> None:
        rows = [(80, 90, "sum", "forward", 1), (40, 45, "gather", "forward", 0)]
        merged = on_one_clock([RankTrace(1, idle_rank(-7), 7, collectives=rows), RankTrace(0, busy_rank())])

        assert merged.collectives[0] == ()
        assert [(one.begin_ns, one.end_ns, one.kind) for one in merged.collectives[1]] == [
            (47, 52, "gather"),
            (87, 97, "sum"),
        ]

    def test_a_rank_comes_once(self) -> None:
        with pytest.raises(ValueError, match="one trace of each rank"):
            on_one_clock([RankTrace(1, busy_rank()), RankTrace(1, idle_rank())])
        with pytest.raises(ValueError, match="none"):
            on_one_clock([])


class TestSummaryOfRanks:
    def test_counts_each_rank_over_the_stretch_of_all(self) -> None:
        busy, idle = ranks_summary(on_one_clock(two_ranks(offset_ns=-40))).rows

        assert (busy.busy_share, busy.dummy_share, busy.wait_share) == pytest.approx((0.6, 0.0, 0.25))
        assert (idle.busy_share, idle.dummy_share, idle.wait_share) == pytest.approx((0.4, 0.4, 0.3))
        assert (busy.tokens, busy.num_iterations, busy.num_dummy) == (3, 2, 0)
        assert (idle.tokens, idle.num_iterations, idle.num_dummy) == (0, 1, 1)

    def test_counts_collectives_as_a_part_of_the_time_that_the_device_is_busy(self) -> None:
        busy, idle = two_ranks(offset_ns=-40)
        rows = [(50, 55, "gather", "forward", 0), (53, 70, "sum", "forward", 0), (85, 95, "gather", "forward", 1)]
        summary = ranks_summary(on_one_clock([replace(busy, collectives=rows), idle]))

        # Busy from 30 to 90: 20 of it twice told, and 5 up to where the device ends.
        assert [row.collective_share for row in summary.rows] == [pytest.approx(25 / 60), None]
        assert "in collectives %" in str(summary)
        assert [line.split()[5] for line in str(summary).splitlines()[1:3]] == ["41.7", "no"]
        assert "in collectives" not in str(ranks_summary(on_one_clock([busy, idle])))

    def test_shows_itself_with_the_stated_error(self) -> None:
        summary = on_one_clock(two_ranks(error_ns=2_500)).summary
        lines = str(summary).splitlines()

        assert lines[1].split() == ["rank", "0", "60.0", "0.0", "25.0", "3", "2", "0"]
        assert lines[2].split() == ["rank", "1", "40.0", "40.0", "30.0", "0", "1", "1"]
        assert "within 2.5 µs" in lines[-1]
        assert "rank 1" in summary._repr_html_()

    def test_a_rank_whose_device_is_not_in_the_trace_has_no_samples(self) -> None:
        spans = [phase("prepare", 0, 10, 0)]
        trace = on_one_clock([RankTrace(0, busy_rank())]).traces[0]
        bare = replace(trace, records=Records(spans=spans, iterations=[record(0, 0, 10)]))
        assert "no samples" in str(on_one_clock([RankTrace(0, bare)]).summary)


class TestChrome:
    def test_has_a_process_a_rank_and_the_error_of_the_clock(self, tmp_path: Path) -> None:
        file = ChromeFile(on_one_clock(two_ranks(error_ns=1_200)).write_chrome(tmp_path / "ranks.json"))
        names = [event["args"]["name"] for event in file.events("M") if event["name"] == "process_name"]
        pids = {event["pid"] for event in file.events("X") if event["name"] in ("forward", "dummy_forward")}

        assert names == ["rank 0: async", "rank 1: async"]
        assert len(pids) == 2
        assert file.document["otherData"]["ranks_clock_error_ns"] == 1_200

    def test_no_arrow_leads_from_a_copy_to_a_wait_for_ranks(self, tmp_path: Path) -> None:
        trace = busy_rank()
        copy = device("fetch", 5, 8, 0, lane="copy", enqueued=11)
        spans = Records(spans=[*trace.records.spans, copy], iterations=trace.records.iterations)
        file = ChromeFile(on_one_clock([RankTrace(0, replace(trace, records=spans))]).write_chrome(tmp_path / "a.json"))
        assert [event for event in file.events("s") if event["name"] == "result"] == []


class TestNumbersOfARank:
    def test_waiting_for_ranks_is_no_work_and_not_the_callers_code(self) -> None:
        records = busy_rank().records
        host = summarise(records.spans, records.iterations).host

        assert host.ranks_ns == 5 + 10
        assert host.between_ns == 10
        assert host.wait_ns == 5
        assert host.work_ns == 10 + 5 + 8 + 42

    def test_a_bubble_in_which_the_host_waited_for_ranks_is_blamed_on_that(self) -> None:
        spans = [
            phase("forward", 0, 10, 0),
            device("forward", 5, 10, 0, enqueued=4),
            wait(12, 18, NO_ITERATION, name="ranks"),
            phase("forward", 20, 30, 1),
            device("forward", 25, 30, 1, enqueued=25),
        ]
        records = [record(0, 0, 10), record(1, 20, 30)]
        rows = blame_bubbles(spans, records).rows

        assert [(row.label, row.time_ns) for row in rows] == [
            ("outside iterations", 2),
            ("wait for ranks", 6),
            ("outside iterations", 2),
            ("forward", 5),
        ]

    def test_a_copy_that_was_enqueued_before_does_not_end_a_wait_for_ranks(self) -> None:
        spans = [
            phase("forward", 0, 2, 0),
            device("forward", 1, 3, 0, enqueued=1),
            phase("prepare", 2, 20, 0),
            device("fetch", 3, 4, 0, lane="copy", enqueued=1),
            wait(2, 18, 0, name="ranks"),
            device("sample", 20, 22, 0, enqueued=20),
        ]
        labels = {row.label: row.time_ns for row in blame_bubbles(spans, [record(0, 0, 25)]).rows}
        assert labels == {"wait for ranks": 15, "prepare": 2}

    def test_the_replay_and_the_path_fit_iterations_with_waits_between_them(self) -> None:
        records = busy_rank().records
        answer = what_if(records.spans, records.iterations)
        path = whole_path(records.spans, records.iterations)

        assert answer.residual_ns == 0
        assert path.time_ns == 90

    def test_dummy_work_is_busy_and_has_a_number_of_its_own(self) -> None:
        spans = [
            phase("forward", 0, 40, 0),
            device("forward", 0, 10, 0, enqueued=0),
            device("dummy_forward", 10, 30, 0, enqueued=5),
        ]
        summary = summarise(spans, [record(0, 0, 40)])

        assert (summary.device.busy_ns, summary.device.dummy_ns) == (30, 20)
        assert summary.device.dummy_share == 0.5
        assert summary.host.hidden_ns == 30

    def test_rows_of_other_ranks_stand_where_there_are_any(self) -> None:
        def labels(*traces: RankTrace) -> list[str]:
            summaries = [summarise(one.trace.records.spans, one.trace.records.iterations) for one in traces]
            return [row.label for row in comparison_rows(summaries) if row.section == "other ranks"]

        alone = [phase("forward", 0, 10, 0), device("forward", 2, 9, 0, enqueued=1)]
        assert labels(*two_ranks()) == ["wait for ranks / iteration", "dummy work"]
        assert [r for r in comparison_rows([summarise(alone, [record(0, 0, 10)])]) if r.section == "other ranks"] == []


class TestNamesOfTheEngine:
    def test_are_the_ones_that_traces_are_read_by(self) -> None:
        assert {order.label for order in Order if order.is_dummy} == DUMMY_ORDERS
        assert WAIT == RANKS_WAIT
