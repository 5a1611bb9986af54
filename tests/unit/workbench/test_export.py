"""``workbench export``: from run folders to a file that Perfetto opens."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tests.unit.tracing.chrome_files import ChromeFile
from tests.unit.tracing.kineto_files import BASE_NS, event, kernel, write_kineto
from tests.unit.tracing.traces import phase, record
from tracing.run_folder import RunFolderError, write_run
from tracing.torch_clock import CLOCK_KEY
from tracing.trace import Records, Trace
from workbench.export import add_export_parser, run_export
from workbench.options import OneLineParser, UsageError


def export(*words: str | Path) -> int:
    parser = OneLineParser(prog="workbench")
    add_export_parser(parser.add_subparsers())
    args: argparse.Namespace = parser.parse_args(["export", *map(str, words)])
    status: int = args.command(args)
    return status


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two, of which the second began 500 later."""
    folders = []
    for name, at in (("legacy", 1_000), ("async", 1_500)):
        records = Records(spans=[phase("forward", at, at + 100)], iterations=[record(0, at, at + 200)])
        folders.append(write_run(Trace(name=name, records=records), tmp_path / name))
    return folders


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "trace.json.gz"


def starts(path: Path) -> list[int]:
    file = ChromeFile(path)
    return [file.slices[track][0].start_ns for track, name in file.track_names.items() if name == "host"]


class TestExport:
    def test_a_run_is_written_and_the_place_told(
        self, runs: list[Path], out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert export(runs[0], "--chrome", out) == 0

        assert [one.name for one in ChromeFile(out).of("phase")] == ["forward"]
        assert re.search(rf"written: {out}, 1 spans, .* MiB", capsys.readouterr().out)

    def test_several_begin_together(self, runs: list[Path], out: Path) -> None:
        export(*runs, "--chrome", out)

        assert starts(out) == [0, 0]

    def test_or_as_they_ran(self, runs: list[Path], out: Path) -> None:
        export(*runs, "--chrome", out, "--as-they-ran")

        assert starts(out) == [0, 500]

    def test_a_torch_trace_lies_on_the_runs_clock(
        self, runs: list[Path], out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        clocks = {CLOCK_KEY: [[BASE_NS, 1_000, 0], [BASE_NS, 1_000, 0]]}
        torch = write_kineto(tmp_path / "torch.json", [kernel(40, 60, 1)], **clocks)

        export(runs[0], "--chrome", out, "--torch", torch)

        assert "note: recorded while the run ran; it holds no ranges of our names" in capsys.readouterr().out

        [one] = ChromeFile(out).of("kernel")
        assert (one.start_ns, one.end_ns) == (40, 60)

    def test_a_torch_trace_without_clocks_is_placed_by_our_ranges(
        self, runs: list[Path], out: Path, tmp_path: Path
    ) -> None:
        events = [event("user_annotation", "forward", 7, 20), kernel(27, 30, 1)]

        export(runs[0], "--chrome", out, "--torch", write_kineto(tmp_path / "torch.json", events))

        [one] = ChromeFile(out).of("kernel")
        assert one.start_ns == 20

    def test_what_cannot_be_is_told_in_one_line(self, runs: list[Path], out: Path, tmp_path: Path) -> None:
        lost = write_kineto(tmp_path / "torch.json", [kernel(27, 30, 1)])
        later = {CLOCK_KEY: [[BASE_NS, 5_000, 0], [BASE_NS, 5_000, 0]]}
        foreign = write_kineto(tmp_path / "other.json", [kernel(27, 30, 1)], **later)
        for words, fault in (
            ([runs[0], "--chrome", "x.txt"], "ends in .json"),
            ([*runs, "--chrome", out, "--torch", "t.json"], "belongs to one run"),
            ([runs[0], "--chrome", out, "--torch", tmp_path / "no.json"], "cannot be read"),
            ([runs[0], "--chrome", out, "--torch", lost], f"--torch {lost}: .*noting_clock"),
            ([runs[0], "--chrome", out, "--torch", foreign], f"--torch {foreign}: the trace is of another run"),
        ):
            with pytest.raises(UsageError, match=fault) as caught:
                export(*words)
            assert "\n" not in str(caught.value)
        with pytest.raises(RunFolderError, match="no such folder"):
            export(tmp_path / "none", "--chrome", out)
        assert not out.exists()


def test_the_command_is_the_function() -> None:
    parser = OneLineParser(prog="workbench")
    add_export_parser(parser.add_subparsers())

    assert parser.parse_args(["export", "a", "--chrome", "b.json"]).command is run_export
