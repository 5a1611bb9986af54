"""Spans of one stretch of time, found without reading the rest of the trace."""

from __future__ import annotations

import random
import time

from tracing.recorder import Recorder
from tracing.records import Span


class Timing:
    """Device work that ends when it is told to."""

    def __init__(self) -> None:
        self.is_done = False
        self.start_ns = self.end_ns = time.perf_counter_ns()

    def done(self) -> bool:
        return self.is_done


def recorded_ns(span: Span) -> int:
    return span.end_ns if span.enqueued_ns is None else span.enqueued_ns


def filled(recorder: Recorder, count: int) -> list[Timing]:
    timings = []
    for index in range(count):
        with recorder.phase("prepare"), recorder.wait("samples"):
            timings.append(Timing())
            recorder.device("forward", "compute", index, timings[-1])
        recorder.instant("moment")
    return timings


def check_every_stretch(recorder: Recorder) -> None:
    """What is found is what all spans, filtered, are; for stretches between any two records."""
    spans = recorder.spans()
    moments = [recorded_ns(span) for span in spans]
    generator = random.Random(7)
    for _ in range(200):
        begin_ns, end_ns = sorted(generator.choices([0, *moments, max(moments) + 5], k=2))
        expected = [span for span in spans if begin_ns <= recorded_ns(span) <= end_ns]
        assert recorder.spans_recorded(begin_ns, end_ns) == expected


def check_newest_columns(recorder: Recorder) -> None:
    """They are the newest spans, however many are asked for."""
    for newest in (0, 1, 7, 60, 10_000):
        columns = recorder.newest_columns(newest)
        spans = recorder.spans(newest)
        assert [columns.span(place) for place in range(len(columns))] == spans
        assert columns.recorded_ns.tolist() == [recorded_ns(span) for span in spans]


class TestNewestColumns:
    def test_are_the_newest_spans_without_work_that_has_not_ended(self) -> None:
        recorder = Recorder(nvtx=False)
        timings = filled(recorder, 50)
        for timing in timings[:20] + timings[22:-3]:
            timing.is_done = True
        recorder.counter("rows", 3.5)
        recorder.instant("pause", request="story-3")
        check_newest_columns(recorder)

    def test_once_the_ring_has_gone_round(self) -> None:
        recorder = Recorder(nvtx=False, capacity=61)
        for timing in filled(recorder, 50):
            timing.is_done = True
        assert recorder.num_recorded == 200
        check_newest_columns(recorder)

    def test_stay_as_they_were_read(self) -> None:
        recorder = Recorder(nvtx=False, capacity=10)
        filled(recorder, 2)
        columns = recorder.newest_columns(10)
        before = [columns.span(place) for place in range(len(columns))]
        filled(recorder, 20)
        assert [columns.span(place) for place in range(len(columns))] == before


class TestSpansRecorded:
    def test_are_those_that_were_recorded_in_it(self) -> None:
        recorder = Recorder(nvtx=False)
        for timing in filled(recorder, 50):
            timing.is_done = True
        check_every_stretch(recorder)

    def test_once_the_ring_has_gone_round(self) -> None:
        recorder = Recorder(nvtx=False, capacity=61)
        for timing in filled(recorder, 50):
            timing.is_done = True
        assert recorder.lost_spans > 100
        check_every_stretch(recorder)

    def test_leave_out_device_work_that_has_not_ended(self) -> None:
        recorder = Recorder(nvtx=False)
        timings = filled(recorder, 3)
        assert not any(span.is_device for span in recorder.spans_recorded(0, 2**63))
        timings[1].is_done = True
        assert [span.iteration for span in recorder.spans_recorded(0, 2**63) if span.is_device] == [1]
        check_every_stretch(recorder)

    def test_of_an_empty_trace_are_none(self) -> None:
        assert Recorder(nvtx=False).spans_recorded(0, 2**63) == []
