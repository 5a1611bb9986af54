"""Comparing legs: the same workload, one engine at a time, outputs judged."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from tqdm import tqdm

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.policy import never_overlap
from engine.request import SamplingParams
from tests.unit.workbench.worlds import oracle, spread_workload
from workbench import comparison
from workbench.comparison import Comparison, Leg, compare
from workbench.figures import FigureError
from workbench.repeats import MedianInterval, find_row
from workbench.runs import Run, jsonable
from workbench.widgets.timeline import TimelineWidget
from workbench.workloads import RequestSpec, Workload, WorkloadError, parse_workload

SMALL = EngineConfig(max_requests=4, max_batch_tokens=128, max_sequence_length=96, num_blocks=24)


class TestCompare:
    def test_runs_the_three_legs_and_finds_their_outputs_equal(self) -> None:
        result = compare(spread_workload(), model=oracle(), config=SMALL, repeats=1, warmup=0)

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

        result = compare(spread_workload(2), legs, model=oracle(), config=SMALL, repeats=1, warmup=0)

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
        result = compare(spread_workload(3), ["legacy", "async"], model=oracle(), config=SMALL, repeats=1, warmup=0)

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

        # The second repeat begins one leg further on, so that neither always comes first.
        assert begun == ["legacy", "async", "async", "legacy"]
        assert [run.name for run in result.runs] == ["legacy", "async"]
        assert result.ids_equal
        # The warm-up is gone: a run's records begin with its own first iteration.
        assert all(run.iterations[0].iteration == 0 for run in result.runs)
        assert all(run.counters["submitted"] == 2 for run in result.runs)

    def test_takes_its_clock_from_the_workload(self) -> None:
        seconds = parse_workload("poisson:rate=500,requests=3,input=4,output=3", vocab_size=64)

        by_seconds = compare(seconds, ["async"], model=oracle(), config=SMALL, repeats=1, warmup=0)
        by_iterations = compare(spread_workload(2), ["async"], model=oracle(), config=SMALL, repeats=1, warmup=0)

        assert by_seconds.runs[0].clock == "virtual"
        assert by_iterations.runs[0].clock == "iterations"

    def test_prints_the_rows_that_matter_before_the_verdict_and_has_all_in_its_table(self) -> None:
        result = compare(spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, repeats=2, warmup=0)
        head, verdict, *_ = str(result).split("\n\n")

        labels = [
            "tokens/s",
            "TTFT p50",
            "TPOT p50",
            "step time p50",
            "host work / iteration",
            "hidden share",
            "bubbles",
        ]
        labels.append("graph hit rate")
        assert [line.split("  ")[0] for line in head.splitlines()[1:]] == labels
        assert max(map(len, head.splitlines())) < 110
        assert verdict.startswith("ids and ends of 2 requests in 2 legs")
        assert f"All {len(result.rows)} rows are in table()." in str(result)
        assert all(label in result.table() for label in (*labels, "wasted rows", "orders and reasons"))

    def test_what_there_was_has_no_ratio(self) -> None:
        result = compare(spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, repeats=1, warmup=0)

        for label in ("requests", "iterations", "void iterations"):
            assert find_row(label, result.rows).ratios == (None, None)
        assert find_row("tokens/s", result.rows).ratios[1] is not None

    def test_takes_the_text_of_the_command_line(self) -> None:
        """It gave AttributeError: 'str' object has no attribute 'unit'."""
        text = "fixed:requests=2,input=4,output=3"

        by_text = compare(text, ["async"], model=oracle(), config=SMALL, repeats=1, warmup=0)

        assert by_text.workload == parse_workload(text, vocab_size=oracle().vocab_size)

    def test_refuses_no_workload_before_it_loads_a_model(self) -> None:
        with pytest.raises(WorkloadError, match=r"workload must be a Workload, or text.*got int"):
            compare(4, ["async"], model="no such folder")  # type: ignore[arg-type]

    def test_a_policy_can_be_a_leg(self) -> None:
        leg = Leg(name="mine", mode="async", policy=never_overlap)

        result = compare(spread_workload(2), [leg], model=oracle(), config=SMALL, repeats=1, warmup=0)

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
            compare(spread_workload(1), legs, model=oracle(), config=SMALL, repeats=1, warmup=0)


@pytest.fixture(scope="module")
def result() -> Comparison:
    """Three legs, two repeats each."""
    return compare(spread_workload(), model=oracle(), config=SMALL, repeats=2, warmup=0, progress=False)


class TestRepeats:
    def test_judge_every_run_of_every_leg(self, result: Comparison) -> None:
        assert result.verdict_counts == {"equal": 6, "numeric": 0, "DIFFERENT": 0}
        assert [len(leg) for leg in result.summaries] == [2, 2, 2]

    def test_keep_the_run_of_median_throughput_of_each_leg(self, result: Comparison) -> None:
        for run, summaries in zip(result.runs, result.summaries, strict=True):
            assert run.summary.tokens_per_s == min(summary.tokens_per_s or 0 for summary in summaries)

    def test_show_medians_spreads_and_ratios_of_pairs(self, result: Comparison) -> None:
        row = find_row("tokens/s", result.rows)

        speeds = [[summary.tokens_per_s or 0.0 for summary in leg] for leg in result.summaries]
        pairs = [late / base for late, base in zip(speeds[2], speeds[0], strict=True)]
        assert row.legs[2].median == pytest.approx(sum(speeds[2]) / 2)
        assert row.legs[2].spread == (min(speeds[2]), max(speeds[2]))
        assert row.ratios[0] is None
        assert row.ratios[2] is not None
        assert row.ratios[2].median == pytest.approx(sum(pairs) / 2)
        assert row.ratios[2].interval == MedianInterval(min(pairs), max(pairs), 0.5)
        assert "async/legacy" in result.table()
        assert "50.0 % is little: 5 repeats give 93.8 %." in str(result)

    def test_state_clock_and_pools(self, result: Comparison) -> None:
        assert "Clock of arrivals: iterations" in str(result)
        assert "each run with an empty KV pool of its own: 24 blocks of 16 tokens." in str(result)

    def test_have_figures_of_runs_and_of_metrics_and_a_panel_with_all(self, result: Comparison) -> None:
        figures = result.figures(template="dark")

        assert [figure.chart.title for figure in figures] == [
            "tokens/s",
            "step time p50",
            "Latency",
            "Throughput",
            "Hidden share of host work",
            "Bubbles by cause",
        ]
        speeds = figures[0].data.to_pylist()
        assert [(row["run"], row["repeat"]) for row in speeds[:3]] == [
            ("legacy", 1),
            ("legacy", 2),
            ("async without overlap", 1),
        ]
        assert speeds[-1]["ratio"] == speeds[-1]["value"] / speeds[1]["value"]
        kinds = [type(part).__name__ for part in result.panel().children]
        assert kinds == ["HTML", "TimelineWidget", *["FigureWidget"] * 6]

    def test_show_their_timelines_on_one_axis(self, result: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[str] = []
        monkeypatch.setattr(TimelineWidget, "show", lambda self, runs: shown.extend(run.name for run in runs))

        result.timelines()

        assert shown == ["legacy", "async without overlap", "async"]

    def test_an_unknown_figure_is_refused_with_what_there_is(self, result: Comparison) -> None:
        with pytest.raises(FigureError, match=r"no metric 'speed' .* tokens/s.*or one of the figures latency, thr"):
            result.figure("speed")


class TestLegs:
    def test_a_leg_is_a_name_with_a_configuration_or_with_options(self) -> None:
        wide = SMALL.replace(mode="legacy", max_batch_tokens=100)

        result = compare(
            spread_workload(2),
            {"wide": wide, "few": {"max_requests": 2}},
            model=oracle(),
            config=SMALL,
            repeats=1,
            warmup=0,
        )

        assert [run.name for run in result.runs] == ["wide", "few"]
        wanted = ("mode", "max_batch_tokens", "max_requests")
        assert [[run.config[name] for name in wanted] for run in result.runs] == [["legacy", 100, 4], ["async", 128, 2]]

    def test_legs_get_pools_of_one_size_unless_they_ask_for_another(self) -> None:
        """A pool of no given size once followed each leg's own max_requests, so that legs had unequal pools."""
        base = EngineConfig(max_requests=4, max_batch_tokens=128, max_sequence_length=96)
        legs = {"base": {}, "few": {"max_requests": 2}, "own": {"num_blocks": 30}}

        result = compare(spread_workload(2), legs, model=oracle(), config=base, repeats=1, warmup=0)

        first, few, own = (run.config["num_blocks"] for run in result.runs)
        assert first == few != 30
        assert own == 30
        assert "own 30 blocks of 16 tokens" in str(result)

    def test_an_option_that_does_not_fit_is_refused_before_anything_runs(self) -> None:
        begun: list[str] = []

        with pytest.raises(ConfigError, match="max_requests"):
            compare(
                spread_workload(2),
                ["legacy", ("none", {"max_requests": 0})],
                model=oracle(),
                config=SMALL,
                on_run=lambda name, session: begun.append(name),
            )
        assert not begun

    def test_what_is_no_leg_is_refused(self) -> None:
        with pytest.raises(WorkloadError, match="a leg is a name, a Leg, or a name with a configuration"):
            compare(spread_workload(2), [3], model=oracle(), config=SMALL)  # type: ignore[list-item]


class TestProgress:
    def test_counts_the_requests_of_every_run_warm_ups_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bars: list[Any] = []

        def bar(total: int, *, wanted: bool) -> Any:
            bars.append(tqdm(total=total, file=io.StringIO(), disable=not wanted))
            return bars[-1]

        monkeypatch.setattr(comparison, "progress_bar", bar)
        compare(spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, repeats=2, warmup=1)

        assert bars[0].total == bars[0].n == 2 * 2 * 2 * 2

    def test_is_silent_where_it_is_not_wanted(self, capsys: pytest.CaptureFixture[str]) -> None:
        compare(spread_workload(1), ["async"], model=oracle(), config=SMALL, repeats=1, warmup=0, progress=False)

        assert capsys.readouterr() == ("", "")


class TestResult:
    def test_is_a_table_a_document_and_html(self) -> None:
        result = compare(spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, repeats=1, warmup=0)

        document = json.loads(json.dumps(jsonable(result.to_dict()), allow_nan=False))

        assert document["command"] == "compare"
        assert [leg["name"] for leg in document["legs"]] == ["legacy", "async"]
        assert document["legs"][0]["requests"][1]["output_token_ids"] == list(result.runs[0].outputs[1].token_ids)
        assert document["verdict_counts"] == {"equal": 2, "numeric": 0, "DIFFERENT": 0}
        assert document["environment"]["torch"]
        assert "tokens/s" in result.table()
        assert "2 equal" in repr(result)
        assert document["clock"] == "iterations"
        (speed,) = [row for row in document["metrics"] if row["label"] == "tokens/s"]
        assert speed["legs"]["async"]["samples"] == [result.runs[1].summary.tokens_per_s]
        assert speed["legs"]["async"]["ratio"]["interval"] is None
        assert "<th" in result._repr_html_()

    def test_shows_the_same_few_rows_as_html_and_as_text_and_the_rest_on_demand(self) -> None:
        """HTML showed every row there is, where the text had eight."""
        result = compare(spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, repeats=2, warmup=0)
        shown, rest = result._repr_html_().split("<details>")
        few = [line.split("  ")[0].strip() for line in result.short_table().splitlines()[1:]]

        assert shown.count("<tr>") == 1 + len(few)
        assert all(f">{label}</td>" in shown for label in few)
        assert "prompt tokens" not in shown
        assert f"<summary>All {len(result.rows)} rows</summary>" in rest
        assert all(f">{row.label}</td>" in rest for row in result.rows)

    def test_says_in_text_and_html_which_pairs_were_dropped(self) -> None:
        result = compare(spread_workload(2), ["legacy", "async"], model=oracle(), config=SMALL, repeats=2, warmup=0)
        lacking = replace(result.summaries[1][0], tokens_per_s=None)
        cut = replace(result, repeat_summaries=(result.summaries[0], (lacking, result.summaries[1][1])))
        told = "async/legacy of tokens/s: 1 of 2 pairs; async has no sample in repeat 1."

        for text in (cut.text(), cut.text(is_whole=True), cut._repr_html_()):
            assert told in text
            assert "(1 of 2)" in text

    def test_holds_the_log_probabilities_of_prompt_and_output_and_how_far_they_are_apart(self) -> None:
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, prompt_logprobs=2, ignore_eos=True)
        workload = Workload(name="one", requests=(RequestSpec(prompt=(4, 5, 6), params=params),), unit="iterations")

        result = compare(workload, ["legacy", "async"], model=oracle(), config=SMALL, repeats=1, warmup=0)

        document = json.loads(json.dumps(jsonable(result.to_dict()), allow_nan=False))
        for leg in document["legs"]:
            (request,) = leg["requests"]
            assert len(request["logprobs"]) == 3
            first, *others = request["prompt_logprobs"]
            assert first is None
            assert [next(iter(row)) for row in others] == ["5", "6"]
        assert document["verdicts"][0]["logprob_deviation"] == 0.0
        assert result.verdict_text.endswith("1 equal; log-probabilities differ by at most 0")
