"""Runs in the background at a pace that a person can follow."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.unit.workbench.worlds import make_session, spread_workload, tokens, what_happened
from workbench.session import Session, SessionError
from workbench.stops import RunOutcome, StopCause


class TestPace:
    def test_rests_behind_each_iteration_and_leaves_the_loop_to_others(self) -> None:
        turns = 0

        async def work() -> float:
            nonlocal turns
            begin = time.perf_counter()
            run = session.start(4)
            while not run.done:
                turns += 1
                await asyncio.sleep(0.001)
            return time.perf_counter() - begin

        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.pace_s = 0.05
            took_s = asyncio.run(work())

        assert took_s >= 3 * 0.05  # none behind the last
        assert turns > 20

    @pytest.mark.parametrize("n", [1, None])
    def test_rests_behind_no_last_iteration(self, n: int | None) -> None:
        async def work() -> RunOutcome:
            async with asyncio.timeout(20):
                return await session.run_async(n)

        with make_session("legacy") as session:
            session.submit([1], max_tokens=1 if n is None else 30, ignore_eos=True)
            session.pace_s = 60.0
            assert asyncio.run(work()).iterations == 1

    def test_changes_no_token_and_no_schedule(self) -> None:
        with make_session(clock="iterations") as plain, make_session(clock="iterations") as paced:
            for session in (plain, paced):
                session.submit_workload(spread_workload())
            paced.pace_s = 0.001
            plain.run()
            asyncio.run(paced.run_async())

            assert tokens(paced) == tokens(plain)
            assert list(map(what_happened, paced.iterations())) == list(map(what_happened, plain.iterations()))

    def test_voids_the_iterations_that_had_one_and_no_others(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            asyncio.run(session.run_async(2))
            session.pace_s = 0.001
            asyncio.run(session.run_async(2))
            session.run(1)  # at once, whatever the pace
            session.pace_s = 0.0
            asyncio.run(session.run_async(2))

            paced = ["paced" in record.void_reasons for record in session.iterations()]
        assert paced == [False, False, True, True, False, False, False]

    def test_pause_acts_at_once_and_not_behind_the_rest(self) -> None:
        async def work() -> tuple[RunOutcome, float]:
            run = session.start()
            await asyncio.sleep(0.05)
            begin = time.perf_counter()
            session.pause()
            return await run, time.perf_counter() - begin

        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.pace_s = 60.0
            outcome, took_s = asyncio.run(work())

        assert took_s < 5.0
        assert (outcome.iterations, outcome.stopped and outcome.stopped.cause) == (1, StopCause.PAUSE)

    def test_another_one_acts_in_the_rest(self) -> None:
        async def work() -> RunOutcome:
            run = session.start(6)
            await asyncio.sleep(0.05)
            assert session.engine.controller.next_index == 1
            session.pace_s = 0.0
            async with asyncio.timeout(20):
                return await run

        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.pace_s = 60.0
            assert asyncio.run(work()).iterations == 6

    @pytest.mark.parametrize("act", [Session.reset, Session.close])
    def test_a_session_that_is_taken_away_in_the_rest_ends_the_run(self, act: Any) -> None:
        async def work() -> RunOutcome:
            run = session.start()
            await asyncio.sleep(0.05)
            act(session)
            async with asyncio.timeout(20):
                return await run

        session = make_session()
        session.submit([1], max_tokens=30, ignore_eos=True)
        session.pace_s = 60.0
        assert asyncio.run(work()).stopped is None
        session.close()

    def test_a_breakpoint_is_found_without_a_rest_behind_it(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.break_on("resolve")
            session.pace_s = 0.01
            outcome = asyncio.run(session.run_async())

            assert outcome.stopped is not None
            assert outcome.stopped.cause is StopCause.BREAKPOINT

    @pytest.mark.parametrize("pace_s", [-0.1, float("inf"), float("nan")])
    def test_refuses_what_is_no_time(self, pace_s: float) -> None:
        with make_session() as session, pytest.raises(SessionError, match="pace_s is a time in seconds"):
            session.pace_s = pace_s


class TestWhenDone:
    def test_tells_the_outcome_or_the_error_once_the_seat_is_free(self) -> None:
        async def work(until: Any) -> tuple[object, str]:
            told: list[tuple[object, str]] = []
            session.start(3, until=until).when_done(lambda result: told.append((result, session.state)))
            async with asyncio.timeout(20):
                while not told:
                    await asyncio.sleep(0)
            return told[0]

        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            outcome, state = asyncio.run(work(None))
            assert isinstance(outcome, RunOutcome)
            assert (outcome.iterations, state) == (3, "paused")
            error, state = asyncio.run(work(lambda s: 1 // 0))
            assert isinstance(error, ZeroDivisionError)
            assert state == "paused"
