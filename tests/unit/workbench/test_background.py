"""Runs in the background: turns for others, pause within one iteration, failures that are shown."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.phases import Phase
from engine.request import RequestOutput
from tests.unit.workbench.worlds import make_session, spread_workload, tokens, what_happened
from workbench import background
from workbench.session import Session, SessionError
from workbench.stops import RunOutcome, StopCause


@pytest.fixture
def _a_turn_after_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "SLICE_NS", 0)
    monkeypatch.setattr(background, "_LONGEST_SLICE_NS", 0)


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await work()

    return asyncio.run(run())


def cause(session: Session) -> StopCause | None:
    return None if session.stopped is None else session.stopped.cause


@pytest.mark.usefixtures("_a_turn_after_each_iteration")
class TestRunAsync:
    @pytest.mark.parametrize("device", ["inline", "cpu"])
    def test_gives_the_records_and_tokens_of_run(self, device: str) -> None:
        with (
            make_session(clock="iterations", device=device) as plain,
            make_session(clock="iterations", device=device) as turned,
        ):
            plain.submit_workload(spread_workload())
            turned.submit_workload(spread_workload())
            plain.run()
            outcome: RunOutcome = in_loop(turned.run_async)

            assert tokens(turned) == tokens(plain)
            assert list(map(what_happened, turned.iterations())) == list(map(what_happened, plain.iterations()))
            assert sorted(one.request_id for one in outcome) == [f"request-{index}" for index in range(6)]
            assert cause(turned) is StopCause.FINISHED

    def test_stops_after_so_many_iterations_or_where_the_condition_is_true(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            few: RunOutcome = in_loop(lambda: session.run_async(3))
            until: RunOutcome = in_loop(lambda: session.run_async(until=lambda s: s.row(0).output_tokens >= 8))

            assert (few.iterations, few.stopped and few.stopped.cause) == (3, StopCause.COUNT)
            assert until.stopped is not None
            assert until.stopped.cause is StopCause.CONDITION
            assert session.row(0).output_tokens == 8

    def test_stops_at_a_breakpoint(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.break_on("resolve")
            outcome: RunOutcome = in_loop(session.run_async)

            assert outcome.stopped is not None
            assert (outcome.stopped.cause, outcome.stopped.phase) == (StopCause.BREAKPOINT, "resolve")
            assert session.state == "paused"

    def test_others_have_their_turn_between_iterations(self) -> None:
        seen: list[int] = []

        async def work() -> None:
            async def other() -> None:
                while session.state == "running":
                    seen.append(session.snapshot().iterations_begun)
                    await asyncio.sleep(0)

            task = asyncio.ensure_future(other())
            await session.run_async(10)
            await task

        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            in_loop(work)

        assert set(range(2, 10)) <= set(seen)

    def test_two_sessions_run_side_by_side(self) -> None:
        with make_session(clock="iterations") as left, make_session("legacy", clock="iterations") as right:
            for session in (left, right):
                session.submit_workload(spread_workload())

            async def both() -> None:
                await asyncio.gather(left.run_async(), right.run_async())

            in_loop(both)

            assert tokens(left) == tokens(right)
            assert left.finished
            assert right.finished

    def test_needs_no_thread(self) -> None:
        before = threading.active_count()
        with make_session(device="inline") as session:
            session.submit([1], max_tokens=5, ignore_eos=True)
            counts: list[int] = []
            session.watch("threads", lambda s: counts.append(threading.active_count()))
            in_loop(session.run_async)

        assert set(counts) == {before}

    def test_requests_and_modes_change_while_it_runs(self) -> None:
        async def work() -> RunOutcome:
            run = session.start()
            await asyncio.sleep(0)
            session.submit([2, 3], max_tokens=4, request_id="late")
            session.mode = "legacy"
            session.abort("early")
            return await run

        with make_session() as session:
            session.submit([1], max_tokens=60, ignore_eos=True, request_id="early")
            outcome: RunOutcome = in_loop(work)

        ends: dict[str, RequestOutput] = {one.request_id: one for one in outcome}
        assert {name: one.finish_reason for name, one in ends.items()} == {"early": "abort", "late": "length"}
        assert session.mode == "legacy"


class TestArrivals:
    def test_on_a_wall_clock_are_waited_for_on_the_loop(self) -> None:
        turns: list[float] = []

        async def work() -> None:
            run = session.start()
            while not run.done:
                turns.append(session.clock.now())
                await asyncio.sleep(0.01)
            assert len(await run) == 1

        with make_session(clock="wall") as session:
            session.submit([1], max_tokens=3, ignore_eos=True, arrival=session.clock.now() + 0.25)
            in_loop(work)

            assert len(turns) > 3
            assert session.outputs["request-0"].finished

    def test_can_be_paused_while_nothing_is_there(self) -> None:
        async def work() -> None:
            run = session.start()
            await asyncio.sleep(0.01)
            session.pause()
            assert (await run).iterations == 0

        with make_session(clock="wall") as session:
            session.submit([1], max_tokens=3, arrival=session.clock.now() + 60)
            in_loop(work)

            assert session.state == "paused"


@pytest.mark.usefixtures("_a_turn_after_each_iteration")
class TestPause:
    def test_acts_behind_the_iteration_in_hand(self) -> None:
        begun: list[int] = []

        async def work() -> None:
            run = session.start()
            assert session.state == "running"
            for _ in range(5):
                await asyncio.sleep(0)
            session.pause()
            begun.append(session.engine.controller.next_index)
            await run

        with make_session() as session:
            session.submit([1], max_tokens=80, ignore_eos=True)
            in_loop(work)

            assert session.engine.controller.next_index <= begun[0] + 1
            assert session.engine.in_hand is None
            assert (session.state, cause(session)) == ("paused", StopCause.PAUSE)
            assert session.last_failure is None
            session.run()
            assert session.state == "finished"

    def test_before_the_first_turn_is_kept(self) -> None:
        async def work() -> None:
            run = session.start()
            session.pause()
            outcome = await run
            assert outcome.iterations <= 1

        with make_session() as session:
            session.submit([1], max_tokens=80, ignore_eos=True)
            in_loop(work)

            assert cause(session) is StopCause.PAUSE

    def test_of_what_does_not_run_is_nothing(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3, ignore_eos=True)
            session.pause()

            assert len(in_loop(session.run_async)) == 1


class TestOneDriver:
    def test_nobody_else_drives_while_it_runs(self) -> None:
        async def work() -> None:
            session.start()
            for drive in (session.step, session.step_phase, session.run, session.start):
                with pytest.raises(SessionError, match=r"driven by a run in the background; pause\(\) it"):
                    drive()
            with pytest.raises(SessionError, match="driven by"):
                await session.run_async()
            session.pause()

        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            in_loop(work)

    def test_without_a_loop_the_error_names_run(self) -> None:
        with make_session() as session, pytest.raises(SessionError, match=r"running event loop.*call run\(\)"):
            session.start()

    def test_a_cancelled_task_leaves_the_session_usable(self) -> None:
        async def work() -> None:
            task = asyncio.ensure_future(session.run_async())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with make_session(device="cpu", op_sleep_s=0.02) as session:
            name = session.submit([1], max_tokens=8, ignore_eos=True)
            in_loop(work)

            assert session.state == "paused"
            assert cause(session) is StopCause.PAUSE
            session.run()
            assert len(session.outputs[name].token_ids) == 8

    def test_a_reset_takes_the_engine_away_from_it(self) -> None:
        async def work() -> None:
            run = session.start()
            await asyncio.sleep(0.05)
            session.reset()
            session.submit([1, 2], max_tokens=3, ignore_eos=True, request_id="new")
            session.step()
            outcome = await run
            assert outcome.stopped is None
            assert session.engine.controller.next_index == 1

        with make_session(device="cpu", op_sleep_s=0.02) as session:
            session.submit([1], max_tokens=80, ignore_eos=True)
            in_loop(work)
            session.run()

            assert list(session.outputs) == ["new"]

    def test_a_reset_before_its_first_turn_takes_the_engine_away_too(self) -> None:
        async def work() -> None:
            run = session.start()
            session.reset()
            session.submit([1, 2], max_tokens=3, ignore_eos=True)
            outcome = await run
            assert (outcome.iterations, outcome.stopped) == (0, None)

        with make_session() as session:
            session.submit([1], max_tokens=80, ignore_eos=True)
            in_loop(work)

            assert session.engine.controller.next_index == 0
            assert session.state == "paused"

    def test_closing_ends_it(self) -> None:
        async def work() -> None:
            run = session.start()
            await asyncio.sleep(0.01)
            session.close()
            await run

        session = make_session(device="cpu", op_sleep_s=0.01)
        session.submit([1], max_tokens=80, ignore_eos=True)
        in_loop(work)

        assert session.engine.is_closed


class TestFailures:
    def test_are_shown_and_the_session_recovers_without_changing_a_token(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with make_session() as plain:
            plain.submit([1, 2], max_tokens=9, ignore_eos=True)
            plain.run()
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            phases = session.engine.controller.phase_functions
            whole = phases[Phase.RESOLVE]
            session.run(3)
            phases[Phase.RESOLVE] = lambda iteration: [][1]

            async def work() -> None:
                run = session.start()
                with pytest.raises(IndexError):
                    await run

            with caplog.at_level(logging.ERROR):
                in_loop(work)

            assert session.state == "failed"
            assert "IndexError" in caplog.text
            assert [event.kind for event in session.events][-2:] == ["started", "failed"]
            phases[Phase.RESOLVE] = whole
            session.recover()
            assert session.state == "paused"
            in_loop(session.run_async)
            assert tokens(session) == tokens(plain)

    def test_of_a_condition_leave_the_engine_whole(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(2)
            with pytest.raises(ZeroDivisionError):
                in_loop(lambda: session.run_async(until=lambda s: 1 // 0))

            assert session.state == "paused"
            assert session.stopped is not None
            assert session.stopped.text.startswith("ZeroDivisionError, behind iteration 1:")
            assert len(session.run()) == 1

    def test_are_raised_where_the_run_is_awaited(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.engine.controller.phase_functions[Phase.RESOLVE] = lambda iteration: [][1]
            with pytest.raises(IndexError):
                in_loop(session.run_async)

            assert session.state == "failed"
            session.reset()
            assert session.state == "finished"


class TestWaitingOnTheLoop:
    def test_a_long_wait_for_the_device_gives_turns_inside_an_iteration(self) -> None:
        """With 40 ms a forward a cell would else wait 40 ms for each of its turns."""
        naps: list[float] = []

        async def work() -> None:
            run = session.start(12)
            while not run.done:
                begin = time.perf_counter()
                await asyncio.sleep(0)
                naps.append(time.perf_counter() - begin)
            await run

        with make_session(device="cpu", op_sleep_s=0.04) as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            in_loop(work)

            assert len(naps) > 3 * 12  # several turns an iteration, where else there is one
            assert session.iterations()[-1].iteration == 11

    def test_a_turn_that_kept_a_finished_device_waiting_voids_the_iteration(self) -> None:
        async def work() -> None:
            run = session.start(20)
            for _ in range(4):
                await asyncio.sleep(0.05)
                time.sleep(0.06)  # somebody's cell; the device is done after 0.03
            await run

        with make_session(device="cpu", op_sleep_s=0.03) as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            in_loop(work)

            assert ("event_loop",) in [record.void_reasons for record in session.iterations()]

    def test_short_waits_are_left_to_the_phase(self, monkeypatch: pytest.MonkeyPatch) -> None:
        turns: list[object] = []
        whole = background.Background._turn_while_waiting

        async def noted(self: background.Background) -> None:
            turns.append(self)
            await whole(self)

        monkeypatch.setattr(background.Background, "_turn_while_waiting", noted)
        with make_session(device="inline") as session:
            session.submit([1], max_tokens=10, ignore_eos=True)
            in_loop(session.run_async)
        assert turns == []

        with make_session(device="cpu", op_sleep_s=0.03) as session:
            session.submit([1], max_tokens=5, ignore_eos=True)
            in_loop(session.run_async)
        assert turns
