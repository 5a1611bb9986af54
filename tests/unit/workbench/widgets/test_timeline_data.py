"""Records as columns of numbers: nothing is lost on the way but what the timeline does not draw."""

from __future__ import annotations

import math
from typing import Any

from tests.unit.tracing.traces import batch, detail, device, phase, record, wait
from tests.unit.workbench.widgets.timeline_worlds import Reader, columns_of, work
from tracing.blame import blame_bubbles
from tracing.records import Category, GraphUse, Span
from tracing.void_words import void_words
from workbench.widgets.timeline_data import (
    Packed,
    Texts,
    graph_text,
    message,
    pack_blame,
    pack_bubbles,
    pack_iterations,
    pack_span_columns,
    pack_spans,
    unfinished_entries,
)

REST: dict[str, Any] = {"seq": 0, "group": 0, "unfinished": [], "inHand": None, "now": 0.0}


def rows(name: str, table: Packed, texts: Texts) -> list[dict[str, Any]]:
    reader = Reader().read([message({name: table}, texts=texts.take_new(), **REST)])
    return reader.tables.get(name, [])


class TestSpans:
    def test_come_with_their_numbers_and_names(self) -> None:
        texts = Texts()
        spans = [
            phase("resolve", 1_000, 5_000, 7),
            wait(1_500, 4_000, 7),
            device("forward", 900, 3_900, 6, enqueued=800),
        ]

        found = rows("spans", pack_spans(spans, 500, texts), texts)

        assert [(row["name"], row["lane"], row["start"], row["end"], row["iteration"]) for row in found] == [
            ("resolve", "host", 500, 4_500, 7),
            ("results", "host", 1_000, 3_500, 7),
            ("forward", "compute", 400, 3_400, 6),
        ]
        assert [row["kind"] for row in found] == [0, 2, 3]
        assert [row["depth"] for row in found] == [0, 1, 0]
        assert found[2]["enqueued"] == 300
        assert math.isnan(found[0]["enqueued"])

    def test_are_packed_alike_from_columns(self) -> None:
        instant = {"category": Category.INSTANT, "lane": "host", "start_ns": 950, "end_ns": 950}
        counter = {**instant, "category": Category.COUNTER, "value": 3.0}
        spans = [
            device("forward", 900, 3_900, 6, enqueued=800),
            Span(name="rewind", args={"accepted": 3, "drafts": 8}, **instant),
            Span(name="rows", **counter),
            phase("resolve", 1_000, 5_000, 7),
            wait(1_500, 4_000, 7),
            Span(name="pause", args={"accepted": 3, "drafts": 8}, **instant),
        ]
        texts, others = Texts(), Texts()
        first = rows("spans", pack_spans(spans, 500, texts), texts)
        other = rows("spans", pack_span_columns(columns_of(spans), 500, others), others)

        assert repr(other) == repr(first)  # NaN is not itself
        assert other[1]["note"] == "accepted=3, drafts=8"

    def test_keep_single_nanoseconds_however_long_the_machine_runs(self) -> None:
        texts, origin = Texts(), 10**17

        found = rows(
            "spans", pack_spans([phase("emit", origin + 10**15 + 1, origin + 10**15 + 2)], origin, texts), texts
        )

        assert (found[0]["start"], found[0]["end"]) == (10**15 + 1, 10**15 + 2)

    def test_leave_counters_out_and_give_instants_their_arguments(self) -> None:
        texts = Texts()
        moment = {"lane": "host", "start_ns": 5, "end_ns": 5}
        spans = [
            Span(name="queue", category=Category.COUNTER, value=3.0, **moment),
            Span(name="abort", category=Category.INSTANT, args={"request": "r1", "why": "asked"}, **moment),
        ]

        found = rows("spans", pack_spans(spans, 0, texts), texts)

        assert [(row["name"], row["note"], row["phase"]) for row in found] == [("abort", "request=r1, why=asked", None)]


class TestTexts:
    def test_are_sent_once(self) -> None:
        texts = Texts()
        pack_spans([phase("prepare", 0, 1), detail("stage", 0, 1)], 0, texts)
        first = texts.take_new()
        pack_spans([phase("prepare", 2, 3), phase("forward", 3, 4)], 0, texts)

        assert sorted(first) == ["host", "prepare", "stage"]
        assert texts.take_new() == ["forward"]


class TestIterations:
    def test_come_with_both_batches_and_how_the_forward_ran(self) -> None:
        texts = Texts()
        hit = GraphUse(label="CUDA graph", hit=True, dims=(8, 0, 8), padding_tokens=3)
        records = [
            record(4, 0, 90, consumed=batch(3, decode=4), launched=batch(4, decode=5), graph=hit, new_tokens=4),
            record(5, 100, 190, void_reasons=("hand_stepped", "debugger"), wasted_rows={"eos": 2}),
        ]

        found = rows("iterations", pack_iterations(records, 0, texts), texts)

        assert [row["number"] for row in found] == [4, 5]
        assert (found[0]["consumedFrom"], found[0]["consumedDecode"]) == (3, 4)
        assert (found[0]["launchedFrom"], found[0]["launchedTokens"]) == (4, 5)
        assert (found[0]["graph"], found[0]["padding"]) == ("CUDA graph of 8 tokens", 3)
        assert (found[1]["consumedFrom"], found[1]["graph"]) == (-1, None)
        assert (found[1]["void"], found[1]["wasted"]) == (void_words(("hand_stepped", "debugger")), "eos 2")

    def test_of_an_eager_forward_say_why_no_graph_was_replayed(self) -> None:
        assert graph_text(GraphUse(label="eager", hit=False, miss_reason="prefill rows")) == "eager: prefill rows"
        assert graph_text(None) is None


class TestBubbles:
    def test_come_with_the_parts_that_the_host_is_to_blame_for(self) -> None:
        spans = [
            phase("resolve", 100, 150),
            phase("prepare", 150, 180),
            phase("forward", 180, 190),
            device("forward", 0, 100, 0, enqueued=0),
            device("forward", 200, 300, 1, enqueued=190),
        ]
        blame, texts = blame_bubbles(spans, [record(0, 0, 95), record(1, 95, 310)]), Texts()
        tables = {
            "bubbles": pack_bubbles(blame.bubbles, 0, texts),
            "blame": pack_blame([(blame.bubbles, blame.rows)], texts),
        }

        reader = Reader().read([message(tables, texts=texts.take_new(), **REST)])

        (bubble,) = reader.tables["bubbles"]
        assert (bubble["start"], bubble["end"], bubble["late"]) == (100, 200, 90)
        assert (bubble["before"], bubble["iteration"]) == ("forward", 1)
        parts = [(row["bubble"], row["label"], row["time"]) for row in reader.tables["blame"]]
        assert sum(time for _, _, time in parts) == 90
        assert parts[0] == (0, "between phases", 90)


class TestUnfinishedWork:
    def test_only_the_oldest_runs_whatever_its_lane(self) -> None:
        entries = unfinished_entries([work("sample", 100), work("fetch", 110, lane="copy"), work("forward", 120)], 50)

        assert [(entry["name"], entry["enqueued"], entry["runs"]) for entry in entries] == [
            ("sample", 50, True),
            ("fetch", 60, False),
            ("forward", 70, False),
        ]


class TestMessage:
    def test_leaves_out_tables_without_rows(self) -> None:
        content, buffers = message({"spans": pack_spans([], 0, Texts())}, texts=[], **REST)

        assert content["tables"] == {}
        assert buffers == []
