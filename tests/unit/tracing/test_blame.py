from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.any_trace import Trace, any_trace
from tests.unit.tracing.simulated import Lengths, simulate
from tests.unit.tracing.traces import batch, detail, device, phase, record, wait
from tracing.analysis import iteration_table, summarise
from tracing.blame import Blame, blame_bubbles
from tracing.blame_totals import blame_totals
from tracing.host_line import HostKind, HostPiece, host_lines, moments
from tracing.records import Category


def parts(blame: Blame, *, late: bool | None = None) -> dict[str, int]:
    """Time by cause, over all bubbles."""
    times: Counter[str] = Counter()
    for row in blame.rows:
        if late is None or row.is_late == late:
            times[row.label] += row.time_ns
    return dict(times)


def check_sums(blame: Blame) -> None:
    """The parts of each bubble adjoin and fill it, and its late time is theirs."""
    for bubble in blame.bubbles:
        rows = [row for row in blame.rows if row.bubble == bubble.index]
        assert [rows[0].start_ns, *(row.end_ns for row in rows)] == [*(row.start_ns for row in rows), bubble.end_ns]
        assert rows[0].start_ns == bubble.start_ns
        assert all(row.time_ns > 0 for row in rows)
        assert sum(row.time_ns for row in rows if row.is_late) == bubble.late_ns
        assert bubble.late_ns + bubble.launch_ns == bubble.time_ns


def check_adjoin(pieces: Sequence[HostPiece]) -> None:
    assert all(left.end_ns == right.start_ns for left, right in pairwise(pieces))
    assert all(piece.start_ns <= piece.end_ns for piece in pieces)


class TestOverlap:
    def test_none_blames_each_thing_the_host_did_alone(self) -> None:
        spans = [
            device("sample", 0, 100, enqueued=5),
            phase("resolve", 20, 140),
            wait(20, 110),
            phase("prepare", 150, 180),
            phase("forward", 185, 200),
            device("publish", 196, 210, enqueued=190),
        ]
        blame = blame_bubbles(spans, [record(0, 0, 300, order="legacy", reason="legacy mode")])
        (bubble,) = blame.bubbles
        assert (bubble.start_ns, bubble.end_ns, bubble.late_ns, bubble.launch_ns) == (100, 196, 90, 6)
        assert (bubble.kind, bubble.order, bubble.reason) == ("before forward, legacy", "legacy", "legacy mode")
        assert parts(blame, late=True) == {
            "wait for results": 10,
            "resolve": 30,
            "between phases": 15,
            "prepare": 30,
            "forward": 5,
        }
        assert parts(blame, late=False) == {"forward": 6}
        check_sums(blame)

    def test_full_has_no_bubble_to_blame_anyone_for(self) -> None:
        spans = [phase("resolve", 10, 90), device("forward", 0, 50), device("sample", 50, 100)]
        assert blame_bubbles(spans, [record(0, 0, 100)]) == Blame(bubbles=(), rows=())

    def test_partial_blames_what_lies_in_the_bubble_alone(self) -> None:
        spans = [device("forward", 0, 30), phase("resolve", 20, 60), device("sample", 50, 70, enqueued=45)]
        blame = blame_bubbles(spans, [record(0, 0, 100)])
        assert parts(blame, late=True) == {"resolve": 15}
        assert parts(blame, late=False) == {"resolve": 5}

    def test_copies_fill_no_bubble(self) -> None:
        spans = [device("sample", 0, 10), device("fetch", 10, 40, lane="copy"), device("publish", 40, 50)]
        blame = blame_bubbles([*spans, phase("emit", 12, 18)], [record(0, 0, 50)])
        assert parts(blame) == {"emit": 6, "between phases": 24}

    def test_spans_of_length_zero_change_nothing(self) -> None:
        spans = [device("forward", 0, 10), device("sample", 30, 40, enqueued=30), phase("prepare", 15, 25)]
        empty = [device("compact", at, at, enqueued=12) for at in (20, 30)]
        empty += [phase("admit", 12, 12), phase("emit", 30, 30), wait(17, 17)]
        records = [record(0, 0, 50)]
        assert parts(blame_bubbles([*spans, *empty], records)) == parts(blame_bubbles(spans, records))
        assert blame_bubbles([*spans, *empty], records).bubbles == blame_bubbles(spans, records).bubbles

    def test_details_are_not_blamed_beside_their_phase(self) -> None:
        spans = [
            device("forward", 0, 10),
            detail("detokenise", 12, 18),
            phase("emit", 10, 20),
            device("sample", 20, 30),
        ]
        assert parts(blame_bubbles(spans, [record(0, 0, 30)])) == {"emit": 10}


class TestLaunchLatency:
    def bubble_before_work_noted_at(self, enqueued: int | None) -> tuple[int, int, str]:
        spans = [device("forward", 0, 10, enqueued=0), device("sample", 30, 40, enqueued=enqueued)]
        (bubble,) = blame_bubbles(spans, [record(0, 0, 50)]).bubbles
        return bubble.late_ns, bubble.launch_ns, bubble.kind

    def test_is_all_of_a_bubble_whose_next_work_was_there_before_it(self) -> None:
        assert self.bubble_before_work_noted_at(4) == (0, 20, "launch latency")

    def test_begins_when_the_work_was_enqueued(self) -> None:
        assert self.bubble_before_work_noted_at(23) == (13, 7, "before sample, OVERLAP")
        assert self.bubble_before_work_noted_at(11) == (1, 19, "before sample, OVERLAP")

    def test_is_none_where_the_device_began_before_the_host_had_noted_it(self) -> None:
        assert self.bubble_before_work_noted_at(35) == (20, 0, "before sample, OVERLAP")

    def test_is_not_claimed_without_enqueue_times(self) -> None:
        assert self.bubble_before_work_noted_at(None) == (20, 0, "before sample, OVERLAP")

    def test_counts_from_the_first_of_several_pieces_that_begin_at_once(self) -> None:
        spans = [device("forward", 0, 10), device("b", 30, 40, enqueued=28), device("a", 30, 50, enqueued=25)]
        (bubble,) = blame_bubbles(spans, [record(0, 0, 50)]).bubbles
        assert (bubble.before, bubble.late_ns) == ("a", 15)


class TestWait:
    def test_ends_with_the_copy_it_waits_for_and_the_rest_is_waking_up(self) -> None:
        spans = [
            device("sample", 0, 10, enqueued=1),
            device("fetch", 15, 20, lane="copy", enqueued=2),
            phase("resolve", 3, 40),
            wait(4, 30),
            device("publish", 50, 60, enqueued=50),
        ]
        blame = blame_bubbles(spans, [record(0, 0, 60)])
        assert parts(blame) == {"wait for results": 10, "wake-up": 10, "resolve": 10, "between phases": 10}
        kinds = {row.cause: row.kind for row in blame.rows}
        assert (kinds["results"], kinds["wake-up"]) == (HostKind.WAIT, HostKind.WAKE_UP)

    def test_for_a_copy_that_was_there_is_all_waking_up(self) -> None:
        spans = [
            device("fetch", 2, 5, lane="copy", enqueued=1),
            device("sample", 0, 4),
            phase("resolve", 5, 20),
            wait(6, 8),
            device("publish", 20, 30),
        ]
        assert parts(blame_bubbles(spans, [record(0, 0, 60)])) == {"between phases": 1, "resolve": 13, "wake-up": 2}

    def test_is_for_the_newest_of_the_copies_before_it(self) -> None:
        spans = [
            device("sample", 0, 10),
            *(device("fetch", at, at + 5, lane="copy", enqueued=at - 9) for at in (10, 17)),
            phase("resolve", 8, 40),
            wait(9, 30),
            device("publish", 40, 60),
        ]
        assert parts(blame_bubbles(spans, [record(0, 0, 60)])) == {"wait for results": 12, "wake-up": 8, "resolve": 10}

    def test_is_not_for_the_copy_of_an_iteration_that_a_reset_ended(self) -> None:
        spans = [
            device("fetch", 2, 5, lane="copy", enqueued=1),
            device("sample", 0, 110),
            phase("resolve", 103, 140),
            wait(104, 130),
            device("publish", 140, 160),
        ]
        records = [record(0, 0, 10, num_active=0), record(0, 100, 160)]
        assert parts(blame_bubbles(spans, records)) == {"wait for results": 20, "resolve": 10}

    def test_at_the_border_of_two_phases_is_in_one_of_them(self) -> None:
        spans = [phase("resolve", 0, 5), wait(3, 5), wait(5, 5, name="empty"), phase("emit", 5, 9), wait(5, 7)]
        (line,) = host_lines(spans, [record(0, 0, 9)])
        assert [(piece.cause, piece.phase, piece.end_ns) for piece in line.pieces] == [
            ("resolve", "resolve", 3),
            ("results", "resolve", 5),
            ("empty", "resolve", 5),
            ("resolve", "resolve", 5),
            ("results", "emit", 7),
            ("emit", "emit", 9),
        ]

    def test_for_accepted_counts_ends_with_their_copy_though_others_were_enqueued_behind_it(self) -> None:
        spans = [
            device("verify", 0, 10),
            device("fetch_accepted", 12, 20, lane="copy", enqueued=1),
            device("fetch", 21, 90, lane="copy", enqueued=2),
            phase("rewind", 3, 40),
            wait(4, 30, name="accepted"),
        ]
        (line,) = host_lines(spans, [record(0, 0, 60)])

        (waiting,) = [piece for piece in line.pieces if piece.kind is HostKind.WAIT]
        assert waiting.release is not None
        assert waiting.release.name == "fetch_accepted"

    @pytest.mark.parametrize("copy", [{"iteration": 7}, {"enqueued": 5}], ids=["another iteration's", "behind it"])
    def test_is_one_piece_without_a_copy_of_its_own_before_it(self, copy: dict[str, int]) -> None:
        spans = [
            device("sample", 0, 10),
            device("fetch", 15, 20, lane="copy", **{"enqueued": 2, **copy}),
            phase("resolve", 3, 40),
            wait(4, 30),
            device("publish", 40, 60),
        ]
        assert parts(blame_bubbles(spans, [record(0, 0, 60)])) == {"wait for results": 20, "resolve": 10}


class TestIterations:
    def test_time_outside_belongs_to_the_one_that_follows(self) -> None:
        spans = [device("forward", 0, 10, 0), device("forward", 40, 50, 1, enqueued=40), phase("prepare", 32, 36, 1)]
        records = [record(0, 0, 20, reason="first"), record(1, 30, 60, order="no_overlap", reason="second")]
        rows = blame_bubbles(spans, records).rows
        assert [(row.cause, row.kind, row.iteration, row.order, row.reason, row.time_ns) for row in rows] == [
            ("between phases", HostKind.BETWEEN, 0, "OVERLAP", "first", 10),
            ("outside iterations", HostKind.OUTSIDE, 1, "no_overlap", "second", 10),
            ("between phases", HostKind.BETWEEN, 1, "no_overlap", "second", 2),
            ("prepare", HostKind.PHASE, 1, "no_overlap", "second", 4),
            ("between phases", HostKind.BETWEEN, 1, "no_overlap", "second", 4),
        ]

    def test_nothing_of_a_void_one_is_blamed(self) -> None:
        spans = [device("forward", at, at + 2, at // 10) for at in (0, 5, 10, 15, 20, 25)]
        records = [record(0, 0, 10), record(1, 10, 20, void_reasons=("hand_stepped",)), record(2, 20, 30)]
        assert [bubble.start_ns for bubble in blame_bubbles(spans, records).bubbles] == [2, 22]

    def test_work_that_left_no_record_has_an_unknown_order(self) -> None:
        spans = [device("forward", 0, 2, 0), device("forward", 5, 9, 44)]
        (bubble,) = blame_bubbles(spans, [record(0, 0, 10)]).bubbles
        assert (bubble.order, bubble.reason) == ("unknown", "unknown")

    def test_that_overlap_as_no_engine_makes_them_still_fill_the_bubbles(self) -> None:
        spans = [device("forward", at, at + 1) for at in range(0, 40, 7)]
        spans += [phase("prepare", 3, 18, 0), phase("prepare", 8, 12, 1), phase("emit", 14, 29, 1)]
        records = [record(0, 0, 20), record(1, 5, 30), record(2, 12, 18), record(3, 25, 38)]
        check_sums(blame_bubbles(spans, records))
        check_adjoin(host_lines(spans, records)[0].pieces)

    def test_after_a_reset_a_number_means_its_newest_bearer(self) -> None:
        spans = [
            device("forward", 0, 2, 0),
            device("forward", 5, 9, 0, enqueued=4),
            device("forward", 100, 102, 0),
            device("forward", 105, 109, 0, enqueued=104),
        ]
        records = [record(0, 0, 10, order="legacy", num_active=0), record(0, 100, 110, order="primer")]
        assert [bubble.order for bubble in blame_bubbles(spans, records).bubbles] == ["legacy", "primer"]


class TestTotals:
    def test_of_a_legacy_run_add_up_in_every_division(self) -> None:
        lengths = Lengths(launch=5, wake=7)
        summary = summarise(*simulate("legacy", 4, lengths))
        blame = summary.blame
        assert blame is not None
        assert blame.idle_ns == summary.device.bubble_ns == blame.late_ns + blame.launch_ns
        each = {"resolve": 80, "prepare": 100, "emit": 60, "admit": 20, "wake-up": 7, "outside iterations": 30}
        steps = {name: 3 * time for name, time in each.items()}
        assert {name: blame.parts[name] for name in each} == steps, "three steps begin where a device stands idle"
        assert blame.parts["wait for samples"] == 3 * 15, "launch latency of the copy, and the copy"
        assert sum(blame.parts.values()) == blame.idle_ns
        for division in (blame.causes, blame.kinds, blame.reasons):
            assert sum(one.share for one in division) == pytest.approx(1)
        assert sum(cause.late_ns + cause.launch_ns for cause in blame.causes) == blame.idle_ns
        assert sum(kind.late_ns + kind.launch_ns for kind in blame.kinds) == blame.idle_ns
        assert [(one.order, one.reason, one.time_ns) for one in blame.reasons] == [
            ("legacy", "why legacy", blame.idle_ns)
        ]

    def test_of_an_async_run_leave_launch_latency(self) -> None:
        blame = summarise(*simulate("async", 6, Lengths(launch=5, wake=7))).blame
        assert blame is not None
        assert blame.kinds[0].kind == "launch latency"
        assert blame.launch_ns > 0.9 * blame.idle_ns
        assert {"resolve", "prepare", "emit"}.isdisjoint(blame.parts)

    def test_of_a_late_host_in_async_say_so(self) -> None:
        blame = summarise(*simulate("async", 6, Lengths().with_host(resolve=3000))).blame
        assert blame is not None
        assert blame.kinds[0].kind == "before sample, overlap"
        assert max(blame.parts, key=blame.parts.__getitem__) == "resolve"
        assert blame.causes[0].per_step_ns == blame.causes[0].late_ns / 8
        assert blame.reasons[0].order == "overlap"

    def test_are_none_without_device_work_and_empty_without_bubbles(self) -> None:
        assert summarise([phase("prepare", 0, 5)], [record(0, 0, 10)]).blame is None
        assert summarise([], []).blame is None
        blame = summarise([device("forward", 0, 5)], [record(0, 0, 10)]).blame
        assert blame is not None
        assert (blame.idle_ns, blame.parts, blame.causes, blame.kinds, blame.reasons) == (0, {}, (), (), ())

    def test_of_a_void_run_are_empty(self) -> None:
        spans = [device("forward", 0, 2), device("sample", 5, 9)]
        blame = summarise(spans, [record(0, 0, 10, void_reasons=("debugger",))]).blame
        assert blame is not None
        assert blame.idle_ns == 0

    @pytest.mark.parametrize("launched", [batch(0, prefill=1, decode=0), batch(0, decode=1), None])
    def test_need_no_class_of_batch(self, launched: object) -> None:
        spans = [device("forward", 0, 2), phase("emit", 2, 4), device("sample", 5, 9)]
        blame = summarise(spans, [record(0, 0, 10, launched=launched)]).blame
        assert blame is not None
        assert blame.parts == {"emit": 2, "between phases": 1}


class TestClockDrift:
    @pytest.mark.parametrize("drift", [-4, -1, 3, 5])
    def test_of_the_device_moves_each_cause_by_no_more_than_itself_a_bubble(self, drift: int) -> None:
        spans, records = simulate("legacy", 6, Lengths(launch=5, wake=7))
        drifted = [
            replace(span, start_ns=span.start_ns + drift, end_ns=span.end_ns + drift)
            if span.category is Category.DEVICE
            else span
            for span in spans
        ]
        true, seen = blame_bubbles(spans, records), blame_bubbles(drifted, records)
        check_sums(seen)
        assert [bubble.time_ns for bubble in seen.bubbles] == [bubble.time_ns for bubble in true.bubbles]
        for cause in {*parts(true), *parts(seen)}:
            change = parts(seen).get(cause, 0) - parts(true).get(cause, 0)
            assert abs(change) <= abs(drift) * len(true.bubbles)


class TestAnyTrace:
    @given(any_trace())
    def test_blame_sums_to_the_bubbles(self, trace: Trace) -> None:
        blame = blame_bubbles(*trace)
        check_sums(blame)
        summary = summarise(*trace)
        idle_ns = sum(bubble.time_ns for bubble in blame.bubbles)
        assert (summary.device.bubble_ns or 0) == idle_ns
        if summary.blame is not None:
            assert sum(summary.blame.parts.values()) == summary.blame.idle_ns == idle_ns
            assert summary.blame == blame_totals(blame, summary.num_timed)

    @given(any_trace())
    def test_what_the_host_did_fills_measured_time_and_agrees_with_the_table_of_iterations(self, trace: Trace) -> None:
        spans, records = trace
        lines = host_lines(spans, records)
        for line in lines:
            check_adjoin(line.pieces)
            check_adjoin(list(moments(line.pieces)))
            assert (line.pieces[0].start_ns, line.pieces[-1].end_ns) == (
                line.records[0].begin_ns,
                line.records[-1].end_ns,
            )
        times = {row.iteration: row for row in iteration_table(spans, records)}
        for line in lines:
            for one in line.records:
                by_kind: Counter[HostKind] = Counter()
                for piece in line.pieces:
                    if piece.record is one:
                        by_kind[piece.kind] += piece.end_ns - piece.start_ns
                row = times[one.iteration]
                assert by_kind[HostKind.PHASE] == row.host_ns
                assert by_kind[HostKind.WAIT] == row.wait_ns
                assert by_kind[HostKind.BETWEEN] == row.other_ns

    @given(any_trace(), st.randoms(use_true_random=False))
    def test_the_order_of_records_does_not_matter(self, trace: Trace, shuffle: random.Random) -> None:
        expected = blame_bubbles(*trace)
        spans, records = list(trace[0]), list(trace[1])
        shuffle.shuffle(spans)
        shuffle.shuffle(records)
        assert blame_bubbles(spans, records) == expected
