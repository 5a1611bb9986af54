"""The strip: each phase's state at each border, the order that comes next, and what it is for."""

from __future__ import annotations

from itertools import product

import pytest

from engine.phases import Order, Phase, Reason
from engine.policy import OrderState, never_overlap
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.worlds import make_session, spread_workload, tokens, what_happened
from tracing.records import PHASE_COLOURS
from workbench.panel.strip_view import phase_title, strip_view
from workbench.session import Session


def states(session: Session) -> dict[str, str]:
    return {cell["name"]: cell["state"] for cell in strip_view(session)["phases"]}


class TestPhases:
    @pytest.mark.parametrize(("mode", "order"), [("legacy", Order.LEGACY), ("async", Order.OVERLAP)])
    def test_move_on_by_one_at_each_border(self, mode: str, order: Order) -> None:
        with make_session(mode) as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(3)
            names = [phase.value for phase in order.phases]
            for at in range(len(names) - 1):
                session.step_phase()
                strip = strip_view(session)
                expected = ["done"] * at + ["last", "next"] + ["coming"] * (len(names) - at - 2)
                assert states(session) == dict(zip(names, expected, strict=True))
                assert (strip["iteration"], strip["order"], strip["is_in_hand"]) == (3, order.label, True)
                assert (strip["next_phase"], strip["next_order"]) == (names[at + 1], None)
            session.step_phase()
            strip = strip_view(session)

        assert states(session) == dict(zip(names, ["done"] * (len(names) - 1) + ["last"], strict=True))
        assert (strip["is_in_hand"], strip["iteration"], strip["next_phase"]) == (False, 3, names[0])
        assert strip["next_order"] is not None
        assert [cell["colour"] for cell in strip["phases"]] == [PHASE_COLOURS[name] for name in names]

    def test_one_that_raised_is_the_last_and_says_why(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(3)
            fail_in(session, Phase.FORWARD)
            with pytest.raises(ZeroDivisionError):
                session.run()
            strip = strip_view(session)

        assert list(states(session).values()) == ["done", "done", "last", "coming", "coming"]
        assert strip["phases"][2]["title"] == "ZeroDivisionError in forward: planted."
        assert strip["next_phase"] is None
        assert "recover()" in strip["why"]

    def test_that_a_failure_kept_from_running_are_not_done_behind_recover(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(3)
            mend = fail_in(session, Phase.FORWARD)
            with pytest.raises(ZeroDivisionError):
                session.run()
            mend()
            session.recover()
            assert list(states(session).values()) == ["done", "last", "coming", "coming", "coming"]
            session.step()
            assert list(states(session).values()) == ["done", "done", "last"]  # a primer

    def test_of_an_iteration_held_before_its_first_are_all_to_come(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(3)
            session.break_on("prepare")
            session.run()
            assert list(states(session).values()) == ["next", "coming", "coming", "coming", "coming"]

    def test_of_a_session_that_never_ran_are_none(self) -> None:
        with make_session() as session:
            strip = strip_view(session)

        assert (strip["iteration"], strip["order"], strip["reason"], strip["phases"]) == (None, None, "", [])
        assert strip["why"] == "No request is live: submit one."
        assert strip["next_phase"] is None

    def test_have_a_sentence_in_every_order(self) -> None:
        for order in Order:
            for phase in order.phases:
                assert phase_title(order, phase).endswith(".")
        told = {(order, phase): phase_title(order, phase) for order, phase in product(Order, Phase)}
        assert told[Order.OVERLAP, Phase.RESOLVE] != told[Order.LEGACY, Phase.RESOLVE]


class TestWhatComesNext:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_comes(self, mode: str) -> None:
        """Told at each border between iterations, compared with the iteration that then ran."""
        with make_session(mode, clock="iterations") as session:
            session.submit_workload(spread_workload())
            told, ran = [], []
            while not session.finished:
                if session.engine.controller.next_index == 6:
                    session.mode = "legacy" if mode == "async" else "async"
                strip = strip_view(session)
                session.step()
                record = session.iterations()[-1]
                if strip["next_phase"] is not None:
                    order = Order[record.order.upper()]
                    told.append((strip["next_order"], strip["next_phase"]))
                    ran.append((f"{record.order}: {record.reason}", order.phases[0].value))

        assert told == ran
        assert len(told) > 20
        assert {one[0] for one in told} >= {f"legacy: {Reason.LEGACY_MODE.value}"}

    def test_waits_for_an_arrival_that_is_due_or_that_the_idle_engine_jumps_to(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.submit([2], max_tokens=2, arrival=2, request_id="late")
            session.run(2)
            assert strip_view(session)["next_order"] == "late arrives first, at 2 iterations."
            session.submit([2], max_tokens=2, arrival=99, request_id="last")
            session.step()
            assert strip_view(session)["next_phase"] is not None
            session.run_until(lambda s: s.outputs["request-0"].finished)
            session.run_until(lambda s: s.outputs["late"].finished)
            assert strip_view(session)["next_order"] == "last arrives first, at 99 iterations."

    def test_of_a_policy_that_may_count_is_not_asked(self) -> None:
        """A policy that takes every other overlap gave another schedule once a panel asked it at each tick."""

        class EveryOther:
            def __init__(self) -> None:
                self.asked = 0

            def choose(self, state: OrderState) -> tuple[Order, Reason]:
                self.asked += 1
                return (Order.OVERLAP, Reason.STEADY_DECODE) if self.asked % 2 else (Order.NO_OVERLAP, Reason.POLICY)

        runs = []
        for is_watched in (False, True):
            with make_session(clock="iterations", policy=EveryOther()) as session:
                session.submit_workload(spread_workload())
                told = set()
                while not session.finished:
                    if is_watched:
                        told.add(strip_view(session)["next_order"])
                    session.step()
                runs.append((tokens(session), list(map(what_happened, session.iterations()))))

        assert runs[0] == runs[1]
        assert "overlap is legal, EveryOther decides" in told

    def test_of_a_policy_that_refuses_is_no_overlap(self) -> None:
        with make_session(policy=never_overlap) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)

            assert strip_view(session)["next_order"] == f"no_overlap: {Reason.POLICY.value}"

    def test_of_a_finished_and_of_a_closed_session_is_nothing(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=2)
            session.run()
            assert strip_view(session)["next_order"] == "No request is live: submit one."
        strip = strip_view(session)
        assert (strip["next_order"], strip["next_phase"]) == ("The session is closed: make a new one.", None)


class TestForwards:
    def test_in_overlap_the_sampled_and_the_pending_one(self) -> None:
        with make_session(graphs=[2], graph_non_decode=False, max_requests=4) as session:
            session.submit([[1], [2]], max_tokens=20, ignore_eos=True)
            session.run(3)
            assert [cell["role"] for cell in strip_view(session)["forwards"]] == ["pending"]
            for _ in range(3):
                session.step_phase()
            cells = strip_view(session)["forwards"]

        assert [(cell["role"], cell["iteration"]) for cell in cells] == [("sampled", 2), ("pending", 3)]
        assert cells[1]["text"] == "2 decode rows, 2 tokens, bucket of 2 tokens, 4 KV blocks"

    def test_says_what_the_device_does_with_each(self) -> None:
        """Whoever steps by hand sees that one runs while the host is between two phases, and that it has run later."""
        with make_session(device="cpu", op_sleep_s=0.3, max_requests=4) as session:
            session.submit([[1], [2]], max_tokens=20, ignore_eos=True)
            session.run(3)
            for _ in range(3):
                session.step_phase()
            at_once = [(cell["role"], cell["on_device"]) for cell in strip_view(session)["forwards"]]
            session.engine.device.synchronize()
            later = [cell["on_device"] for cell in strip_view(session)["forwards"]]
            session.recorder.enabled = False
            unknown = [cell["on_device"] for cell in strip_view(session)["forwards"]]

        assert at_once == [("sampled", "runs"), ("pending", "in line")]
        assert later == ["has run", "has run"]
        assert unknown == ["", ""]

    def test_a_row_that_ended_is_for_nothing(self) -> None:
        with make_session(launch_ending_rows=True) as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.submit([2], max_tokens=4, ignore_eos=True)
            texts = []
            while session.step_phase() is not None:
                texts += [cell["text"] for cell in strip_view(session)["forwards"]]

        assert any("1 for nothing" in text for text in texts)

    def test_a_prompt_is_told_as_prefill(self) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=5)
            session.run(1)

            assert strip_view(session)["forwards"][0]["text"].startswith("1 prefill row, 3 tokens, eager")
