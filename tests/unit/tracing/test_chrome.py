"""What a Chrome trace holds, and that a viewer takes it: nothing lost, slices nested, arrows tied, strict JSON."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tracing import record_strategies as some
from tests.unit.tracing.chrome_files import ChromeFile, nanoseconds
from tests.unit.tracing.simulated import Lengths, simulate
from tests.unit.tracing.traces import batch, detail, device, phase, record, wait
from tracing.chrome import write_chrome_trace
from tracing.chrome_tracks import nested_tracks, separate_tracks
from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace
from tracing.intervals import Interval
from tracing.records import Category, GraphUse, IterationRecord, RequestRecord, Span
from tracing.trace import Records, Trace

SPAN_CATEGORIES = ("phase", "detail", "wait", "device")


def trace_of(
    spans: Iterable[Span] = (),
    iterations: Iterable[IterationRecord] = (),
    requests: Iterable[RequestRecord] = (),
    **fields: Any,
) -> Trace:
    records = Records(spans=tuple(spans), iterations=tuple(iterations), requests=tuple(requests))
    return Trace(**{"name": "async", "records": records, **fields})


def simulated(mode: str = "async", **lengths: Any) -> Trace:
    spans, records = simulate(mode, 6, Lengths(**lengths))
    return trace_of(spans, records, name=mode)


def span(name: str, category: Category, at_ns: int, **fields: Any) -> Span:
    return Span(name=name, category=category, lane="host", start_ns=at_ns, end_ns=at_ns, **fields)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def written(traces: Trace | list[Trace], path: Path, **options: Any) -> ChromeFile:
    return ChromeFile(write_chrome_trace(traces, path, **options))


class TestWhatItHolds:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_every_span_is_there_once_with_its_times(self, path: Path, mode: str) -> None:
        trace = simulated(mode)

        file = written(trace, path)

        origin = trace.records.spans[0].start_ns
        expected = Counter(
            (s.name, s.category.value, s.start_ns - origin, s.end_ns - origin) for s in trace.records.spans
        )
        assert Counter(one[:4] for one in file.of(*SPAN_CATEGORIES)) == expected
        file.check_nesting()

    def test_times_keep_every_nanosecond_after_days_of_uptime(self, path: Path) -> None:
        start = 40 * 86_400 * 10**9 + 7
        trace = trace_of(
            [phase("prepare", start, start + 1_001), phase("forward", start + 1_234_567, start + 1_999_993)]
        )

        file = written(trace, path)

        assert [(one.start_ns, one.end_ns) for one in file.track("host")] == [(0, 1_001), (1_234_567, 1_999_993)]
        assert file.document["otherData"]["traces"][0]["origin_ns"] == start

    def test_lanes_stand_in_one_order_with_names_of_their_own(self, path: Path) -> None:
        trace = trace_of(
            [phase("forward", 0, 9), device("forward", 5, 9), device("fetch", 8, 9, lane="copy")],
            [record(0, 0, 9)],
            [RequestRecord(request_id="a", arrival_ns=0)],
            rank=3,
        )

        file = written(trace, path)

        assert list(file.track_names.values()) == ["iterations", "host", "device compute", "device copy", "requests"]
        order = [event["args"]["sort_index"] for event in file.events("M") if event["name"] == "thread_sort_index"]
        assert order == sorted(order)
        processes = [event["args"]["name"] for event in file.events("M") if event["name"] == "process_name"]
        assert processes == ["rank 3: async"]

    def test_an_iteration_tells_its_order_reason_batch_graph_and_why_it_is_void(self, path: Path) -> None:
        graph = GraphUse(label="CUDA graph", hit=True, dims=(16, 0, 16), padding_tokens=4)
        fields = {"launched": batch(7, decode=12), "graph": graph, "void_reasons": ("debugger",), "order": "overlap"}

        file = written(trace_of([], [record(7, 0, 9, **fields)]), path)

        [iteration] = file.track("iterations")
        assert iteration.name == "overlap"
        args = iteration.args
        assert (args["iteration"], args["reason"], args["void"]) == (7, "decode only", ["debugger"])
        assert args["launched"]["requests"] == 12
        assert args["launched"]["request_ids"] == "r0, r1, r2, r3, r4, r5, r6, r7, .."
        assert args["graph"]["label"] == "CUDA graph"
        assert args["graph"]["padding_tokens"] == 4
        assert "consumed" not in args

    def test_device_work_tells_its_iteration_and_how_long_it_was_queued(self, path: Path) -> None:
        graph = GraphUse(label="CUDA graph", hit=True)
        spans = [phase("forward", 0, 9, 4), device("forward", 12_000, 20_000, 4, enqueued=8_000)]
        trace = trace_of(spans, [record(4, 0, 9_000, launched=batch(4, decode=8), graph=graph, order="overlap")])

        file = written(trace, path)

        [work] = file.track("device compute")
        assert (work.args["iteration"], work.args["order"], work.args["reason"]) == (4, "overlap", "decode only")
        assert (work.args["enqueued_us"], work.args["queued_us"]) == (8, 4)
        assert (work.args["rows"], work.args["batch"], work.args["graph"]) == (8, "decode", "CUDA graph")

    def test_what_an_abandoned_iteration_left_is_not_charged_to_the_next_of_its_number(self, path: Path) -> None:
        trace = trace_of([phase("prepare", 0, 5, 3), phase("prepare", 20, 25, 3)], [record(3, 20, 30)])

        file = written(trace, path)

        left, kept = file.track("host")
        assert left.args == {"iteration": 3}
        assert kept.args["order"] == "OVERLAP"

    def test_after_a_reset_a_span_has_the_args_of_its_own_run(self, path: Path) -> None:
        """A reviewer's find: all had those of the last iteration of that number, or none."""
        spans = [phase("prepare", 0, 5, 3), phase("prepare", 20, 25, 3)]
        trace = trace_of(spans, [record(3, 0, 9, order="primer"), record(3, 20, 30, order="legacy")])

        assert [one.args["order"] for one in written(trace, path).track("host")] == ["primer", "legacy"]

    def test_a_request_has_its_stages_inside_and_a_running_one_lasts_to_the_end(self, path: Path) -> None:
        done = RequestRecord(
            request_id="a", arrival_ns=0, admitted_ns=10, first_token_ns=30, finished_ns=90, finish_reason="length"
        )
        running = RequestRecord(request_id="b", arrival_ns=20, admitted_ns=40)

        file = written(trace_of([phase("emit", 0, 100)], [], [done, running]), path)

        first, second = file.track("requests"), file.track("requests (2)")
        assert [one.place for one in first] == [
            ("a", 0, 90),
            ("queued", 0, 10),
            ("prefill", 10, 30),
            ("decode", 30, 90),
        ]
        assert [one.place for one in second] == [("b", 20, 100), ("queued", 20, 40), ("prefill", 40, 100)]
        assert first[0].args["finish_reason"] == "length"
        assert second[0].args["finish_reason"] == "unfinished"

    def test_counters_follow_iterations_and_what_is_no_number_becomes_an_instant(self, path: Path) -> None:
        spans = [
            span("queue", Category.COUNTER, 5, value=2.5),
            span("queue", Category.COUNTER, 6, value=math.inf),
            span("abort", Category.INSTANT, 7, iteration=1, args={"request": "a", "score": math.nan}),
        ]

        file = written(trace_of(spans, [record(1, 5, 9, free_blocks=40, num_waiting=3, num_active=2)]), path)

        counters = [(event["name"], event["args"]) for event in file.events("C")]
        assert sorted(counters, key=str) == [
            ("KV blocks", {"free": 40}),
            ("queue", {"value": 2.5}),
            ("requests", {"active": 2}),
            ("requests", {"waiting": 3}),
        ]
        instants = [(event["name"], event["args"]) for event in file.events("i")]
        assert instants == [("queue", {"value": "inf"}), ("abort", {"request": "a", "score": "nan", "iteration": 1})]

    def test_what_the_numbers_depend_on_stands_beside_the_events(self, path: Path) -> None:
        trace = trace_of(config={"graphs": (1, 2)}, environment={"gpu": "H200"}, device_clock_error_ns=900)

        file = written(trace, path)

        [head] = file.document["otherData"]["traces"]
        assert head["config"] == {"graphs": [1, 2]}
        assert head["environment"] == {"gpu": "H200"}
        assert head["device_clock_error_ns"] == 900

    def test_each_phase_has_a_colour_of_its_own_for_viewers_that_take_it(self, path: Path) -> None:
        names = ("admit", "prepare", "forward", "sample", "verify", "draft", "rewind", "resolve", "emit")
        file = written(trace_of(phase(name, 10 * n, 10 * n + 5) for n, name in enumerate(names)), path)

        colours = [event["cname"] for event in file.events("X")]
        assert len(set(colours)) == len(names)


class TestArrows:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("launch", [0, 7])
    def test_all_device_work_is_tied_to_the_phase_that_launched_it(self, path: Path, mode: str, launch: int) -> None:
        trace = simulated(mode, launch=launch)

        file = written(trace, path)

        found = file.flows("launch")
        work = [one for one in trace.records.spans if one.category is Category.DEVICE]
        assert len(found) == len(work)
        for start, end in found:
            assert start.category == "phase"
            assert end.category == "device"
            assert start.name == {"publish": "forward", "fetch": "sample"}.get(end.name, end.name)
            assert start.args["iteration"] == end.args["iteration"]

    def test_each_copy_is_tied_to_the_wait_for_it(self, path: Path) -> None:
        trace = simulated("async")

        file = written(trace, path)

        found = file.flows("result")
        waits = [one for one in trace.records.spans if one.category is Category.WAIT and one.duration_ns]
        assert len(found) == len(waits)
        for start, end in found:
            assert (start.name, end.name) == ("fetch", "samples")
            assert start.args["iteration"] == end.args["iteration"]

    def test_accepted_counts_and_drawn_ids_are_tied_each_to_their_own_wait(self, path: Path) -> None:
        """Both copies are enqueued in verify, before either wait."""
        spans = [
            *(phase("verify", 0, 8), phase("rewind", 10, 32), phase("resolve", 40, 62)),
            device("fetch_accepted", 12, 20, lane="copy", enqueued=4),
            device("fetch", 21, 50, lane="copy", enqueued=5),
            *(wait(11, 30, name="accepted"), wait(41, 60, name="samples")),
        ]

        found = written(trace_of(spans), path).flows("result")

        assert [(copy.name, waiting.name) for copy, waiting in found] == [
            ("fetch_accepted", "accepted"),
            ("fetch", "samples"),
        ]

    def test_a_wait_before_the_copy_was_enqueued_is_not_for_it(self, path: Path) -> None:
        spans = [wait(0, 5), device("fetch", 12, 20, lane="copy", enqueued=10), wait(14, 30)]

        [(_, waiting)] = written(trace_of(spans), path).flows("result")

        assert waiting.start_ns == 14

    def test_a_copy_of_an_iteration_that_a_reset_ended_is_not_tied_to_a_wait_of_the_next_run(self, path: Path) -> None:
        left = device("fetch", 12, 20, 3, lane="copy", enqueued=10)
        spans = [left, wait(105, 130, 3), device("fetch", 110, 120, 3, lane="copy", enqueued=104)]

        [(copy, _)] = written(trace_of(spans, [record(3, 100, 140)]), path).flows("result")

        assert copy.start_ns == 98, "times begin with the trace's first, at 12"

    def test_an_arrow_leaves_the_phase_though_something_in_it_ended_before(self, path: Path) -> None:
        """Perfetto ties an arrow to what began last on a track, ended or not."""
        spans = [phase("resolve", 0, 100), wait(10, 60), device("compact", 80, 90, enqueued=75)]

        file = written(trace_of(spans), path)

        [(start, end)] = file.flows("launch")
        assert (start.name, end.name) == ("resolve", "compact")

    @pytest.mark.parametrize("start", [30, -20])
    def test_work_that_began_before_it_was_noted_is_tied_all_the_same(self, path: Path, start: int) -> None:
        """A device is fast, or its clock is off."""
        file = written(trace_of([phase("forward", 0, 100), device("forward", start, 200, enqueued=60)]), path)

        [(begin, end)] = file.flows("launch")
        assert (begin.category, end.category) == ("phase", "device")
        [(_, arrival)] = file.flow_events
        assert nanoseconds(arrival["ts"]) == max(end.start_ns, begin.start_ns)

    def test_what_cannot_be_joined_has_none(self, path: Path) -> None:
        spans = [
            phase("forward", 0, 10),
            device("nothing", 5, 5, enqueued=5),
            device("outside", 20, 30, enqueued=15),
            device("unknown", 40, 50),
        ]

        file = written(trace_of(spans), path)

        assert file.flow_events == []


class TestImported:
    def test_a_tools_lanes_are_a_process_with_an_arrow_to_the_first_kernel_of_each_launch(self, path: Path) -> None:
        def one(kind: ImportedKind, name: str, start: int, end: int, **fields: Any) -> ImportedSpan:
            return ImportedSpan(kind=kind, name=name, start_ns=start, end_ns=end, **fields)

        tool = ImportedTrace(
            source="torch.profiler",
            notes=("2 events were left out",),
            spans=(
                one(ImportedKind.RUNTIME, "cudaGraphLaunch", 90, 99, thread=12, correlation=5),
                one(ImportedKind.KERNEL, "gemm", 120, 150, device=0, stream=7, correlation=5, graph=2),
                one(ImportedKind.KERNEL, "norm", 155, 160, device=0, stream=7, correlation=5, graph=2),
                one(ImportedKind.MARK, "here", 95, 95, thread=12),
            ),
        )

        file = written(trace_of([phase("forward", 100, 110)]), path, imported=[tool])

        assert list(file.track_names.values()) == ["host", "thread 12", "device 0, stream 7"]
        assert [one.place for one in file.track("device 0, stream 7")] == [
            ("gemm", 30, 60),
            ("norm", 65, 70),
        ]
        [(start, end)] = file.flows("launch")
        assert (start.name, end.name) == ("cudaGraphLaunch", "gemm")
        assert [event["name"] for event in file.events("i")] == ["here"]
        assert file.document["otherData"]["imported"][0]["notes"] == ["2 events were left out"]


class TestSeveralTraces:
    def test_ranks_keep_their_distance_in_time(self, path: Path) -> None:
        first, second = (trace_of([phase("emit", at, at + 5)], rank=rank) for rank, at in enumerate((100, 130)))

        file = written([first, second], path)

        assert [members[0].start_ns for members in file.slices.values()] == [0, 30]

    def test_aligned_ones_all_begin_at_zero(self, path: Path) -> None:
        runs = [trace_of([phase("emit", at, at + 5)], name=name) for name, at in (("legacy", 100), ("async", 9_000))]

        file = written(runs, path, aligned=True)

        assert [members[0].start_ns for members in file.slices.values()] == [0, 0]
        assert [head["origin_ns"] for head in file.document["otherData"]["traces"]] == [100, 9_000]


class TestTheFile:
    def test_a_compressed_one_holds_the_same_and_equal_traces_make_equal_bytes(self, path: Path) -> None:
        packed = path.with_name("trace.json.gz")

        plain, first = (write_chrome_trace(simulated(), target).read_bytes() for target in (path, packed))

        assert gzip.decompress(first) == plain
        assert write_chrome_trace(simulated(), packed).read_bytes() == first

    def test_folders_on_the_way_are_made(self, tmp_path: Path) -> None:
        assert write_chrome_trace(simulated(), tmp_path / "a" / "b.json").exists()

    def test_a_failed_one_leaves_the_file_before_it_alone(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_chrome_trace(simulated(), path)
        before = path.read_bytes()

        def fail(*args: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("tracing.chrome._write_requests", fail)
        with pytest.raises(OSError, match="disk full"):
            write_chrome_trace(simulated(), path)

        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize(
        ("name", "traces", "fault"),
        [
            ("trace.pftrace", [trace_of()], "ends in .json or .json.gz"),
            ("trace.json", [], "nothing to write"),
        ],
    )
    def test_what_cannot_be_written_is_refused(
        self, tmp_path: Path, name: str, traces: list[Trace], fault: str
    ) -> None:
        with pytest.raises(ValueError, match=fault):
            write_chrome_trace(traces, tmp_path / name)
        assert not list(tmp_path.iterdir())

    def test_a_trace_without_records_is_a_file_without_slices(self, path: Path) -> None:
        file = written(trace_of(), path)

        assert not file.slices


numbers = st.integers(0, 30)


@st.composite
def any_spans(draw: st.DrawFn) -> Span:
    start, length, iteration, enqueued = draw(st.tuples(numbers, numbers, st.integers(-1, 3), st.none() | numbers))
    return Span(
        name=draw(st.sampled_from(["forward", "fetch", 'odd "name"'])),
        category=draw(st.sampled_from(Category)),
        lane=draw(st.sampled_from(["host", "compute", "copy", "other"])),
        start_ns=start,
        end_ns=start + length,
        iteration=iteration,
        enqueued_ns=enqueued,
        value=1.5,
    )


any_records = st.builds(
    lambda number, begin, length: record(number, begin, begin + length), st.integers(0, 3), numbers, numbers
)
any_requests = st.builds(
    RequestRecord,
    request_id=st.just("a"),
    arrival_ns=numbers,
    admitted_ns=st.none() | numbers,
    first_token_ns=st.none() | numbers,
    finished_ns=st.none() | numbers,
)
any_traces = st.builds(
    trace_of, st.lists(any_spans(), max_size=8), st.lists(any_records, max_size=3), st.lists(any_requests, max_size=4)
)


@pytest.mark.slow
class TestAnyTrace:
    @settings(max_examples=1000)
    @given(trace=any_traces)
    def test_keeps_every_record_and_its_order_and_nests(
        self, tmp_path_factory: pytest.TempPathFactory, trace: Trace
    ) -> None:
        file = written(trace, tmp_path_factory.getbasetemp() / "any.json")

        records = trace.records
        expected = Counter(one.category.value for one in records.spans)
        found = Counter(one.category for track in file.slices.values() for one in track)
        assert {name: found[name] for name in SPAN_CATEGORIES} == {name: expected[name] for name in SPAN_CATEGORIES}
        assert found["iteration"] == len(records.iterations)
        assert sum("output_tokens" in one.args for one in file.of("request")) == len(records.requests)
        moments = len(file.events("C")) + len(file.events("i")) - 3 * len(records.iterations)
        assert moments == expected["instant"] + expected["counter"]
        file.check_nesting()
        for members in file.slices.values():
            assert all(left.start_ns <= right.start_ns for left, right in pairwise(members))
        for start, end in file.flow_events:
            assert file.is_inside_a_slice(start)
            assert file.is_inside_a_slice(end)

    @given(some.traces())
    def test_is_strict_json_whatever_stands_in_it(self, tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
        written(trace, tmp_path_factory.getbasetemp() / "strange.json").check_nesting()


class TestTracks:
    intervals = st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=25
    )

    @given(intervals)
    def test_nested_ones_never_overlap_in_part(self, stretches: list[Interval]) -> None:
        ordered = sorted(stretches, key=lambda one: (one[0], -one[1]))

        for members in _by_track(ordered, nested_tracks(ordered)):
            assert not [
                (left, right) for left in members for right in members if left[0] < right[0] < left[1] < right[1]
            ]

    @given(intervals)
    def test_separate_ones_never_overlap_and_no_track_is_wasted(self, stretches: list[Interval]) -> None:
        ordered = sorted(stretches)
        tracks = separate_tracks(ordered)

        for members in _by_track(ordered, tracks):
            assert all(left[1] <= right[0] for left, right in pairwise(members))
        most = max((sum(a <= at < b or a == b == at for a, b in ordered) for at in range(45)), default=0)
        assert max(tracks, default=-1) + 1 <= most

    def test_details_stay_with_their_phase(self) -> None:
        spans = [phase("forward", 0, 10), detail("publish", 2, 5), detail("replay", 5, 10), phase("emit", 10, 12)]

        assert nested_tracks([(one.start_ns, one.end_ns) for one in spans]) == [0, 0, 0, 0]


def _by_track(stretches: list[Interval], tracks: list[int]) -> list[list[Interval]]:
    return [
        [one for one, track in zip(stretches, tracks, strict=True) if track == number] for number in sorted(set(tracks))
    ]
