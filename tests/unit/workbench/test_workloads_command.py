"""Workloads on the command line: what was left out of a file is said, and a wrong call names its remedy."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.profile_job import Captured, ProfileError, read_captured, write_captured
from workbench.workloads import known_workloads

ENGINE = ["--model", "oracle", "--device", "inline", "--max-sequence-length", "64", "--num-blocks", "40"]
TRACE = "timestamp,input,output\n0,9,3\n1,x,3\n2,40,30\n3,12,4\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE, encoding="utf-8")
    return path


class TestNotes:
    warnings = (
        "1 of 4 rows are malformed and left out: line 3: input must be a whole number of at least 1, got 'x'",
        "1 of 3 outputs end early: with their prompts they exceed max_sequence_length=64",
    )

    def test_of_a_run_are_warnings_and_stand_in_its_json(self, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", *ENGINE, "--json", "--workload", f"csv:{trace}?scale=0.01"]) == 0

        streams = capsys.readouterr()
        document = json.loads(streams.out)
        assert [line for line in streams.err.splitlines() if line.startswith("warning: ")] == [
            f"warning: workload: {note}" for note in self.warnings
        ]
        assert document["workload"]["notes"] == [self.warnings[0]]
        assert [len(one["output_token_ids"]) for one in document["requests"]] == [3, 24, 4]

    def test_of_a_comparison_stand_under_its_table(self, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        text = f"csv:{trace}?concurrency=2"
        assert main(["compare", *ENGINE, "--legs", "legacy,async", "--json", "--workload", text]) == 0

        streams = capsys.readouterr()
        notes = json.loads(streams.out)["notes"]
        assert [note for note in notes if note.startswith("Workload: ")] == [
            f"Workload: {one}." for one in self.warnings
        ]
        assert f"warning: workload: {self.warnings[0]}" in streams.err

    def test_of_a_profile_come_back_from_its_program(self, tmp_path: Path) -> None:
        versions = {"nvtx": "0", "torch": "0"}
        captured = Captured(
            first=0, last=1, session_id=1, nvtx="no", epoch_offset_ns=0, versions=versions, workload_notes=("a note",)
        )
        write_captured(captured, tmp_path)
        assert list(read_captured(tmp_path).workload_notes) == ["a note"]

        broken = json.dumps({**asdict(captured), "workload_notes": "a note"})
        next(tmp_path.iterdir()).write_text(broken, encoding="utf-8")
        with pytest.raises(ProfileError, match="workload_notes must be a list of texts"):
            read_captured(tmp_path)


class TestHelp:
    def test_shows_an_example_of_every_kind(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["run", "--help"])

        shown = "".join(capsys.readouterr().out.split())
        for example in known_workloads().split(" | "):
            assert example in shown

    def test_prompts_too_long_are_refused_in_one_line(self, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", *ENGINE[:-4], "--max-sequence-length", "32", "--workload", f"csv:{trace}"]) == 2

        error = capsys.readouterr().err.splitlines()[-1]
        assert "1 of 3 prompts leave no room for output within max_sequence_length=32" in error
        assert "max_input= or max_length=" in error
