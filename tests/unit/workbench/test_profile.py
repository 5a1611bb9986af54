"""``workbench profile``: with a stand-in for Nsight Systems, and with the real one where there is one."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nsys import OFFSET_NS, make_fake_nsys, there_is_nsys
from tests.unit.tracing.test_run_folder import damaged
from tracing.recorder import Recorder
from workbench import profiled
from workbench.cli import main
from workbench.nsys_tool import NSYS_VARIABLE
from workbench.profile_job import (
    Captured,
    Job,
    ProfileError,
    Stretch,
    parse_stretch,
    read_captured,
    read_job,
    write_captured,
    write_job,
)
from workbench.session import Session

CAPTURED = Captured(
    first=0, last=3, session_id=1, nvtx="on", epoch_offset_ns=7, versions={"nvtx": "0.2.11", "torch": "2.13.0"}
)
WORKLOAD = "fixed:requests=4,input=6,output=12"
SMALL = ["--model", "oracle", "--workload", WORKLOAD, "--device", "inline", "--max-sequence-length", "64"]
GRAPHS = ["--graphs", "4", "--no-graph-non-decode"]
CLOSE_NS = 1_000_000
"""Of a median, and generous; docs/metrics.md has what was measured."""


def a_job() -> Job:
    config = {"device": "inline", "max_requests": 4, "max_sequence_length": 64}
    return Job(tool="nsys", model="oracle", workload=WORKLOAD, clock=None, config=config)


def refusal(folder: Path) -> str:
    """What is said of a damaged profile; empty where it can be read."""
    try:
        read_job(folder)
        read_captured(folder)
    except ProfileError as error:
        return str(error)
    return ""


def profile(folder: Path, *more: str, tool: str = "nsys", status: int = 0) -> dict[str, Any]:
    """Run the command on the oracle; returns what ``agreement.json`` holds."""
    assert main(["profile", "--tool", tool, *SMALL, "--out", str(folder), *more]) == status
    found: dict[str, Any] = json.loads((folder / "agreement.json").read_text(encoding="utf-8"))
    return found


def error_of(capsys: pytest.CaptureFixture[str], *call: str) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(["profile", *(() if "--read" in call else SMALL), *call]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


class TestStretch:
    @pytest.mark.parametrize(
        ("text", "stretch", "count"),
        [
            ("100-200", Stretch(first=100, last=200), 101),
            ("5-5", Stretch(first=5, last=5), 1),
            ("7", Stretch(last=6), 7),
        ],
    )
    def test_holds_both_ends(self, text: str, stretch: Stretch, count: int) -> None:
        assert parse_stretch(text) == stretch
        assert stretch.count == count

    @pytest.mark.parametrize("text", ["", "a-b", "5-", "-5", "1-2-3", "1.5"])
    def test_of_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ProfileError, match="takes A-B or a number"):
            parse_stretch(text)

    @pytest.mark.parametrize("text", ["5-4", "0"])
    def test_of_nothing_is_refused(self, text: str) -> None:
        with pytest.raises(ProfileError, match="holds no iteration"):
            parse_stretch(text)


class TestUnderNsys:
    def test_what_was_asked_for_is_captured_imported_compared_and_can_be_compared_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        nsys = make_fake_nsys(tmp_path)

        found = profile(tmp_path / "out", "--nsys", str(nsys), "--iterations", "3-6", *GRAPHS)

        assert found["tool"] == "Nsight Systems 2099.1.1"
        assert (found["captured"]["first"], found["captured"]["last"]) == (3, 6)
        assert found["ranges"]["missing"] == 0
        assert found["clock"]["offset_ns"] == OFFSET_NS
        assert {row["name"] for row in found["differences"]} >= {"overlap", "prepare", "publish", "replay", "samples"}
        assert all(row["count"] == 4 and row["start_p50_ns"] == 0 for row in found["differences"])
        shown = capsys.readouterr().out
        assert "iterations 3 to 6, 40 of 40 ranges found" in shown

        # On another machine, without the tool, from what the folder holds.
        assert main(["profile", "--tool", "nsys", "--nsys", "/nowhere", "--read", str(tmp_path / "out")]) == 0
        assert capsys.readouterr().out == shown

    def test_both_are_on_one_time_axis_in_a_file_and_a_folder_may_be_used_again(self, tmp_path: Path) -> None:
        for _ in range(2):
            profile(tmp_path / "out", "--nsys", str(make_fake_nsys(tmp_path)), "--iterations", "2")

        events = json.loads(gzip.decompress((tmp_path / "out" / "merged.json.gz").read_bytes()))["traceEvents"]
        starts = [event["ts"] for event in events if event.get("name") == "prepare" and event["ph"] == "X"]
        assert len(starts) == 4  # two iterations, ours and theirs
        assert len(set(starts)) == 2

    def test_counting_can_begin_at_the_first_full_batch(self, tmp_path: Path) -> None:
        call = ["--nsys", str(make_fake_nsys(tmp_path)), "--when", "decode-full", "--iterations", "1-2"]

        found = profile(tmp_path / "out", *call)
        # 0 launches the prompts, 1 the first full batch of decode rows: from there, 2 is number 0.
        assert (found["captured"]["first"], found["captured"]["last"]) == (3, 4)

    def test_a_range_that_did_not_arrive_is_told_and_the_status_says_so(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        nsys = make_fake_nsys(tmp_path, drops="emit")

        found = profile(tmp_path / "out", "--nsys", str(nsys), "--iterations", "2-3", status=1)
        assert found["ranges"] == {"found": 16, "missing": 2, "unknown": 0}
        assert "missing: phase emit of iteration 2" in capsys.readouterr().out


class TestUnderTorch:
    def test_without_a_device_it_says_that_there_is_nothing_to_compare(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = profile(tmp_path / "out", "--iterations", "2-3", tool="torch")

        assert found["device"] is None
        assert "nothing to compare without --device cuda" in capsys.readouterr().out
        assert (tmp_path / "out" / "merged.json.gz").exists()


class TestFaults:
    def test_a_machine_without_the_tool_gets_the_remedy(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(NSYS_VARIABLE, "/nowhere/nsys")

        line = error_of(capsys, "--tool", "nsys")
        assert line.startswith("workbench: error: /nowhere/nsys is no program; install NVIDIA Nsight Systems")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (
                {"stretch": Stretch(first=50, last=60)},
                "the workload ended after 13 iterations, before the first that was to be captured",
            ),
            (
                {"when": "decode-full", "workload": "poisson:rate=0.01,requests=4,input=6,output=2"},
                "no batch held 4 decode rows and no prefill; the most were 1",
            ),
            ({"model": "shape:nosuch"}, "nosuch"),
        ],
        ids=["too soon", "never full", "no model"],
    )
    def test_what_the_program_cannot_do_comes_back_in_one_line(
        self, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        write_job(replace(a_job(), **change), tmp_path)

        assert profiled.main(tmp_path) == 2
        with pytest.raises(ProfileError, match=re.escape(words)):
            read_captured(tmp_path)

    @pytest.mark.parametrize("text", ["", "[1]", '{"first": 1}'])
    def test_a_damaged_folder_is_told(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "captured.json").write_text(text, encoding="utf-8")

        with pytest.raises(ProfileError, match=r"captured\.json is damaged"):
            read_captured(tmp_path)

    @pytest.mark.parametrize("key", ["nvtx", "torch"])
    def test_a_result_without_a_version_is_told(
        self, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A KeyError came out when the table's head was written."""
        write_job(a_job(), tmp_path)
        write_captured(CAPTURED, tmp_path)
        path = tmp_path / "captured.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        del found["versions"][key]
        path.write_text(json.dumps(found), encoding="utf-8")

        line = error_of(capsys, "--tool", "nsys", "--read", str(tmp_path))
        assert f"{path} is damaged: versions must name nvtx and torch; make the profile again" in line

    @pytest.mark.parametrize("name", ["captured.json", "job.json"])
    @pytest.mark.parametrize("seed", range(4))
    def test_whatever_is_damaged_it_reads_or_is_refused_in_one_line(self, tmp_path: Path, name: str, seed: int) -> None:
        rng, path = random.Random(seed), tmp_path / name
        write_job(a_job(), tmp_path)
        write_captured(CAPTURED, tmp_path)
        data, refused = path.read_bytes(), 0
        for _ in range(150):
            path.write_bytes(damaged(path, data, rng))
            said = refusal(tmp_path)
            refused += bool(said)
            assert re.fullmatch(rf"({re.escape(str(path))} is damaged: [^\n]+)?", said)
        assert 40 < refused < 150
        path.write_text('{"versions": ' + "[" * 100_000 + "]" * 100_000 + "}", encoding="utf-8")
        with pytest.raises(ProfileError, match="is damaged"):
            read_captured(tmp_path) if name == "captured.json" else read_job(tmp_path)

    def test_more_iterations_than_the_recorder_keeps_are_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The comparison would have called ranges missing that the ring had let go."""

        def session(*args: Any, **more: Any) -> Session:
            return Session(*args, **more, recorder=Recorder(capacity=80))

        monkeypatch.setattr(profiled, "Session", session)
        write_job(a_job(), tmp_path)

        assert profiled.main(tmp_path) == 2
        with pytest.raises(ProfileError, match="13 iterations are more than the recorder keeps: capture fewer"):
            read_captured(tmp_path)
        write_job(replace(a_job(), stretch=Stretch(first=2, last=4)), tmp_path)
        assert profiled.main(tmp_path) == 0

    def test_a_program_that_dies_without_a_word_leaves_its_log(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        nsys = tmp_path / "nsys"
        nsys.write_text("#!/bin/sh\necho version 1.0\nexit 1\n", encoding="utf-8")
        nsys.chmod(0o755)

        line = error_of(capsys, "--tool", "nsys", "--nsys", str(nsys), "--out", str(tmp_path / "out"))
        assert "nsys failed with status 1: version 1.0" in line


@pytest.mark.slow
@pytest.mark.skipif(not there_is_nsys(), reason="needs Nsight Systems")
class TestUnderTheRealNsys:
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    def test_every_range_arrives_when_and_as_long_as_we_say(self, tmp_path: Path, mode: str) -> None:
        found = profile(tmp_path / "out", "--mode", mode, "--device", "cpu", "--iterations", "2-9", *GRAPHS)

        assert found["ranges"]["missing"] == 0
        assert {row["category"] for row in found["differences"]} == {"iteration", "phase", "copy", "graph", "wait"}
        assert found["clock"]["residual_p50_ns"] < CLOSE_NS
        assert all(row["length_p50_ns"] < CLOSE_NS for row in found["differences"])


def test_capture_without_a_profiler_is_a_run() -> None:
    with Session("oracle", device="inline", max_requests=2, max_sequence_length=64) as session:
        session.submit([1, 2, 3], max_tokens=4, ignore_eos=True)

        done = session.capture()

        assert [len(output.token_ids) for output in done] == [4]


class TestReading:
    """``--read nope`` said that the program had ended too soon, and flags of a run went unheard."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_job(a_job(), tmp_path)
        return tmp_path

    def test_of_a_folder_that_is_not_there_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = error_of(capsys, "--tool", "nsys", "--read", "nope")
        assert "--read nope: there is no such folder; name one that workbench profile made" in line

    def test_of_a_folder_without_a_profile_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "holds no profile: it has no job.json" in error_of(capsys, "--tool", "nsys", "--read", str(tmp_path))

    def test_of_a_profile_that_captured_nothing_says_so(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "ended before it captured anything" in error_of(capsys, "--tool", "nsys", "--read", str(folder))

    def test_of_another_tools_profile_says_so(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        line = error_of(capsys, "--tool", "torch", "--read", str(folder))
        assert "was made with --tool nsys; say so instead of --tool torch" in line

    @pytest.mark.parametrize(
        "flags",
        [
            ["--model", "oracle"],
            ["--workload", WORKLOAD],
            ["--clock", "wall"],
            ["--iterations", "3"],
            ["--when", "start"],
            ["--graph-trace", "graph"],
            ["--out", "other"],
            ["--config", "engine.yaml"],
            ["--max-requests", "4"],
            ["--no-graph-non-decode"],
        ],
        ids=lambda flags: flags[0],
    )
    def test_takes_no_flag_of_a_run(self, folder: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        line = error_of(capsys, "--tool", "nsys", "--read", str(folder), *flags)
        assert f"--read runs nothing, so {flags[0].replace('--no-', '--')} cannot go with it" in line


class TestCapture:
    def test_waits_for_the_device_before_the_profiler_stops(self) -> None:
        """Without that a tool missed the work of the last iteration."""
        said: list[str] = []
        with Session("oracle", device="inline", max_requests=2, max_sequence_length=64) as session:
            honest = session.engine.device.synchronize

            def synchronize() -> None:
                said.append("waited")
                honest()

            @contextmanager
            def capture() -> Iterator[None]:
                said.append("began")
                yield
                said.append("ended")

            session.engine.device.synchronize = synchronize  # type: ignore[method-assign]
            session.recorder.capture = capture  # type: ignore[method-assign, assignment]
            session.submit([1, 2, 3], max_tokens=4, ignore_eos=True)

            session.capture(2)

        assert said[:3] == ["began", "waited", "ended"]


class TestFolder:
    def test_that_holds_other_files_is_left_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "torch.json").write_text("mine", encoding="utf-8")

        status = main(["profile", "--tool", "torch", "--model", "oracle", "--out", str(tmp_path)])

        assert status == 2
        assert "name another folder" in capsys.readouterr().err
        assert (tmp_path / "torch.json").read_text(encoding="utf-8") == "mine"
