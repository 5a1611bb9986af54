"""The order of collectives of several ranks, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.parallel.log import Collective
from engine.request import SamplingParams
from tests.rank_world import rank_world
from tracing.ranks import CollectiveSpan
from workbench.cluster import Cluster
from workbench.collectives import collectives_table, device_spans
from workbench.session import Session


def account(*, is_dummy: bool = False, iterations: int = 3) -> list[Collective]:
    """As a rank's log gives it: the host's before the device's."""
    host = [Collective("host", "agree", "options", 14 * part, 128) for part in range(2)]
    host += [
        Collective("host", "agree", topic, at, 128) for at in range(iterations) for topic in ("iteration", "batch")
    ]
    device = [
        Collective("device", kind, "forward", at, 640, is_dummy)
        for at in range(iterations)
        for kind in ("gather", "sum")
    ]
    return host + device


class TestSideBySide:
    def test_rows_follow_the_iterations_and_keep_the_order_of_each_place(self) -> None:
        table = collectives_table([account(), account()])
        told = [(row.place, row.first.purpose, row.number) for row in table.rows[:7]]

        assert told == [
            ("host", "options", 0),
            ("host", "options", 1),
            ("host", "iteration", 2),
            ("host", "batch", 3),
            ("device", "forward", 0),
            ("device", "forward", 1),
            ("host", "iteration", 4),
        ]
        for place in ("host", "device"):
            numbers = [row.number for row in table.rows if row.place == place]
            assert numbers == list(range(len(numbers)))

    def test_dummy_work_is_marked_and_is_no_difference(self) -> None:
        table = collectives_table([account(), account(is_dummy=True)])

        assert table.difference is None
        assert [table.rows[4].cell(rank) for rank in (0, 1)] == ["✓", "dummy"]
        assert "2 ranks did the same, in the same order: 8 of the host and 6 of the device" in str(table)
        assert "repeating-linear-gradient" in table._repr_html_()
        assert "repeating-linear-gradient" not in collectives_table([account(), account()])._repr_html_()

    def test_the_first_difference_is_marked_and_told(self) -> None:
        other = account()
        other[-3] = replace(other[-3], num_bytes=1_280)
        table = collectives_table([account(), other])
        (marked,) = [row for row in table.rows if table.is_different(row)]

        assert (marked.place, marked.number) == ("device", 3)
        assert str(table).startswith("device collective 3 differs; rank 0: sum for forward in iteration 1, 640 bytes")
        assert next(line for line in str(table).splitlines() if line.startswith("→")).endswith("1,280 bytes")
        assert table._repr_html_().count("background:#F6C6CE") == 1

    def test_a_rank_that_stopped_did_nothing_any_more(self) -> None:
        table = collectives_table([account(), account(iterations=2)])

        assert table.difference is not None
        assert table.rows[-1].cell(1) == "nothing"

    def test_of_many_those_around_the_difference_are_shown(self) -> None:
        logs = [account(iterations=500), account(iterations=500)]
        assert "the newest, 60 of " in str(collectives_table(logs))
        logs[1][202] = replace(logs[1][202], kind="sum")
        table = collectives_table(logs)

        assert any(table.is_different(row) for row in table.shown())
        assert len(table.shown()) == 60

    def test_each_rank_has_the_microseconds_that_it_was_in_it_where_they_are_known(self) -> None:
        logs = [account(iterations=1), account(iterations=1)]
        logs[0][-1] = replace(logs[0][-1], begin_ns=1_000, end_ns=2_345_600)
        logs[1][-1] = replace(logs[1][-1], begin_ns=1_000)  # it has not gone on
        table = collectives_table(logs)

        assert [table.rows[-1].waited_us(rank) for rank in (0, 1)] == [2_344.6, None]
        assert table.rows[0].waited_us(0) is None
        assert str(table).splitlines()[1].endswith("rank 1  rank 1 µs")
        assert str(table).splitlines()[-1].split()[-3:] == ["✓", "2,344.6", "✓"]
        assert table._repr_html_().count("2,344.6") == 1

    def test_nothing_was_done_yet(self) -> None:
        assert "0 of the host" in str(collectives_table([[], []]))


class TestSpansForATimeline:
    def test_are_those_of_the_device_that_have_ended_at_known_times(self) -> None:
        known = Collective("device", "sum", "draft", 3, 640, begin_ns=5, end_ns=9)
        log = [replace(known, place="host"), known, replace(known, end_ns=0), replace(known, begin_ns=0)]
        assert device_spans(log) == [(5, 9, "sum", "draft", 3)]


def test_engines_of_two_ranks_are_seen_to_do_the_same() -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0, seed=0, ignore_eos=True)
    with rank_world(2) as world:
        world.on(0, lambda one: one.submit([1, 2, 3], greedy))
        world.drain()
        table = collectives_table(world.logs())

    assert table.difference is None
    assert {row.cell(1) for row in table.rows if row.place == "device"} == {"dummy"}
    assert {row.cell(0) for row in table.rows} == {"✓"}


@contextmanager
def two_ranks_that_have_run() -> Iterator[Cluster]:
    options = {"device": "cpu", "clock": "iterations", "max_requests": 4, "num_blocks": 40, "block_size": 4}
    with Cluster("oracle-moe", ranks=2, in_process=True, progress=False, **options) as cluster:
        cluster.submit([1, 2, 3], rank=0, max_tokens=5, ignore_eos=True)
        cluster.run()
        yield cluster


def test_a_cluster_tells_its_timeline_and_its_summary_what_devices_spent_in_collectives() -> None:
    with two_ranks_that_have_run() as cluster:
        traces, shares = cluster.traces(), [row.collective_share for row in cluster.summary().rows]

    for one in traces:
        work = [span for span in one.trace.records.spans if span.is_device and span.lane == "compute"]
        spans = [CollectiveSpan(*row) for row in one.collectives]
        assert spans
        assert all(
            any(span.start_ns <= each.begin_ns <= each.end_ns <= span.end_ns for span in work) for each in spans
        ), "each is inside a piece of the device's work"
    assert all(share is not None and 0 < share <= 1 for share in shares)


def test_of_ranks_on_cuda_the_hosts_times_are_not_taken_for_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks_that_have_run() as cluster:
        config = cluster.sessions[0].resolved_config()
        monkeypatch.setattr(Session, "resolved_config", lambda self: {**config, "device": "cuda"})
        assert [one.collectives for one in cluster.traces()] == [(), ()]
