"""Runs saved, loaded, and laid side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.unit.workbench.worlds import make_session, spread_workload
from tracing.run_folder import RunFolderError, write_run
from tracing.trace import Records, Trace
from workbench import load_run
from workbench.runs import Run, serve
from workbench.saved_runs import check_folders, folder_of, report_of, save_runs


def made_run(name: str = "async", **options: Any) -> Run:
    with make_session(clock="iterations", **options) as session:
        return serve(session, spread_workload(), name=name)


@pytest.fixture(scope="module")
def run() -> Run:
    return made_run()


def bare(name: str, **fields: Any) -> Trace:
    return Trace(name=name, records=Records(), **fields)


def notes_of(tmp_path: Path, *traces: Trace) -> list[str]:
    folders = [write_run(trace, tmp_path / str(number)) for number, trace in enumerate(traces)]
    return report_of(folders, tmp_path / "report.html")


class TestRunTrace:
    def test_comes_back_equal_from_its_folder(self, run: Run, tmp_path: Path) -> None:
        again = load_run(write_run(run.trace, tmp_path / "run"))

        assert again == run.trace
        assert again.summary == run.summary
        assert again.workload == {**spread_workload().to_dict(), "clock": "iterations"}
        assert again.counters["finished"] == {"length": 6}
        assert again.environment["torch"]
        assert [output["output_token_ids"] for output in again.outputs] == [list(o.token_ids) for o in run.outputs]

    def test_logprobs_and_their_infinities_can_be_saved(self, tmp_path: Path) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=3, logprobs=2, prompt_logprobs=1)
            session.run()
            session.save(tmp_path / "run")

        (output,) = load_run(tmp_path / "run").outputs
        assert len(output["logprobs"]) == 3
        assert output["prompt_logprobs"][0] is None


class TestFolders:
    def test_each_run_has_one_of_its_name(self, tmp_path: Path) -> None:
        saved = save_runs(tmp_path, [bare("legacy"), bare("async without overlap")])

        assert saved == [tmp_path / "legacy", tmp_path / "async-without-overlap"]
        assert folder_of(tmp_path, "a/b") == tmp_path / "a-b"
        assert load_run(saved[1]).name == "async without overlap"

    def test_are_checked_before_the_runs(self, tmp_path: Path) -> None:
        save_runs(tmp_path, [bare("async")])

        check_folders(tmp_path, ["legacy"])
        check_folders(tmp_path, ["legacy", "async"], overwrite=True)
        with pytest.raises(RunFolderError, match="async holds a run already"):
            check_folders(tmp_path, ["legacy", "async"])


class TestReport:
    def page(self, tmp_path: Path, *folders: Path) -> str:
        report_of(folders, tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    def test_of_one_run_has_its_numbers_and_no_comparison(self, run: Run, tmp_path: Path) -> None:
        page = self.page(tmp_path, write_run(run.trace, tmp_path / "run"))

        assert "<h1>oracle: async</h1>" in page
        assert "request-5" in page
        assert "The runs differ in" not in page
        assert 'class="differs"' not in page

    def test_of_two_marks_what_differs(self, run: Run, tmp_path: Path) -> None:
        here = write_run(
            replace(run.trace, environment={"gpu": "H200", "torch": "2.11", "commit": None}), tmp_path / "here"
        )
        there = made_run("legacy", mode="legacy").trace
        there = replace(there, environment={"gpu": None, "torch": "2.11"}, device_clock_error_ns=1500)

        page = self.page(tmp_path, here, write_run(there, tmp_path / "there"))

        assert "The runs differ in: mode." in page
        assert '<span class="differs" title="the runs differ">gpu <b>H200</b> / <b>none</b></span>' in page
        assert "<span>torch <b>2.11</b></span>" in page
        assert "commit" not in page.split("Timeline")[0]
        assert "device times <b>on the host&#39;s clock</b> / <b>within 1.5 µs</b>" in page
        assert "async and legacy gave the same ids for all 6 requests." in page

    def test_names_runs_so_that_they_can_be_told_apart(self, tmp_path: Path) -> None:
        first = write_run(bare("async"), tmp_path / "before" / "run")
        second = write_run(bare("async"), tmp_path / "after")
        third = write_run(bare("async"), tmp_path / "later" / "run")

        assert "run and after</h1>" in self.page(tmp_path, first, second)
        assert f"{first} and {third}</h1>" in self.page(tmp_path, first, third)

    def test_refuses_a_run_beside_itself(self, tmp_path: Path) -> None:
        folder = write_run(bare("async"), tmp_path / "run")

        with pytest.raises(RunFolderError, match="name each folder once"):
            report_of([folder, tmp_path / "." / "run"], tmp_path / "report.html")


class TestDamage:
    WHOLE: ClassVar[dict[str, Any]] = {"request_id": "r0", "prompt_token_ids": [1], "output_token_ids": [2]}

    @pytest.mark.parametrize(
        ("key", "value"),
        [(key, value) for key in WHOLE for value in (None, 7, ["x"], {})],
    )
    def test_outputs_without_what_every_one_has_are_refused(self, tmp_path: Path, key: str, value: Any) -> None:
        """``[{}]`` was read, and a KeyError came out of the report."""
        outputs = [self.WHOLE, {name: one for name, one in self.WHOLE.items() if name != key}]
        if value is not None:
            outputs[1][key] = value
        folder = write_run(bare("async", outputs=outputs), tmp_path / "run")

        for act in (load_run, lambda one: report_of([one], tmp_path / "report.html")):
            with pytest.raises(RunFolderError) as caught:
                act(folder)
            assert str(caught.value).startswith(f"{folder / 'outputs.json'} is damaged: its output 1 has no {key}")
            assert str(caught.value).endswith("or make the run again")


class TestNotes:
    def outputs(self, *tokens: list[int], prompt: int = 1) -> list[dict[str, Any]]:
        return [
            {"request_id": f"r{index}", "prompt_token_ids": [prompt], "output_token_ids": ids}
            for index, ids in enumerate(tokens)
        ]

    def test_say_which_requests_have_other_ids(self, tmp_path: Path) -> None:
        left = bare("legacy", outputs=self.outputs([1], [2], [3]))
        right = bare("async", outputs=self.outputs([1], [9], [8]))

        assert notes_of(tmp_path, left, right) == ["The ids of legacy and async differ for 2 of 3 requests: r1, r2."]

    def test_a_long_list_is_cut(self, tmp_path: Path) -> None:
        left = bare("legacy", outputs=self.outputs(*[[1]] * 7))
        right = bare("async", outputs=self.outputs(*[[2]] * 7))

        assert notes_of(tmp_path, left, right)[0].endswith("7 of 7 requests: r0, r1, r2, r3, r4 and others.")

    def test_other_requests_and_workloads_make_no_comparison_of_ids(self, tmp_path: Path) -> None:
        work = {"name": "fixed:requests=1", "clock": "wall"}
        runs = [
            bare("one", outputs=self.outputs([1])),
            bare("two", outputs=self.outputs([2], prompt=7)),
            bare("three", outputs=self.outputs([2]), workload=work),
            bare("four"),
        ]

        assert notes_of(tmp_path, *runs) == [
            "one and two served different requests.",
            "one and three served different workloads: requests handed in one by one; fixed:requests=1 (wall clock).",
        ]

    def test_say_what_the_recorder_lost(self, tmp_path: Path) -> None:
        assert notes_of(tmp_path, bare("async", lost_iterations=1200)) == [
            "Of async 1,200 iterations are missing: the recorder's ring was full."
        ]
