"""A session that is suspended: it refuses to be driven, and goes on with the same tokens."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import EngineError, EnginePausedError, MidIterationError
from tests.unit.workbench.worlds import oracle
from workbench.peek import SessionError
from workbench.session import Session


def session_with_requests() -> Session:
    session = Session(oracle(), device="inline", num_blocks=40, suspend_mode="offload")
    for number in range(3):
        session.submit([number + 1, 2, 3], max_tokens=9, seed=number)
    return session


def tokens(session: Session) -> list[tuple[int, ...]]:
    return [output.token_ids for output in sorted(session.run(), key=lambda output: output.request_id)]


class TestSuspending:
    @pytest.mark.parametrize("mode", [None, "persist", "recompute"])
    def test_changes_no_token(self, mode: str | None) -> None:
        with session_with_requests() as session:
            expected = tokens(session)
        with session_with_requests() as session:
            session.run(4)
            assert session.suspend(mode).mode == (mode or "offload")
            with pytest.raises(EnginePausedError, match=r"call resume\(\) first"):
                session.step()
            assert session.last_failure is None
            session.resume()
            assert tokens(session) == expected

    def test_is_told_in_the_event_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with session_with_requests() as session:
            session.run(4)
            session.suspend("offload")
            monkeypatch.setattr(session.engine, "load_weights", lambda source: None)  # the oracle has none
            session.load_weights([])
            session.resume()
            session.resume()  # runs already
            told = [
                (event.kind, event.text) for event in session.events if event.kind in ("suspended", "weights", "awake")
            ]

        assert [kind for kind, _ in told] == ["suspended", "weights", "awake"]
        assert told[0][1].startswith("offload: ")
        assert told[0][1].endswith(" kept on the host")

    def test_ends_by_starting_over(self) -> None:
        with session_with_requests() as session:
            expected = tokens(session)
            session.restart()
            session.run(3)
            session.suspend("recompute")
            session.restart()
            assert tokens(session) == expected

    def test_needs_a_border_and_nobody_who_drives(self) -> None:
        async def drive(session: Session) -> None:
            run = session.start()
            await asyncio.sleep(0)
            for call in (session.suspend, session.resume, lambda: session.load_weights([])):
                with pytest.raises(SessionError, match="driven by a run in the background"):
                    call()
            await run

        with session_with_requests() as session:
            session.pace_s = 0.001
            asyncio.run(drive(session))
        with session_with_requests() as session:
            session.step_phase()
            with pytest.raises(MidIterationError):
                session.suspend()

    def test_is_needed_for_new_weights(self) -> None:
        with session_with_requests() as session, pytest.raises(EngineError, match=r"pause\(\) or suspend\(\)"):
            session.load_weights([])
