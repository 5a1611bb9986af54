from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tracing.recorder import Recorder
from tracing.records import NO_ITERATION, Category, GraphUse, Span


@dataclass
class FakeTiming:
    start_ns: int = 10
    end_ns: int = 30
    is_done: bool = True
    reads: int = 0

    def done(self) -> bool:
        self.reads += 1
        return self.is_done


@dataclass
class FakeSink:
    """Keeps what it was told; a push is an attribute tuple and a payload."""

    open: list[tuple[str, str]] = field(default_factory=list)
    events: list[tuple[str, str, str, int]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def attributes(self, name: str, category: str, colour: str) -> Any:
        assert colour.startswith("#")
        return name, category

    def push(self, attributes: Any, payload: int) -> None:
        self.open.append(attributes)
        self.events.append(("push", *attributes, payload))

    def pop(self) -> None:
        self.open.pop()

    def start(self, attributes: Any, payload: int) -> Any:
        self.started.append(attributes[0])
        self.events.append(("start", *attributes, payload))
        return attributes[0]

    def end(self, token: Any) -> None:
        self.started.remove(token)

    def mark(self, attributes: Any, payload: int) -> None:
        self.events.append(("mark", *attributes, payload))


def begin(recorder: Recorder, iteration: int, order: str = "OVERLAP") -> None:
    recorder.begin_iteration(iteration, order, "decode only", "async")


def run_iteration(recorder: Recorder, iteration: int) -> None:
    begin(recorder, iteration)
    for name in ("prepare", "forward", "resolve"):
        with recorder.phase(name):
            pass
    recorder.end_iteration()


def only(spans: list[Span], name: str) -> Span:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, f"{name} in {[span.name for span in spans]}"
    return found[0]


class TestHostSpans:
    def test_nested_spans_have_depth_phase_and_category(self) -> None:
        recorder = Recorder(nvtx=False)
        begin(recorder, 7)
        with recorder.phase("resolve"):
            with recorder.wait("results"):
                pass
            with recorder.phase("detokenise"):
                pass
        spans = recorder.spans()

        seen = {span.name: (span.category, span.depth, span.phase, span.iteration, span.lane) for span in spans}
        assert seen == {
            "resolve": (Category.PHASE, 0, "resolve", 7, "host"),
            "results": (Category.WAIT, 1, "resolve", 7, "host"),
            "detokenise": (Category.DETAIL, 1, "resolve", 7, "host"),
        }

    def test_an_outer_span_encloses_its_inner_ones_and_comes_first(self) -> None:
        recorder = Recorder(nvtx=False)
        with recorder.phase("emit"), recorder.phase("emit"):
            pass
        outer, inner = recorder.spans()
        assert (outer.depth, inner.depth) == (0, 1)
        assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns

    def test_a_span_outside_an_iteration_says_so(self) -> None:
        recorder = Recorder(nvtx=False)
        with recorder.phase("capture"):
            pass
        assert recorder.spans()[0].iteration == NO_ITERATION

    def test_a_span_whose_body_raises_is_closed_and_the_error_goes_on(self) -> None:
        sink = FakeSink()
        recorder = Recorder(nvtx=sink)
        begin(recorder, 0)
        with pytest.raises(RuntimeError, match="inside"), recorder.phase("forward"), recorder.phase("publish"):
            raise RuntimeError("inside")
        with recorder.phase("sample"):
            pass
        assert {span.name: span.depth for span in recorder.spans()} == {"forward": 0, "publish": 1, "sample": 0}
        assert sink.open == []

    def test_context_managers_are_reused_by_name(self) -> None:
        recorder = Recorder(nvtx=False)
        assert recorder.phase("admit") is recorder.phase("admit")
        assert recorder.phase("admit") is not recorder.wait("admit")


class TestOff:
    def test_stores_nothing(self) -> None:
        sink = FakeSink()
        recorder = Recorder(enabled=False, nvtx=sink)
        run_iteration(recorder, 0)
        with recorder.wait("results"):
            pass
        recorder.device("forward", "compute", 0, FakeTiming())
        recorder.instant("abort", request="r1")
        recorder.counter("free_blocks", 3)

        assert recorder.spans() == []
        assert recorder.iterations() == []
        assert sink.events == []

    def test_can_be_switched_while_running(self) -> None:
        sink = FakeSink()
        recorder = Recorder(nvtx=sink)
        begin(recorder, 0)
        with recorder.phase("prepare"):
            recorder.enabled = False
            with recorder.phase("publish"):
                pass
        recorder.end_iteration()
        run_iteration(recorder, 1)
        recorder.enabled = True
        run_iteration(recorder, 2)

        assert [span.name for span in recorder.spans() if span.iteration < 2] == ["prepare"]
        assert [record.iteration for record in recorder.iterations()] == [0, 2]
        assert sink.open == []
        assert sink.started == []


class TestIterations:
    def test_keeps_what_it_was_told(self) -> None:
        recorder = Recorder(nvtx=False)
        recorder.begin_iteration(4, "NO_OVERLAP", "prefill pending", "async")
        use = GraphUse(label="bucket", hit=True, dims=(8, 0, 8), padding_tokens=2)
        recorder.end_iteration(
            new_tokens=6, wasted_rows={"eos": 1}, graph=use, void_reasons=("hand_stepped",), num_waiting=2, rows_moved=1
        )
        (record,) = recorder.iterations()
        assert (record.iteration, record.order, record.reason, record.mode) == (
            4,
            "NO_OVERLAP",
            "prefill pending",
            "async",
        )
        assert (record.new_tokens, dict(record.wasted_rows), record.graph) == (6, {"eos": 1}, use)
        assert (record.num_waiting, record.rows_moved, record.is_void) == (2, 1, True)
        assert record.duration_ns >= 0

    def test_an_abandoned_iteration_leaves_no_record_and_no_open_range(self) -> None:
        sink = FakeSink()
        recorder = Recorder(nvtx=sink)
        begin(recorder, 3)
        with recorder.phase("prepare"):
            pass
        recorder.abandon_iteration()
        run_iteration(recorder, 3)

        assert [record.iteration for record in recorder.iterations()] == [3]
        assert recorder.num_abandoned == 1
        assert sink.started == []

    def test_abandoning_nothing_is_not_counted(self) -> None:
        recorder = Recorder(nvtx=False)
        recorder.abandon_iteration()
        assert recorder.num_abandoned == 0

    def test_two_open_iterations_are_refused(self) -> None:
        recorder = Recorder(nvtx=False)
        begin(recorder, 1)
        with pytest.raises(RuntimeError, match="iteration 1 is still open"):
            begin(recorder, 2)

    def test_clear_forgets_everything_but_the_open_iteration(self) -> None:
        recorder = Recorder(nvtx=False, capacity=4)
        for iteration in range(5):
            run_iteration(recorder, iteration)
        begin(recorder, 5)
        recorder.device("forward", "compute", 5, FakeTiming(is_done=False))
        recorder.clear()
        with recorder.phase("emit"):
            pass
        recorder.end_iteration()

        assert [span.name for span in recorder.spans()] == ["emit"]
        assert [record.iteration for record in recorder.iterations()] == [5]
        assert (recorder.lost_spans, recorder.lost_iterations) == (0, 0)


class TestDeviceSpans:
    def test_times_are_taken_when_the_work_is_done(self) -> None:
        recorder = Recorder(nvtx=False)
        timing = FakeTiming(start_ns=100, end_ns=250, is_done=False)
        begin(recorder, 2)
        with recorder.phase("forward"):
            recorder.device("forward", "compute", 2, timing)
        assert [span.category for span in recorder.spans()] == [Category.PHASE]

        timing.is_done = True
        (work,) = [span for span in recorder.spans() if span.category is Category.DEVICE]
        assert (work.name, work.lane, work.iteration, work.phase) == ("forward", "compute", 2, "forward")
        assert (work.start_ns, work.end_ns) == (100, 250)
        assert work.enqueued_ns is not None
        assert work.enqueued_ns > 250  # this fake's times lie in the clock's past

    def test_finished_timings_are_read_once_and_let_go_of(self) -> None:
        recorder = Recorder(nvtx=False)
        timing = FakeTiming()
        gone = weakref.ref(timing)
        recorder.device("sample", "compute", 0, timing)
        recorder.spans()
        assert timing.reads == 1
        del timing
        assert gone() is None
        assert len(recorder.spans()) == 1

    def test_work_enqueued_between_phases_belongs_to_none(self) -> None:
        recorder = Recorder(nvtx=False)
        with recorder.phase("resolve"):
            pass
        recorder.device("compact", "compute", 0, FakeTiming())
        assert only(recorder.spans(), "compact").phase is None

    def test_old_timings_are_read_in_passing_so_that_events_do_not_pile_up(self) -> None:
        recorder = Recorder(nvtx=False)
        timings = [FakeTiming() for _ in range(400)]
        for iteration, timing in enumerate(timings):
            begin(recorder, iteration)
            recorder.device("forward", "compute", iteration, timing)
            recorder.end_iteration()
        unread = sum(timing.reads == 0 for timing in timings)
        assert 0 < unread <= 65

    def test_an_unfinished_one_does_not_hold_back_the_others(self) -> None:
        recorder = Recorder(nvtx=False)
        recorder.device("forward", "compute", 0, FakeTiming(is_done=False))
        recorder.device("fetch", "copy", 0, FakeTiming())
        assert [span.lane for span in recorder.spans()] == ["copy"]


class TestRunning:
    def test_tells_what_has_not_ended_and_consumes_nothing(self) -> None:
        recorder = Recorder(nvtx=False)
        ended, runs = FakeTiming(), FakeTiming(is_done=False)
        recorder.device("sample", "compute", 4, ended)
        recorder.device("forward", "compute", 4, runs)

        for _ in range(2):
            (work,) = recorder.running()
            assert (work.name, work.lane, work.iteration) == ("forward", "compute", 4)
            assert work.enqueued_ns > 0

        runs.is_done = True
        assert recorder.running() == []
        assert [span.name for span in recorder.spans()] == ["sample", "forward"]

    def test_leaves_out_what_was_overwritten(self) -> None:
        recorder = Recorder(nvtx=False, capacity=1)
        recorder.device("forward", "compute", 0, FakeTiming(is_done=False))
        recorder.device("sample", "compute", 1, FakeTiming(is_done=False))

        assert [work.name for work in recorder.running()] == ["sample"]


class TestRing:
    def test_keeps_the_newest_and_says_how_many_were_lost(self) -> None:
        recorder = Recorder(nvtx=False, capacity=6)
        for iteration in range(10):
            run_iteration(recorder, iteration)
        assert [span.iteration for span in recorder.spans()] == [8, 8, 8, 9, 9, 9]
        assert recorder.lost_spans == 24

    def test_iterations_that_lost_a_span_are_dropped_and_counted(self) -> None:
        recorder = Recorder(nvtx=False, capacity=8)
        for iteration in range(10):
            run_iteration(recorder, iteration)
        kept = {record.iteration for record in recorder.iterations()}
        spans = recorder.spans()
        assert kept == {8, 9}
        assert all(sum(span.iteration == iteration for span in spans) == 3 for iteration in kept)
        assert recorder.lost_iterations == 8

    def test_an_iteration_whose_spans_are_overwritten_after_its_end_is_dropped_too(self) -> None:
        recorder = Recorder(nvtx=False, capacity=8)
        run_iteration(recorder, 0)
        for _ in range(6):
            with recorder.phase("capture"):
                pass
        assert recorder.iterations() == []
        assert recorder.lost_iterations == 1

    def test_unread_device_work_may_be_overwritten(self) -> None:
        recorder = Recorder(nvtx=False, capacity=3)
        stuck = FakeTiming(is_done=False)
        recorder.device("forward", "compute", 0, stuck)
        for _ in range(3):
            with recorder.phase("emit"):
                pass
        stuck.is_done = True
        assert [span.name for span in recorder.spans()] == ["emit"] * 3

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Recorder(capacity=0), "capacity must be at least 1"),
            (lambda: Recorder(session_id=-1), "session_id must be in"),
            (lambda: Recorder(session_id=1 << 23), "session_id must be in"),
        ],
    )
    def test_impossible_sizes_are_refused(self, make: Callable[[], Recorder], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make()


class TestMoments:
    def test_instants_keep_their_arguments_and_counters_their_value(self) -> None:
        recorder = Recorder(nvtx=False)
        recorder.instant("abort", request="r1")
        recorder.counter("free_blocks", 12)
        spans = recorder.spans()
        assert only(spans, "abort").args == {"request": "r1"}
        assert only(spans, "free_blocks").value == 12.0
        assert all(span.duration_ns == 0 for span in spans)


class TestRanges:
    def test_every_span_is_a_balanced_range_with_the_iteration_as_payload(self) -> None:
        sink = FakeSink()
        recorder = Recorder(nvtx=sink)
        recorder.begin_iteration(5, "OVERLAP", "decode only", "async")
        with recorder.phase("prepare"), recorder.phase("publish"):
            pass
        with recorder.phase("resolve"), recorder.wait("results"):
            pass
        recorder.instant("abort")
        recorder.end_iteration()

        assert sink.events == [
            ("start", "OVERLAP", "iteration", 5),
            ("push", "prepare", "phase", 5),
            ("push", "publish", "copy", 5),
            ("push", "resolve", "phase", 5),
            ("push", "results", "wait", 5),
            ("mark", "abort", "instant", 5),
        ]
        assert sink.open == []
        assert sink.started == []

    def test_two_interleaved_sessions_can_be_told_apart(self) -> None:
        sink = FakeSink()
        first, second = Recorder(nvtx=sink, session_id=1), Recorder(nvtx=sink, session_id=2)
        begin(first, 0)
        begin(second, 0)
        with first.phase("prepare"):
            pass
        first.abandon_iteration()
        with second.phase("prepare"):
            pass
        second.end_iteration()
        assert [event[-1] >> 40 for event in sink.events] == [1, 2, 1, 2]
        assert sink.started == []

    def test_a_name_inside_a_phase_is_a_detail_and_by_itself_a_phase(self) -> None:
        sink = FakeSink()
        recorder = Recorder(nvtx=sink)
        with recorder.phase("emit"), recorder.phase("detokenise"):
            pass
        with recorder.phase("detokenise"):
            pass
        assert [event[1:3] for event in sink.events] == [
            ("emit", "phase"),
            ("detokenise", "detail"),
            ("detokenise", "phase"),
        ]
        assert sink.open == []

    def test_what_an_interrupt_left_open_is_closed_when_the_iteration_is_abandoned(self) -> None:
        # A Ctrl-C between the push and the span's own bookkeeping: the with block is never entered, nor left.
        class Interrupting(FakeSink):
            def push(self, attributes: Any, payload: int) -> None:
                super().push(attributes, payload)
                raise KeyboardInterrupt

        sink = Interrupting()
        recorder = Recorder(nvtx=sink)
        begin(recorder, 0)
        with pytest.raises(KeyboardInterrupt), recorder.phase("prepare"):
            pass
        assert sink.open == [("prepare", "phase")]
        recorder.abandon_iteration()
        assert sink.open == []
        assert sink.started == []

    def test_an_order_named_like_a_phase_does_not_share_its_attributes(self) -> None:
        sink = FakeSink()
        recorder = Recorder(nvtx=sink)
        begin(recorder, 0, order="forward")
        with recorder.phase("forward"):
            pass
        assert [event[2] for event in sink.events] == ["iteration", "phase"]


class TestNewestSpans:
    def test_gives_the_last_ones_recorded_and_no_more_than_there_are(self) -> None:
        recorder = Recorder(nvtx=False, capacity=4)
        for number in range(6):
            recorder.instant(f"mark {number}")

        assert [span.name for span in recorder.spans(newest=2)] == ["mark 4", "mark 5"]
        assert recorder.spans(newest=99) == recorder.spans()


class TestNewestIterations:
    def test_are_the_last_ones_in_order_and_no_more_than_there_are(self) -> None:
        recorder = Recorder(nvtx=False)
        for number in range(5):
            recorder.begin_iteration(number, "overlap", "steady", "async")
            recorder.end_iteration()

        assert [record.iteration for record in recorder.iterations(newest=2)] == [3, 4]
        assert recorder.iterations(newest=0) == []
        assert recorder.iterations(newest=99) == recorder.iterations()

    def test_reach_back_to_the_oldest_of_which_no_span_was_lost(self) -> None:
        recorder = Recorder(nvtx=False, capacity=4)
        assert (recorder.num_iterations, recorder.oldest_iteration) == (0, None)
        for number in range(6):
            recorder.begin_iteration(number, "overlap", "steady", "async")
            with recorder.phase("prepare"):
                pass
            recorder.end_iteration()
        with recorder.phase("prepare"):  # overwrites a span of the oldest that is whole
            pass

        assert recorder.oldest_iteration is recorder.iterations()[0]
        assert recorder.num_iterations == len(recorder.iterations(newest=99)) < 4
