"""``workbench whatif``: what bounds a saved run, and what another length would make of it."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tracing.simulated import Lengths, simulate
from tracing.run_folder import RunFolderError, write_run
from tracing.trace import Records, Trace
from workbench.options import OneLineParser, UsageError
from workbench.what_if_command import add_what_if_flags, parse_changes, what_if_command


def whatif(*words: str | Path) -> int:
    parser = OneLineParser(prog="workbench whatif")
    add_what_if_flags(parser)
    args: argparse.Namespace = parser.parse_args([*map(str, words)])
    return what_if_command(args)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four legacy iterations whose host and device never overlap."""
    spans, records = simulate("legacy", 4, Lengths())
    return write_run(Trace(name="legacy", records=Records(spans=spans, iterations=records)), tmp_path / "run")


class TestMissingRun:
    def test_names_the_runs_that_a_notebook_saved_in_its_own_folder(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """session.save("runs/mine") in a notebook, and ``workbench report runs/mine`` from the root found nothing."""
        monkeypatch.chdir(tmp_path)
        for place in ("notebooks/runs/mine", "runs/demo/async"):
            shutil.copytree(run, tmp_path / place)
        (tmp_path / "runs" / "notes").mkdir()

        with pytest.raises(RunFolderError) as refused:
            whatif("runs/mine")
        assert str(refused.value).startswith("runs/mine is no run: there is no such folder; saved runs nearby: ")
        assert set(str(refused.value).partition("nearby: ")[2].split(", ")) == {
            "notebooks/runs/mine",
            "runs/demo/async",
        }

    def test_says_how_to_save_one_where_there_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(RunFolderError, match=r"no saved run is in runs or notebooks/runs either; save one with"):
            whatif("runs/mine")


class TestCommand:
    def test_without_changes_says_what_bounds_the_run(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert whatif(run) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("critical path of 4 iterations")
        assert lines[1].split()[:2] == ["forward", "compute"]

    def test_of_one_iteration(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        whatif(run, "--iteration", "2", "--json")
        found = json.loads(capsys.readouterr().out)
        assert found["num_iterations"] == 1
        assert sum(share["time_ns"] for share in found["shares"]) == found["time_ns"]

    def test_a_shorter_forward_shortens_legacy_by_as_much(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        whatif(run, "device forward=0.5x", "--json")
        found = json.loads(capsys.readouterr().out)
        assert found["makespan_before_ns"] - found["makespan_after_ns"] == 4 * 500

    def test_microseconds_are_added(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        whatif(run, "resolve=+2us", "--json")
        found = json.loads(capsys.readouterr().out)
        assert found["makespan_after_ns"] - found["makespan_before_ns"] == 4 * 2_000

    @pytest.mark.parametrize("change", ["resolve", "resolve=2", "resolve=x", "=2x", "resolve=+5", "resolve=1..2x"])
    def test_what_cannot_be_read_is_named(self, run: Path, change: str) -> None:
        with pytest.raises(UsageError, match="cannot read the change"):
            whatif(run, change)

    def test_unknown_work_is_answered_with_what_there_is(self, run: Path) -> None:
        with pytest.raises(UsageError, match=r"'resolv' is not in the trace; known are .*host resolve"):
            whatif(run, "resolv=2x")

    def test_an_iteration_that_is_not_there(self, run: Path) -> None:
        with pytest.raises(UsageError, match="timed one of the trace, got 9"):
            whatif(run, "--iteration", "9")

    def test_an_iteration_goes_with_no_change(self, run: Path) -> None:
        with pytest.raises(UsageError, match="critical path"):
            whatif(run, "resolve=2x", "--iteration", "2")

    def test_an_empty_run_says_that_nothing_was_measured(self, tmp_path: Path) -> None:
        folder = write_run(Trace(name="empty", records=Records()), tmp_path / "empty")
        with pytest.raises(UsageError, match="no iteration was measured"):
            whatif(folder)


class TestChanges:
    def test_factors_and_times_of_both_signs(self) -> None:
        found = parse_changes(["resolve=0.5x", "device forward=2x", "prepare=+200us", "emit=-1.5ms"])
        assert found == ({"resolve": 0.5, "device forward": 2.0}, {"prepare": 200.0, "emit": -1500.0})


class TestTrace:
    def test_whole_path_covers_every_stretch(self) -> None:
        """A run with a void iteration in the middle has two stretches, and its path is the sum of theirs."""
        spans, records = simulate("async", 9, Lengths())
        records[4] = replace(records[4], void_reasons=("hand_stepped",))
        trace = Trace(name="async", records=Records(spans=spans, iterations=records))
        path = trace.critical_path()
        assert path.num_iterations == len(records) - 1
        assert sum(share.share for share in path.shares) == pytest.approx(1)
        assert path.time_ns == sum(share.time_ns for share in path.shares)
        assert path.time_ns < path.end_ns - path.start_ns
