"""What is done to a trace before it is served: excerpt, cuts, time, arrival process; and laws of lengths."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from workbench.workloads import RequestSpec, Shaping, Workload, WorkloadError, parse_workload
from workbench.workloads.shaping import LengthCutter

ROWS = [{"t": 10 * index, "in": 10 + index, "out": 5 + index} for index in range(8)]


def shaped(**options: object) -> Workload:
    return Workload.from_records(
        ROWS,
        arrival="t",
        input="in",
        output="out",
        vocab_size=64,
        shaping=Shaping(**options),  # type: ignore[arg-type]
    )


def inputs(workload: Workload) -> list[int]:
    return [len(spec.prompt) for spec in workload.requests]


class TestExcerpt:
    def test_takes_so_many_from_an_offset_and_starts_its_time_there(self) -> None:
        workload = shaped(first=3, requests=2)

        assert inputs(workload) == [13, 14]
        assert [spec.arrival for spec in workload.requests] == [0, 10]

    def test_a_row_is_the_same_request_in_every_excerpt(self) -> None:
        whole, part = shaped(), shaped(first=5)

        assert [spec.prompt for spec in part.requests] == [spec.prompt for spec in whole.requests[5:]]
        assert [spec.params for spec in part.requests] == [spec.params for spec in whole.requests[5:]]

    def test_says_when_there_are_fewer(self) -> None:
        assert shaped(first=6, requests=5).notes == ("records ends after 2 of the 5 requests asked for",)
        with pytest.raises(WorkloadError, match="records holds no row behind the first 8"):
            shaped(first=8)

    def test_rows_that_are_left_out_do_not_count_and_rows_behind_are_not_read(self) -> None:
        rows = iter([{"in": 0, "out": 1}, {"in": 1, "out": 1}, {"in": 2, "out": 2}, "never read"])

        workload = Workload.from_records(rows, input="in", output="out", vocab_size=9, shaping=Shaping(requests=2))

        assert inputs(workload) == [1, 2]
        assert workload.notes[0].startswith("1 of 3 rows are malformed")
        assert next(rows) == "never read"


class TestTime:
    def test_scale_multiplies_arrivals(self) -> None:
        assert [spec.arrival for spec in shaped(scale=0.5, requests=3).requests] == [0, 5, 10]

    def test_rate_and_concurrency_replace_them(self) -> None:
        drawn, again, closed = shaped(rate=2.0), shaped(rate=2.0), shaped(concurrency=3)

        assert drawn.requests == again.requests
        assert drawn.unit == "s"
        assert drawn.requests != shaped(rate=2.0, seed=1).requests
        assert (closed.is_closed, closed.concurrency, closed.unit) == (True, 3, "iterations")
        assert inputs(drawn) == inputs(closed) == inputs(shaped())


class TestCuts:
    def test_count_what_they_cut(self) -> None:
        workload = shaped(max_input=14, max_output=10)

        assert inputs(workload) == [10, 11, 12, 13, 14, 14, 14, 14]
        assert workload.notes == (
            "3 of 8 prompts were cut to max_input=14: 6 tokens less",
            "2 of 8 outputs were cut to max_output=10: 3 tokens less",
        )

    def test_keep_the_beginning_of_a_prompt(self) -> None:
        for whole, part in zip(shaped().requests, shaped(max_input=12).requests, strict=True):
            assert part.prompt[:] == whole.prompt[:12]

    @given(
        input=st.integers(1, 400),
        output=st.integers(1, 400),
        limit=st.integers(2, 300),
        shrink=st.integers(1, 40),
    )
    def test_max_length_holds_and_takes_no_more_than_needed(
        self, input: int, output: int, limit: int, shrink: int
    ) -> None:
        fit = LengthCutter(Shaping(max_length=limit, shrink=shrink)).fit(input, output)

        before = (-(-input // shrink), -(-output // shrink))
        assert min(fit) >= 1
        assert sum(fit) == min(limit, sum(before))
        assert all(now == then or now >= limit // 2 for now, then in zip(fit, before, strict=True))


class TestBadShaping:
    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("first=-1", "first must be at least 0, got -1"),
            ("requests=0", "requests must be at least 1, got 0"),
            ("max_length=1", "max_length must be at least 2, got 1"),
            ("concurrency=0", "concurrency must be at least 1, got 0"),
            ("scale=0", "scale must be above 0 and finite, got 0"),
            ("scale=nan", "scale must be finite, got nan"),
            ("spread=-1", "spread must be at least 0"),
            ("rate=-2", "rate must be above 0"),
            ("rate=2&concurrency=3", "rate= is an open loop and concurrency= a closed one"),
            (
                "scale=2&concurrency=3",
                "scale= and spread= change a trace.s arrivals, which rate= and concurrency= replace",
            ),
            ("requets=5", "'requets=5' is unknown; azure knows .*; did you mean 'requests'"),
            ("requests=5&requests=6", "'requests=6' is given twice"),
            ("requests", "'requests' is not KEY=VALUE"),
            ("max_input=many", "max_input must be a whole number, got 'many'"),
        ],
    )
    def test_is_told_in_one_line_that_names_the_workload(self, query: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "trace.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3,4\n", encoding="utf-8")

        with pytest.raises(WorkloadError, match=f"^workload 'azure:.*': {message}") as error:
            parse_workload(f"azure:{path}?{query}", vocab_size=50)

        assert "\n" not in str(error.value)


class TestLaws:
    def test_even_lengths_lie_between_their_ends_and_reach_both(self) -> None:
        workload = parse_workload("poisson:rate=1,requests=400,input=3..6,output=1..2", vocab_size=50)

        assert set(inputs(workload)) == {3, 4, 5, 6}
        assert {spec.params.max_tokens for spec in workload.requests} == {1, 2}

    def test_log_normal_lengths_have_their_median_and_a_long_tail(self) -> None:
        found = inputs(parse_workload("fixed:requests=2000,input=200~1,output=1", vocab_size=50))

        assert median(found) == pytest.approx(200, rel=0.1)
        assert max(found) > 2000
        assert min(found) >= 1

    @pytest.mark.parametrize(
        ("law", "message"),
        [
            ("6..3", "input must not fall from 6 to 3"),
            ("0..3", "input must be at least 1, got 0..3"),
            ("0", "input must be at least 1, got 0"),
            ("3~0", "input must have a sigma above 0 and up to 4"),
            ("3~9", "input must have a sigma above 0 and up to 4"),
            ("many", r"input must be a whole number or a law: N, LOW\.\.HIGH .*; got 'many'"),
        ],
    )
    def test_bad_laws_are_told_with_the_forms_there_are(self, law: str, message: str) -> None:
        with pytest.raises(WorkloadError, match=message):
            parse_workload(f"fixed:requests=1,input={law},output=1", vocab_size=50)


class TestFitting:
    def spec(self, prompt: tuple[int, ...] | str, output: int) -> RequestSpec:
        return RequestSpec(prompt=prompt, params=SamplingParams(max_tokens=output))

    def test_outputs_that_the_engine_will_cut_are_told(self) -> None:
        work = Workload(name="w", requests=(self.spec((1,) * 6, 4), self.spec((1,) * 6, 5), self.spec("text", 99)))

        assert work.length_notes(10) == (
            "1 of 3 outputs end early: with their prompts they exceed max_sequence_length=10",
        )
        assert work.length_notes(11) == ()

    def test_prompts_that_leave_no_room_are_an_error_with_its_remedies(self) -> None:
        work = Workload(name="w", requests=(self.spec((1,) * 10, 4), self.spec((1,) * 9, 1)))

        with pytest.raises(WorkloadError, match=r"1 of 2 prompts leave no room .*max_sequence_length=10, the longest"):
            work.length_notes(10)
