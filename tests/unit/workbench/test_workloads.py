"""Workloads from text and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.request import SamplingParams
from workbench.workloads import (
    RequestSpec,
    Workload,
    WorkloadError,
    WorkloadKind,
    WorkloadOptions,
    as_workload,
    parse_workload,
    register_workload,
)


class TestFixed:
    def test_makes_equal_lengths_that_all_arrive_at_the_start(self) -> None:
        workload = parse_workload("fixed:requests=3,input=7,output=5", vocab_size=50)

        assert [len(spec.prompt) for spec in workload.requests] == [7, 7, 7]
        assert all(spec.params.max_tokens == 5 and spec.params.is_greedy for spec in workload.requests)
        assert all(0 <= token < 50 for spec in workload.requests for token in spec.prompt)  # type: ignore[operator]
        assert workload.is_closed

    def test_lets_so_many_arrive_at_each_iteration(self) -> None:
        workload = parse_workload("fixed:requests=5,input=1,output=1,arrive=2", vocab_size=50)

        assert [spec.arrival for spec in workload.requests] == [0, 0, 1, 1, 2]
        assert workload.unit == "iterations"
        assert not workload.is_closed

    def test_keeps_its_output_length_over_eos_unless_told_otherwise(self) -> None:
        kept = parse_workload("fixed:requests=1,input=1,output=9", vocab_size=50)
        free = parse_workload("fixed:requests=1,input=1,output=9,ignore_eos=0", vocab_size=50)

        assert kept.requests[0].params.ignore_eos
        assert not free.requests[0].params.ignore_eos

    def test_gives_the_same_requests_for_the_same_seed_and_others_for_another(self) -> None:
        text = "fixed:requests=4,input=12,output=3,temperature=0.8,seed="

        first, again = (parse_workload(text + "5", vocab_size=99) for _ in range(2))
        other = parse_workload(text + "6", vocab_size=99)

        assert first.requests == again.requests
        assert [spec.prompt for spec in first.requests] != [spec.prompt for spec in other.requests]
        assert len({spec.params.seed for spec in first.requests}) == 4


class TestPoisson:
    def test_spreads_arrivals_over_seconds_at_the_rate_asked_for(self) -> None:
        workload = parse_workload("poisson:rate=10,requests=2000,input=1,output=1", vocab_size=50)

        arrivals = [spec.arrival for spec in workload.requests]
        assert arrivals == sorted(arrivals)
        assert arrivals[-1] == pytest.approx(200, rel=0.1)
        assert workload.unit == "s"

    def test_refuses_a_rate_that_never_lets_anything_arrive(self) -> None:
        with pytest.raises(WorkloadError, match="rate must be above 0"):
            parse_workload("poisson:rate=0,requests=1,input=1,output=1", vocab_size=50)


class TestWithoutVocabulary:
    def test_parse_workload_says_where_the_vocabulary_is(self) -> None:
        with pytest.raises(WorkloadError, match=r"needs vocab_size=.*session\.engine\.loaded\.vocab_size"):
            parse_workload("fixed:requests=1,input=1,output=1")

    @pytest.mark.parametrize("thing", [None, 4, ["fixed:requests=1,input=1,output=1"]])
    def test_what_is_neither_a_workload_nor_text_is_refused_in_one_line(self, thing: Any) -> None:
        with pytest.raises(WorkloadError, match="workload must be a Workload, or text") as refused:
            as_workload(thing, vocab_size=50)

        assert type(thing).__name__ in str(refused.value)
        assert "\n" not in str(refused.value)


class TestBadText:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("bursty:x=1", r"kind 'bursty' is unknown; known: fixed:requests=16,input=64,output=32 \| poisson"),
            ("fixed:requests=1,input=1,outptu=1", "'outptu=1' is unknown; fixed knows requests, input, output, arrive"),
            ("fixed:requests=1,input=1", "fixed needs output="),
            ("fixed:requests=x,input=1,output=1", "requests must be a whole number, got 'x'"),
            ("fixed:requests=0,input=1,output=1", "requests must be at least 1, got 0"),
            ("fixed:requests=1,requests=2,input=1,output=1", "'requests=2' is given twice"),
            ("fixed:requests", "'requests' is not KEY=VALUE"),
            ("fixed:requests=1,input=1,output=1,temperature=nan", "temperature must be finite"),
        ],
    )
    def test_says_in_one_line_what_is_wrong_and_what_is_known(self, text: str, message: str) -> None:
        with pytest.raises(WorkloadError, match=message) as error:
            parse_workload(text, vocab_size=50)

        assert "\n" not in str(error.value)


class TestFile:
    def write(self, folder: Path, *lines: object) -> str:
        path = folder / "requests.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
        return f"file:{path}"

    def test_reads_text_ids_parameters_and_arrivals(self, tmp_path: Path) -> None:
        text = self.write(
            tmp_path,
            {"prompt": "Hello", "chat": True, "params": {"max_tokens": 3, "stop": ["."]}},
            {"prompt_ids": [1, 2], "arrival": 4},
        )

        workload = parse_workload(text, vocab_size=50)

        assert workload.requests == (
            RequestSpec(prompt="Hello", params=SamplingParams(max_tokens=3, stop=["."]), chat=True),
            RequestSpec(prompt=(1, 2), params=SamplingParams(), arrival=4.0),
        )
        assert workload.unit == "iterations"

    def test_counts_seconds_where_a_line_says_so(self, tmp_path: Path) -> None:
        text = self.write(tmp_path, {"unit": "s"}, {"prompt": "a", "arrival": 0.5})

        assert parse_workload(text, vocab_size=50).unit == "s"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ([1], "expected a JSON object"),
            ({"promt": "a"}, "unknown key 'promt'; known are prompt, prompt_ids, params, arrival, chat"),
            ({"prompt": "a", "max_tokens": 3}, "'max_tokens' is a sampling parameter: put it under params"),
            ({"params": {}}, "expected one of prompt"),
            ({"prompt": "a", "prompt_ids": [1]}, "expected one of prompt"),
            ({"prompt": "a", "arrival": -1}, "arrival must be a number of at least 0"),
            ({"prompt": "a", "params": {"max_tokens": 0}}, "max_tokens must be at least 1"),
            ({"prompt": "a", "params": {"max_token": 1}}, "max_token"),
            ({"unit": "days"}, "unit must be 's' or 'iterations'"),
        ],
    )
    def test_names_the_line_that_is_wrong(self, tmp_path: Path, line: object, message: str) -> None:
        text = self.write(tmp_path, {"prompt": "good"}, line)

        with pytest.raises(WorkloadError, match=f"requests.jsonl:2: .*{message}"):
            parse_workload(text, vocab_size=50)

    def test_says_when_the_file_is_missing_broken_or_empty(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadError, match="cannot be read"):
            parse_workload(f"file:{tmp_path / 'none.jsonl'}", vocab_size=50)
        (tmp_path / "broken.jsonl").write_text("{", encoding="utf-8")
        with pytest.raises(WorkloadError, match=r"broken.jsonl:1: not a JSON object"):
            parse_workload(f"file:{tmp_path / 'broken.jsonl'}", vocab_size=50)
        (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
        with pytest.raises(WorkloadError, match="holds no request"):
            parse_workload(f"file:{tmp_path / 'empty.jsonl'}", vocab_size=50)


class TestRegisterWorkload:
    def test_adds_a_kind_that_text_can_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workbench.workloads.kinds._kinds", {})

        def make(options: WorkloadOptions) -> Workload:
            params = SamplingParams(max_tokens=options.whole("length"))
            return Workload(name=options.text, requests=(RequestSpec(prompt=(1,), params=params),))

        register_workload("one", WorkloadKind(make, ("length",), "one:length=3"))

        assert parse_workload("one:length=3", vocab_size=50).requests[0].params.max_tokens == 3
