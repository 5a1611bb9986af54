"""The demo's story, on a model that takes no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workbench.worlds import oracle, spread_workload
from tracing.run_folder import RunFolderError
from workbench import comparison, load_run
from workbench.demo import demo_config, run_demo
from workbench.demo_prompts import demo_workload
from workbench.runs import Run
from workbench.workloads import Workload


class Terminal:
    """Keeps what was written."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, text: str, end: str = "\n") -> None:
        self.text += text + end


def streaming_workload() -> Workload:
    workload = spread_workload()
    specs = [replace(spec, stream=index in (0, 4)) for index, spec in enumerate(workload.requests)]
    return replace(workload, requests=tuple(specs))


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[Run], Run]) -> None:
    """Change what the async leg gave."""
    honest = comparison.serve

    def serve(session: Any, workload: Any, **more: Any) -> Run:
        run = honest(session, workload, **more)
        return change(run) if more["name"] == "async" else run

    monkeypatch.setattr(comparison, "serve", serve)


class TestRunDemo:
    def test_compares_both_modes_and_writes_the_report(self, tmp_path: Path) -> None:
        say = Terminal()

        status = run_demo(model=oracle(), out=tmp_path / "demo", say=say, workload=streaming_workload())

        assert status == 0
        runs = [load_run(tmp_path / "demo" / mode) for mode in ("legacy", "async")]
        assert [run.summary.orders[0].order for run in runs] == ["legacy", "overlap"]
        report = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
        assert "legacy" in report
        assert "async" in report
        assert "Both modes gave the same ids for all 6 requests." in say.text
        assert say.text.count(f"open {tmp_path / 'demo' / 'report.html'} in a browser\n") == 1
        for part in (
            "--- legacy ---",
            "--- async ---",
            "request-0: ",
            "request-4: ",
            "tokens/s",
            "TTFT p50",
            "TPOT p50",
            "hidden share",
            "exposed / iteration",
            "device busy",
            "graph hit rate",
            "padding tokens",
            "wasted rows",
            "more than that overlap cannot save here. One run each",
            "(A captured size is",
            "no forward is pending 1",
            "forwards ran in captured sizes",
        ):
            assert part in say.text, part

    def test_replaces_the_runs_of_the_last_time_and_nothing_else(self, tmp_path: Path) -> None:
        for _ in range(2):
            run_demo(model=oracle(), device="inline", out=tmp_path, say=Terminal(), workload=streaming_workload())
        (tmp_path / "async" / "notes.txt").write_text("mine")

        say = Terminal()
        with pytest.raises(RunFolderError, match=r"holds notes\.txt"):
            run_demo(model=oracle(), device="inline", out=tmp_path, say=say, workload=streaming_workload())

        assert say.text == ""

    def test_fails_and_says_where_if_ids_differ(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def change(run: Run) -> Run:
            wrong = replace(run.outputs[2], token_ids=(*run.outputs[2].token_ids[:-1], 0))
            return replace(run, outputs=(*run.outputs[:2], wrong, *run.outputs[3:]))

        tamper(monkeypatch, change)
        say = Terminal()

        status = run_demo(model=oracle(), out=tmp_path, say=say, workload=streaming_workload())

        assert status == 1
        assert "The modes' ids DIFFER for 1 of 6 requests: request-2 at position" in say.text
        assert (tmp_path / "report.html").exists()

    @pytest.mark.parametrize("has_other_ids", [False, True])
    def test_says_what_differs_where_only_log_probabilities_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_other_ids: bool
    ) -> None:
        """It said that ids differ, "at position None"."""
        workload = streaming_workload()
        params = workload.requests[1].params.replace(logprobs=1)
        specs = (workload.requests[0], replace(workload.requests[1], params=params), *workload.requests[2:])

        def change(run: Run) -> Run:
            first, second, third, *rest = run.outputs
            assert second.logprobs is not None
            rows = tuple({token: value - 1.0 for token, value in row.items()} for row in second.logprobs)
            if has_other_ids:
                third = replace(third, token_ids=(*third.token_ids[:-1], 0))
            return replace(run, outputs=(first, replace(second, logprobs=rows), third, *rest))

        tamper(monkeypatch, change)
        say = Terminal()

        assert run_demo(model=oracle(), out=tmp_path, say=say, workload=replace(workload, requests=specs)) == 1

        what, count = ("ids and log-probabilities", 2) if has_other_ids else ("log-probabilities", 1)
        assert f"The modes' {what} DIFFER for {count} of 6 requests: request-1 (log-probabilities of output" in say.text
        assert "position None" not in say.text

    def test_runs_on_the_inline_device_without_times(self, tmp_path: Path) -> None:
        say = Terminal()

        assert run_demo(model=oracle(), device="inline", out=tmp_path, say=say, workload=streaming_workload()) == 0

        assert "no samples" in say.text


class TestPrompts:
    def test_are_sixteen_of_different_lengths_with_sampling_of_every_kind(self) -> None:
        specs = demo_workload().requests

        assert len(specs) == 16
        assert len({len(str(spec.prompt)) for spec in specs}) >= 12
        params = [spec.params for spec in specs]
        assert 4 <= sum(one.is_greedy for one in params) <= 12
        assert all(one.is_greedy or one.seed is not None for one in params)
        assert any(one.stop for one in params)
        assert any(one.logprobs for one in params)
        assert sum(spec.stream for spec in specs) >= 2
        assert len({spec.arrival for spec in specs}) >= 4
        assert all(spec.chat for spec in specs)

    def test_fit_the_demos_configuration(self) -> None:
        config = demo_config("cpu")

        assert config.max_requests >= 16
        assert config.mode == "async"
