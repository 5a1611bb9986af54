"""Benchmarks run and record what they ran on; their numbers are nobody's test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.bench import run_benchmarks
from workbench.workloads import WorkloadError


class TestRunBenchmarks:
    def test_writes_results_with_hardware_versions_and_seed(self, tmp_path: Path) -> None:
        lines: list[str] = []

        path = run_benchmarks(["steady", "recorder"], device="cpu", out=tmp_path / "b", quick=True, say=lines.append)

        document = json.loads(path.read_text(encoding="utf-8"))
        assert document["environment"]["cpu"]
        assert document["seed"] == 0
        assert document["quick"] is True
        found = {(one["benchmark"], one["what"]): one["value"] for one in document["results"]}
        assert found["steady", "blocks not given back at the end"] == 0
        assert found["recorder", "step with it on, median"] > 0
        assert len(lines) == len(document["results"]) + 1

    def test_refuses_an_unknown_name_before_it_measures(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadError, match="known are host, hidden, recorder, steady"):
            run_benchmarks(["steady", "speed"], device="cpu", out=tmp_path, quick=True, say=lambda text: None)

        assert list(tmp_path.iterdir()) == []
