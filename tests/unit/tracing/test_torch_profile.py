"""torch.profiler's traces: what is read, where it lies on our clock, and what a file that is none is told."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.unit.tracing.kineto_files import BASE_NS, copy, event, kernel, launch, write_kineto
from tests.unit.tracing.traces import phase
from tracing.chrome import write_chrome_trace
from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, TraceImportError
from tracing.recorder import Recorder
from tracing.torch_clock import CLOCK_KEY, ClockLine, ClockPair, noting_clock, offset_by_ranges, read_clock_pair
from tracing.torch_profile import read_torch_trace
from tracing.trace import Records, Trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "torch.json"


class TestReading:
    def test_each_kind_keeps_its_times_stream_correlation_and_graph(self, path: Path) -> None:
        write_kineto(
            path,
            [
                launch(1_000, 3_500, 7, "cudaGraphLaunch"),
                event("cuda_driver", "cuLaunchKernelEx", 4_000, 5_000, cbid=652, correlation=8),
                kernel(6_000, 7_501, 7, graph=3, node=11),
                copy(8_000, 9_000, 9, stream=20),
                event("gpu_memset", "Memset (Device)", 9_000, 9_500, device=0, stream=7, correlation=10, bytes=4),
                event("user_annotation", "forward", 500, 9_800),
                event("cpu_op", "aten::zeros", 600, 700),
            ],
        )

        trace = read_torch_trace(path)

        kinds = [(span.kind.value, span.start_ns, span.end_ns, span.correlation) for span in trace.spans]
        assert kinds == [
            ("range", 500, 9_800, None),
            ("operator", 600, 700, None),
            ("runtime", 1_000, 3_500, 7),
            ("runtime", 4_000, 5_000, 8),
            ("kernel", 6_000, 7_501, 7),
            ("memcpy", 8_000, 9_000, 9),
            ("memset", 9_000, 9_500, 10),
        ]
        node, moved = trace.of(ImportedKind.KERNEL)[0], trace.of(ImportedKind.MEMCPY)[0]
        assert (node.stream, node.device, node.graph, node.graph_node) == (7, 0, 3, 11)
        assert (moved.stream, moved.bytes, moved.thread) == (20, 64, None)
        assert trace.of(ImportedKind.RUNTIME)[0].thread == 4711

    def test_a_kernel_outside_any_graph_has_none(self, path: Path) -> None:
        assert read_torch_trace(write_kineto(path, [kernel(0, 1, 1)])).spans[0].graph is None

    def test_a_compressed_file_gives_the_same(self, path: Path) -> None:
        events = [launch(0, 5, 1), kernel(6, 9, 1)]

        plain, packed = write_kineto(path, events), write_kineto(path.with_suffix(".gz"), events)

        assert read_torch_trace(plain) == read_torch_trace(packed)

    def test_what_is_not_read_is_noted_and_the_rest_is_read(self, path: Path) -> None:
        broken = {**kernel(4, 5, 2), "dur": None}
        write_kineto(path, [kernel(0, 1, 1), event("python_function", "f", 0, 9), broken, event("Trace", "x", 0, 9)])

        trace = read_torch_trace(path)

        assert len(trace.spans) == 1
        assert "1 events of category python_function, which is not read" in trace.notes
        assert "1 events of category kernel, without times" in trace.notes

    def test_a_file_of_an_old_torch_has_unix_times(self, path: Path) -> None:
        document = json.loads(write_kineto(path, [kernel(5_000, 6_000, 1)]).read_text())
        del document["baseTimeNanoseconds"]
        path.write_text(json.dumps(document))

        trace = read_torch_trace(path)

        assert (trace.start_epoch_ns, trace.spans[0].start_ns) == (0, 5_000)


class TestOurClock:
    def test_without_clocks_times_stay_and_the_zero_is_told(self, path: Path) -> None:
        trace = read_torch_trace(write_kineto(path, [kernel(5, 6, 1)]))

        assert (trace.start_epoch_ns, trace.spans[0].start_ns) == (BASE_NS, 5)
        assert any("not on our clock" in note for note in trace.notes)

    def test_noted_clocks_place_it(self, path: Path) -> None:
        pairs = [[BASE_NS, 1_000_000, 30], [BASE_NS + 10**9, 1_001_000_000, 40]]

        trace = read_torch_trace(write_kineto(path, [kernel(5_000, 6_000, 1)], **{CLOCK_KEY: pairs}))

        assert (trace.spans[0].start_ns, trace.spans[0].end_ns) == (1_005_000, 1_006_000)
        assert trace.start_epoch_ns is None
        assert any("within 40 ns" in note for note in trace.notes)

    def test_given_clocks_place_a_file_that_holds_none(self, path: Path) -> None:
        line = ClockLine(ClockPair(BASE_NS, 70_000, 5), ClockPair(BASE_NS + 100, 70_100, 5))

        assert read_torch_trace(write_kineto(path, [kernel(5, 6, 1)]), clock=line).spans[0].start_ns == 70_005

    def test_a_clock_that_was_set_meanwhile_is_followed_and_widens_the_bound(self) -> None:
        line = ClockLine(ClockPair(0, 0, 10), ClockPair(1_000_000, 1_000_500, 10))

        assert [line.host_ns(at) for at in (0, 500_000, 1_000_000)] == [0, 500_250, 1_000_500]
        assert line.error_ns == 510

    def test_a_reading_lies_between_moments_before_and_behind_it(self) -> None:
        before_ns = time.perf_counter_ns()
        pair = read_clock_pair()
        behind_ns = time.perf_counter_ns()

        assert before_ns <= pair.host_ns - pair.half_width_ns
        assert pair.host_ns + pair.half_width_ns <= behind_ns + 1

    def test_a_real_profile_lies_where_our_spans_do(self, path: Path) -> None:
        recorder = Recorder(nvtx=False)
        with profile(activities=[ProfilerActivity.CPU]) as profiler, noting_clock(profiler):
            for _ in range(20):
                with recorder.phase("forward"), record_function("forward"):
                    torch.zeros(8)
        profiler.export_chrome_trace(str(path))

        trace = read_torch_trace(path)

        ours, theirs = recorder.spans(), trace.of(ImportedKind.RANGE)
        assert len(theirs) == len(ours)
        slack_ns = 100_000  # the profiler's own clock is off by less than a microsecond
        inside = [
            left.start_ns - slack_ns <= right.start_ns and right.end_ns <= left.end_ns + slack_ns
            for left, right in zip(ours, theirs, strict=True)
        ]
        assert all(inside)


class TestOffsetByRanges:
    STARTS = (0, 1_000, 2_700, 3_100, 5_900, 6_000, 9_200)

    def ranges(self, starts: tuple[int, ...], name: str = "forward") -> ImportedTrace:
        spans = [ImportedSpan(kind=ImportedKind.RANGE, name=name, start_ns=at, end_ns=at + 50) for at in starts]
        return ImportedTrace(source="torch.profiler", spans=tuple(spans))

    def test_it_is_the_distance_of_like_ranges(self) -> None:
        ours = [phase("forward", at + 40_000, at + 40_060) for at in self.STARTS]

        assert offset_by_ranges(self.ranges(self.STARTS), ours) == 40_000

    @pytest.mark.parametrize("part", [slice(0, 4), slice(2, 6), slice(3, 7)])
    def test_either_side_may_hold_a_part_only(self, part: slice) -> None:
        ours = [phase("forward", at + 40_000, at + 40_060) for at in self.STARTS]

        assert offset_by_ranges(self.ranges(self.STARTS[part]), ours) == 40_000
        assert offset_by_ranges(self.ranges(self.STARTS), ours[part]) == 40_000

    def test_other_ranges_and_spans_do_not_count(self) -> None:
        ours = [phase("forward", at + 500, at + 560) for at in self.STARTS] + [phase("emit", 5, 6)]

        assert offset_by_ranges(self.ranges(self.STARTS), ours) == 500

    def test_a_trace_without_our_ranges_is_told_how_to_get_a_clock(self) -> None:
        with pytest.raises(TraceImportError, match="noting_clock"):
            offset_by_ranges(self.ranges(self.STARTS, "mine"), [phase("forward", 0, 1)])


def truncated(path: Path) -> None:
    write_kineto(path, [kernel(0, 1, 1)])
    path.write_bytes(path.read_bytes()[:-40])


def truncated_gzip(path: Path) -> None:
    write_kineto(path, [kernel(0, 1, 1)])
    path.write_bytes(gzip.compress(path.read_bytes())[:-20])


def damaged_gzip(path: Path) -> None:
    data = bytearray(gzip.compress(b"{}" * 500))
    data[12:20] = b"\xff" * 8
    path.write_bytes(data)


def our_own_export(path: Path) -> None:
    write_chrome_trace(Trace(name="x", records=Records()), path)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot be read: No such file"),
    "a folder": (lambda path: path.mkdir(), "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "truncated": (truncated, "cut off"),
    "truncated gzip": (truncated_gzip, "cut off or damaged"),
    "damaged gzip": (damaged_gzip, "cut off or damaged"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "is no JSON"),
    "other JSON": (lambda path: path.write_text("[1, 2]"), "no list traceEvents"),
    "events that are no list": (lambda path: path.write_text('{"traceEvents": 3}'), "no list traceEvents"),
    "another tool's": (our_own_export, "but not of torch.profiler"),
    "without work": (lambda path: write_kineto(path, []), "no event of a kind that is read"),
    "strange events": (lambda path: write_kineto(path, [3, None, {"ph": "X"}]), "no event of a kind"),  # type: ignore[list-item]
    "a strange clock": (lambda path: write_kineto(path, [kernel(0, 1, 1)], **{CLOCK_KEY: 7}), "holds no clocks"),
    "half a clock": (lambda path: write_kineto(path, [kernel(0, 1, 1)], **{CLOCK_KEY: [[1, 2]]}), "holds no clocks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_told_in_one_line_with_the_file(path: Path, fault: str) -> None:
    make, expected = FAULTS[fault]
    make(path)

    with pytest.raises(TraceImportError, match=expected) as caught:
        read_torch_trace(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
