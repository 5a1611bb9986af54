from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.traces import batch, detail, device, phase, record, wait
from tracing.analysis import iteration_table, measured_windows, request_latency, summarise
from tracing.comparison import comparison_rows
from tracing.records import TRACE_EDGE, GraphUse, IterationRecord, RequestRecord, Span
from tracing.summary import Spread


def hidden_and_exposed(spans: list[Span]) -> tuple[int | None, int | None]:
    host = summarise(spans, [record(0, 0, 100)]).host
    return host.hidden_ns, host.exposed_ns


class TestOverlap:
    def test_none(self) -> None:
        assert hidden_and_exposed([phase("prepare", 0, 40), device("forward", 40, 100)]) == (0, 40)

    def test_full(self) -> None:
        assert hidden_and_exposed([phase("resolve", 50, 90), device("forward", 40, 100)]) == (40, 0)

    def test_partial(self) -> None:
        assert hidden_and_exposed([phase("resolve", 20, 60), device("forward", 30, 50)]) == (20, 20)

    def test_several_pieces_of_device_work(self) -> None:
        spans = [phase("resolve", 0, 100), device("sample", 10, 20), device("forward", 15, 40), device("fetch", 60, 61)]
        assert hidden_and_exposed(spans) == (31, 69)

    def test_copies_hide_nothing(self) -> None:
        spans = [phase("resolve", 0, 50), device("fetch", 0, 50, lane="copy"), device("forward", 60, 70)]
        assert hidden_and_exposed(spans) == (0, 50)

    def test_waiting_is_not_work(self) -> None:
        host = summarise([phase("resolve", 0, 50), wait(10, 40), device("forward", 0, 40)], [record(0, 0, 60)]).host
        assert (host.work_ns, host.wait_ns, host.hidden_ns, host.exposed_ns) == (20, 30, 10, 10)
        assert host.hidden_share == 0.5

    def test_details_are_not_counted_again(self) -> None:
        host = summarise([phase("emit", 0, 50), detail("detokenise", 10, 30)], [record(0, 0, 50)]).host
        assert host.work_ns == 50
        assert [part.name for part in host.phases] == ["emit"]

    def test_zero_length_spans_take_no_time(self) -> None:
        spans = [phase("admit", 5, 5), device("forward", 7, 7), device("sample", 7, 7), wait(5, 5)]
        summary = summarise(spans, [record(0, 0, 10)])
        assert (summary.host.work_ns, summary.host.other_ns) == (0, 10)
        assert summary.host.phases[0].host.count == 1
        assert summary.host.hidden_share is None

    def test_without_device_work_nothing_is_claimed(self) -> None:
        summary = summarise([phase("prepare", 0, 10)], [record(0, 0, 10)])
        assert (summary.host.hidden_ns, summary.host.exposed_ns, summary.host.hidden_share) == (None, None, None)
        assert (summary.device.busy_ns, summary.device.busy_share, summary.device.bubbles) == (None, None, None)


class TestIterationTable:
    def test_phases_waits_and_other_sum_to_the_iteration(self) -> None:
        spans = [
            phase("prepare", 110, 130, 1),
            phase("resolve", 140, 190, 1),
            wait(150, 180, 1),
            device("forward", 120, 170, 0),
        ]
        (row,) = iteration_table(spans, [record(1, 100, 200)])
        assert (row.duration_ns, row.host_ns, row.wait_ns, row.other_ns) == (100, 40, 30, 30)
        assert (row.hidden_ns, row.exposed_ns, row.busy_ns) == (20, 20, 50)
        assert list(row.phases) == ["prepare", "resolve"]
        assert (row.phases["resolve"].host_ns, row.phases["resolve"].wait_ns) == (20, 30)

    def test_what_an_abandoned_iteration_left_is_not_charged_to_its_successor(self) -> None:
        spans = [phase("prepare", 0, 90, 5), phase("prepare", 110, 120, 5)]
        (row,) = iteration_table(spans, [record(5, 100, 200)])
        assert row.host_ns == 10


class TestWindows:
    def test_neighbours_form_one_stretch(self) -> None:
        assert measured_windows([record(0, 0, 10), record(1, 12, 20)]) == [(0, 20)]

    @pytest.mark.parametrize(
        "records",
        [
            [record(0, 0, 10), record(1, 10, 50, void_reasons=("hand_stepped",)), record(2, 50, 60)],
            [record(0, 0, 10), record(2, 50, 60)],
            [record(0, 0, 10, num_active=0), record(1, 50, 60)],
        ],
        ids=["void", "abandoned", "drained"],
    )
    def test_a_stretch_ends_where_time_means_nothing(self, records: list[IterationRecord]) -> None:
        assert measured_windows(records) == [(0, 10), (50, 60)]

    def test_queued_requests_keep_a_stretch_going(self) -> None:
        records = [record(0, 0, 10, num_active=0, num_waiting=1), record(1, 50, 60)]
        assert measured_windows(records) == [(0, 60)]


class TestDevice:
    def test_busy_and_bubbles(self) -> None:
        spans = [device("forward", 10, 30), device("sample", 30, 40), device("forward", 60, 90)]
        times = summarise(spans, [record(0, 0, 50), record(1, 50, 100)]).device
        assert (times.busy_ns, times.busy_share) == (60, 0.6)
        assert (times.bubble_ns, times.bubble_share) == (20, 0.2)
        assert times.bubbles == Spread.of([20])

    def test_no_bubble_spans_a_void_stretch(self) -> None:
        spans = [device("forward", 0, 5, 0), device("forward", 95, 100, 2)]
        records = [record(0, 0, 10), record(1, 10, 90, void_reasons=("debugger",)), record(2, 90, 100)]
        times = summarise(spans, records).device
        assert (times.busy_ns, times.bubble_ns) == (10, 0)

    def test_sample_belongs_to_the_consumed_batch_and_forward_to_the_launched_one(self) -> None:
        spans = [device("sample", 0, 7), device("forward", 7, 20), device("publish", 0, 2, lane="copy")]
        records = [record(0, 0, 30, consumed=batch(9, prefill=2, decode=0), launched=batch(0, decode=3))]
        phases = summarise(spans, records).device.phases
        assert [(p.lane, p.name, p.batch, p.time.total_ns) for p in phases] == [
            ("compute", "forward", "decode", 13),
            ("compute", "sample", "prefill", 7),
            ("copy", "publish", "decode", 2),
        ]

    def test_two_runs_between_which_the_numbers_started_anew_are_two_samples(self) -> None:
        """A reviewer's find: the second run's device times were added to the first's, or left out."""
        spans = [device("forward", 5, 15, 3, enqueued=4), device("forward", 105, 135, 3, enqueued=104)]
        records = [record(3, 0, 20, launched=batch(3)), record(3, 100, 140, launched=batch(3))]
        for order in (records, records[::-1]):
            (row,) = summarise(spans, order).device.phases
            assert row.time == Spread.of([10, 30])

    def test_pieces_of_one_name_in_one_iteration_are_one_sample(self) -> None:
        spans = [device("forward", 0, 5), device("forward", 6, 9)]
        (row,) = summarise(spans, [record(0, 0, 10, launched=batch(0))]).device.phases
        assert row.time == Spread.of([8])


class TestCounts:
    def test_orders_count_void_iterations_but_do_not_time_them(self) -> None:
        records = [
            record(0, 0, 10, order="PRIMER", reason="no pending forward"),
            record(1, 10, 30),
            record(2, 30, 60, reason="policy"),
            record(3, 60, 1000, void_reasons=("hand_stepped", "invariants")),
        ]
        summary = summarise([], records)
        overlap, primer = summary.orders
        assert (overlap.order, overlap.count, overlap.share) == ("OVERLAP", 3, 0.75)
        assert overlap.reasons == {"decode only": 2, "policy": 1}
        assert overlap.step == Spread.of([20, 30])
        assert primer.step == Spread.of([10])
        assert (summary.num_void, summary.void_reasons) == (1, {"hand_stepped": 1, "invariants": 1})

    def test_graphs_and_padding(self) -> None:
        hit = GraphUse(label="bucket", hit=True, dims=(8, 0, 8), padding_tokens=5)
        miss = GraphUse(label="eager", hit=False, miss_reason="no bucket for prefill")
        records = [
            record(0, 0, 1, graph=hit, launched=batch(0, decode=3)),
            record(1, 1, 2, graph=miss, launched=batch(1, prefill=1, decode=2)),
            record(2, 2, 3),
        ]
        graphs = summarise([], records).graphs
        assert (graphs.hits, graphs.hit_rate) == (1, 0.5)
        assert graphs.misses == {"no bucket for prefill": 1}
        assert graphs.labels == {"bucket": 1, "eager": 1}
        assert (graphs.padding_tokens, graphs.padding_share) == (5, 5 / 20)

    def test_wasted_rows(self) -> None:
        records = [
            record(0, 0, 1, consumed=batch(0, decode=4), wasted_rows={"eos": 1, "abort": 1}),
            record(1, 1, 2, consumed=batch(1, decode=4), wasted_rows={"eos": 1}),
        ]
        wasted = summarise([], records).wasted_rows
        assert (wasted.by_cause, wasted.total, wasted.share) == ({"eos": 2, "abort": 1}, 3, 3 / 8)

    def test_tokens_per_second_leave_void_iterations_out(self) -> None:
        records = [
            record(0, 0, 10**9, new_tokens=30),
            record(1, 10**9, 9 * 10**9, new_tokens=50, void_reasons=("debugger",)),
        ]
        assert summarise([], records).tokens_per_s == 30.0


class TestRequests:
    def test_latencies(self) -> None:
        request = RequestRecord(
            request_id="a",
            arrival_ns=100,
            admitted_ns=110,
            first_token_ns=150,
            finished_ns=250,
            token_times_ns=(150, 180, 190, 250),
            num_output_tokens=5,
            finish_reason="length",
        )
        latency = request_latency([request])
        assert latency.queue_delay == Spread.of([10])
        assert latency.ttft == Spread.of([50])
        assert latency.tpot == Spread.of([25])
        assert latency.itl == Spread.of([30, 10, 60])
        assert latency.e2e == Spread.of([150])
        assert latency.finish_reasons == {"length": 1}

    def test_one_token_has_no_time_per_further_token(self) -> None:
        request = RequestRecord(
            request_id="a", arrival_ns=0, first_token_ns=5, finished_ns=6, token_times_ns=(5,), num_output_tokens=1
        )
        latency = request_latency([request])
        assert (latency.tpot, latency.itl) == (None, None)
        assert latency.ttft == Spread.of([5])

    def test_a_request_that_never_ran_gives_no_samples(self) -> None:
        latency = request_latency([RequestRecord(request_id="a", arrival_ns=0)])
        assert (latency.queue_delay, latency.ttft, latency.e2e) == (None, None, None)
        assert latency.finish_reasons == {"unfinished": 1}

    def test_requests_that_met_a_void_iteration_are_left_out(self) -> None:
        void = [record(0, 100, 200, void_reasons=("hand_stepped",))]
        before = RequestRecord(request_id="a", arrival_ns=0, first_token_ns=50, finished_ns=90)
        across = RequestRecord(request_id="b", arrival_ns=0, first_token_ns=150, finished_ns=250)
        running = RequestRecord(request_id="c", arrival_ns=150, first_token_ns=160)
        latency = request_latency([before, across, running], void)
        assert (latency.count, latency.num_void) == (1, 2)
        assert latency.ttft == Spread.of([50])

    def test_requests_that_say_so_are_left_out_without_any_record_of_the_iteration(self) -> None:
        """A reviewer's find: they counted again as soon as the ring had lost that record."""
        marked = RequestRecord(request_id="a", arrival_ns=0, finished_ns=90, void_reasons=("hand_stepped",))
        other = RequestRecord(request_id="b", arrival_ns=0, finished_ns=80)
        for kept in ([], [record(7, 100, 200)], [record(7, 100, 200, void_reasons=("debugger",))]):
            latency = request_latency([marked, other], kept)
            assert (latency.count, latency.num_void) == (1, 1)
            assert latency.e2e == Spread.of([80])

    def test_device_work_that_is_not_known_says_nothing_against_a_request(self) -> None:
        edge = [record(0, 100, 200, void_reasons=(TRACE_EDGE,))]
        latency = request_latency([RequestRecord(request_id="a", arrival_ns=0, finished_ns=150)], edge)
        assert (latency.count, latency.num_void) == (1, 0)


class TestEmpty:
    def test_an_empty_trace_has_no_samples_and_is_valid_json(self) -> None:
        summary = summarise([], [], [])
        plain = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
        assert plain["step"] is None
        assert plain["tokens_per_s"] is None
        assert plain["step_by_batch"] == {"decode": None, "prefill": None, "mixed": None}
        assert plain["requests"]["ttft"] is None
        assert plain["graphs"]["hit_rate"] is None
        assert plain["wasted_rows"]["share"] is None

    def test_a_run_of_void_iterations_only_has_no_times(self) -> None:
        summary = summarise([phase("prepare", 0, 5)], [record(0, 0, 10, void_reasons=("hand_stepped",))])
        assert (summary.num_iterations, summary.num_void, summary.num_timed) == (1, 1, 0)
        assert (summary.step, summary.host.phases, summary.measured_ns) == (None, (), 0)


LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Span], list[IterationRecord]]:
    """Iterations of adjoining phases with waits inside them, over device work that is placed at random."""
    spans: list[Span] = []
    records: list[IterationRecord] = []
    now = draw(st.integers(0, 5))
    for iteration in range(draw(st.integers(0, 5))):
        begin = now
        for name, long in zip(("admit", "prepare", "forward", "sample", "resolve"), draw(LENGTHS), strict=False):
            now += draw(st.integers(0, 3))
            spans.append(phase(name, now, now + long, iteration))
            if draw(st.booleans()):
                start = now + draw(st.integers(0, long))
                spans.append(wait(start, draw(st.integers(start, now + long)), iteration))
            now += long
        now += draw(st.integers(0, 3))
        void = draw(st.sampled_from([(), (), ("debugger",)]))
        order = draw(st.sampled_from(["OVERLAP", "NO_OVERLAP"]))
        rows = batch(iteration, prefill=draw(st.integers(0, 1)), decode=draw(st.integers(0, 2)))
        fields: dict[str, Any] = {"void_reasons": void, "order": order, "launched": rows, "num_active": 1}
        records.append(record(iteration, begin, now, **fields))
        now += draw(st.integers(0, 4))
    starts = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 20), st.integers(0, 5)), max_size=12))
    spans += [device("forward", start, start + long, iteration) for start, long, iteration in starts]
    return spans, records


class TestAnyTrace:
    @given(traces())
    def test_hidden_and_exposed_sum_to_host_work(self, trace: tuple[list[Span], list[IterationRecord]]) -> None:
        spans, records = trace
        for row in iteration_table(spans, records):
            assert row.hidden_ns + row.exposed_ns == row.host_ns
            assert row.hidden_ns <= row.busy_ns
            assert row.host_ns + row.wait_ns + row.other_ns == row.duration_ns
            assert row.other_ns >= 0
        host = summarise(spans, records).host
        if host.hidden_ns is not None:
            assert host.exposed_ns is not None
            assert host.hidden_ns + host.exposed_ns == host.work_ns
            assert sum(part.hidden_ns or 0 for part in host.phases) == host.hidden_ns

    @given(traces())
    def test_busy_and_bubbles_fit_into_the_measured_time(self, trace: tuple[list[Span], list[IterationRecord]]) -> None:
        summary = summarise(*trace)
        if summary.device.busy_ns is not None and summary.device.bubble_ns is not None:
            assert summary.device.busy_ns + summary.device.bubble_ns <= summary.measured_ns
        assert summary.host.between_ns >= 0

    @given(traces(), st.randoms(use_true_random=False))
    def test_the_order_of_records_does_not_matter(
        self, trace: tuple[list[Span], list[IterationRecord]], shuffle: random.Random
    ) -> None:
        spans, records = trace
        expected = json.dumps(summarise(spans, records).to_dict())
        shuffled_spans, shuffled_records = list(spans), list(records)
        shuffle.shuffle(shuffled_spans)
        shuffle.shuffle(shuffled_records)
        assert json.dumps(summarise(shuffled_spans, shuffled_records).to_dict()) == expected


class TestSpread:
    def test_percentiles_interpolate(self) -> None:
        spread = Spread.of(range(101))
        assert spread is not None
        assert (spread.count, spread.p50_ns, spread.p90_ns, spread.p99_ns, spread.max_ns) == (101, 50, 90, 99, 100)
        assert (spread.mean_ns, spread.total_ns) == (50, 5050)

    def test_any_order_sums_to_the_same_last_bit(self) -> None:
        assert Spread.of([0.1, 0.2, 0.3]) == Spread.of([0.3, 0.2, 0.1])


def drafted(name: str, proposed: tuple[int, ...], accepted: tuple[int, ...], **fields: Any) -> RequestRecord:
    return RequestRecord(request_id=name, arrival_ns=0, drafts_proposed=proposed, drafts_accepted=accepted, **fields)


class TestDrafts:
    def test_acceptance_is_by_place_over_all_requests_void_ones_too(self) -> None:
        requests = [drafted("a", (4, 4), (3, 1)), drafted("b", (6, 6), (2, 2), void_reasons=("paced",))]

        table = summarise([], [], requests).drafts

        assert table is not None
        assert (table.proposed, table.accepted) == ((10, 10), (5, 3))
        assert table.acceptance == (0.5, 0.3)
        assert table.acceptance_rate == 0.4
        assert (table.verified_rows, table.tokens_per_row) == (10, 1.8)

    def test_there_is_no_table_where_nothing_was_drafted(self) -> None:
        assert summarise([], [], [drafted("a", (), ())]).drafts is None

    def test_only_a_comparison_with_drafts_has_rows_of_them(self) -> None:
        with_drafts, without = summarise([], [], [drafted("a", (4, 4), (3, 1))]), summarise([], [])

        rows = [row for row in comparison_rows([with_drafts, without]) if row.section == "drafts"]

        assert [(row.label, row.values) for row in rows] == [
            ("drafts accepted", (50.0, None)),
            ("draft 1 accepted", (75.0, None)),
            ("draft 2 accepted", (25.0, None)),
            ("tokens / verified row", (2.0, None)),
        ]
        assert not [row for row in comparison_rows([without, without]) if row.section == "drafts"]
