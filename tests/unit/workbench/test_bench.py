"""Benchmarks run and record what they ran on; their numbers are nobody's test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.unit.workbench.worlds import oracle
from workbench.bench import what_if
from workbench.bench.options import BenchError, BenchOptions
from workbench.bench.runner import BENCHMARKS, run_benchmarks

SMALL = BenchOptions(model="oracle", batches=(1, 3), prompt_len=5, output_len=6, repeats=1, quick=True)
LEGS = [("legacy", True), ("async", True), ("legacy", False), ("async", False)]


def run(names: list[str], options: BenchOptions, out: Path) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    path = run_benchmarks(names, options, out=out, say=lines.append)
    return json.loads(path.read_text(encoding="utf-8")), lines


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    return run(["decode"], SMALL, tmp_path_factory.mktemp("decode"))


def results(document: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    return [one for one in document["results"] if one["metric"] == metric]


class TestRunBenchmarks:
    def test_writes_results_with_hardware_versions_and_seed(self, tmp_path: Path) -> None:
        document, lines = run(["steady", "recorder"], BenchOptions(quick=True, repeats=2), tmp_path / "b")

        assert document["environment"]["cpu"]
        assert document["seed"] == 0
        assert document["quick"] is True
        found = {(one["benchmark"], one["metric"]): one["value"] for one in document["results"]}
        assert found["steady", "blocks not given back"] == 0
        assert found["recorder", "step with it on, median"] > 0
        assert len(lines) == len(document["results"]) + 1

    def test_refuses_an_unknown_name_before_it_measures(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="known are host, hidden, recorder, steady, decode, mix, whatif"):
            run(["steady", "speed"], BenchOptions(), tmp_path)

        assert list(tmp_path.iterdir()) == []

    def test_refuses_a_folder_that_cannot_be_made_before_it_measures(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setitem(BENCHMARKS, "steady", lambda workplace: pytest.fail("it measured"))

        with pytest.raises(BenchError, match="file cannot be made"):
            run(["steady"], BenchOptions(), tmp_path / "file")

    def test_the_recorder_is_measured_at_each_batch_asked_for(self, tmp_path: Path) -> None:
        document, _ = run(["recorder"], SMALL, tmp_path)

        ratios = results(document, "on / off, median of pairs")
        assert [one["batch"] for one in ratios] == [1, 3]
        assert all(one["value"] > 0 and one["model"] == "oracle" for one in ratios)


class TestDecode:
    def test_every_leg_names_its_mode_and_graphs_and_keeps_its_configuration(
        self, decoded: tuple[dict[str, Any], list[str]]
    ) -> None:
        legs = decoded[0]["legs"]

        assert [(leg["mode"], leg["graphs"]) for leg in legs] == LEGS
        assert [leg["config"]["mode"] for leg in legs] == [mode for mode, _ in LEGS]
        assert [leg["config"]["graphs"] for leg in legs] == [[1, 3] if graphs else None for _, graphs in LEGS]
        assert all(leg["config"]["num_blocks"] == 3 for leg in legs)  # 5 + 6 + 1 tokens of 3 rows, in blocks of 16

    def test_a_cell_a_batch_and_leg_holds_every_column(self, decoded: tuple[dict[str, Any], list[str]]) -> None:
        cells = results(decoded[0], "TPOT")

        assert [(one["mode"], one["graphs"], one["batch"]) for one in cells] == [
            (mode, graphs, batch) for mode, graphs in LEGS for batch in (1, 3)
        ]
        for one in cells:
            details = one["details"]
            assert one["value"] == details["tpot_ms"]
            assert details["lost_iterations"] == 0
            assert {"forward", "sample"} <= details["device_ms"].keys()
            phases = {"prepare", "forward", "sample", "resolve", "emit"} | (
                {"admit"} if one["mode"] == "legacy" else set()
            )
            assert details["host_us"].keys() == phases
            assert details["host_sum_us"] == pytest.approx(sum(details["host_us"].values()))
            assert details["graph_hit_rate"] == (1.0 if one["graphs"] else 0.0)
            for key in ("prefill_ms", "tokens_per_s", "floor_ms", "step_ms", "busy_share"):
                assert details[key] > 0, key
            assert 0 <= details["hidden_share"] <= 1

    def test_only_steady_iterations_count(self, decoded: tuple[dict[str, Any], list[str]]) -> None:
        counts = {(one["mode"], one["details"]["num_iterations"]) for one in results(decoded[0], "TPOT")}

        # Of 7 tokens legacy samples 6 after decode forwards; async samples the first of them beside a forward as well,
        # but the last one beside none, and the prompt's forward is consumed where the first decode forward is launched.
        assert counts == {("legacy", 6), ("async", 5)}

    def test_async_stands_beside_its_legacy_twin(self, decoded: tuple[dict[str, Any], list[str]]) -> None:
        steps = {
            (one["mode"], one["graphs"], one["batch"]): one["details"]["step_ms"] for one in results(decoded[0], "TPOT")
        }
        gains = results(decoded[0], "gain over legacy")

        assert len(gains) == 4
        for one in gains:
            key = one["graphs"], one["batch"]
            assert one["value"] == pytest.approx(steps["legacy", *key] / steps["async", *key])
            assert 1 <= one["details"]["predicted_gain"] <= 2

    def test_prints_a_row_a_cell_in_both_tables_and_a_row_a_pair(
        self, decoded: tuple[dict[str, Any], list[str]]
    ) -> None:
        lines = decoded[1]

        assert sum(line.startswith(("    1 ", "    3 ")) for line in lines) == 8 + 8 + 4
        assert lines[0].startswith("decode: oracle on cpu, 5 tokens in, 6 out")

    def test_without_legacy_there_are_no_pairs(self, tmp_path: Path) -> None:
        options = BenchOptions(model="oracle", batches=(2,), modes=("async",), graphs="off", quick=True)

        document, lines = run(["decode"], options, tmp_path)

        assert [one["metric"] for one in document["results"]] == ["TPOT"]
        assert not any("predicted" in line for line in lines)

    def test_a_device_without_times_of_its_own_has_no_samples(self, tmp_path: Path) -> None:
        options = BenchOptions(device="inline", model="oracle", batches=(2,), graphs="off", quick=True)

        document, lines = run(["decode"], options, tmp_path)

        gain = results(document, "gain over legacy")[0]
        assert set(gain["details"].values()) == {2, None}
        assert results(document, "TPOT")[0]["details"]["step_ms"] is None
        assert lines[-2].split() == ["2", "off", "-", "-", "-", "-"]


class TestMix:
    def test_a_leg_serves_all_requests_and_keeps_its_configuration(self, tmp_path: Path) -> None:
        document, _ = run(["mix"], SMALL, tmp_path)

        rates = results(document, "output tokens a second")
        assert [(one["mode"], one["graphs"]) for one in rates] == LEGS
        assert all(one["value"] > 0 and one["batch"] == 8 and one["lengths"] == "4-16" for one in rates)
        assert [0 < one["details"]["graph_hit_rate"] < 1 for one in rates] == [True, True, False, False]
        assert [leg["config"]["mode"] for leg in document["legs"]] == [mode for mode, _ in LEGS]


class TestWhatIf:
    def test_sets_predictions_beside_runs_that_have_the_delay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(what_if, "_DEVICE_SLEEP_S", {"forward": 0.002})
        options = BenchOptions(model="oracle", batches=(3,), repeats=1, quick=True)

        document, lines = run(["whatif"], options, tmp_path)

        cells = document["results"]
        works = [f"{work} + {factor} steps" for work in ("prepare", "resolve", "device forward") for factor in (0.5, 2)]
        assert [(one["mode"], one["metric"]) for one in cells] == [
            (mode, metric) for mode in ("legacy", "async") for metric in works
        ]
        for one in cells:
            details = one["details"]
            assert one["value"] == pytest.approx(details["predicted_ms"] / details["measured_ms"])
            assert details["before_ms"] > 0
            assert details["makespan_ratio"] > 0
        assert len(lines) == len(cells) + 1

    def test_leaves_the_engine_as_it_was(self) -> None:
        with Engine(oracle(), EngineConfig(num_blocks=24, max_requests=4, max_batch_tokens=64)) as engine:
            for work in ("prepare", "device forward"):
                before = engine.controller.watch, engine.device.op_sleep_s
                with what_if._delayed(engine, work, 0.001):
                    assert (engine.controller.watch, engine.device.op_sleep_s) != before
                assert (engine.controller.watch, engine.device.op_sleep_s) == before

    def test_a_device_without_times_of_its_own_has_no_results(self, tmp_path: Path) -> None:
        options = BenchOptions(device="inline", model="oracle", batches=(2,), quick=True)

        assert run(["whatif"], options, tmp_path)[0]["results"] == []


class TestOptions:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"repeats": 0}, "repeats must be at least 1, got 0"),
            ({"output_len": -1}, "output_len must be at least 1"),
            ({"batches": (4, 0)}, "batches must be numbers of rows"),
            ({"batches": ()}, "batches must be numbers of rows"),
            ({"modes": ("async", "turbo")}, "modes are async and legacy; got turbo"),
            ({"modes": ()}, "got none"),
            ({"graphs": "maybe"}, "graphs must be one of on, off, both"),
        ],
    )
    def test_refuse_what_cannot_be(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(BenchError, match=message):
            BenchOptions(**values)

    def test_the_default_model_is_small_where_there_is_no_gpu(self) -> None:
        assert BenchOptions().model_name == "shape:tiny"
        assert BenchOptions(device="cuda").model_name == "shape:qwen3-0.6b"
        assert BenchOptions(device="cuda", model="oracle").model_name == "oracle"
