"""The graph grid: hits, misses and padding, counted on and never anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.workbench.worlds import make_session, spread_workload
from tracing.recorder import Recorder
from workbench.panel.graphs_view import GraphTally
from workbench.panel.messages import GraphsPane
from workbench.session import Session

GRAPHS: dict[str, Any] = {"graphs": [1, 2, 4], "graph_non_decode": False}


@pytest.fixture
def session() -> Iterator[Session]:
    with make_session(clock="iterations", **GRAPHS) as made:
        yield made


def check_agrees_with_the_summary(pane: GraphsPane, session: Session) -> None:
    table = session.summary().graphs
    assert (pane["hits"], pane["misses"], pane["padding_share"]) == (table.hits, table.misses, table.padding_share)
    assert sum(cell["hits"] for cell in pane["graphs"]) == table.hits
    assert sum(cell["padding_tokens"] for cell in pane["graphs"]) == table.padding_tokens


class TestCounts:
    def test_are_those_of_the_summary_whenever_one_looks(self, session: Session) -> None:
        tally = GraphTally(session)
        session.submit_workload(spread_workload())
        while not session.finished:
            session.run(3)
            check_agrees_with_the_summary(tally.view(), session)

        pane = tally.view()
        assert pane["hits"] > 5
        assert pane["misses"] == {"prefill not captured": pane["misses"]["prefill not captured"]}
        assert pane["label"] == "bucket"
        assert pane["memory"].endswith("MiB by which the process grew")
        assert [cell["name"] for cell in pane["graphs"]] == [
            "1 token: 1 decode",
            "2 tokens: 2 decode",
            "4 tokens: 4 decode",
        ]

    def test_start_again_where_the_trace_was_cleared_or_the_session_reset(self, session: Session) -> None:
        tally = GraphTally(session)
        for again in (session.clear_trace, session.reset, session.restart):
            session.submit([[1], [2]], max_tokens=6, ignore_eos=True)
            session.run()
            assert tally.view()["hits"] > 0
            again()
            assert (tally.view()["hits"], tally.view()["misses"], tally.view()["padding_share"]) == (0, {}, None)
            session.run()
            check_agrees_with_the_summary(tally.view(), session)

    def test_start_again_even_where_as_many_iterations_came_since(self, session: Session) -> None:
        tally = GraphTally(session)
        session.submit([[1], [2], [3]], max_tokens=6, ignore_eos=True)
        session.run()
        before = tally.view()
        session.reset()
        session.submit([1], max_tokens=6, ignore_eos=True)
        session.run()

        check_agrees_with_the_summary(tally.view(), session)
        assert tally.view()["graphs"] != before["graphs"]

    def test_forget_what_the_recorder_lost(self) -> None:
        with make_session(**GRAPHS, recorder=Recorder(capacity=120)) as session:
            tally = GraphTally(session)
            session.submit([1], max_tokens=80, ignore_eos=True)
            while not session.finished:
                session.run(7)
                check_agrees_with_the_summary(tally.view(), session)

            assert session.recorder.lost_iterations > 20

    def test_read_each_record_once(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        tally, counted = GraphTally(session), []
        whole = tally._count
        monkeypatch.setattr(
            tally, "_count", lambda record, sign: (counted.append(record.iteration), whole(record, sign))
        )
        session.submit([1], max_tokens=20, ignore_eos=True)
        while not session.finished:
            session.step()
            tally.view()
            tally.view()

        assert counted == list(range(len(session.iterations())))


class TestPending:
    def test_is_the_size_that_the_pending_forward_replays(self, session: Session) -> None:
        session.submit([[1], [2], [3]], max_tokens=9, ignore_eos=True)
        tally = GraphTally(session)
        session.run(1)
        assert not any(cell["is_pending"] for cell in tally.view()["graphs"])  # the prompts run eagerly
        session.run(2)
        assert [cell["is_pending"] for cell in tally.view()["graphs"]] == [False, False, True]


class TestGraphWaits:
    def test_are_counted_and_the_size_that_is_waited_for_is_marked(self) -> None:
        sizes: dict[str, Any] = {"graphs": [1, 2, 4, 8, 16], "max_batch_tokens": 32, "max_sequence_length": 32}
        with make_session(graph_all_prefills=True, **sizes) as session:
            tally = GraphTally(session)
            session.submit([[1, 2, 3], [4, 5]], max_tokens=9, ignore_eos=True)
            session.run(3)
            assert tally.view()["deferrals"] == 0
            session.submit([7] * 15, max_tokens=4, ignore_eos=True, request_id="long")
            session.run(3)
            waiting = tally.view()
            session.run()
            ended = tally.view()

        assert waiting["deferrals"] == 3
        assert {cell["name"]: cell["awaited_by"] for cell in waiting["graphs"] if cell["awaited_by"]} == {
            "16 tokens: 1 prefill": "long"
        }
        assert ended["deferrals"] == session.engine.counters.graph_wait_steps > 3
        assert not any(cell["awaited_by"] for cell in ended["graphs"])

    def test_are_not_told_where_no_request_ever_waits_for_a_graph(self, session: Session) -> None:
        assert GraphTally(session).view()["deferrals"] is None


class TestHints:
    def test_without_graphs_name_the_option(self) -> None:
        with make_session() as session:
            pane = GraphTally(session).view()

        assert "graphs=" in pane["hint"]
        assert (pane["graphs"], pane["memory"], pane["deferrals"]) == ([], "", None)

    def test_before_a_forward_say_what_to_do(self, session: Session) -> None:
        assert GraphTally(session).view()["hint"].startswith("No forward yet")

    def test_a_closed_session_keeps_its_grid(self, session: Session) -> None:
        tally = GraphTally(session)
        session.submit([1], max_tokens=9, ignore_eos=True)
        session.run()
        before = tally.view()
        session.close()

        assert tally.view() == before
        assert before["hint"] == ""
