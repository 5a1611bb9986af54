"""The history pane: facts of a past iteration, its times, what was watched, and its table."""

from __future__ import annotations

import pytest

from engine.phases import Phase
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.worlds import make_session, spread_workload
from tracing.analysis import iteration_table
from tracing.recorder import Recorder
from workbench.panel.history_view_model import PastFacts
from workbench.panel.messages import HistoryPane


def facts(pane: HistoryPane) -> dict[str, str]:
    return dict(map(tuple, pane["facts"]))


class TestFacts:
    def test_are_those_of_the_record_for_every_iteration(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(spread_workload())
            session.run()
            past = PastFacts(session)
            for record in session.iterations():
                pane = past.view(record.iteration)
                told = facts(pane)
                assert (told["order"], told["reason"], told["mode"]) == (record.order, record.reason, record.mode)
                assert told["new tokens"] == str(record.new_tokens)
                assert pane["why"] == session.explain(record.iteration)
                assert (pane["first"], pane["last"], pane["chosen"]) == (
                    0,
                    session.iterations()[-1].iteration,
                    record.iteration,
                )

    def test_of_the_newest_come_without_a_choice(self) -> None:
        with make_session() as session:
            past = PastFacts(session)
            session.submit([1], max_tokens=9, ignore_eos=True)
            for index in range(4):
                session.step()
                pane = past.view()
                assert pane["chosen"] is None
                assert pane["title"].startswith(f"iteration {index} ")

    def test_tell_times_as_the_tables_of_the_whole_trace_do(self) -> None:
        with make_session(device="cpu", op_sleep_s=0.001) as session:
            session.submit([[1], [2, 3]], max_tokens=12, ignore_eos=True)
            session.run()
            session.engine.device.synchronize()
            rows = {row.iteration: row for row in iteration_table(session.spans(), session.iterations())}
            past = PastFacts(session)
            for index, row in rows.items():
                told = facts(past.view(index))
                assert told["host work"] == f"{row.host_ns / 1e6:.3f} ms"
                assert told["exposed host work"] == f"{row.exposed_ns / 1e6:.3f} ms"
                assert told["hidden host work"] == f"{row.hidden_ns / 1e6:.3f} ms"
                assert told["device busy"] == f"{row.busy_ns / 1e6:.3f} ms"
                assert told["wait"] == f"{row.wait_ns / 1e6:.3f} ms"
                assert "times are void" not in told

        assert any(row.busy_ns for row in rows.values())

    def test_of_device_work_that_runs_come_when_it_has_ended(self) -> None:
        with make_session(device="cpu", op_sleep_s=0.3) as session:
            session.submit([1], max_tokens=12, ignore_eos=True)
            session.run(3)
            past = PastFacts(session)
            assert facts(past.view(2))["device busy"] == "not known yet: its work has not ended"
            session.engine.device.synchronize()
            assert facts(past.view(2))["device busy"].endswith(" ms")

    def test_say_why_times_are_void(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=12, ignore_eos=True)
            session.step_phase()
            session.step()
            assert facts(PastFacts(session).view())["times are void"] == "stepped by hand or held at a breakpoint"

    def test_name_the_graph_and_the_padding(self) -> None:
        with make_session(graphs=[4], graph_non_decode=False) as session:
            session.submit([1], max_tokens=12, ignore_eos=True)
            session.run(3)
            past = PastFacts(session)
            assert facts(past.view(0))["ran"] == "eagerly: prefill not captured"
            assert facts(past.view(2))["ran"] == "as bucket of 4 tokens, 0 prefill and 4 decode rows"
            assert facts(past.view(2))["padding"] == "3 tokens"

    def test_of_the_same_number_after_a_reset_are_the_new_ones(self) -> None:
        with make_session() as session:
            past = PastFacts(session)
            session.submit([1] * 7, max_tokens=3)
            session.run()
            before = facts(past.view(0))
            session.reset()
            session.submit([1], max_tokens=3)
            session.run()
            assert facts(past.view(0))["launched"] != before["launched"]


class TestMore:
    def test_watch_values_at_its_end(self) -> None:
        with make_session() as session:
            session.watch("kv", lambda s: s.row(0).kv_len)
            session.watch("bad", lambda s: 1 // 0)
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(4)
            watched = PastFacts(session).view(2)["watched"]

        assert watched == [["kv", "4"], ["bad", "<ZeroDivisionError: integer division or modulo by zero>"]]

    def test_the_table_where_changes_were_recorded(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.record_changes = True
            session.run(2)
            past = PastFacts(session)
            without, having = past.view(1), past.view(3)

        assert without["table"] == []
        assert "switch recording of changes on" in without["hint"]
        assert having["table"][0][:3] == ["row", "request", "state"]
        assert having["table"][1][:3] == ["0", "request-0", "decode"]
        assert having["hint"] == ""


class TestNothingToShow:
    def test_before_the_first_iteration(self) -> None:
        with make_session() as session:
            pane = PastFacts(session).view()
            assert (pane["first"], pane["last"], pane["facts"]) == (0, -1, [])
            assert "submit a request" in pane["hint"]
            assert PastFacts(session).view(3) == pane

    def test_of_the_iteration_in_hand(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.step_phase()
            assert PastFacts(session).view(2)["hint"].startswith("It is in hand")
            assert PastFacts(session).view()["title"].startswith("iteration 1 ")

    def test_of_one_that_failed_or_that_the_recorder_lost(self) -> None:
        with make_session(recorder=Recorder(capacity=100)) as session:
            session.submit([1], max_tokens=80, ignore_eos=True)
            session.run(40)
            past = PastFacts(session)
            assert past.view(3)["hint"] == "Nothing is known of iteration 3 any more: the newest ones are kept."
            assert past.view()["first"] > 3
            session.record_changes = True
            fail_in(session, Phase.FORWARD)
            with pytest.raises(ZeroDivisionError):
                session.run()
            session.recover()
            pane = past.view(40)
            assert pane["hint"] == "It left no record: the recorder was off, or it never ended."
            assert pane["table"][1][1] == "request-0"
