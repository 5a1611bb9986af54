"""Comparing legs: the same workload, one engine at a time, outputs judged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.policy import never_overlap
from engine.request import SamplingParams
from tests.unit.workbench.worlds import oracle, spread_workload
from workbench import comparison
from workbench.comparison import Leg, compare
from workbench.runs import Run, jsonable
from workbench.workloads import RequestSpec, Workload, WorkloadError, parse_workload

SMALL = EngineConfig(max_requests=4, max_batch_tokens=128, max_sequence_length=96, num_blocks=24)


class TestCompare:
    def test_runs_the_three_legs_and_finds_their_outputs_equal(self) -> None:
        result = compare(spread_workload(), model=oracle(), config=SMALL, warmup=0)

        assert [run.name for run in result.runs] == ["legacy", "async without overlap", "async"]
        assert result.verdict_counts == {"equal": 6, "numeric": 0, "DIFFERENT": 0}
        assert result.outputs_match
        assert result.ids_equal
        legacy, plain, overlapped = (run.counters for run in result.runs)
        assert legacy["legacy_steps"] > 0
        assert legacy["async_steps"] == 0
        assert plain["overlap_steps"] == 0
        assert plain["async_steps"] > 0
        assert overlapped["overlap_steps"] > 0

    def test_each_leg_names_its_mode_and_keeps_its_whole_configuration(self) -> None:
        legs = ["legacy", Leg(name="small", mode="async", changes={"max_requests": 2})]

        result = compare(spread_workload(2), legs, model=oracle(), config=SMALL, warmup=0)

        configs = [run.config for run in result.runs]
        assert [config["mode"] for config in configs] == ["legacy", "async"]
        assert [config["max_requests"] for config in configs] == [4, 2]
        assert all(set(config) >= set(SMALL.to_dict()) and config["model"] == "oracle" for config in configs)

    def test_a_planted_difference_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = comparison.serve

        def tampered(session: Any, workload: Any, **more: Any) -> Run:
            run = honest(session, workload, **more)
            if more["name"] != "async":
                return run
            wrong = replace(run.outputs[1], token_ids=(*run.outputs[1].token_ids[:-1], 0))
            return replace(run, outputs=(run.outputs[0], wrong, *run.outputs[2:]))

        monkeypatch.setattr(comparison, "serve", tampered)
        result = compare(spread_workload(3), ["legacy", "async"], model=oracle(), config=SMALL, warmup=0)

        assert not result.outputs_match
        assert result.verdict_counts["DIFFERENT"] == 1
        assert "request-1 in async parts at output position" in str(result)
        verdict = result.verdicts[1]
        assert (verdict.dtype, verdict.tolerance) == ("float32", 0.0)

    def test_repeats_take_turns_and_are_all_judged(self) -> None:
        begun: list[str] = []

        def on_run(name: str, session: Any) -> None:
            begun.append(name)

        result = compare(
            spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, repeats=2, warmup=1, on_run=on_run
        )

        assert begun == ["legacy", "async", "legacy", "async"]
        assert result.ids_equal
        # The warm-up is gone: a run's records begin with its own first iteration.
        assert all(run.iterations[0].iteration == 0 for run in result.runs)
        assert all(run.counters["submitted"] == 2 for run in result.runs)

    def test_takes_its_clock_from_the_workload(self) -> None:
        seconds = parse_workload("poisson:rate=500,requests=3,input=4,output=3", vocab_size=64)

        by_seconds = compare(seconds, ["async"], model=oracle(), config=SMALL, warmup=0)
        by_iterations = compare(spread_workload(2), ["async"], model=oracle(), config=SMALL, warmup=0)

        assert by_seconds.runs[0].clock == "virtual"
        assert by_iterations.runs[0].clock == "iterations"

    def test_a_policy_can_be_a_leg(self) -> None:
        leg = Leg(name="mine", mode="async", policy=never_overlap)

        result = compare(spread_workload(2), [leg], model=oracle(), config=SMALL, warmup=0)

        assert result.runs[0].counters["overlap_steps"] == 0

    @pytest.mark.parametrize(
        ("legs", "message"),
        [
            (["legacy", "turbo"], "leg 'turbo' is unknown; known are legacy, no-overlap, async"),
            (["async", "async"], "each with a name of its own; got async, async"),
            ([], "got none"),
        ],
    )
    def test_refuses_legs_that_make_no_comparison(self, legs: list[str], message: str) -> None:
        with pytest.raises(WorkloadError, match=message):
            compare(spread_workload(2), legs, model=oracle(), config=SMALL)

    def test_refuses_no_repeats(self) -> None:
        with pytest.raises(WorkloadError, match="repeats must be at least 1"):
            compare(spread_workload(2), model=oracle(), config=SMALL, repeats=0)

    def test_refuses_a_leg_that_needs_another_model(self) -> None:
        legs = ["async", Leg(name="wide", mode="async", changes={"dtype": "float64"})]

        with pytest.raises(WorkloadError, match="leg 'wide' changes dtype, but all legs share one loaded model"):
            compare(spread_workload(1), legs, model=oracle(), config=SMALL, warmup=0)


class TestResult:
    def test_is_a_table_a_document_and_html(self) -> None:
        result = compare(spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, warmup=0)

        document = json.loads(json.dumps(jsonable(result.to_dict()), allow_nan=False))

        assert document["command"] == "compare"
        assert [leg["name"] for leg in document["legs"]] == ["legacy", "async"]
        assert document["legs"][0]["requests"][1]["output_token_ids"] == list(result.runs[0].outputs[1].token_ids)
        assert document["verdict_counts"] == {"equal": 2, "numeric": 0, "DIFFERENT": 0}
        assert document["environment"]["torch"]
        assert "tokens/s" in result.table()
        assert "2 equal" in repr(result)
        assert result._repr_html_().startswith("<pre>")

    def test_holds_the_log_probabilities_of_prompt_and_output_and_how_far_they_are_apart(self) -> None:
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, prompt_logprobs=2, ignore_eos=True)
        workload = Workload(name="one", requests=(RequestSpec(prompt=(4, 5, 6), params=params),), unit="iterations")

        result = compare(workload, ["legacy", "async"], model=oracle(), config=SMALL, warmup=0)

        document = json.loads(json.dumps(jsonable(result.to_dict()), allow_nan=False))
        for leg in document["legs"]:
            (request,) = leg["requests"]
            assert len(request["logprobs"]) == 3
            first, *others = request["prompt_logprobs"]
            assert first is None
            assert [next(iter(row)) for row in others] == ["5", "6"]
        assert document["verdicts"][0]["logprob_deviation"] == 0.0
        assert result.verdict_text.endswith("1 equal; log-probabilities differ by at most 0")
