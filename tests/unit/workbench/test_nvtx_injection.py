"""Ranges as a tool sees them, without Nsight Systems: a library of ours records a run in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.nvtx.injection import attached, build_library, read_events
from tracing.importing import ImportedTrace
from tracing.nvtx_match import RangePair, emitted_ranges, match_ranges
from tracing.nvtx_ranges import SESSION_SHIFT
from tracing.run_folder import read_run
from workbench.profile_job import RUN, Captured, Job, read_captured, write_job

ROOT = Path(__file__).resolve().parents[3]
CLOSE_NS = 1_000_000
"""Of a median, and generous: a loaded machine may take the processor away between our clock and the tool's."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("recorder"))


@pytest.fixture(scope="module", params=["async", "legacy"])
def recorded(
    library: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ImportedTrace, Captured]:
    """A run's folder, what the tool saw of it, and what it says of itself."""
    folder = tmp_path_factory.mktemp(request.param)
    config = {"mode": request.param, "graphs": [4], "max_requests": 4, "graph_non_decode": False}
    workload = "fixed:requests=4,input=6,output=12"
    write_job(Job(tool="nsys", model="oracle", workload=workload, clock=None, config=config), folder)
    command = [sys.executable, "-m", "workbench.profiled", str(folder)]
    environment = attached(library, folder / "events.jsonl")
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=200)
    return folder, read_events(folder / "events.jsonl"), read_captured(folder)


def pairs_of(recorded: tuple[Path, ImportedTrace, Captured]) -> tuple[RangePair, ...]:
    folder, trace, captured = recorded
    records = read_run(folder / RUN).records
    match = match_ranges(emitted_ranges(records.spans, records.iterations, session_id=captured.session_id), trace)
    assert match.missing == ()
    assert [(one.name, one.category) for one in match.unknown] == [("capture", "capture")]
    return match.pairs


class TestATool:
    def test_sees_every_span_with_its_name_category_and_payload(
        self, recorded: tuple[Path, ImportedTrace, Captured]
    ) -> None:
        pairs = pairs_of(recorded)

        categories = {pair.theirs.category for pair in pairs}
        assert categories == {"iteration", "phase", "copy", "graph", "wait"}
        assert {pair.theirs.domain for pair in pairs} == {"engine"}
        assert all(pair.ours.payload == pair.theirs.payload for pair in pairs)
        assert {pair.theirs.payload >> SESSION_SHIFT for pair in pairs} == {recorded[2].session_id}  # type: ignore[operator]

    def test_sees_them_when_and_as_long_as_we_say(self, recorded: tuple[Path, ImportedTrace, Captured]) -> None:
        pairs = pairs_of(recorded)

        assert median(abs(pair.ours.start_ns - pair.theirs.start_ns) for pair in pairs) < CLOSE_NS
        assert median(abs(pair.theirs.duration_ns - _length(pair)) for pair in pairs) < CLOSE_NS

    def test_sees_no_span_shorter_than_we_do(self, recorded: tuple[Path, ImportedTrace, Captured]) -> None:
        # The range is opened before our clock is read and closed after it, so this holds on any machine.
        for pair in pairs_of(recorded):
            if pair.ours.category != "iteration":
                assert pair.theirs.start_ns <= pair.ours.start_ns
                assert pair.theirs.end_ns >= pair.ours.end_ns

    def test_sees_the_capture_range_around_all_of_it(self, recorded: tuple[Path, ImportedTrace, Captured]) -> None:
        spans = recorded[1].spans
        (capture,) = (span for span in spans if span.name == "capture")

        assert all(capture.start_ns <= span.start_ns and span.end_ns <= capture.end_ns for span in spans)

    def test_is_named_by_the_run(self, recorded: tuple[Path, ImportedTrace, Captured], library: Path) -> None:
        assert recorded[2].nvtx == f"tool attached: {library}"


def _length(pair: RangePair) -> int:
    return pair.ours.end_ns - pair.ours.start_ns
