"""``workbench bench --against``: a ratio a cell, and an exit status."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from workbench.bench.against import BenchFile, compare_files, read_bench_file
from workbench.bench.options import BenchError
from workbench.cli import main


def result(value: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "leg": "decode async, graphs on",
        "benchmark": "decode",
        "metric": "TPOT",
        "model": "shape:tiny",
        "batch": 8,
        "mode": "async",
        "graphs": True,
        "lengths": "64+64",
        "value": value,
        "unit": "ms",
        "is_compared": True,
        **changes,
    }


def bench_file(path: Path, *results: dict[str, Any], **changes: Any) -> BenchFile:
    """Write what a run with these results would have written, and read it."""
    document = {
        "command": "bench",
        "environment": {"commit": "abc", "gpu": "H200", "torch": "2.11"},
        "device": "cpu",
        "quick": False,
        "legs": [{"name": "decode async, graphs on", "config": {"num_blocks": 8}}],
        "results": list(results),
        **changes,
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_bench_file(path)


class TestCompareFiles:
    @pytest.mark.parametrize(
        ("after", "outside"), [(1.0, 0), (1.09, 0), (0.91, 0), (1.11, 1), (0.89, 1), (0.0, 1), (math.nan, 1)]
    )
    def test_a_ratio_outside_the_tolerance_counts_in_either_direction(
        self, tmp_path: Path, after: float, outside: int
    ) -> None:
        found = compare_files(bench_file(tmp_path / "a", result(1.0)), bench_file(tmp_path / "b", result(after)), 0.1)

        assert found.num_outside == outside
        assert sum(line.endswith("outside") for line in found.lines()) == outside
        assert found.lines()[-1] == f"{outside} of 1 cells outside 1 ± 0.1"

    @pytest.mark.parametrize(("after", "ratio"), [(0.0, 1.0), (2.0, math.inf)])
    def test_nothing_against_nothing_is_the_same(self, tmp_path: Path, after: float, ratio: float) -> None:
        found = compare_files(bench_file(tmp_path / "a", result(0.0)), bench_file(tmp_path / "b", result(after)), 0.1)

        assert [one.ratio for one in found.ratios] == [ratio]

    @pytest.mark.parametrize(
        "changes",
        [{"batch": 1}, {"mode": "legacy"}, {"graphs": False}, {"model": "oracle"}, {"lengths": "8+8"}, {"metric": "x"}],
    )
    def test_cells_that_differ_in_anything_are_not_compared(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        before = bench_file(tmp_path / "a", result(1.0, batch=2), result(5.0, **changes))
        after = bench_file(tmp_path / "b", result(1.0, batch=2), result(1.0))

        found = compare_files(before, after, 0.1)

        assert found.num_outside == 0
        assert (len(found.ratios), len(found.only_before), len(found.only_after)) == (1, 1, 1)
        lines = found.lines()
        assert sum(line.startswith(f"only in {tmp_path / 'a'}: decode") for line in lines) == 1
        assert sum(line.startswith("only in this run: decode TPOT: shape:tiny, 8 rows") for line in lines) == 1

    def test_a_cell_without_samples_counts_as_not_there(self, tmp_path: Path) -> None:
        before = bench_file(tmp_path / "a", result(1.0, batch=2), result(None))
        after = bench_file(tmp_path / "b", result(1.0, batch=2), result(1.0))

        assert len(compare_files(before, after, 0.1).only_after) == 1

    def test_what_only_explains_is_left_out(self, tmp_path: Path) -> None:
        gain = result(1.2, metric="gain", is_compared=False)

        assert len(bench_file(tmp_path / "a", result(1.0), gain).cells) == 1

    def test_warns_where_hardware_versions_or_configurations_differ(self, tmp_path: Path) -> None:
        before = bench_file(tmp_path / "a", result(1.0))
        after = bench_file(
            tmp_path / "b",
            result(1.0),
            environment={"commit": "def", "gpu": None, "torch": "2.11"},
            quick=True,
            legs=[{"name": "decode async, graphs on", "config": {"num_blocks": 9}}],
        )

        assert compare_files(before, before, 0.1).warnings == ()
        assert compare_files(before, after, 0.1).warnings == (
            "gpu was 'H200' and is None, quick was False and is True",
            "leg decode async, graphs on: num_blocks was 8 and is 9",
        )
        assert any(line.startswith("warning: gpu was") for line in compare_files(before, after, 0.1).lines())

    def test_nothing_in_common_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="nothing to compare: no cell of"):
            compare_files(bench_file(tmp_path / "a", result(1.0)), bench_file(tmp_path / "b"), 0.1)


class TestReadBenchFile:
    @pytest.mark.parametrize(
        "text",
        ["{", "[1]", "{}", '"x"', '{"command": "run", "environment": {}}', '{"command": "bench", "results": [1]}'],
    )
    def test_refuses_a_foreign_file(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "other.json"
        path.write_text(text, encoding="utf-8")

        with pytest.raises(BenchError, match=r"other\.json is not a file of workbench bench"):
            read_bench_file(path)


class TestCommand:
    """By the benchmark whose compared number is the same in every run: blocks not given back."""

    def bench(self, out: Path, *more: str) -> int:
        return main(["bench", "steady", "--quick", "--out", str(out), *more])

    def written(self, out: Path) -> Path:
        (path,) = out.glob("bench-*.json")
        return path

    def test_against_a_run_like_it_exits_with_zero_and_against_another_with_three(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.bench(tmp_path / "first") == 0
        before = self.written(tmp_path / "first")
        capsys.readouterr()

        assert self.bench(tmp_path / "second", "--against", str(before)) == 0
        assert "0 of 1 cells outside 1 ± 0.1" in capsys.readouterr().out

        document = json.loads(before.read_text(encoding="utf-8"))
        document["results"][0]["value"] = 2
        before.write_text(json.dumps(document), encoding="utf-8")
        assert self.bench(tmp_path / "third", "--against", str(before)) == 3
        assert self.bench(tmp_path / "fourth", "--against", str(before), "--tolerance", "1") == 0
        assert self.written(tmp_path / "third").is_file()

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--against", "/nowhere.json"], "cannot read /nowhere.json: No such file or directory"),
            (["--tolerance", "-0.1"], "tolerance must be a number of at least 0, got -0.1"),
            (["--batches", "1,x"], "batches must be whole numbers with commas between, got '1,x'"),
            (["--modes", "turbo"], "modes are async and legacy; got turbo"),
            (["--attention", "turbo"], "attention_backend must be one of"),
            (["--device", "tpu"], "device must be one of"),
            (["decode", "--model", "smolm2"], "did you mean 'smollm2'?"),
            (["speed"], "benchmark 'speed' is unknown; known are host"),
        ],
    )
    def test_a_wrong_call_is_one_line_and_exits_with_two(
        self, argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", "--quick", "--out", str(tmp_path), *argv]) == 2

        streams = capsys.readouterr()
        assert message in streams.err
        assert streams.err.count("\n") == 1
        assert list(tmp_path.glob("bench-*")) == []
