from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.tracing.simulated import Lengths, simulate
from tests.unit.tracing.traces import batch, device, phase, record
from tracing.analysis import format_comparison, summarise
from tracing.blame import LAUNCH_LATENCY
from tracing.comparison import (
    ADMISSION_CAUSE,
    IDLE_SECTION,
    KINDS_NOTE,
    Row,
    ShownNumbers,
    comparison_notes,
    comparison_rows,
    format_value,
)
from tracing.host_line import BETWEEN_PHASES, OUTSIDE_ITERATIONS, WAKE_UP, HostKind
from tracing.nvtx_ranges import CATEGORY_OF_DETAIL
from tracing.records import BATCH_OF, PHASE_COLOURS, PHASES, RequestRecord
from tracing.summary import Summary

METRICS = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
DOCUMENTED = set(re.findall(r"`([^`]+)`", METRICS))


def run(order: str, length: int) -> Summary:
    spans = [phase("prepare", 0, length // 2), device("forward", length // 4, length)]
    return summarise(spans, [record(0, 0, length, order=order, launched=batch(0), wasted_rows={"eos": 1})])


class TestTable:
    def test_shows_values_units_and_the_ratio_of_last_to_first(self) -> None:
        text = format_comparison({"legacy": run("LEGACY", 4_000_000), "async": run("OVERLAP", 1_000_000)})
        lines = text.splitlines()
        assert lines[0].split() == ["unit", "legacy", "async", "async/legacy"]
        (step,) = [line for line in lines if line.startswith("  step time p50")]
        assert step.split() == ["step", "time", "p50", "ms", "4.00", "1.00", "0.25x"]

    def test_columns_are_aligned(self) -> None:
        text = format_comparison({"legacy": run("LEGACY", 4_000_000), "async": run("OVERLAP", 1_000_000)})
        table = text.split("\n\norders and reasons")[0].splitlines()
        ends = {len(line) for line in table if line.endswith("x") or line.endswith("async/legacy")}
        assert len(ends) == 1

    def test_missing_classes_say_no_samples(self) -> None:
        text = format_comparison({"legacy": run("LEGACY", 4000), "async": run("OVERLAP", 1000)})
        (line,) = [line for line in text.splitlines() if line.startswith("  LEGACY step p50")]
        assert line.split()[-2:] == ["no", "samples"]
        assert re.search(r"TTFT p50 +ms +no samples +no samples$", text, re.MULTILINE)

    def test_names_every_order_with_its_reasons(self) -> None:
        text = format_comparison({"only": run("OVERLAP", 1000)})
        assert text.splitlines()[-1] == "  only: OVERLAP 1 (100.0 %): decode only 1"
        assert "/" not in text.splitlines()[0]

    def test_nothing_to_compare_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one run"):
            format_comparison({})


class TestRows:
    def test_labels_are_unique_within_a_section(self) -> None:
        rows = comparison_rows([run("LEGACY", 4000), run("OVERLAP", 1000)])
        keys = [(row.section, row.label) for row in rows]
        assert len(set(keys)) == len(keys)

    @pytest.mark.parametrize("values", [(1.0,), (None, 1.0), (1.0, None), (0.0, 1.0)])
    def test_no_ratio_without_two_numbers(self, values: tuple[float | None, ...]) -> None:
        assert Row("s", "l", "ms", values).ratio is None

    def test_shares_have_no_ratio(self) -> None:
        assert Row("s", "l", "%", (0.5, 80.0)).ratio is None
        assert Row("s", "l", "ms", (4.0, 1.0)).ratio == 0.25

    @pytest.mark.parametrize("label", ["queue delay p50", "step time, decode p99", "step time, prefill p50"])
    def test_what_means_something_else_in_each_mode_has_no_ratio(self, label: str) -> None:
        assert Row("s", label, "ms", (4.0, 1.0)).ratio is None

    def test_say_which_direction_is_good(self) -> None:
        better = {row.label: row.better for row in comparison_rows([run("legacy", 4000), run("overlap", 1000)])}
        assert better["tokens/s"] == "higher"
        assert better["step time p50"] == better["TTFT p99"] == better["bubble / iteration"] == "lower"
        assert better["iterations"] == better["hidden share"] == ""

    def test_format(self) -> None:
        shown = [format_value(value, "ms") for value in (1234.56, 12.345, 0.1234, 0.0, None)]
        assert shown == ["1,234.6", "12.35", "0.123", "0.000", "no samples"]
        assert (format_value(1234.0, ""), format_value(12.34, "%")) == ("1,234", "12.3")


class TestIdleSection:
    def rows(self, *summaries: Summary) -> list[Row]:
        return [row for row in comparison_rows(summaries) if row.section == IDLE_SECTION]

    def test_sums_to_the_bubble_of_a_mean_iteration_in_each_run(self) -> None:
        runs = [summarise(*simulate(mode, 5, Lengths(launch=5, wake=7))) for mode in ("legacy", "async")]
        rows = self.rows(*runs)
        (bubble,) = [row for row in comparison_rows(runs) if row.label == "bubble / iteration"]
        for values, whole in zip(zip(*(row.values for row in rows), strict=True), bubble.values, strict=True):
            assert sum(value or 0 for value in values) == pytest.approx(whole)

    def test_has_the_largest_cause_first_and_says_zero_where_a_run_has_none_of_it(self) -> None:
        runs = [summarise(*simulate(mode, 5, Lengths(launch=5))) for mode in ("legacy", "async")]
        rows = self.rows(*runs)
        most = [max(value or 0 for value in row.values) for row in rows]
        assert most == sorted(most, reverse=True)
        assert (rows[0].label, rows[0].values[1], rows[0].better) == ("prepare", 0.0, "lower")
        assert {"wait for samples", "outside iterations", "launch latency"} <= {row.label for row in rows}

    def test_has_no_samples_in_a_run_without_device_work(self) -> None:
        host_only = summarise([phase("prepare", 0, 5)], [record(0, 0, 10, launched=batch(0))])
        assert self.rows(host_only) == []
        rows = self.rows(host_only, summarise(*simulate("legacy", 3, Lengths())))
        assert {row.values[0] for row in rows} == {None}


def steps(order: str, *, queue_ms: int = 1, ttft_ms: int = 5) -> Summary:
    """Two steps of 10 ms; in each the host works alone for 1 ms and the device idles 2 ms."""
    spans, records = [], []
    for number in range(3):
        at = number * 10_000_000
        spans += [phase("prepare", at + 500_000, at + 1_500_000, number), device("forward", at + 2_000_000, at + 10**7)]
        records.append(record(number, at, at + 10**7, order=order, launched=batch(number)))
    times = {"admitted_ns": queue_ms * 10**6, "first_token_ns": ttft_ms * 10**6}
    return summarise(spans, records, [RequestRecord(request_id="a", arrival_ns=0, **times)])


class TestNotes:
    def test_bound_what_overlap_can_save_by_the_idle_time_of_a_mean_legacy_step(self) -> None:
        limit, *rest = comparison_notes({"legacy": steps("legacy"), "async": steps("overlap")})
        assert limit == (
            "Of a mean legacy step of 10.0 ms the host exposes 1,000 µs (10.0 %); with launch latency, wake-up and the "
            "time between phases the device idles 1,333 µs (13.3 %): more than that overlap cannot save here. "
            "One run each: differences above that are this machine's noise."
        ), "two bubbles of 2 ms over three steps"
        assert rest == [KINDS_NOTE]

    def test_say_what_waits_longer_in_async_only_where_it_does(self) -> None:
        """TTFT was called longer below a table that had it 0.76x."""
        legacy = steps("legacy", queue_ms=2, ttft_ms=6)

        def told(**times: int) -> list[str]:
            notes = comparison_notes({"legacy": legacy, "async": steps("overlap", **times)})
            return [note for note in notes if ADMISSION_CAUSE in note]

        assert told(queue_ms=1, ttft_ms=5) == []
        assert told(queue_ms=3, ttft_ms=5) == [f"Longer in async: queue delay; {ADMISSION_CAUSE}."]
        assert told(queue_ms=3, ttft_ms=7) == [f"Longer in async: TTFT and queue delay; {ADMISSION_CAUSE}."]

    def test_go_by_the_numbers_that_the_table_shows(self) -> None:
        shown = ShownNumbers(speedup=[None, 1.15], ttft=[1.0, 2.0], queue_delay=[2.0, 1.0])
        limit, admission, _ = comparison_notes(
            {"legacy": steps("legacy"), "async": steps("overlap")}, repeats=5, shown=shown
        )
        assert limit.endswith("cannot save here."), "13.3 % of idle time allow 1.15x"
        assert admission.startswith("Longer in async: TTFT; ")

    def test_name_a_ratio_above_what_overlap_can_give(self) -> None:
        """1.32x stood above a sentence that allowed 0.6 % and said nothing of it."""
        shown = ShownNumbers(speedup=[None, 1.32, 1.1], ttft=[None] * 3, queue_delay=[None] * 3)
        runs = {"legacy": steps("legacy"), "async": steps("overlap"), "mine": steps("overlap")}
        (limit, _) = comparison_notes(runs, repeats=5, shown=shown)
        assert limit.endswith(
            "async has 1.32x the tokens/s, where that idle time allows 1.15x: more than overlap can give, so the rest "
            "has other causes or is noise."
        )

    def test_speak_of_single_runs_only_where_there_was_one(self) -> None:
        (limit, *_) = comparison_notes({"legacy": steps("legacy"), "async": steps("overlap")}, repeats=5)
        assert limit.endswith("cannot save here.")

    def test_are_left_out_where_there_is_one_mode_or_one_run(self) -> None:
        assert comparison_notes({"a": steps("overlap"), "b": steps("overlap")}) == []
        assert comparison_notes({"legacy": steps("legacy")}) == []

    def test_bound_nothing_without_device_times_or_without_a_legacy_baseline(self) -> None:
        host_only = summarise([phase("prepare", 0, 5)], [record(0, 0, 10, order="legacy", launched=batch(0))])
        assert comparison_notes({"legacy": host_only, "async": steps("overlap")}) == [KINDS_NOTE]
        assert comparison_notes({"async": steps("overlap"), "legacy": steps("legacy")}) == [KINDS_NOTE]


class TestDocumentation:
    def test_every_row_is_defined_in_metrics_md(self) -> None:
        rows = comparison_rows([run("LEGACY", 4000), run("OVERLAP", 1000)])
        undefined = []
        for row in rows:
            plain = re.sub(r" p(50|99)$", "", row.label)
            variable = row.section in DOCUMENTED or row.section == "orders"
            if plain not in DOCUMENTED and row.label not in DOCUMENTED and not variable:
                undefined.append(row.label)
        assert undefined == []
        assert "`NAME share` (%)" in METRICS

    def test_every_cause_of_idle_time_is_defined(self) -> None:
        causes = {BETWEEN_PHASES, OUTSIDE_ITERATIONS, WAKE_UP, LAUNCH_LATENCY, "wait for NAME", "before WORK, ORDER"}
        assert {IDLE_SECTION, *causes} <= DOCUMENTED
        (table,) = re.findall(r"its \*\*cause\*\*.*?\n\n(.*?)\n\n", METRICS, re.DOTALL)
        assert re.findall(r"\| `([\w-]+)` \|", table) == [kind.value for kind in HostKind]

    def test_every_range_is_listed_with_its_category_and_colour(self) -> None:
        for name in PHASES:
            assert f"| `{name}` | `phase` | push/pop | iteration | {PHASE_COLOURS[name]} |" in METRICS
        assert set(CATEGORY_OF_DETAIL) | set(CATEGORY_OF_DETAIL.values()) <= DOCUMENTED

    def test_every_name_that_belongs_to_a_batch_is_listed(self) -> None:
        for side in ("launched", "consumed"):
            (line,) = [line for line in METRICS.splitlines() if line.startswith(f"| {side} batch |")]
            assert set(re.findall(r"`(\w+)`", line)) == {name for name, of in BATCH_OF.items() if of == side}

    def test_the_nvtx_pin_is_the_installed_one(self) -> None:
        from importlib.metadata import version

        assert f"nvtx **{version('nvtx')}**" in METRICS
