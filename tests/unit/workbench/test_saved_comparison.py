"""Saved runs side by side: repeats by name, what must agree, whose ids differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workbench.figures.figure_worlds import trace
from tests.unit.workbench.worlds import make_session, oracle, spread_workload
from tracing.trace import Trace
from workbench import compare
from workbench.figures import FIGURES
from workbench.saved_comparison import ComparisonError, compare_saved
from workbench.saved_runs import save_runs


def output(request_id: str = "a", tokens: tuple[int, ...] = (1, 2), prompt: tuple[int, ...] = (7,)) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "prompt_token_ids": list(prompt),
        "output_token_ids": list(tokens),
        "finish_reason": "length",
    }


def saved(name: str = "async", **fields: Any) -> Trace:
    return trace(name, **{"outputs": [output()], **fields})


class TestCompareSaved:
    def test_shows_what_the_comparison_showed_before_it_was_saved(self, tmp_path: Path) -> None:
        before = compare(spread_workload(3), model=oracle(), max_requests=4, num_blocks=24, repeats=1, warmup=0)
        folders = save_runs(tmp_path, [run.trace for run in before.runs])

        after = compare_saved(folders)

        assert after.table() == before.table()
        assert after.verdict_text == "ids and ends of 3 requests are equal in all runs"
        assert "clock iterations" in str(after)
        assert [figure.data.num_rows for figure in after.figures()] == [
            figure.data.num_rows for figure in before.figures()
        ]

    def test_runs_of_one_name_are_repeats_in_order(self) -> None:
        result = compare_saved([saved("legacy"), saved("async"), saved("async"), saved("legacy")])

        assert result.names == ("legacy", "async")
        assert result.repeats == 2
        assert set(FIGURES) == {"latency", "throughput", "hidden", "bubbles", "drafts"}
        assert len(result.to_dict()["metrics"]) == len(result.rows)

    def test_tells_which_requests_differ_and_what_would_explain_it(self) -> None:
        result = compare_saved([saved("legacy"), saved("async", outputs=[output(tokens=(1, 3))])])

        assert result.differing == ["a"]
        assert result.verdict_text.startswith("ids or ends of 1 of 1 requests differ; whether rounding explains it")
        assert "  a differs" in str(result)

    def test_without_outputs_says_so(self) -> None:
        assert compare_saved([saved(outputs=[])]).verdict_text == "these runs kept no outputs"

    def test_sessions_that_were_saved_compare(self, tmp_path: Path) -> None:
        for mode in ("legacy", "async"):
            with make_session(mode, device="cpu") as session:
                session.submit([3, 4, 5], max_tokens=4, temperature=0.0, ignore_eos=True, request_id="one")
                session.run()
                session.save(tmp_path / mode)

        assert compare_saved([tmp_path / "legacy", tmp_path / "async"]).differing == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"config": {"model": "other", "device": "cpu"}}, "runs of different models: toy"),
            ({"config": {"model": "toy", "device": "cpu", "dtype": "float64"}}, "runs of different models: toy"),
            ({"workload": {"clock": "wall"}}, "runs of different clocks: iterations and wall"),
            ({"workload": {}}, "runs of different clocks: iterations and unknown"),
            ({"environment": {"cpu": "Pico 2", "cores": 2}}, "runs of different hardware: device cpu, cpu Pico 1"),
            ({"environment": {"cpu": "Pico 1", "cores": 64, "gpu": "NVIDIA H200"}}, "cores 2, gpu .* and .* cores 64"),
            ({"config": {"model": "toy", "device": "cuda"}}, "runs of different hardware: device cpu"),
            ({"outputs": [output(prompt=(8,))]}, "runs of different requests"),
        ],
    )
    def test_runs_whose_times_do_not_compare(self, other: dict[str, Any], message: str) -> None:
        with pytest.raises(ComparisonError, match=message):
            compare_saved([saved("legacy"), saved("async", **other)])

    def test_a_repeat_of_another_machine_is_refused_too(self) -> None:
        elsewhere = saved(environment={"cpu": "Pico 9"})

        with pytest.raises(ComparisonError, match="different hardware"):
            compare_saved([saved(), elsewhere])

    def test_other_versions_and_commits_may_be_compared(self) -> None:
        newer = saved("new", environment={**saved().environment, "commit": "fff", "torch": "9.9"})

        assert compare_saved([saved("old"), newer]).names == ("old", "new")

    def test_legs_of_different_length_make_no_pairs(self) -> None:
        with pytest.raises(ComparisonError, match="as many runs as the others, to be paired; there are a 2, b 1"):
            compare_saved([saved("a"), replace(saved("a")), saved("b")])

    def test_no_runs_are_no_comparison(self) -> None:
        with pytest.raises(ComparisonError, match="at least one run"):
            compare_saved([])
