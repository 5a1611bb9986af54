"""The tables and charts behind figures, of runs made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tracing.traces import device, phase, record
from tests.unit.workbench.figures.figure_worlds import MS, iterations, requests, spans, trace
from tracing.records import PHASE_COLOURS
from tracing.trace import Records, Trace
from workbench.figures import FIGURES, FigureError, make_figure
from workbench.figures.chart import Chart, Series
from workbench.figures.windows import PAUSE_NS, pauses_in, windows_of
from workbench.widgets.timeline_feed import PauseFinder


def drawn(chart: Chart, place: int = 0) -> dict[str, Series]:
    return {series.name: series for series in chart.axes[place].series}


def long_trace(count: int, void: tuple[int, ...] = ()) -> Trace:
    """Iterations of 1 ms with 1 ms between them, one token each; iteration 0 gives 5."""
    records = [
        record(
            number,
            2 * number * MS,
            (2 * number + 1) * MS,
            new_tokens=5 if number == 0 else 1,
            void_reasons=("hand_stepped",) if number in void else (),
        )
        for number in range(count)
    ]
    return trace(records=Records(iterations=records))


class TestLatency:
    def test_has_a_row_for_each_request_whose_times_count(self) -> None:
        rows = make_figure("latency", trace()).data.to_pylist()

        assert [row["request_id"] for row in rows] == ["a", "b"]
        assert [row["ttft_ns"] for row in rows] == [4 * MS, 8 * MS]
        assert [row["queue_delay_ns"] for row in rows] == [1 * MS, 3 * MS]
        assert [row["tpot_ns"] for row in rows] == [2 * MS, None]

    def test_draws_which_share_was_served_within_a_time(self) -> None:
        chart = make_figure("latency", trace()).chart

        queue, ttft, tpot = (drawn(chart, place)["async"] for place in range(3))
        assert (ttft.x, ttft.y) == ((4.0, 4.0, 8.0), (0, 50, 100))
        assert (queue.x, tpot.x, tpot.y) == ((1.0, 1.0, 3.0), (2.0, 2.0), (0, 100))


class TestWindows:
    def test_adjoin_within_a_stretch_and_never_hold_void_iterations(self) -> None:
        windows = windows_of(long_trace(7, void=(3,)).records.iterations, 2)

        assert [[one.iteration for one in window.records] for window in windows] == [[0, 1], [2], [4, 5], [6]]
        assert [window.stretch for window in windows] == [0, 0, 1, 1]
        assert windows[0].end_ns == windows[1].start_ns == 4 * MS
        assert windows[1].end_ns == 5 * MS

    def test_are_about_sixty_where_nobody_says_how_long(self) -> None:
        assert len(windows_of(long_trace(600).records.iterations)) == 60
        assert len(windows_of(long_trace(5).records.iterations)) == 5
        assert windows_of([]) == []

    def test_of_no_iterations_are_refused(self) -> None:
        with pytest.raises(FigureError, match="window must be at least 1 iteration, got 0"):
            make_figure("throughput", trace(), window=0)


class TestThroughput:
    @pytest.mark.parametrize("window", [None, 1, 2, 3, 100])
    def test_sums_to_the_rate_of_the_run_whatever_the_windows(self, window: int | None) -> None:
        run = long_trace(11, void=(4, 5))
        rows = make_figure("throughput", run, window=window).data.to_pylist()

        time_ns = sum(row["end_ns"] - row["start_ns"] for row in rows)
        assert sum(row["new_tokens"] for row in rows) * 1e9 / time_ns == run.summary.tokens_per_s

    def test_a_line_has_a_gap_where_time_was_not_measured(self) -> None:
        (line,) = make_figure("throughput", long_trace(4, void=(1,)), window=1).chart.axes[0].series

        assert line.x == (0.0, 0.001, 0.001, 0.004, 0.006, 0.007, 0.007)
        assert line.y == (5000.0, 5000.0, None, 500.0, 1000.0, 1000.0, None)

    def test_time_in_which_nobody_ran_the_engine_is_in_no_window(self) -> None:
        """A run that was stopped for 4 s and run on was drawn as 4 s near zero, and a spike behind it."""
        steps = [(0, 1), (1, 2), (4002, 4003), (4003, 4004)]
        records = [record(n, low * MS, high * MS, new_tokens=2) for n, (low, high) in enumerate(steps)]
        run = trace(records=Records(iterations=records))
        rows = make_figure("throughput", run, window=1).data.to_pylist()

        assert [(row["start_ns"] // MS, row["end_ns"] // MS) for row in rows] == steps
        assert {row["tokens_per_s"] for row in rows} == {2000.0}
        (line,) = make_figure("throughput", run, window=4).chart.axes[0].series
        assert line.y == (2000.0, 2000.0, None, 2000.0, 2000.0, None)

    def test_tokens_whose_forward_ran_into_a_pause_are_not_divided_by_the_moment_they_were_fetched_in(self) -> None:
        steps = [(0, 10), (10, 20), (4020, 4021), (4021, 4031)]
        records = [record(n, low * MS, high * MS, new_tokens=2) for n, (low, high) in enumerate(steps)]
        forwards = [device("forward", low * MS, (low + 9) * MS, n) for n, low in enumerate((2, 12, 4021))]
        rows = make_figure("throughput", trace(records=Records(spans=forwards, iterations=records)), window=1).data

        assert rows["first_iteration"].to_pylist() == [0, 1, 3]
        assert set(rows["tokens_per_s"].to_pylist()) == {200.0}

    def test_a_device_that_works_on_and_a_short_gap_are_no_pause(self) -> None:
        assert PauseFinder().least_ns == PAUSE_NS
        records = [record(0, 0, MS), record(1, 9 * MS, 10 * MS), record(2, 14 * MS, 15 * MS)]
        busy = [device("forward", 0, 9 * MS)]

        assert pauses_in(busy, records) == []
        assert pauses_in([], records) == [(MS, 9 * MS)]


class TestHidden:
    def test_has_a_row_for_each_timed_iteration_and_the_runs_share_in_all(self) -> None:
        run = trace()
        rows = make_figure("hidden", run).data.to_pylist()

        # Iteration 0 works in [0, 2], [7, 8] and [8, 9] beside an idle device; iteration 1 in [10, 14], all hidden.
        assert [(row["host_ns"], row["hidden_ns"], row["order"]) for row in rows] == [
            (4 * MS, 0, "no_overlap"),
            (4 * MS, 4 * MS, "overlap"),
        ]
        share = sum(row["hidden_ns"] for row in rows) / sum(row["host_ns"] for row in rows)
        assert share == run.summary.host.hidden_share == 0.5

    def test_by_iteration_a_series_is_an_order(self) -> None:
        series = drawn(make_figure("hidden", trace()).chart)

        assert (series["no_overlap"].x, series["no_overlap"].y) == ((0,), (0.0,))
        assert (series["overlap"].x, series["overlap"].y) == ((1,), (100.0,))
        assert series["overlap"].kind != series["no_overlap"].kind

    def test_by_order_a_bar_is_a_mean_iteration(self) -> None:
        series = drawn(make_figure("hidden", trace(), by="order").chart)

        assert series["hidden"].x == ("no_overlap", "overlap")
        assert series["hidden"].y == (0.0, 4000.0)
        assert series["exposed"].y == (4000.0, 0.0)

    def test_of_many_iterations_a_point_is_the_mean_of_several_and_the_axis_says_so(self) -> None:
        count = 5_000
        records = [record(number, 10 * number, 10 * number + 10) for number in range(count)]
        work = [phase("prepare", 10 * number, 10 * number + 4, number) for number in range(count)]
        busy = [device("forward", 10 * number, 10 * number + 1 + number % 3, number) for number in range(count)]
        run = trace(records=Records(spans=[*work, *busy], iterations=records))

        axes = make_figure("hidden", run).chart.axes[0]

        (points,) = axes.series
        assert len(points.x) == -(-count // 3)
        assert axes.x_title == "iteration, a point the mean of 3"
        assert points.y[0] == pytest.approx(50.0)  # 1, 2 and 3 of 4 each


class TestBubbles:
    def test_divides_the_idle_time_by_cause_as_the_summary_does(self) -> None:
        run = trace()
        rows = make_figure("bubbles", run, by="run").data.to_pylist()

        idle = {row["cause"]: row["idle_ns"] for row in rows if row["idle_ns"]}
        assert idle == {"wait for results": 1 * MS, "resolve": 1 * MS, "prepare": 1 * MS}
        assert run.summary.blame is not None
        assert idle == run.summary.blame.parts

    def test_a_run_has_a_bar_of_a_mean_iteration(self) -> None:
        series = drawn(make_figure("bubbles", [trace("one"), trace("two")]).chart)

        assert series["resolve"].x == ("one", "two")
        assert series["resolve"].y == (500.0, 500.0)
        assert series["resolve"].colour == PHASE_COLOURS["resolve"]
        assert series["wait for results"].hatch == "/"

    def test_by_iteration_a_window_is_as_wide_as_its_iterations(self) -> None:
        series = drawn(make_figure("bubbles", trace(), by="iteration", window=2).chart)

        assert (series["prepare"].x, series["prepare"].y, series["prepare"].widths) == ((0.5,), (500.0,), (2.0,))

    def test_a_window_without_bubbles_still_counts_its_iterations(self) -> None:
        rows = make_figure("bubbles", trace(), window=1).data.to_pylist()

        assert [
            (row["num_iterations"], row["cause"], row["idle_ns"]) for row in rows if row["first_iteration"] == 1
        ] == [(1, None, 0)]

    def test_launch_latency_is_a_cause_of_its_own(self) -> None:
        late = [*spans()[:5], device("forward", 9 * MS, 19 * MS, 1, enqueued=7 * MS), spans()[6]]
        run = trace(records=Records(spans=late, iterations=iterations()))

        idle = {row["cause"]: row["idle_ns"] for row in make_figure("bubbles", run).data.to_pylist() if row["cause"]}

        assert idle == {"wait for results": 1 * MS, "launch latency": 2 * MS}


class TestSources:
    def test_runs_of_one_name_are_told_apart(self) -> None:
        figure = make_figure("throughput", [trace("async"), trace("async")])

        assert [series.name for series in figure.chart.axes[0].series] == ["async", "async (2)"]

    def test_a_mapping_names_the_runs(self) -> None:
        figure = make_figure("throughput", {"before": trace(), "after": trace()})

        assert [run.name for run in figure.provenance.runs] == ["before", "after"]

    @pytest.mark.parametrize(
        ("name", "sources", "options", "message"),
        [
            ("speed", trace(), {}, "there is no figure 'speed'; there are latency, throughput, hidden, bubbles"),
            ("latency", [], {}, "at least one session, trace or run; got none"),
            ("latency", {}, {}, "at least one session, trace or run; got none"),
            ("latency", 3, {}, "drawn of sessions, traces or runs; got int"),
            ("hidden", trace(), {"by": "day"}, "by must be 'iteration' or 'order', got 'day'"),
            ("bubbles", trace(), {"by": "day"}, "by must be 'run' or 'iteration', got 'day'"),
            ("latency", trace(), {"template": "blue"}, "template must be one of light, dark; got 'blue'"),
        ],
    )
    def test_what_cannot_be_drawn_is_refused(
        self, name: str, sources: Any, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(FigureError, match=message):
            make_figure(name, sources, **options)


class TestEmpty:
    @pytest.mark.parametrize("name", FIGURES)
    def test_before_a_run_it_says_what_to_do(self, name: str) -> None:
        figure = make_figure(name, trace(records=Records()))

        assert figure.chart.is_empty
        assert figure.chart.hint == "Nothing has run yet. Submit requests, then session.run()."
        assert figure.data.num_rows == 0

    @pytest.mark.parametrize("name", [name for name in FIGURES if name != "drafts"])  # counts are no times
    def test_where_all_iterations_are_void_it_says_why_and_how_to_get_others(self, name: str) -> None:
        void = iterations(void_reasons=("inline_device",))
        run = trace(records=Records(spans=spans(), iterations=void, requests=requests()[2:]))

        chart = make_figure(name, run).chart

        assert chart.is_empty
        assert "All 2 iterations are void (computed on the host's thread by the inline device)" in chart.hint
        assert "use device='cpu' or 'cuda'" in chart.hint

    @pytest.mark.parametrize("name", ["hidden", "bubbles"])
    def test_without_device_times_it_says_so(self, name: str) -> None:
        host = [span for span in spans() if not span.is_device]

        chart = make_figure(name, trace(records=Records(spans=host, iterations=iterations()))).chart

        assert chart.is_empty
        assert chart.hint.startswith("No device work was recorded")

    def test_a_run_with_something_to_show_is_not_empty(self) -> None:
        assert not any(make_figure(name, trace()).chart.is_empty for name in FIGURES)
