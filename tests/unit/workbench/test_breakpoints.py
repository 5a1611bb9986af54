"""Breakpoints: where runs and steps stand still, and what they say."""

from __future__ import annotations

import pytest

from engine.phases import Order, Phase, Reason
from engine.policy import never_overlap
from tests.unit.workbench.worlds import make_session, spread_workload, tokens, what_happened
from workbench.peek import as_reason
from workbench.session import Session, SessionError
from workbench.stops import StopCause


def stands(session: Session) -> tuple[int | None, str | None]:
    """Iteration in hand and the phase it stands before."""
    current, phase = session.engine.in_hand, session.engine.next_phase
    return (None if current is None else current.index), (None if phase is None else phase.value)


def places_of_hits(session: Session, most: int = 100) -> list[tuple[int | None, str | None]]:
    """Run to the end, noting every place where a breakpoint holds it."""
    places = []
    for _ in range(most):
        session.run()
        assert session.stopped is not None
        if session.stopped.cause is not StopCause.BREAKPOINT:
            return places
        places.append(stands(session))
    raise AssertionError("it does not come to an end")


class TestAPhase:
    def test_holds_a_run_just_before_it_and_says_so(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            made = session.break_on("resolve")

            outcome = session.run()

            assert stands(session) == (1, "resolve")
            assert made.hits == 1
            assert outcome.stopped is session.stopped
            assert session.stopped is not None
            assert (session.stopped.cause, session.stopped.breakpoint) == (StopCause.BREAKPOINT, made.id)
            assert (session.stopped.iteration, session.stopped.phase) == (1, "resolve")
            assert str(session.stopped) == "breakpoint 1 (before resolve), before resolve of iteration 1"

    def test_is_not_hit_again_where_it_stands_but_in_every_later_iteration(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            session.break_on(Phase.RESOLVE)

            assert places_of_hits(session) == [(1, "resolve"), (2, "resolve"), (3, "resolve"), (4, "resolve")]
            assert session.finished

    def test_may_be_the_first_of_an_iteration_which_is_then_in_hand(self) -> None:
        with make_session("legacy") as session:
            session.submit([1], max_tokens=3, ignore_eos=True)
            session.break_on("admit")
            session.run()

            assert stands(session) == (0, "admit")
            assert session.snapshot().order == Order.LEGACY.label

    @pytest.mark.parametrize("drive", ["step", "run_until", "run_to"])
    def test_holds_every_way_of_driving(self, drive: str) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.break_on("sample")

            calls = {
                "step": lambda: session.step(),
                "run_until": lambda: session.run_until(lambda s: False),
                "run_to": lambda: session.run_to("emit"),
            }
            calls[drive]()

            assert stands(session) == (2, "sample")
            assert session.stopped is not None
            assert session.stopped.cause is StopCause.BREAKPOINT

    def test_is_told_while_stepping_by_phases(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            made = session.break_on("sample")
            session.step_phase()

            assert session.stopped is not None
            assert session.stopped.breakpoint == made.id

            session.step_phase()

            assert session.stopped is None
            assert made.hits == 1

    def test_holds_a_step_by_phase_before_the_first_phase_of_an_order_too(self) -> None:
        """step_phase ran the first phase of each iteration without a look: break_on("prepare") was never hit."""
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            made = session.break_on("prepare")
            border = session.step_phase()

            assert border is not None
            assert (border.phase.value, border.side) == ("prepare", "before")
            assert stands(session) == (2, "prepare")
            assert session.stopped is not None
            assert session.stopped.breakpoint == made.id

            border = session.step_phase()
            assert border is not None
            assert (border.phase.value, border.side) == ("prepare", "after")
            assert (session.stopped, made.hits) == (None, 1)
            session.run(1)  # to its end
            session.run(1)
            assert (stands(session), made.hits) == ((3, "prepare"), 2)

    def test_that_hold_no_first_phase_change_nothing_in_steps_by_phase(self) -> None:
        seen = []
        for phase in ("emit", None):
            with make_session() as session:
                session.submit([1], max_tokens=9, ignore_eos=True)
                if phase is not None:
                    session.break_on(phase)
                borders = []
                while (border := session.step_phase()) is not None:
                    borders.append((border.iteration.index, border.phase, border.side))
                seen.append((borders, tokens(session)))

        assert seen[0] == seen[1]

    def test_run_to_tells_that_it_arrived(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run_to("resolve")

            assert session.stopped is not None
            assert session.stopped.cause is StopCause.CONDITION
            assert session.stopped.text == "stands before resolve of iteration 1"

    def test_voids_the_iteration_that_stood_still_and_no_other(self) -> None:
        with make_session(device="cpu", overlap_admission=False) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            made = session.break_on("sample", reason="STEADY_DECODE")
            session.run()
            made.remove()
            session.run()

            assert [bool(record.void_reasons) for record in session.iterations()][:4] == [False, False, True, False]

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_standing_still_everywhere_changes_no_token_and_no_record(self, mode: str) -> None:
        with make_session(mode, clock="iterations") as plain, make_session(mode, clock="iterations") as broken:
            for session in (plain, broken):
                session.submit_workload(spread_workload())
            for phase in Phase:
                broken.break_on(phase)
            plain.run()
            places = places_of_hits(broken, 1000)

            assert tokens(broken) == tokens(plain)
            assert list(map(what_happened, broken.iterations())) == list(map(what_happened, plain.iterations()))
            orders = {order.label: order for order in Order}
            expected = [(r.iteration, p.value) for r in plain.iterations() for p in orders[r.order].phases]
            assert places == expected


class TestACondition:
    def test_alone_holds_where_it_becomes_true_and_only_there(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.break_on(when=lambda s: s.row(0).output_tokens >= 3)

            assert places_of_hits(session) == [(3, "emit")]  # behind the resolve that gave token 3

    def test_that_is_true_again_is_hit_again(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            session.break_on(when=lambda s: s.engine.pending is None)

            # The last forward is sampled in an iteration that launches none.
            assert places_of_hits(session) == [
                (0, "admit"),
                (1, "forward"),
                (2, "forward"),
                (3, "forward"),
                (4, "resolve"),
            ]

    def test_with_a_phase_is_asked_there_alone(self) -> None:
        asked: list[tuple[int | None, str | None]] = []
        with make_session() as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            session.break_on("emit", when=lambda s: asked.append(stands(s)))
            session.run()

        assert asked == [(1, "emit"), (2, "emit"), (3, "emit"), (4, "emit")]

    def test_that_raises_is_named_and_the_session_goes_on_without_it(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            made = session.break_on("resolve", when=lambda s: 1 // 0)
            with pytest.raises(SessionError, match=r"condition of breakpoint 1 .* raised ZeroDivisionError"):
                session.run()

            assert session.last_failure is None
            assert session.stopped is not None
            assert session.stopped.cause is StopCause.FAILURE
            made.disable()
            assert len(session.run()) == 1

    def test_must_not_drive_the_session(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            session.break_on("resolve", when=lambda s: s.step())
            with pytest.raises(SessionError, match="driven by a call in progress"):
                session.run()


class TestAReason:
    def test_holds_before_the_first_phase_of_each_such_iteration(self) -> None:
        for beside, reason, first in (
            (False, Reason.HEAD_ADMISSIBLE, "sample"),
            (True, Reason.ADMITS_BESIDE, "admit"),
        ):
            with make_session(clock="iterations", overlap_admission=beside) as session:
                session.submit([1], max_tokens=8, ignore_eos=True)
                session.submit([2], max_tokens=2, arrival=4)
                session.break_on(reason=reason)

                assert places_of_hits(session) == [(4, first)]

    def test_is_taken_by_name_in_any_case_or_by_its_words(self) -> None:
        assert as_reason("prefill_pending") is as_reason("the pending forward holds prefill rows")
        with make_session() as session, pytest.raises(SessionError, match="reason must be one of LEGACY_MODE"):
            session.break_on(reason="no such thing")

    def test_and_a_phase_must_both_hold(self) -> None:
        with make_session(policy=never_overlap) as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            session.break_on("forward", reason="policy")

            assert places_of_hits(session) == [(1, "forward"), (2, "forward"), (3, "forward")]


class TestARequest:
    def test_alone_holds_where_its_state_changes(self) -> None:
        with make_session(clock="iterations", overlap_admission=False) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            name = session.submit([2], max_tokens=2, arrival=3, ignore_eos=True)
            session.break_on(request=name)

            # It has arrived; is admitted; has its first token; ends.
            assert places_of_hits(session) == [(3, "sample"), (3, "prepare"), (4, "admit"), (5, "emit")]

    def test_with_a_phase_holds_where_the_phase_works_on_it(self) -> None:
        with make_session(clock="iterations", overlap_admission=False) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            name = session.submit([2], max_tokens=2, arrival=3, ignore_eos=True)
            for phase in ("admit", "prepare", "forward", "sample", "resolve", "emit"):
                session.break_on(phase, request=name)

            of = {3: ("admit", "prepare", "forward"), 4: ("sample", "resolve", "emit")}
            hits = places_of_hits(session)

            assert [place for place in hits if place[0] in of] == [
                (3, "admit"),
                (3, "prepare"),
                (3, "forward"),
                (4, "sample"),
                (4, "resolve"),
                (4, "prepare"),
                (4, "forward"),
                (4, "emit"),
            ]
            assert {place[0] for place in hits} == {3, 4, 5}

    def test_that_nobody_submitted_is_waited_for(self) -> None:
        with make_session() as session:
            session.break_on(request="late")
            session.submit([1], max_tokens=4, ignore_eos=True)
            session.run(1)
            session.submit([2], max_tokens=2, request_id="late")
            session.run()

            assert session.stopped is not None
            assert session.stopped.cause is StopCause.BREAKPOINT


class TestAGraphMiss:
    def test_holds_before_the_forward_that_no_graph_runs(self) -> None:
        with make_session(graphs=[1], graph_non_decode=False) as session:
            session.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
            session.break_on(graph_miss=True)

            assert places_of_hits(session) == [(0, "forward")]  # the prompt; one row decodes in the graph

    def test_that_cannot_happen_is_refused(self) -> None:
        with make_session() as session, pytest.raises(SessionError, match="captures no graphs"):
            session.break_on(graph_miss=True)
        with make_session(graphs=[1]) as session, pytest.raises(SessionError, match="known behind prepare"):
            session.break_on("prepare", graph_miss=True)


class TestABubble:
    def test_that_is_long_holds_behind_the_iteration_in_which_it_is_known(self) -> None:
        with make_session("legacy", device="cpu") as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            made = session.break_on(bubble_longer_than_us=0.5)
            session.run()

            assert session.stopped is not None
            assert session.engine.in_hand is None
            assert made.hits == 1
            assert "a bubble of " in session.stopped.text
            before = session.iterations()[-1].iteration
            session.run()
            assert session.iterations()[-1].iteration > before

    def test_that_is_older_than_the_breakpoint_holds_nothing(self) -> None:
        """Notebook 02 stopped at a bubble of the run before, and not at the delayed resolve."""
        with make_session("legacy", device="cpu") as session:
            session.submit([1], max_tokens=40, ignore_eos=True)
            with session.delayed({"resolve": 0.03}):
                session.run(3)
            made = session.break_on(bubble_longer_than_us=25_000)
            session.run(5)
            assert made.hits == 0

            with session.delayed({"resolve": 0.03}):
                session.run(5)
            assert made.hits == 1
            assert session.stopped is not None
            assert "a bubble of " in session.stopped.text

    def test_that_began_before_the_last_stop_holds_nothing(self) -> None:
        """Idle time from one run to the next is a person's, and what a stop showed is not shown again."""
        with make_session("legacy", device="cpu") as session:
            session.submit([1], max_tokens=40, ignore_eos=True)
            made = session.break_on(bubble_longer_than_us=60e6)
            session.run(3)
            last = session.iterations()[-1]
            session.run(3)

            assert last.end_ns < made.since_ns < session.iterations()[last.iteration + 1].begin_ns

    def test_is_not_where_a_person_kept_the_device_waiting(self) -> None:
        with make_session("legacy", device="cpu") as session:
            session.submit([1], max_tokens=6, ignore_eos=True)
            made = session.break_on(bubble_longer_than_us=0.001)
            while session.step_phase() is not None:
                pass

            assert made.hits == 0

    def test_shorter_than_asked_for_holds_nothing(self) -> None:
        with make_session("legacy", device="cpu") as session:
            session.submit([1], max_tokens=6, ignore_eos=True)
            session.break_on(bubble_longer_than_us=60e6)

            assert places_of_hits(session) == []

    def test_that_cannot_be_measured_is_refused(self) -> None:
        with (
            make_session(device="inline") as session,
            pytest.raises(SessionError, match="inline device has no bubbles"),
        ):
            session.break_on(bubble_longer_than_us=10)
        with make_session(device="cpu") as session, pytest.raises(SessionError, match="above 0"):
            session.break_on(bubble_longer_than_us=0)


class TestKeepingThem:
    def test_one_is_disabled_enabled_and_removed(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            made = session.break_on("resolve")
            made.disable()
            session.run(3)
            assert made.hits == 0
            assert "disabled" in repr(made)
            made.enable()
            session.run()
            assert made.hits == 1
            made.remove()
            session.run()

            assert session.finished
            assert len(session.breakpoints) == 0

    def test_all_that_are_hit_count_and_the_first_is_told(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            first, second = session.break_on("resolve"), session.break_on(Phase.RESOLVE, when=lambda s: True)
            session.run()

            assert (first.hits, second.hits) == (1, 1)
            assert session.stopped is not None
            assert session.stopped.breakpoint == first.id

    def test_they_outlive_a_reset_and_count_from_the_start(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            made = session.break_on("resolve")
            session.run()
            session.restart()
            assert made.hits == 0
            session.run()

            assert stands(session) == (1, "resolve")

    def test_nothing_to_stop_at_is_refused(self) -> None:
        with make_session() as session:
            with pytest.raises(SessionError, match="break_on needs something to stop at"):
                session.break_on()
            with pytest.raises(SessionError, match="phase must be one of"):
                session.break_on("resolv")
            with pytest.raises(SessionError, match="when must be a function"):
                session.break_on(when=True)  # type: ignore[arg-type]

    def test_they_are_listed_for_a_person(self) -> None:
        with make_session() as session:
            assert "break_on" in repr(session.breakpoints)
            session.break_on("resolve", reason="steady_decode", request="request-0")

            assert repr(session.breakpoints) == (
                "<breakpoint 1 (before resolve, for request-0, reason STEADY_DECODE): 0 hits>"
            )
            assert "breakpoint 1" in session.breakpoints._repr_html_()


class TestOutcome:
    def test_tells_why_it_stopped_without_a_breakpoint(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3, ignore_eos=True)
            few = session.run(2)
            rest = session.run()

            assert few.stopped is not None
            assert rest.stopped is not None
            assert (few, few.iterations, few.stopped.cause) == ([], 2, StopCause.COUNT)
            assert ([one.request_id for one in rest], rest.stopped.cause) == (["request-0"], StopCause.FINISHED)
            assert repr(few) == "<0 requests ended in 2 iterations; ran 2 iterations>"

    def test_tells_of_a_failure(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3, ignore_eos=True)
            session.engine.controller.phase_functions[Phase.PREPARE] = lambda iteration: [][0]
            with pytest.raises(IndexError):
                session.run()

            assert session.state == "failed"
            assert session.stopped is not None
            assert (session.stopped.cause, session.stopped.text) == (
                StopCause.FAILURE,
                "IndexError in prepare: list index out of range",
            )
