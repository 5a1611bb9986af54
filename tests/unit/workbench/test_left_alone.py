"""What a reviewer broke in driving: time that a person took, seats that nobody gives back, names of switched runs."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine.errors import RequestError
from tests.unit.workbench.worlds import oracle
from workbench.cli import main
from workbench.driver import LEFT_NS
from workbench.figures import FigureError
from workbench.peek import SessionError
from workbench.session import Session

SMALL = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64, "num_blocks": 64}
LONG_S = 3 * LEFT_NS / 1e9


@pytest.fixture
def nobody_is_away() -> None:
    """Here somebody is."""


@pytest.fixture
def session() -> Session:
    with Session(oracle(), device="cpu", **SMALL) as made:
        made.submit([[1, 2, 3], [4, 5]], max_tokens=20, ignore_eos=True)
        yield made


class TestPauses:
    def test_between_two_runs_are_nobodys_time(self, session: Session) -> None:
        """A second of looking between two runs once stood as a bubble, and in every request's time per token."""
        session.run(5)
        time.sleep(LONG_S)
        session.run()
        voids = {record.iteration: record.void_reasons for record in session.iterations() if record.is_void}
        assert voids == {5: ("resumed",)}
        assert session.summary().device.bubbles is None or session.summary().device.bubbles.max_ns < LONG_S * 1e9
        assert all(record.void_reasons == ("resumed",) for record in session.requests())

    def test_with_nothing_running_void_nothing(self, session: Session) -> None:
        session.run()
        time.sleep(LONG_S)
        session.submit([7, 8], max_tokens=3)
        session.run()
        assert not any(record.is_void for record in session.iterations())

    def test_that_a_loop_of_steps_does_not_make_are_none(self, session: Session) -> None:
        while not session.finished:
            session.step()
        resumed = [record for record in session.iterations() if "resumed" in record.void_reasons]
        assert len(resumed) <= 1  # the machine may have had other things to do


class TestSeats:
    def test_of_a_closed_loop_are_free(self, session: Session) -> None:
        """A run whose loop was closed once was said to be running for ever."""

        async def begin() -> None:
            session.start()

        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
        assert session.state == "paused"
        session.run()
        assert session.finished


class TestRecover:
    def test_is_refused_where_nothing_has_failed(self, session: Session) -> None:
        with pytest.raises(SessionError, match="nothing has failed"):
            session.recover()


class TestNames:
    def test_tell_every_mode_that_a_trace_has(self, session: Session) -> None:
        session.run(4)
        session.mode = "legacy"
        session.run()
        assert session.trace.name == "async, then legacy"

    def test_reset_forgets_why_it_stopped(self, session: Session) -> None:
        session.run(2)
        assert session.stopped is not None
        session.reset()
        assert session.stopped is None


class TestEnds:
    def test_a_raising_condition_behind_an_iteration_is_told_and_loses_no_token(self, session: Session) -> None:
        def broken(s: Session) -> bool:
            raise ZeroDivisionError("of the condition")

        session.break_on(bubble_longer_than_us=0.001, when=broken)
        with pytest.raises(SessionError, match="raised ZeroDivisionError: of the condition"):
            session.run()
        assert session.stopped is not None
        assert session.stopped.cause.value == "failure"
        for stop in list(session.breakpoints):
            stop.remove()
        session.run()
        assert [len(output.token_ids) for output in session.outputs.values()] == [20, 20]

    @pytest.mark.parametrize("n", [2.5, "3", True, -1])
    def test_a_number_of_iterations_is_a_whole_one(self, session: Session, n: object) -> None:
        with pytest.raises(SessionError, match="takes a number of iterations"):
            session.run(n)  # type: ignore[arg-type]


class TestIds:
    @pytest.mark.parametrize("request_id", [" ", "a ", "\ud800", "a\nb", "\x00"])
    def test_are_words_that_can_be_saved_and_shown(self, session: Session, request_id: str) -> None:
        """A lone surrogate was taken, and the session could never be saved."""
        with pytest.raises(RequestError, match="printable"):
            session.submit([1], request_id=request_id)


class TestOptions:
    @pytest.mark.parametrize("words", [["--save", ""], ["--save="], ["--model", ""], ["--clock="]])
    def test_without_a_value_are_named(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """``--save "$UNSET"`` ran to the end and saved nothing."""
        assert main(["run", "--model", "oracle", *words]) == 2
        assert f"{words[0].rstrip('=')} is given without a value" in capsys.readouterr().err

    def test_of_figures_are_known(self, session: Session) -> None:
        with pytest.raises(FigureError, match="has no option 'foo'; it takes"):
            session.figure("bubbles", foo=1)


class TestPace:
    def test_taken_away_during_a_rest_still_voids_the_iteration_behind_it(self, session: Session) -> None:
        async def drive() -> None:
            session.pace_s = 0.3
            run = session.start(4)
            while session.engine.controller.next_index < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            session.pace_s = 0.0
            await run

        asyncio.run(drive())
        rested = [record.iteration for record in session.iterations() if "paced" in record.void_reasons]
        assert rested == [0, 1, 2]
