"""One sentence for every state a request can be in."""

from __future__ import annotations

import pytest
import torch

from engine.phases import Phase
from tests.oracle_world import loaded_oracle
from tests.unit.workbench.worlds import make_session, spread_workload, tokens
from workbench.session import Session, SessionError


def text_session() -> Session:
    """On the oracle whose ids are pieces of text, so that stop strings work."""
    return Session(
        loaded_oracle(has_text=True),
        device="inline",
        max_requests=4,
        max_batch_tokens=128,
        max_sequence_length=96,
        num_blocks=24,
    )


class TestComing:
    def test_one_to_come_says_when(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit([1], arrival=7, request_id="late")

            assert session.explain("late") == "late has not arrived: it comes at 7 iterations, now is 0."

    def test_one_aborted_before_it_came(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit([1], arrival=7, request_id="late")
            session.abort("late")

            assert session.explain("late") == "late was aborted before it arrived, so it has no tokens."

    def test_one_that_never_was_is_refused(self) -> None:
        with make_session() as session, pytest.raises(SessionError, match="there is no request 'nobody'"):
            session.explain("nobody")


class TestWaiting:
    def test_for_the_next_iteration(self) -> None:
        with make_session() as session:
            session.submit([1], request_id="a")

            assert session.explain("a") == "a waits: it fits, and the next iteration admits it."

    def test_for_the_pending_forward_as_upstream_admits_only_behind_it(self) -> None:
        with make_session(overlap_admission=False) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.submit([2], request_id="b")

            assert session.explain("b") == (
                "b waits: it fits, and without overlap_admission async admits only when no forward is pending: the "
                "next iteration samples the forward of iteration 2 and then admits it."
            )

    def test_for_nothing_but_the_next_iteration_which_admits_beside_the_pending_forward(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.submit([2], request_id="b")

            assert session.explain("b") == (
                "b waits: it fits, and the next iteration admits it while the forward of iteration 2 runs."
            )

    def test_for_the_admit_of_the_iteration_in_hand(self) -> None:
        with make_session(overlap_admission=False) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.submit([2], request_id="b")
            session.step_phase()

            assert session.explain("b") == "b waits: it fits, and the admit of iteration 3 takes it."

    def test_where_the_iteration_in_hand_has_no_admit_to_come(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.step_phase()
            session.submit([2], request_id="b")

            assert session.explain("b") == (
                "b waits: it fits, and iteration 3 has no admit to come; the next admit takes it."
            )

    def test_for_a_row(self) -> None:
        with make_session(max_requests=1) as session:
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="a")
            session.submit([2], request_id="b")
            session.run(2)

            assert session.explain("b") == "b waits: all 1 rows are taken; it waits until a ends."

    def test_for_blocks(self) -> None:
        with make_session(num_blocks=5) as session:
            session.submit([1] * 30, max_tokens=20, ignore_eos=True, request_id="a")
            session.submit([1] * 30, max_tokens=20, request_id="b")
            session.run(2)

            assert session.explain("b") == (
                "b waits: at its longest it needs 4 blocks, and 1 of 5 are not reserved for others; it waits until "
                "a ends."
            )

    def test_for_tokens_of_the_forward(self) -> None:
        with make_session(max_batch_tokens=96) as session:
            session.submit([[1] * 60, [2] * 50], max_tokens=4)

            assert session.explain("request-1") == (
                "request-1 waits: it needs 50 tokens of the next forward and 36 of max_batch_tokens=96 are left; "
                "the admit after that has room."
            )

    def test_for_one_of_many(self) -> None:
        with make_session() as session:
            session.submit([[1]] * 5, max_tokens=9, ignore_eos=True)
            session.run(2)

            assert session.explain("request-4") == (
                "request-4 waits: all 4 rows are taken; it waits until one of request-0, request-1, request-2 and 1 "
                "more ends."
            )

    def test_behind_others(self) -> None:
        with make_session(max_requests=1) as session:
            session.submit([[1], [2], [3], [4]], max_tokens=9, ignore_eos=True)
            session.run(2)

            assert session.explain("request-2") == (
                "request-2 waits: it is behind request-1, first in, first out, and request-1 has to wait (no free row)."
            )
            assert session.explain("request-3") == (
                "request-3 waits: it is behind request-1 and 1 more, first in, first out, and request-1 has to wait "
                "(no free row)."
            )

    def test_and_aborted(self) -> None:
        with make_session(max_requests=1) as session:
            session.submit([[1], [2]], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.abort("request-1")

            assert session.explain("request-1") == (
                "request-1 waits and is aborted: the next admit or resolve ends it."
            )

    def test_again_after_a_failure_which_is_told_until_it_recovers(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="a")
            session.run(3)
            phases = session.engine.controller.phase_functions
            whole = phases[Phase.PREPARE]
            phases[Phase.PREPARE] = lambda iteration: [][1]
            with pytest.raises(IndexError):
                session.step()
            phases[Phase.PREPARE] = whole

            assert session.explain("a").endswith(
                "The engine has failed: recover() computes it again from the tokens it has."
            )
            session.recover()
            assert session.explain("a") == (
                "a waits again, with the 2 tokens it has to be computed anew: it fits, and the next iteration admits "
                "it."
            )


class TestRunning:
    def test_prefill_from_admission_to_its_first_token(self) -> None:
        told = []
        with make_session(overlap_admission=False) as session:
            session.submit([1, 2, 3], max_tokens=9, ignore_eos=True, request_id="a")
            for _ in range(5):
                session.step_phase()
                told.append(session.explain("a"))

        start = "a has row 0 and reads its prompt of 3 tokens: its first token "
        assert told == [
            start + "comes from the next forward, which holds it.",
            start + "comes from the forward that is prepared and not launched yet.",
            start + "comes from the forward that iteration 0 launched, once it is sampled.",
            start + "is sampled: resolve gives it to the request.",
            "a has row 0 and decodes: 1 of 9 tokens are known, and the next comes from the next forward, which holds "
            "it.",
        ]

    def test_prefill_whose_first_token_comes_while_the_next_forward_runs(self) -> None:
        told = []
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=9, ignore_eos=True, request_id="a")
            session.run(1)
            for _ in range(4):
                session.step_phase()
                told.append(session.explain("a"))

        start = "a has row 0 and reads its prompt of 3 tokens: its first token "
        assert told == [
            start + "comes from the forward that iteration 0 launched, once it is sampled.",
            start + "is sampled: resolve gives it to the request.",
            start + "is sampled: resolve gives it to the request.",
            "a has row 0 and decodes: 1 of 9 tokens are known, and the next comes from the forward that iteration 1 "
            "launched, once it is sampled.",
        ]

    def test_decode_through_an_overlap(self) -> None:
        told = []
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=9, ignore_eos=True, request_id="a")
            session.run(3)
            for _ in range(4):
                told.append(session.explain("a").removeprefix("a has row 0 and decodes: "))
                session.step_phase()
            told.append(session.explain("a").removeprefix("a has row 0 and decodes: "))

        known = "{} of 9 tokens are known, and the next "
        assert told == [
            known.format(2) + "comes from the forward that iteration 2 launched, once it is sampled.",
            known.format(2) + "comes from the forward that iteration 2 launched, once it is sampled.",
            known.format(2) + "is sampled: resolve gives it to the request.",
            known.format(2) + "is sampled: resolve gives it to the request.",
            known.format(3) + "comes from the forward that iteration 3 launched, once it is sampled.",
        ]

    def test_a_row_that_ends_is_left_out_of_the_forward_behind(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3, ignore_eos=True, request_id="short")
            session.submit([2], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.run_to("resolve")

            assert session.explain("short") == (
                "short has row 0 and decodes: 2 of 3 tokens are known, and the next is sampled: resolve gives it to "
                "the request, and as its last it was left out of the forward behind it."
            )

    def test_an_abort_on_its_way(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="a")
            session.run(3)
            session.abort("a")

            assert session.explain("a") == (
                "a has row 0 and is to be aborted: the next admit or resolve ends it, and no token is given to it."
            )


class TestEnded:
    def ended(self, session: Session, **params: object) -> str:
        session.submit([1, 2], request_id="a", **{"temperature": 0, **params})
        session.run()
        return session.explain("a")

    def test_by_length(self) -> None:
        with make_session() as session:
            assert self.ended(session, max_tokens=3, ignore_eos=True) == (
                "a has ended in iteration 3: it has all 3 tokens that max_tokens allows."
            )

    def test_by_the_longest_sequence(self) -> None:
        with make_session(max_sequence_length=8) as session:
            assert self.ended(session, max_tokens=50, ignore_eos=True) == (
                "a has ended in iteration 6: prompt and output fill max_sequence_length=8 with 6 tokens."
            )

    def test_by_an_end_of_sequence_id(self) -> None:
        with text_session() as session:
            eos = session.engine.resolved.eos_token_ids[0]
            name = session.submit([1, 2], max_tokens=3, temperature=0, logit_bias={eos: 100})
            session.run()

            assert session.explain(name) == (
                f"{name} has ended in iteration 1: its token 1 is an end-of-sequence id, {eos}."
            )

    def test_by_a_stop_id(self) -> None:
        with make_session() as session:
            self.ended(session, max_tokens=4, ignore_eos=True)
            third = session.outputs["a"].token_ids[2]
            session.reset()

            assert self.ended(session, max_tokens=9, ignore_eos=True, stop_token_ids=[third]) == (
                f"a has ended in iteration 3: its token 3 is {third}, one of its stop_token_ids."
            )

    def test_by_a_stop_string(self) -> None:
        with text_session() as session:
            self.ended(session, max_tokens=4, ignore_eos=True)
            text = session.text("a")
            session.reset()

            assert self.ended(session, max_tokens=9, ignore_eos=True, stop=[text]) == (
                f"a has ended in iteration 4: its text holds the stop string {text!r} after 4 tokens."
            )

    def test_by_an_abort(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="a")
            session.run(2)
            session.abort("a")
            session.run()

            assert session.explain("a") == "a has ended in iteration 2: it was aborted and keeps the 1 token it had."

    def test_by_bad_logits(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="a", logit_bias=None)
            session.run(2)
            pending = session.engine.pending
            assert pending is not None
            assert pending.logits.rows is not None
            with torch.inference_mode():
                pending.logits.rows.fill_(torch.nan)
            session.run()

            assert session.explain("a") == (
                "a has ended in iteration 2: it failed after 1 token (the model's logits are NaN, infinite or all "
                "masked at this position)."
            )

    def test_with_its_last_output_still_to_be_made(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=2, ignore_eos=True, request_id="a")
            session.run(2)
            session.run_to("emit")

            assert session.explain("a") == (
                "a has ended: it has all 2 tokens that max_tokens allows; its last output comes with the next emit."
            )


class TestReadsOnly:
    def test_explaining_everything_at_every_border_changes_nothing(self) -> None:
        with make_session(clock="iterations") as plain, make_session(clock="iterations") as asked:
            for session in (plain, asked):
                session.submit_workload(spread_workload())
            plain.run()
            while True:
                for submission in asked.submissions:
                    assert asked.explain(submission.request_id).endswith(".")
                assert asked.explain().endswith((".", "'async'."))
                if asked.step_phase() is None:
                    break

            assert tokens(asked) == tokens(plain)
