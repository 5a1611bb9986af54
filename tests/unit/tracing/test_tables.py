"""Tables: their columns, and what stands in them for traces whose numbers can be added up in the head."""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing import record_strategies as some
from tests.unit.tracing.traces import batch, device, phase, record, wait
from tracing.from_tables import iterations_of, requests_of
from tracing.records import BatchInfo, Category, GraphUse, IterationRecord, RequestRecord, Span
from tracing.tables import iterations_table, requests_table, spans_table
from tracing.trace import Records, Trace

METRICS = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
TABLES = ("spans", "iterations", "requests", "phases", "device", "bubbles", "blame")

# name type, and ? where nulls are allowed; word: dictionary<values=string, indices=int32, ordered=0>
COLUMNS = {
    "spans": """
        name word, category word, lane word, start_ns int64, end_ns int64, duration_ns int64, iteration int64,
        depth int64, phase word?, enqueued_ns int64?, value double?, args string?""",
    "iterations": """
        iteration int64, mode word, order word, reason word, begin_ns int64, end_ns int64, duration_ns int64,
        host_ns int64, wait_ns int64, other_ns int64, hidden_ns int64?, exposed_ns int64?, busy_ns int64?,
        is_void bool, void_reasons list<element: string not null>, consumed_iteration int64?, consumed_kind word?,
        consumed_num_tokens int64?, consumed_num_prefill int64?, consumed_num_decode int64?,
        consumed_request_ids list<element: string not null>?, launched_iteration int64?, launched_kind word?,
        launched_num_tokens int64?, launched_num_prefill int64?, launched_num_decode int64?,
        launched_request_ids list<element: string not null>?, outputs int64, new_tokens int64,
        wasted_rows map<string; int64>, graph_label word?, graph_hit bool?, graph_num_tokens int64?,
        graph_num_prefill int64?, graph_num_decode int64?, graph_miss_reason word?, graph_padding_tokens int64?,
        rows_released int64, rows_moved int64, free_blocks int64, num_waiting int64, num_active int64,
        num_device int64?""",
    "requests": """
        request_id string, arrival_ns int64, admitted_ns int64?, first_token_ns int64?, finished_ns int64?,
        token_times_ns list<element: int64 not null>, num_prompt_tokens int64, num_output_tokens int64,
        finish_reason word?, queue_delay_ns int64?, ttft_ns int64?, tpot_ns double?, e2e_ns int64?, is_void bool,
        void_reasons list<element: string not null>, drafts_proposed list<element: int64 not null>,
        drafts_accepted list<element: int64 not null>""",
    "phases": """
        iteration int64, phase word, batch word, mode word, order word, reason word, start_ns int64, end_ns int64,
        host_ns int64, wait_ns int64, hidden_ns int64?, exposed_ns int64?, is_void bool""",
    "device": """
        iteration int64, name word, lane word, batch word, enqueued_ns int64?, start_ns int64, end_ns int64,
        duration_ns int64, is_void bool?""",
    "bubbles": """
        bubble int64, kind word, before word, iteration int64, order word, reason word, start_ns int64,
        end_ns int64, duration_ns int64, late_ns int64, launch_ns int64""",
    "blame": """
        bubble int64, cause word, kind word, iteration int64, order word, reason word, start_ns int64, end_ns int64,
        duration_ns int64, is_late bool""",
}


def trace_of(
    spans: list[Span] | None = None,
    iterations: list[IterationRecord] | None = None,
    requests: list[RequestRecord] | None = None,
) -> Trace:
    return Trace(name="x", records=Records(spans=spans or [], iterations=iterations or [], requests=requests or []))


def one_of_everything() -> Trace:
    graph = GraphUse(label="bucket", hit=True, dims=(4, 0, 4), padding_tokens=3)
    spans = [
        phase("prepare", 10, 30),
        phase("resolve", 40, 90),
        wait(50, 60),
        device("forward", 20, 55),
        device("sample", 70, 80),
        Span(name="abort", category=Category.INSTANT, lane="host", start_ns=95, end_ns=95, args={"b": 1, "a": [2]}),
        Span(name="free", category=Category.COUNTER, lane="host", start_ns=96, end_ns=96, value=2.5),
    ]
    iterations = [
        record(0, 0, 100, consumed=batch(0, decode=2), launched=batch(0), graph=graph, wasted_rows={"eos": 1}),
        record(1, 110, 150, void_reasons=("hand_stepped",)),
    ]
    requests = [
        RequestRecord(
            request_id="r0",
            arrival_ns=5,
            admitted_ns=8,
            first_token_ns=45,
            finished_ns=85,
            token_times_ns=(45, 65, 85),
            num_prompt_tokens=4,
            num_output_tokens=3,
            finish_reason="length",
        ),
        RequestRecord(request_id="r1", arrival_ns=120),
    ]
    return trace_of(spans, iterations, requests)


def written_out(schema: pa.Schema) -> list[str]:
    """As COLUMNS has them."""
    word = "dictionary<values=string, indices=int32, ordered=0>"
    return [
        f"{field.name} {str(field.type).replace(word, 'word').replace('map<string, ', 'map<string; ')}"
        + ("?" if field.nullable else "")
        for field in schema
    ]


def rows(table: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def records_of(trace: Trace) -> list[list[Any]]:
    return [list(trace.records.spans), list(trace.records.iterations), list(trace.records.requests)]


class TestSchemas:
    @pytest.mark.parametrize("name", TABLES)
    @pytest.mark.parametrize("trace", [trace_of(), one_of_everything()], ids=["empty", "full"])
    def test_are_fixed(self, name: str, trace: Trace) -> None:
        table = getattr(trace, name)

        table.validate(full=True)
        assert written_out(table.schema) == [column.strip() for column in COLUMNS[name].split(",")]
        assert (table.num_rows == 0) == (not trace.records.iterations)

    @given(trace=some.traces())
    def test_what_must_not_be_null_never_is(self, trace: Trace) -> None:
        for name in TABLES:
            table = getattr(trace, name)
            nulls = [field.name for field in table.schema if not field.nullable and table.column(field.name).null_count]
            assert nulls == [], name

    @pytest.mark.parametrize("name", TABLES)
    def test_every_column_is_documented(self, name: str) -> None:
        start = METRICS.index(f"### `{name}`")
        section = re.split(r"\n##+ ", METRICS[start + 3 :])[0]

        missing = [column for column in getattr(trace_of(), name).column_names if f"`{column}`" not in section]

        assert missing == []

    def test_hold_every_field_of_the_records(self) -> None:
        def names(kind: type, prefix: str = "") -> set[str]:
            return {prefix + field.name for field in fields(kind)}

        batch_fields = names(BatchInfo, "consumed_") | names(BatchInfo, "launched_")
        dims = {"graph_num_tokens", "graph_num_prefill", "graph_num_decode"}
        graph_fields = names(GraphUse, "graph_") - {"graph_dims"} | dims
        iteration_fields = names(IterationRecord) - {"consumed", "launched", "graph"} | batch_fields | graph_fields
        trace = trace_of()
        assert names(Span) <= set(trace.spans.column_names)
        assert iteration_fields <= set(trace.iterations.column_names)
        assert names(RequestRecord) <= set(trace.requests.column_names)

    def test_words_are_stored_once(self) -> None:
        table = spans_table([phase("prepare", at, at + 1) for at in range(100)])

        assert table.column("name").chunk(0).dictionary.to_pylist() == ["prepare"]


class TestOrder:
    @given(trace=some.traces(), seed=st.integers(0, 1 << 16))
    def test_of_records_never_matters(self, trace: Trace, seed: int) -> None:
        shuffled = records_of(trace)
        for kind in shuffled:
            random.Random(seed).shuffle(kind)
        other = trace_of(*shuffled)

        assert other.records == trace.records
        for name in TABLES:
            assert getattr(other, name).equals(getattr(trace, name)), name

    def test_does_not_matter_between_records_that_differ_in_their_last_field(self) -> None:
        one = Span(name="x", category=Category.INSTANT, lane="host", start_ns=1, end_ns=1, args={"a": 1, "b": 2})
        two = Span(name="x", category=Category.INSTANT, lane="host", start_ns=1, end_ns=1, args={"a": 1, "b": 1})

        assert spans_table([one, two]).equals(spans_table([two, one]))

    def test_of_a_mapping_does_not_matter(self) -> None:
        one, two = {"eos": 1, "abort": 2}, {"abort": 2, "eos": 1}

        assert iterations_table([], [record(0, 0, 1, wasted_rows=one)]).equals(
            iterations_table([], [record(0, 0, 1, wasted_rows=two)])
        )

    def test_tables_sort_what_they_are_given(self) -> None:
        spans = [device("forward", 5, 9), phase("prepare", 0, 4)]
        requests = [RequestRecord(request_id="b", arrival_ns=2), RequestRecord(request_id="a", arrival_ns=1)]

        assert rows(spans_table(spans), "start_ns") == [(0,), (5,)]
        assert rows(requests_table(requests), "request_id") == [("a",), ("b",)]


class TestValues:
    def test_spans_have_their_numbers_and_args(self) -> None:
        table = one_of_everything().spans

        found = rows(table, "name", "category", "lane", "duration_ns", "value", "args")
        assert ("abort", "instant", "host", 0, None, '{"a": [2], "b": 1}') in found
        assert ("free", "counter", "host", 0, 2.5, None) in found
        assert ("forward", "device", "compute", 35, None, None) in found

    def test_iterations_show_batches_graphs_and_where_the_time_went(self) -> None:
        first, second = one_of_everything().iterations.to_pylist()

        assert (first["host_ns"], first["wait_ns"], first["other_ns"], first["duration_ns"]) == (60, 10, 30, 100)
        assert (first["hidden_ns"], first["exposed_ns"], first["busy_ns"]) == (30, 30, 45)
        assert (first["consumed_kind"], first["consumed_request_ids"]) == ("decode", ["r0", "r1"])
        dims = [first[f"graph_{name}"] for name in ("num_tokens", "num_prefill", "num_decode")]
        assert (first["graph_label"], first["graph_hit"], dims) == ("bucket", True, [4, 0, 4])
        assert first["wasted_rows"] == [("eos", 1)]
        assert (second["consumed_kind"], second["launched_request_ids"], second["graph_hit"]) == (None, None, None)
        assert (second["is_void"], second["void_reasons"]) == (True, ["hand_stepped"])

    def test_requests_show_what_their_caller_felt(self) -> None:
        first, second = one_of_everything().requests.to_pylist()

        felt = [first[f"{name}_ns"] for name in ("queue_delay", "ttft", "tpot", "e2e")]
        assert felt == [3, 40, 20.0, 80]
        assert (first["is_void"], second["is_void"]) == (False, True)
        assert second["ttft_ns"] is None
        assert second["tpot_ns"] is None

    def test_a_single_token_has_no_time_per_token(self) -> None:
        one = RequestRecord(request_id="r", arrival_ns=0, first_token_ns=1, finished_ns=2, num_output_tokens=1)

        assert rows(requests_table([one]), "tpot_ns") == [(None,)]

    def test_phases_split_into_hidden_and_exposed(self) -> None:
        table = one_of_everything().phases

        assert rows(table, "phase", "batch", "start_ns", "host_ns", "wait_ns", "hidden_ns", "exposed_ns") == [
            ("prepare", "decode", 10, 20, 0, 10, 10),
            ("resolve", "decode", 40, 40, 10, 20, 20),
        ]

    def test_without_device_work_nothing_is_called_hidden(self) -> None:
        trace = trace_of([phase("prepare", 0, 10)], [record(0, 0, 20)])

        assert rows(trace.phases, "host_ns", "hidden_ns", "exposed_ns") == [(10, None, None)]
        assert rows(trace.iterations, "hidden_ns", "exposed_ns", "busy_ns") == [(None, None, None)]

    def test_a_phase_in_two_pieces_is_one_row(self) -> None:
        trace = trace_of([phase("prepare", 0, 10), phase("prepare", 30, 35)], [record(0, 0, 40)])

        assert rows(trace.phases, "start_ns", "end_ns", "host_ns") == [(0, 35, 15)]

    def test_what_an_abandoned_iteration_left_is_in_no_phase_row(self) -> None:
        trace = trace_of([phase("prepare", 0, 10), phase("prepare", 22, 25)], [record(0, 20, 40)])

        assert rows(trace.phases, "start_ns", "end_ns", "host_ns") == [(22, 25, 3)]

    def test_device_work_is_filed_under_its_batch(self) -> None:
        spans = [device("forward", 20, 55), device("sample", 70, 80), device("compact", 80, 81), device("x", 1, 2, 7)]
        trace = trace_of(spans, [record(0, 0, 100, consumed=batch(prefill=1, decode=0), launched=batch())])

        assert rows(trace.device, "name", "batch", "duration_ns", "is_void") == [
            ("x", "-", 1, None),
            ("forward", "decode", 35, False),
            ("sample", "prefill", 10, False),
            ("compact", "-", 1, False),
        ]

    def test_device_work_of_an_abandoned_iteration_is_not_filed_under_the_one_that_took_its_number(self) -> None:
        left = replace(device("forward", 12, 25), enqueued_ns=10)
        trace = trace_of([left], [record(0, 20, 40, launched=batch())])

        assert rows(trace.device, "batch", "is_void") == [("-", None)]

    def test_after_a_reset_device_work_and_phases_are_filed_under_the_run_they_are_of(self) -> None:
        spans = [
            phase("prepare", 2, 6),
            device("forward", 10, 20, enqueued=5),
            phase("prepare", 102, 108),
            device("forward", 110, 150, enqueued=105),
        ]
        first = record(0, 0, 30, launched=batch(prefill=1, decode=0), void_reasons=("debugger",))
        trace = trace_of(spans, [first, record(0, 100, 160, launched=batch())])

        assert rows(trace.device, "batch", "duration_ns", "is_void") == [("prefill", 10, True), ("decode", 40, False)]
        assert rows(trace.phases, "batch", "start_ns", "end_ns") == [("prefill", 2, 6), ("decode", 102, 108)]
        (of_device,) = trace.summary.device.phases
        assert (of_device.batch, of_device.time.total_ns, of_device.time.count) == ("decode", 40, 1)

    def test_requests_say_themselves_what_void_iteration_they_lived_through(self) -> None:
        marked = RequestRecord(request_id="r", arrival_ns=0, finished_ns=9, void_reasons=("hand_stepped",))
        table = requests_table([marked, RequestRecord(request_id="s", arrival_ns=0, finished_ns=9)])

        assert rows(table, "is_void", "void_reasons") == [(True, ["hand_stepped"]), (False, [])]

    def test_of_earlier_versions_say_neither_what_was_noted_nor_what_was_lived_through(self) -> None:
        trace = one_of_everything()
        (first, _), (request, _) = (
            iterations_of(trace.iterations.drop_columns(["num_device"])),
            requests_of(trace.requests.drop_columns(["void_reasons"])),
        )

        assert (first, first.num_device) == (trace.records.iterations[0], None)
        assert (request, request.void_reasons) == (trace.records.requests[0], ())

    def test_bubbles_are_those_of_the_summary_and_blame_fills_them(self) -> None:
        trace = one_of_everything()

        assert rows(trace.bubbles, "bubble", "before", "start_ns", "end_ns", "duration_ns") == [
            (0, "sample", 55, 70, 15)
        ]
        assert trace.summary.device.bubble_ns == 15
        assert sum(trace.blame.column("duration_ns").to_pylist()) == 15
        assert set(trace.blame.column("bubble").to_pylist()) == {0}

    @given(records=some.records())
    def test_hidden_and_exposed_are_all_of_the_host_work(self, records: Records) -> None:
        trace = Trace(name="x", records=records)

        for table in (trace.phases, trace.iterations):
            for host, hidden, exposed in rows(table, "host_ns", "hidden_ns", "exposed_ns"):
                assert hidden is None or hidden + exposed == host
        by_iteration: dict[int, int] = {}
        for number, host in rows(trace.phases, "iteration", "host_ns"):
            by_iteration[number] = by_iteration.get(number, 0) + host
        assert sum(by_iteration.values()) == sum(trace.iterations.column("host_ns").to_pylist())
