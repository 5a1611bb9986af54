"""A session on each rank, driven by nobody but its own script, as under torchrun: here each is a thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from engine.controller import Iteration
from engine.errors import RankError
from engine.parallel.local import LocalRanks
from engine.parallel.log import first_difference
from workbench.driver import Script
from workbench.session import Session

pytestmark = pytest.mark.timeout(60)
T = TypeVar("T")
OPTIONS: dict[str, Any] = {
    "device": "inline",
    "max_requests": 4,
    "max_batch_tokens": 64,
    "max_sequence_length": 64,
    "num_blocks": 40,
    "expert_parallel": 2,
    "progress": False,
}


def on_both(do: Callable[[Session, int], T], **options: Any) -> list[Future[T]]:
    """``do(session, rank)`` on two ranks at once, to the end of both; their logs are equal if none failed."""
    ranks = LocalRanks.make(2, timeout_s=20)

    def run(rank: int) -> T:
        with Session("oracle-moe", ranks=ranks[rank], **{**OPTIONS, **options}) as session:
            return do(session, rank)

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(run, rank) for rank in range(2)]
    if all(future.exception() is None for future in futures):
        difference = first_difference([one.log.entries() for one in ranks])
        assert difference is None, str(difference)
    return futures


def lengths(session: Session) -> list[int]:
    return [len(output.token_ids) for output in session.outputs.values()]


class TestRun:
    @pytest.mark.parametrize(("clock", "far"), [("iterations", 60.0), ("virtual", 1000.0), ("wall", 0.3)])
    def test_goes_on_until_nobody_has_anything_left_now_or_later(self, clock: str, far: float) -> None:
        def serve(session: Session, rank: int) -> tuple[list[int], list[int]]:
            if rank == 0:
                session.submit([1, 2], max_tokens=4, ignore_eos=True)
            else:
                session.submit([3], max_tokens=3, arrival=far, ignore_eos=True)
                session.submit([3], max_tokens=2, arrival=2 * far, ignore_eos=True)
            session.run()
            return lengths(session), [record.iteration for record in session.iterations()]

        first, second = (future.result() for future in on_both(serve, clock=clock))

        assert first[0] == [4]
        assert second[0] == [3, 2]
        assert first[1] == second[1]

    def test_of_so_many_iterations_counts_none_in_which_nothing_ran(self) -> None:
        def serve(session: Session, rank: int) -> list[tuple[int, str]]:
            session.submit([1], max_tokens=2, arrival=9.0 if rank else 5.0, ignore_eos=True)
            found = []
            while not session.finished:
                outcome = session.run(2)
                assert outcome.stopped is not None
                found.append((outcome.iterations, outcome.stopped.cause.value))
            return found

        first, second = (future.result() for future in on_both(serve, clock="iterations", mode="legacy"))

        assert first == second
        assert sum(count for count, _ in first) == 4, "two for each of two requests, which come one after the other"

    def test_falling_asleep_is_no_iteration_and_takes_no_time_on_the_clock(self) -> None:
        class Counting(Script):
            ended = 0

            def after(self, iteration: Iteration) -> None:
                self.ended += 1

        def serve(session: Session, rank: int) -> tuple[int, int]:
            session._driver.script = counting = Counting()
            session.submit([1], max_tokens=2, ignore_eos=True)
            session.run()
            return counting.ended, len(session.iterations())

        assert all(ended == recorded > 0 for ended, recorded in (future.result() for future in on_both(serve)))

    def test_alike_whoever_is_asked_first(self) -> None:
        def serve(session: Session, rank: int) -> list[int]:
            time.sleep(0.1 * rank)
            if rank:
                session.submit([1], max_tokens=3, ignore_eos=True)
            while not session.finished:
                session.step()
            return lengths(session)

        assert [future.result() for future in on_both(serve)] == [[], [3]]


class TestAnError:
    def test_in_one_script_ends_the_others_at_once(self) -> None:
        def serve(session: Session, rank: int) -> None:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.run(3)
            if rank == 1:
                raise ZeroDivisionError("planted")
            session.run()

        begin_s = time.monotonic()
        first, second = on_both(serve)

        assert isinstance(first.exception(), RankError)
        assert "rank 1 has failed in iteration 3" in str(first.exception())
        assert isinstance(second.exception(), ZeroDivisionError)
        assert time.monotonic() - begin_s < 15  # what ranks may wait for one another is 20 s
