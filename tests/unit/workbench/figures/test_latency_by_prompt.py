"""Latency by the length of the prompt, on requests whose percentiles can be worked out in the head."""

from __future__ import annotations

import pytest

from tests.unit.workbench.figures.figure_worlds import MS, trace
from tracing.records import RequestRecord
from tracing.trace import Records, Trace
from workbench.figures import FigureError, make_figure


def waited(name: str, length: int, wait_ms: int, **fields: str) -> RequestRecord:
    """A prompt that waited so long and had its first token 2 ms later."""
    return RequestRecord(
        request_id=name,
        arrival_ns=0,
        admitted_ns=wait_ms * MS,
        first_token_ns=(wait_ms + 2) * MS,
        num_prompt_tokens=length,
        num_output_tokens=1,
        void_reasons=tuple(fields.values()),
    )


def run(name: str, waits: dict[int, int]) -> Trace:
    """One request a length, and one that met a void iteration."""
    requests = [waited(f"r{length}", length, wait_ms) for length, wait_ms in waits.items()]
    requests.append(waited("void", 1, 9_000, why="hand_stepped"))
    return trace(name, records=Records(spans=(), iterations=(), requests=tuple(requests)))


class TestLatencyByPrompt:
    def test_has_a_row_a_run_and_quarter_of_all_lengths(self) -> None:
        lengths = (2, 4, 8, 16, 32, 64, 128, 256)
        figure = make_figure(
            "latency",
            [run("a", dict.fromkeys(lengths, 10)), run("b", {length: length for length in lengths})],
            by="prompt",
        )

        rows = figure.data.to_pylist()
        quarters = [(2, 4), (8, 16), (32, 64), (128, 256)]
        assert [(row["run"], row["shortest"], row["longest"]) for row in rows] == [
            (name, *quarter) for name in ("a", "b") for quarter in quarters
        ]
        assert {row["requests"] for row in rows} == {2}
        assert [row["queue_delay_p50_ns"] / MS for row in rows] == [10, 10, 10, 10, 3, 12, 48, 192]
        assert [row["queue_delay_p90_ns"] / MS for row in rows[4:]] == pytest.approx([3.8, 15.2, 60.8, 243.2])
        assert all(row["ttft_p50_ns"] == row["queue_delay_p50_ns"] + 2 * MS for row in rows)

    def test_equal_lengths_are_in_one_class(self) -> None:
        requests = tuple(waited(f"r{place}", 5, place) for place in range(9))
        one = trace("a", records=Records(spans=(), iterations=(), requests=requests))

        (row,) = make_figure("latency", one, by="prompt").data.to_pylist()
        assert (row["shortest"], row["longest"], row["requests"]) == (5, 5, 9)

    def test_every_request_is_in_one_class(self) -> None:
        lengths = (3, 3, 3, 4, 5, 5, 5, 5, 5, 6, 7, 7, 8)
        requests = tuple(waited(f"r{place}", length, 1) for place, length in enumerate(lengths))
        one = trace("a", records=Records(spans=(), iterations=(), requests=requests))

        rows = make_figure("latency", one, by="prompt").data.to_pylist()
        assert sum(row["requests"] for row in rows) == len(lengths)

    def test_draws_a_line_for_the_median_and_points_for_the_90th_percentile(self) -> None:
        figure = make_figure("latency", run("a", {2: 1, 4: 3, 8: 5, 16: 7}), by="prompt")

        waits, ttft = figure.chart.axes
        assert [series.name for series in waits.series] == ["a, p50", "a, p90"]
        line = waits.series[0]
        assert list(zip(line.x, line.y, strict=True)) == [(2, 1), (4, 3), (8, 5), (16, 7), (16, 7)]
        assert ttft.series[1].y == pytest.approx((3, 5, 7, 9))

    def test_of_nothing_says_what_to_do(self) -> None:
        figure = make_figure("latency", trace("a", records=Records(spans=(), iterations=(), requests=())), by="prompt")

        assert figure.chart.is_empty
        assert figure.chart.hint

    def test_by_anything_else_is_refused(self) -> None:
        with pytest.raises(FigureError, match="by must be 'request' or 'prompt', got 'row'"):
            make_figure("latency", run("a", {2: 1}), by="row")
