"""A trace that begins or ends in the middle of device work says so, rather than to call hidden work exposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from engine.engine import Engine
from engine.request import SamplingParams
from tests.oracle_world import oracle_engine
from tests.unit.tracing.any_trace import Trace, any_trace
from tests.unit.tracing.simulated import Lengths, simulate
from tests.unit.tracing.test_recorder import FakeTiming, begin, run_iteration
from tests.unit.tracing.traces import batch, device, phase, record
from tracing.analysis import iteration_table, summarise
from tracing.blame import blame_bubbles
from tracing.critical_path import iteration_path
from tracing.edges import judged
from tracing.recorder import Recorder
from tracing.records import TRACE_EDGE, IterationRecord, Span
from tracing.tables import device_table, iterations_table, phases_table
from tracing.trace import Records
from tracing.what_if import what_if


def edges(spans: list[Span], records: list[IterationRecord]) -> list[int]:
    return [one.iteration for one in judged(spans, records) if TRACE_EDGE in one.void_reasons]


def overlap(count: int) -> Trace:
    """Iterations of 100 ns: each enqueues a forward that runs through the first 80 ns of the next one."""
    spans: list[Span] = []
    records = []
    for number in range(count):
        at = 100 * number
        consumed = None if number == 0 else batch(number - 1)
        spans += [phase("resolve", at, at + 90, number)]
        spans += [device("forward", at + 100, at + 180, number, enqueued=at + 90)]
        records.append(record(number, at, at + 100, num_device=1, consumed=consumed, launched=batch(number)))
    return spans, records


def without(spans: list[Span], *numbers: int) -> list[Span]:
    return [span for span in spans if not (span.is_device and span.iteration in numbers)]


class TestReadInMidRun:
    def test_an_iteration_whose_device_work_has_not_ended_is_left_out(self) -> None:
        spans, records = overlap(5)

        assert edges(spans, records) == []
        assert edges(without(spans, 4), records) == [4]

    def test_the_hidden_share_is_that_of_the_iterations_that_are_known(self) -> None:
        """A reviewer's find: the last iterations of a trace read in mid-run counted as exposed."""
        spans, records = overlap(20)
        read_at = [span for span in spans if span.end_ns <= records[-1].end_ns]  # the newest forward runs still
        known, all_of_it = summarise(read_at, records), summarise(spans, records)

        assert all_of_it.host.hidden_share is not None
        assert (known.num_void, known.void_reasons) == (1, {TRACE_EDGE: 1})
        assert known.host.hidden_share == pytest.approx(summarise(spans, records[:-1]).host.hidden_share)

    def test_one_that_consumes_a_forward_which_is_not_known_is_left_out_too(self) -> None:
        spans, records = overlap(5)

        assert edges(without(spans, 2), records) == [2, 3]

    def test_every_view_of_a_trace_agrees(self) -> None:
        spans, records = overlap(5)
        cut = without(spans, 4)

        assert Records(spans=cut, iterations=records).iterations[-1].void_reasons == (TRACE_EDGE,)
        assert iterations_table(cut, records).column("is_void").to_pylist() == [False] * 4 + [True]
        assert phases_table(cut, records).column("is_void").to_pylist() == [False] * 4 + [True]
        assert blame_bubbles(cut, records) == blame_bubbles(cut, records[:4])
        assert what_if(cut, records).num_iterations == 4
        with pytest.raises(ValueError, match="must be a timed one"):
            iteration_path(cut, records, 4)
        assert len(iteration_table(cut, records)) == 5

    def test_device_rows_say_that_their_iteration_is_void(self) -> None:
        spans, records = overlap(3)
        half = [record if record.iteration < 2 else replace(record, num_device=2) for record in records]

        assert device_table(spans, half).column("is_void").to_pylist() == [False, False, True]


class TestBeginInMidRun:
    def test_the_first_iteration_is_left_out_where_the_forward_it_consumed_is_unknown(self) -> None:
        spans, records = overlap(5)
        late = [span for span in spans if span.iteration >= 2]

        assert edges(late, records[2:]) == [2]

    def test_a_primer_or_a_legacy_iteration_needs_nothing_from_before(self) -> None:
        spans, records = overlap(5)
        alone = [replace(one, consumed=None) for one in records[2:3]] + records[3:]
        legacy = [replace(one, consumed=batch(one.iteration)) for one in records[2:]]
        late = [span for span in spans if span.iteration >= 2]

        assert edges(late, alone) == []
        assert edges(late, legacy) == []

    def test_iterations_picked_out_of_a_whole_trace_are_not_at_its_edge(self) -> None:
        spans, records = overlap(6)

        assert edges(spans, [records[1], records[4]]) == []

    def test_the_forward_of_a_run_before_a_reset_is_not_taken_for_the_one_that_was_consumed(self) -> None:
        spans, records = overlap(3)
        offset = 10_000
        again, later = overlap(3)
        moved = [replace(one, begin_ns=one.begin_ns + offset, end_ns=one.end_ns + offset) for one in later]
        again = [
            replace(
                span,
                start_ns=span.start_ns + offset,
                end_ns=span.end_ns + offset,
                enqueued_ns=None if span.enqueued_ns is None else span.enqueued_ns + offset,
            )
            for span in again
        ]
        lost = [span for span in again if span.iteration >= 2]

        assert edges([*spans, *lost], [*records, moved[2]]) == [2]
        assert [one.is_void for one in judged([*spans, *lost], [*records, moved[2]])] == [False, False, False, True]


class TestJudging:
    @given(any_trace())
    def test_leaves_records_alone_that_do_not_say_what_they_noted(self, trace: Trace) -> None:
        spans, records = trace
        assert edges(spans, records) == []

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_leaves_a_whole_run_alone(self, mode: str) -> None:
        spans, records = simulate(mode, 6, Lengths())
        counted = [
            replace(
                one,
                num_device=sum(span.is_device and span.iteration == one.iteration for span in spans),
                consumed=None if one.order == "primer" else batch(one.iteration - (mode == "async")),
            )
            for one in records
        ]
        assert edges(spans, counted) == []

    def test_changes_nothing_the_second_time_and_keeps_other_reasons(self) -> None:
        spans, records = overlap(4)
        records[3] = replace(records[3], void_reasons=("debugger",))
        once = judged(without(spans, 3), records)

        assert once[3].void_reasons == ("debugger", TRACE_EDGE)
        assert judged(without(spans, 3), once) == once

    def test_does_not_touch_the_times_of_requests(self) -> None:
        (edge,) = judged([], [record(0, 0, 10, num_device=1)])

        assert edge.is_void
        assert not edge.is_disturbed
        assert replace(edge, void_reasons=("debugger", TRACE_EDGE)).is_disturbed


class TestRecorder:
    def test_counts_the_device_work_of_each_iteration(self) -> None:
        recorder = Recorder(nvtx=False)
        for number, pieces in enumerate((2, 0, 3)):
            begin(recorder, number)
            for _ in range(pieces):
                recorder.device("forward", "compute", number, FakeTiming())
            recorder.device("forward", "compute", number - 1, FakeTiming())  # another's
            recorder.end_iteration()
        recorder.device("compact", "compute", 2, FakeTiming())  # between iterations: of none

        assert [one.num_device for one in recorder.iterations()] == [2, 0, 3]

    def test_switched_in_the_middle_voids_the_iteration_and_the_first_one_after_a_gap(self) -> None:
        recorder = Recorder(nvtx=False)
        begin(recorder, 0)
        recorder.enabled = False
        recorder.end_iteration()
        run_iteration(recorder, 1)
        recorder.enabled = True
        run_iteration(recorder, 2)
        run_iteration(recorder, 3)

        assert [(one.iteration, one.void_reasons) for one in recorder.iterations()] == [
            (0, (TRACE_EDGE,)),
            (2, (TRACE_EDGE,)),
            (3, ()),
        ]

    def test_the_first_one_after_some_that_ran_unrecorded_is_void(self) -> None:
        recorder = Recorder(nvtx=False)
        run_iteration(recorder, 0)
        recorder.enabled = False
        run_iteration(recorder, 1)
        recorder.enabled = True
        run_iteration(recorder, 2)
        run_iteration(recorder, 3)

        assert [one.void_reasons for one in recorder.iterations()] == [(), (TRACE_EDGE,), ()]

    def test_switched_off_and_on_where_nothing_runs_voids_nothing(self) -> None:
        recorder = Recorder(nvtx=False, enabled=False)
        recorder.enabled = True
        run_iteration(recorder, 0)
        recorder.enabled = False
        recorder.enabled = True
        run_iteration(recorder, 1)

        assert [one.void_reasons for one in recorder.iterations()] == [(), ()]

    def test_cleared_in_the_middle_voids_the_open_iteration(self) -> None:
        recorder = Recorder(nvtx=False)
        begin(recorder, 0)
        with recorder.phase("prepare"):
            pass
        recorder.clear()
        recorder.end_iteration()
        run_iteration(recorder, 1)

        assert [one.void_reasons for one in recorder.iterations()] == [(TRACE_EDGE,), ()]

    @pytest.mark.parametrize(("capacity", "at_edge"), [(8, []), (9, [8]), (10, []), (13, [7])])
    def test_the_rings_edge_is_one_too_where_the_forward_that_ran_on_was_overwritten(
        self, capacity: int, at_edge: list[int]
    ) -> None:
        recorder = Recorder(nvtx=False, capacity=capacity)
        for number in range(10):
            begin(recorder, number)
            for name in ("prepare", "sample"):
                with recorder.phase(name):
                    pass
            recorder.device("forward", "compute", number, FakeTiming())
            with recorder.phase("emit"):
                pass
            recorder.end_iteration(consumed=batch(number - 1), launched=batch(number))

        assert edges(recorder.spans(), recorder.iterations()) == at_edge


@pytest.fixture
def busy_device() -> Iterator[Engine]:
    """Forwards of 20 ms, in whose shade the host does everything."""
    with oracle_engine(device="cpu", debug_invariants=False) as engine:
        engine.device.op_sleep_s = {"forward": 0.02}
        for seed in range(2):
            params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, seed=seed)
            engine.add_request([1, 2, 3 + seed], params)
        for _ in range(4):
            engine.step()
        yield engine


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


class TestEngine:
    def test_a_whole_run_has_no_edge(self, busy_device: Engine) -> None:
        engine = busy_device
        while engine.has_unfinished():
            engine.step()
        engine.device.synchronize()

        records = engine.recorder.iterations()
        assert edges(engine.recorder.spans(), records) == []
        assert [right.iteration - left.iteration for left, right in pairwise(records)] == [1] * (len(records) - 1)

    def test_cleared_and_read_in_mid_run_leaves_out_the_first_and_the_last_iteration_and_no_other(
        self, busy_device: Engine
    ) -> None:
        """A reviewer's find: over 20 iterations the two edges took 3 points off the hidden share."""
        engine = busy_device
        engine.recorder.clear()
        steps(engine, 20)
        spans, records = engine.recorder.spans(), engine.recorder.iterations()
        numbers = [one.iteration for one in records]

        assert edges(spans, records) == [numbers[0], numbers[-1]]
        engine.device.synchronize()
        inner, whole = summarise(spans, records), summarise(engine.recorder.spans(), records[1:])
        assert inner.num_timed == 18
        assert whole.num_timed == 19, "by now the last one's work is known"
        assert inner.host.hidden_ns == sum(
            row.hidden_ns for row in iteration_table(engine.recorder.spans(), records)[1:-1]
        )
