"""Why an iteration took its order: a sentence for every reason, from real iterations wherever there are any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.phases import Order, Reason
from engine.policy import never_overlap
from tests.unit.workbench.worlds import make_session
from tracing.recorder import Recorder
from workbench.explain_order import REASONS, explain_record
from workbench.session import Session, SessionError

ORDERS = {
    Order.LEGACY: "legacy (admit → prepare → forward → sample → resolve → emit)",
    Order.NO_OVERLAP: "no_overlap (sample → resolve → admit → prepare → forward → emit)",
    Order.OVERLAP: "overlap (prepare → sample → forward → resolve → emit)",
    Order.OVERLAP_ADMIT: "overlap_admit (admit → prepare → sample → forward → resolve → emit)",
    Order.PRIMER: "primer (admit → prepare → forward)",
    Order.DRAIN: "drain (sample → resolve → emit)",
}


def begins(index: int, order: Order, because: str) -> str:
    return f"Iteration {index} took {ORDERS[order]} because {because}"


def steady(**options: object) -> Session:
    session = make_session(**options)
    session.submit([1], max_tokens=9, ignore_eos=True, request_id="a")
    session.run(2)
    return session


class TestEveryReason:
    def test_legacy_mode(self) -> None:
        with steady(mode="legacy") as session:
            assert session.explain(1) == (
                begins(1, Order.LEGACY, "the mode is legacy: each iteration waits for the tokens of its own forward")
                + ". In async the next forward would be launched first: session.mode = 'async'."
            )

    def test_no_pending_forward(self) -> None:
        with steady() as session:
            assert session.explain(0) == (
                begins(0, Order.PRIMER, "no forward was pending, so there was nothing to sample: the first iteration, ")
                + "or one behind a drain or a pause. It launches the forward that the next iteration finds pending."
            )

    def test_prefill_pending_with_how_many_rows(self) -> None:
        with steady(overlap_admission=False) as session:
            assert session.explain(1) == (
                begins(1, Order.NO_OVERLAP, "the pending forward held prompts, and their rows decode only once it is ")
                + "resolved (1 of its 1 rows). It would overlap if the pending forward held decode rows only, as the "
                "one it launched now does unless a request was admitted; or with overlap_admission=True."
            )

    def test_steady_decode(self) -> None:
        with steady() as session:
            session.run(1)

            assert session.explain(2) == (
                begins(2, Order.OVERLAP, "all rows of the next forward decode and nothing could be admitted. ")
                + "It loses the overlap once blocks run out or every row ends; with overlap_admission=False also for a "
                "waiting request that fits, and while the pending forward holds a prompt."
            )

    def test_admits_beside(self) -> None:
        with steady() as session:
            session.submit([[2], [3]], max_tokens=9)
            session.run(1)

            assert session.explain(2) == (
                begins(2, Order.OVERLAP_ADMIT, "a prompt could enter the next forward while the pending one ran. ")
                + "With overlap_admission=False it would have been a no_overlap: sample and resolve first, then admit."
            )

    def test_head_admissible_with_how_many_it_admitted(self) -> None:
        with steady(overlap_admission=False) as session:
            session.submit([[2], [3]], max_tokens=9)
            session.run(1)

            assert session.explain(2) == (
                begins(2, Order.NO_OVERLAP, "the head of the queue could be admitted, and without overlap_admission ")
                + "only when no forward is pending (it admitted 2). An overlap admits nothing and moves no row before "
                "its forward is enqueued: it would overlap with an empty queue, a head that has to wait, or "
                "overlap_admission=True."
            )

    def test_all_rows_ending(self) -> None:
        with steady() as session:
            session.run()
            last = session.iterations()[-1]

            assert session.explain(last.iteration) == (
                begins(9, Order.NO_OVERLAP, "every row ends by length with the pending forward, so there was no next ")
                + "forward to launch. It would overlap if one row had a token to come behind the pending one, or with "
                "launch_ending_rows=True."
            )

    def test_policy(self) -> None:
        with steady(policy=never_overlap) as session:
            session.run(1)

            assert session.explain(2) == (
                begins(2, Order.NO_OVERLAP, "the order policy refused an overlap that was legal. ")
                + "It would overlap under another policy: Session(policy=engine.policy.prefer_overlap) is the default."
            )

    def test_mode_switch(self) -> None:
        with steady() as session:
            session.mode = "legacy"
            session.run(1)

            assert session.explain(2) == (
                begins(2, Order.DRAIN, "the mode was about to change, and the pending forward is drained first. ")
                + "The iteration behind it runs in the new mode."
            )

    def test_nothing_to_run(self) -> None:
        with make_session() as session:
            session.submit([1], request_id="a")
            session.abort("a")
            session.run()

            assert session.explain(0) == (
                begins(0, Order.DRAIN, "only requests that were aborted were left, and nothing was pending. ")
                + "It would launch a forward if a request were live."
            )

    @pytest.mark.parametrize(
        ("reason", "because"),
        [
            (Reason.CHUNK_IN_PROGRESS, "a prompt is being read in chunks"),
            (Reason.PAUSED_ROWS, "rows are paused"),
            (Reason.NOT_ENOUGH_BLOCKS, "the free blocks did not suffice"),
        ],
    )
    def test_those_that_admission_by_reservation_never_gives(self, reason: Reason, because: str) -> None:
        with steady(overlap_admission=False) as session:
            record = replace(session.iterations()[1], reason=reason.value)

            assert explain_record(record).startswith(begins(1, Order.NO_OVERLAP, because))
            assert " It would overlap " in explain_record(record)

    def test_none_is_left_out(self) -> None:
        assert set(REASONS) == set(Reason)


class TestWhich:
    def test_the_one_in_hand(self) -> None:
        with steady() as session:
            session.step_phase()

            assert session.explain() == session.explain(2)
            assert session.explain().startswith("Iteration 2 takes overlap (prepare → ")

    def test_the_one_that_would_come_next(self) -> None:
        with steady() as session:
            assert session.explain().startswith("Iteration 2 would take overlap (prepare → ")
            session.mode = "legacy"
            assert session.explain().startswith("Iteration 2 would take drain (sample → ")

    def test_speaks_of_what_has_not_begun_in_the_present(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=4)
            assert "would take primer (admit → prepare → forward) because no forward is pending" in session.explain()
            session.step()
            assert " took primer (admit → prepare → forward) because no forward was pending" in session.explain(0)

    def test_none_where_nothing_is_left(self) -> None:
        with make_session() as session:
            assert session.explain().startswith("No iteration would come next")

    def test_numbers_where_the_coming_one_lacks_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with steady() as session:
            controller = session.engine.controller
            state = replace(controller.order_state(), blocks_needed=3, blocks_available=1)
            monkeypatch.setattr(controller, "order_state", lambda: state)

            assert "next token of every row (3 needed, 1 free)." in session.explain()

    def test_what_left_no_record_is_refused(self) -> None:
        with make_session() as session, pytest.raises(SessionError, match="iteration 5 is not in the history"):
            session.explain(5)
        with make_session(recorder=Recorder(enabled=False)) as session:
            session.record_changes = True
            session.submit([1], max_tokens=3)
            session.run(1)
            with pytest.raises(SessionError, match="iteration 0 left no record: the recorder was off"):
                session.explain(0)
