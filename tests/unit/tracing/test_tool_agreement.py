"""Whose each kernel is, and how far our lanes are from a tool's, for traces with known answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.kineto_files import BASE_NS, Event, kernel, launch, mirrored, write_kineto
from tests.unit.tracing.simulated import Lengths, simulate
from tests.unit.tracing.traces import device, phase, record
from tracing.agreement import Agreement, Distance, WorkAgreement, agreement
from tracing.agreement_table import agreement_lines
from tracing.importing import DEVICE_KINDS, ImportedKind, ImportedSpan, ImportedTrace, by_start
from tracing.records import IterationRecord, Span
from tracing.tool_groups import group_work
from tracing.torch_clock import CLOCK_KEY
from tracing.torch_profile import read_torch_trace

SLOW = 1_000
"""Simulated lengths are nanoseconds; the margins between launches are microseconds."""


def real(spans: Sequence[Span], records: Sequence[IterationRecord]) -> tuple[list[Span], list[IterationRecord]]:
    """A simulated trace in microseconds."""
    slower = [
        replace(
            span,
            start_ns=span.start_ns * SLOW,
            end_ns=span.end_ns * SLOW,
            enqueued_ns=None if span.enqueued_ns is None else span.enqueued_ns * SLOW,
        )
        for span in spans
    ]
    return slower, [replace(one, begin_ns=one.begin_ns * SLOW, end_ns=one.end_ns * SLOW) for one in records]


def decode(mode: str = "async", count: int = 12) -> tuple[list[Span], list[IterationRecord]]:
    return real(*simulate(mode, count, Lengths()))


def tool(tmp_path: Path, events: Sequence[Event]) -> ImportedTrace:
    """What the reader makes of a file with those events, on our clock."""
    clocks = {CLOCK_KEY: [[BASE_NS, 0, 0], [BASE_NS + 1, 1, 0]]}
    return read_torch_trace(write_kineto(tmp_path / "torch.json", events, **clocks))


def compare(tmp_path: Path, mode: str = "async", **how: int) -> Agreement:
    spans, records = decode(mode)
    return agreement(spans, records, tool(tmp_path, mirrored(spans, **how)))


def row(found: Agreement, name: str) -> WorkAgreement:
    return next(one for one in found.work if one.name == name)


def piece(start: int, end: int, *, stream: int = 7, correlation: int | None = None) -> ImportedSpan:
    return ImportedSpan(
        kind=ImportedKind.KERNEL, name="gemm", start_ns=start, end_ns=end, stream=stream, correlation=correlation
    )


def without_launches(trace: ImportedTrace) -> ImportedTrace:
    return replace(trace, spans=tuple(span for span in trace.spans if span.kind is not ImportedKind.RUNTIME))


class TestWhoseWorkItIs:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_every_kernel_goes_to_the_piece_that_launched_it(self, tmp_path: Path, mode: str) -> None:
        spans, _ = decode(mode)

        found = group_work(spans, tool(tmp_path, mirrored(spans, kernels=3)))

        assert found.is_by_launches
        assert not found.missing
        assert not found.strange
        for group in found.groups:
            assert len(group.work) == 3
            assert (group.start_ns, group.end_ns) == (group.span.start_ns, group.span.end_ns)

    @pytest.mark.parametrize("off_ns", [-1_500, 1_500])
    def test_a_clock_that_is_a_little_off_changes_nothing(self, tmp_path: Path, off_ns: int) -> None:
        spans, _ = decode()

        found = group_work(spans, tool(tmp_path, mirrored(spans)).moved(off_ns))

        assert not found.missing
        assert {group.start_ns - group.span.start_ns for group in found.groups} == {off_ns}

    def test_a_launch_from_outside_our_phases_belongs_to_nobody(self, tmp_path: Path) -> None:
        spans = [phase("forward", 100_000, 200_000), device("forward", 150_000, 900_000, enqueued=180_000)]
        events = [
            launch(20_000, 24_000, 1),
            kernel(30_000, 40_000, 1),
            launch(140_000, 150_000, 2),
            kernel(150_000, 890_000, 2),
            launch(300_000, 310_000, 3),
            kernel(910_000, 920_000, 3),
        ]

        found = group_work(spans, tool(tmp_path, events))

        assert [[one.correlation for one in group.work] for group in found.groups] == [[2]]
        assert [one.correlation for one in found.strange] == [1, 3]

    def test_work_whose_launch_was_not_recorded_is_strange_and_ours_is_missing(self, tmp_path: Path) -> None:
        spans, _ = decode()
        first, *rest = mirrored(spans)

        found = group_work(spans, tool(tmp_path, rest))

        assert first["cat"] == "cuda_runtime"
        assert len(found.missing) == 1
        assert len(found.strange) == 4

    def test_without_launches_time_and_stream_decide(self, tmp_path: Path) -> None:
        spans, _ = decode()

        found = group_work(spans, without_launches(tool(tmp_path, mirrored(spans, late_ns=2_000, lag_ns=1_000))))

        assert not found.is_by_launches
        assert not found.missing
        assert not found.strange
        assert {group.start_ns - group.span.start_ns for group in found.groups} == {2_000}

    def test_spans_without_a_moment_of_enqueueing_are_matched_by_time(self) -> None:
        spans = [device("forward", 0, 100), device("sample", 110, 150)]
        trace = ImportedTrace(source="x", spans=(piece(5, 95), piece(112, 149), piece(4_000, 4_100)))

        found = group_work(spans, trace)

        assert [(group.span.name, group.start_ns) for group in found.groups] == [("forward", 5), ("sample", 112)]
        assert [one.start_ns for one in found.strange] == [4_000]

    def test_gaps_inside_a_piece_are_what_no_kernel_covers(self) -> None:
        trace = ImportedTrace(source="x", spans=(piece(10, 30), piece(20, 40), piece(55, 60), piece(60, 90)))

        [group] = group_work([device("forward", 5, 95)], trace).groups

        assert (group.start_ns, group.end_ns, group.inner_gap_ns) == (10, 90, 15)

    def test_a_graph_shown_as_one_piece_has_no_gaps_that_are_known(self) -> None:
        whole = replace(piece(10, 90), kind=ImportedKind.GRAPH)

        [group] = group_work([device("forward", 5, 95)], ImportedTrace(source="x", spans=(whole,))).groups

        assert group.inner_gap_ns is None

    small = st.integers(0, 60)
    strange_pieces = st.builds(
        ImportedSpan,
        kind=st.sampled_from(ImportedKind),
        name=st.just("x"),
        start_ns=small,
        end_ns=small,
        stream=st.none() | st.integers(0, 2),
        correlation=st.none() | st.integers(0, 4),
    )
    strange_spans = st.builds(
        device,
        st.sampled_from(["forward", "sample"]),
        small,
        small,
        lane=st.sampled_from(["compute", "copy"]),
        enqueued=st.none() | small,
    )

    @given(st.lists(strange_spans, max_size=6), st.lists(strange_pieces, max_size=12))
    def test_whatever_a_tool_shows_each_piece_goes_to_one_of_ours_or_is_strange(
        self, spans: list[Span], pieces: list[ImportedSpan]
    ) -> None:
        trace = ImportedTrace(source="x", spans=by_start(pieces))

        found = group_work(spans, trace)

        matched = [one for group in found.groups for one in group.work]
        assert len(matched) + len(found.strange) == len(trace.of(*DEVICE_KINDS))
        assert len(found.groups) + len(found.missing) == len(spans)
        agreement(spans, [record(0, 0, 60)], trace)


class TestAgreement:
    def test_a_tool_that_sees_the_same_agrees_in_everything(self, tmp_path: Path) -> None:
        found = compare(tmp_path)

        assert {(one.lane, one.name) for one in found.work} == {
            ("compute", "publish"),
            ("compute", "forward"),
            ("compute", "sample"),
            ("copy", "fetch"),
        }
        for one in found.work:
            assert one.start == one.end == one.length == Distance(median_ns=0, p50_ns=0, p99_ns=0)
            assert (one.length_share_p50, one.total_share, one.inner_gap_share) == (0, 0, 0)
        assert found.bubbles is not None
        assert found.hidden is not None
        assert found.bubbles.apart == found.hidden.apart == found.inner_gaps == found.strange_ns == 0

    def test_a_late_first_kernel_and_an_early_last_one_are_told_apart(self, tmp_path: Path) -> None:
        forward = row(compare(tmp_path, late_ns=3_000, lag_ns=1_000), "forward")

        assert (forward.start.median_ns, forward.end.median_ns, forward.length.median_ns) == (-3_000, 1_000, 4_000)
        tool_ns = 1_000 * SLOW - 4_000
        assert forward.tool_length_p50_ns == tool_ns
        assert forward.length_share_p50 == pytest.approx(4_000 / tool_ns)
        assert forward.total_share == pytest.approx(4_000 / tool_ns)

    def test_medians_carry_a_sign_and_percentiles_do_not(self) -> None:
        assert Distance.of([-10, -10, -10, 2]) == Distance(median_ns=-10, p50_ns=10, p99_ns=10)

    def test_bubbles_and_hidden_share_are_those_of_each_side(self) -> None:
        """One iteration of 100: ours computes in [10, 60) and [70, 90), the tool's kernels in [20, 60) and [75, 90)."""
        spans = [
            phase("prepare", 0, 40),
            device("forward", 10, 60),
            device("sample", 70, 90),
        ]
        trace = ImportedTrace(source="x", spans=(piece(20, 60), piece(75, 90)))

        found = agreement(spans, [record(0, 0, 100)], trace)

        assert found.wall_ns == 80  # from the first to the last that either side shows
        assert found.bubbles is not None
        assert found.bubbles.ours == pytest.approx(10 / 80)
        assert found.bubbles.tool == pytest.approx(15 / 80)
        assert found.hidden is not None
        assert found.hidden.ours == pytest.approx(30 / 30)
        assert found.hidden.tool == pytest.approx(20 / 30)

    def test_gaps_inside_pieces_are_no_bubbles(self) -> None:
        trace = ImportedTrace(source="x", spans=(piece(10, 30), piece(50, 60), piece(70, 90)))

        found = agreement([device("forward", 10, 60), device("sample", 70, 90)], [record(0, 0, 100)], trace)

        assert found.bubbles is not None
        assert found.bubbles.tool == pytest.approx(10 / 80)
        assert found.inner_gaps == pytest.approx(20 / 80)

    def test_void_iterations_count_for_pieces_and_for_no_share(self) -> None:
        trace = ImportedTrace(source="x", spans=(piece(10, 30),))

        found = agreement([device("forward", 10, 30)], [record(0, 0, 100, void_reasons=("debugger",))], trace)

        assert found.work[0].count == 1
        assert (found.wall_ns, found.bubbles, found.hidden, found.inner_gaps) == (0, None, None, None)

    def test_a_trace_that_was_cut_off_is_compared_as_far_as_it_goes(self, tmp_path: Path) -> None:
        spans, records = decode()
        events = mirrored(spans)

        whole = agreement(spans, records, tool(tmp_path, events))
        half = agreement(spans, records, tool(tmp_path, events[: len(events) // 2]))

        assert 0 < half.wall_ns < whole.wall_ns
        assert row(half, "forward").count < row(whole, "forward").count
        assert half.missing["compute forward"] + row(half, "forward").count == row(whole, "forward").count
        assert half.bubbles is not None
        assert half.bubbles.apart == pytest.approx(0, abs=0.05)

    def test_a_tool_that_saw_nothing_of_ours_is_no_failure(self) -> None:
        found = agreement([device("forward", 10, 30)], [record(0, 0, 100)], ImportedTrace(source="x", spans=()))

        assert found.work == ()
        assert found.missing == {"compute forward": 1}
        assert agreement_lines(found, "nsys") == [
            "nothing of ours was found in the trace of nsys",
            "not in the tool's trace: 1 compute forward",
        ]

    def test_any_order_of_records_gives_the_same(self, tmp_path: Path) -> None:
        spans, records = decode()
        trace = tool(tmp_path, mirrored(spans, late_ns=500))
        mixed, turned = list(spans), list(records)
        random.Random(0).shuffle(mixed)
        random.Random(1).shuffle(turned)

        assert agreement(mixed, turned, trace) == agreement(spans, records, trace)

    def test_the_delay_of_notes_shows_that_the_clocks_agree(self, tmp_path: Path) -> None:
        """The made launches return 1 µs before the note."""
        assert compare(tmp_path).note_delay_p50_ns == 1_000

    def test_how_long_after_its_launch_work_started_is_the_tools_alone(self) -> None:
        call = replace(piece(40, 60, correlation=1), kind=ImportedKind.RUNTIME)
        trace = ImportedTrace(source="x", spans=(call, piece(75, 90, correlation=1)))

        found = agreement([device("forward", 10, 90, enqueued=65)], [record(0, 0, 100)], trace)

        assert row(found, "forward").after_launch_p50_ns == 15


class TestTheTable:
    def test_it_has_a_row_a_name_and_says_what_was_compared(self, tmp_path: Path) -> None:
        lines = agreement_lines(compare(tmp_path, late_ns=3_000), "torch.profiler")

        text = "\n".join(lines)
        [forward] = [line for line in lines if line.split()[:2] == ["compute", "forward"]]
        assert "-3.0" in forward
        assert "3.0 (0.3 %)" in forward
        for words in ("bubbles", "hidden share", "gaps inside pieces 0.00 %", "ours less torch.profiler"):
            assert words in text

    def test_it_tells_that_work_was_matched_by_time_alone(self, tmp_path: Path) -> None:
        spans, records = decode()
        found = agreement(spans, records, without_launches(tool(tmp_path, mirrored(spans))))

        assert "torch.profiler shows no launches, so work was matched by time alone" in agreement_lines(
            found, "torch.profiler"
        )
