"""Every view in every state: plain values, and a run that was looked at is the run that was not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.phases import Phase
from tests.unit.workbench.panel.looks import Panel
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.worlds import make_session, spread_workload, tokens, what_happened
from workbench.session import Session


def whole_run(session: Session) -> tuple[Any, Any, Any]:
    return tokens(session), list(map(what_happened, session.iterations())), session.engine.counters.to_dict()


class TestPurity:
    @pytest.mark.parametrize("device", ["inline", "cpu"])
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_a_look_at_every_border_changes_no_token_and_no_schedule(self, mode: str, device: str) -> None:
        options: dict[str, Any] = {"clock": "iterations", "device": device, "graphs": [1, 2], "graph_non_decode": False}
        with make_session(mode, **options) as plain, make_session(mode, **options) as watched:
            for session in (plain, watched):
                session.submit_workload(spread_workload())
            panel = Panel(watched)
            while plain.step_phase() is not None:
                pass
            panel.look()
            while watched.step_phase() is not None:
                panel.look()

            assert whole_run(watched) == whole_run(plain)
            assert [one.void_reasons for one in watched.iterations()] == [
                one.void_reasons for one in plain.iterations()
            ]

    def test_a_look_between_two_looks_changes_neither(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(spread_workload())
            panel = Panel(session)
            while session.step_phase() is not None:
                assert panel.look() == panel.look() == Panel(session).look()

    def test_nothing_on_the_device_is_read_or_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session(device="cpu", op_sleep_s=0.02) as session:
            session.submit([[1], [2]], max_tokens=12, ignore_eos=True)
            session.run(3)
            panel = Panel(session)
            with monkeypatch.context() as patch:
                device = session.engine.device
                touches = [(type(device), "synchronize")]
                touches += [(type(device.compute), name) for name in ("launch", "record", "wait_for")]
                touches += [(torch.Tensor, name) for name in ("cpu", "numpy", "item", "tolist", "__array__")]
                for owner, name in touches:
                    patch.setattr(owner, name, lambda *_, **__: pytest.fail("touched the device"))
                for index in (None, 0, 2):
                    panel.look(index)
            session.step()
            assert session.iterations()[-1].void_reasons == ()


def in_mid_phase(session: Session) -> None:
    session.run(3)
    session.step_phase()


def failed(session: Session) -> None:
    session.run(3)
    fail_in(session, Phase.RESOLVE)
    with pytest.raises(ZeroDivisionError):
        session.run()


def recovered(session: Session) -> None:
    session.run(3)
    mend = fail_in(session, Phase.RESOLVE)
    with pytest.raises(ZeroDivisionError):
        session.run()
    mend()
    session.recover()


def switching(session: Session) -> None:
    session.run(3)
    session.mode = "legacy" if session.mode == "async" else "async"


def unrecorded(session: Session) -> None:
    session.recorder.enabled = False
    session.run(5)


def with_changes(session: Session) -> None:
    session.record_changes = True
    session.run(5)
    session.step_phase()


def replayed(session: Session) -> None:
    session.run()
    run = session.trace
    session.replay(run)
    session.run(4)
    session.step_phase()


STATES: dict[str, Callable[[Session], Any]] = {
    "waiting": lambda session: None,
    "between": lambda session: session.run(4),
    "mid": in_mid_phase,
    "failed": failed,
    "recovered": recovered,
    "switching": switching,
    "unrecorded": unrecorded,
    "changes": with_changes,
    "replay": replayed,
    "finished": lambda session: session.run(),
    "reset": lambda session: (session.run(4), session.reset()),
    "restarted": lambda session: (session.run(4), session.restart()),
    "closed": lambda session: (session.run(4), session.close()),
    "closed in mid iteration": lambda session: (in_mid_phase(session), session.close()),
    "cleared": lambda session: (session.run(4), session.clear_trace()),
}


class TestEveryState:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("state", list(STATES))
    def test_can_be_looked_at(self, state: str, mode: str) -> None:
        with make_session(mode, clock="iterations", num_blocks=12, device="cpu") as session:
            panel = Panel(session)
            panel.look()
            session.submit_workload(spread_workload())
            STATES[state](session)
            if not session.engine.is_closed:
                session.engine.device.synchronize()  # so that nothing becomes known between two looks
            views = panel.look()
            assert views == Panel(session).look()
            for index in (0, 2, 99):
                panel.look(index)

        expected = {"reset": 0, "closed in mid iteration": 6}
        assert len(views["requests"]["rows"]) == expected.get(state, 6)

    def test_of_an_empty_session_says_what_to_do_in_each_pane(self) -> None:
        with make_session() as session:
            views = Panel(session).look()

        for pane in ("requests", "graphs", "changes", "history", "stops", "log"):
            assert views[pane]["hint"], pane

    def test_while_it_runs_in_the_background(self) -> None:
        seen: list[str] = []

        async def work() -> None:
            panel = Panel(session)
            run = session.start()
            while not run.done:
                seen.append(panel.look()["bar"]["state"])
                await asyncio.sleep(0)

        with make_session(device="cpu", op_sleep_s=0.02) as session:
            session.submit([[1], [2]], max_tokens=8, ignore_eos=True)
            asyncio.run(work())

        assert "running" in seen
        assert len(seen) > 5  # in the middle of iterations too, while the device is waited for

    def test_two_panels_of_two_sessions_see_their_own(self) -> None:
        with make_session() as left, make_session("legacy") as right:
            left.submit([1], max_tokens=9, request_id="left")
            right.submit([[1], [2]], max_tokens=9)
            panels = Panel(left), Panel(right)
            left.run(2)
            one, other = (panel.look() for panel in panels)

        assert [row["request_id"] for row in one["requests"]["rows"]] == ["left"]
        assert [row["request_id"] for row in other["requests"]["rows"]] == ["request-0", "request-1"]
        assert (one["bar"]["iterations"], other["bar"]["iterations"]) == (2, 0)
