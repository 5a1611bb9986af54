"""Whether a trace of another tool was recorded while a run ran."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import accumulate

import pytest

from tests.unit.tracing.traces import device, phase
from tracing.belonging import belonging_note
from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, TraceImportError
from tracing.records import Span
from tracing.torch_clock import offset_by_ranges

STEP_NS = 1_000_000


def starts_of(seed: int, count: int, step_ns: int = STEP_NS) -> list[int]:
    """Steps that are not equally long: each by up to a tenth of a step."""
    rng = random.Random(seed)
    return list(accumulate(round(step_ns * rng.uniform(0.9, 1.1)) for _ in range(count)))


def run_of(starts: Sequence[int]) -> list[Span]:
    return [phase("forward", at, at + 1_000, number) for number, at in enumerate(starts)]


def trace_of(starts: Sequence[int], name: str = "forward", *, kind: ImportedKind = ImportedKind.RANGE) -> ImportedTrace:
    spans = [ImportedSpan(kind=kind, name=name, start_ns=at, end_ns=at + 900) for at in starts]
    return ImportedTrace(source="torch.profiler", spans=tuple(spans))


def is_told(trace: ImportedTrace, spans: Sequence[Span], *said: str) -> None:
    with pytest.raises(TraceImportError) as caught:
        belonging_note(trace, spans)
    for part in said:
        assert part in str(caught.value)


class TestTime:
    def test_of_another_time_is_refused_with_how_far_it_is(self) -> None:
        spans = run_of([10_000_000_000, 11_000_000_000])
        kernels = ImportedKind.KERNEL
        is_told(trace_of([0], kind=kernels), spans, "of another run", "9.999999 s before the run began", "name the one")
        is_told(trace_of([12_000_000_000], kind=kernels), spans, "0.999999 s after the run had ended")

    def test_that_it_shares_is_all_that_a_trace_without_our_ranges_shows(self) -> None:
        for trace in (trace_of([500], kind=ImportedKind.KERNEL), trace_of([500], "aten::add")):
            assert belonging_note(trace, [phase("forward", 0, 1_000)]).startswith("recorded while the run ran")

    def test_of_nothing_is_refused(self) -> None:
        is_told(trace_of([]), run_of([0]), "nothing shows that they belong together")
        is_told(trace_of([0]), [], "nothing shows that they belong together")


class TestRanges:
    def test_that_lie_where_ours_do_show_it(self) -> None:
        starts = starts_of(1, 40)
        late = [at + 3_000 for at in starts[5:30]]
        note = belonging_note(trace_of(late), run_of(starts))
        assert note == "its 25 ranges of our names begin 3.0 µs from ours in the median"

    @pytest.mark.parametrize("step_ns", [200_000, STEP_NS, 30_000_000])
    @pytest.mark.parametrize("seed", range(5))
    def test_of_another_run_are_refused_though_names_and_time_agree(self, seed: int, step_ns: int) -> None:
        ours, theirs = starts_of(100 + seed, 200, step_ns), starts_of(200 + seed, 200, step_ns)
        is_told(trace_of(theirs), run_of(ours), "of another run: its", "ranges of our names begin")

    @pytest.mark.parametrize("seed", range(5))
    def test_of_another_run_do_not_pass_where_they_were_laid_on_ours_themselves(self, seed: int) -> None:
        """Without clocks the place where names fit best is taken, and some place always is."""
        spans, trace = run_of(starts_of(100 + seed, 200)), trace_of(starts_of(200 + seed, 200))
        is_told(trace.moved(offset_by_ranges(trace, spans)), spans, "of another run")

    def test_few_may_fit_by_chance_and_the_note_says_so(self) -> None:
        spans = run_of(starts_of(1, 3))
        assert "so few may fit by chance" in belonging_note(trace_of(starts_of(2, 3)), spans)

    def test_of_a_device_are_none_of_ours(self) -> None:
        spans = [device("forward", at, at + 9) for at in range(0, 9_000_000, STEP_NS)]
        note = belonging_note(trace_of([at + 400_000 for at in range(0, 8_000_000, STEP_NS)]), spans)
        assert re.search("no ranges of our names", note)

    def test_from_before_our_first_do_not_count(self) -> None:
        """A profiler may run while the workload warms up."""
        starts = starts_of(1, 40)
        before = [at - 50_370_000 for at in starts if at < 45_000_000]
        assert "its 40 ranges" in belonging_note(trace_of([*before, *starts]), run_of(starts))
