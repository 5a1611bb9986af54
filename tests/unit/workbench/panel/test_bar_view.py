"""The bar: state, buttons, badges, and what a switch of mode would do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from engine.phases import Phase
from tests.unit.workbench.worlds import make_session
from workbench.panel import bar_view as bar_module
from workbench.panel.bar_view import bar_view
from workbench.panel.commands import Commands
from workbench.panel.messages import COMMANDS
from workbench.panel.switch_text import other_mode, switch_text
from workbench.session import Session


def fail_in(session: Session, phase: Phase) -> Callable[[], None]:
    """Let ``phase`` raise; returns what mends it."""
    phases = session.engine.controller.phase_functions
    whole = phases[phase]

    def broken(iteration: Any) -> None:
        raise ZeroDivisionError("planted")

    phases[phase] = broken
    return lambda: phases.update({phase: whole})


def wanted_now(session: Session) -> set[str]:
    return {name for name, can in bar_view(session)["can"].items() if can}


ALWAYS = {"set_mode", "set_pace", "submit", "record_changes", "read_device", "break_on"}
DRIVES = {"step_phase", "step", "run", "run_to", "run_until"}


class TestState:
    def test_says_first_where_it_stands_at_every_border(self) -> None:
        with make_session() as session:
            session.submit([[1, 2], [3]], max_tokens=3, arrival=0)
            session.submit([4], max_tokens=2, arrival=5.0)
            while True:
                bar, snapshot = bar_view(session), session.snapshot()
                if snapshot.iteration is not None:
                    after = "" if snapshot.phase is None else f" (after {snapshot.phase})"
                    place = f"{snapshot.iteration} {snapshot.order} · before {snapshot.next_phase}{after}"
                    assert bar["headline"] == place
                assert (bar["mode"], bar["wanted_mode"], bar["clock"]) == (
                    snapshot.mode,
                    snapshot.wanted_mode,
                    snapshot.clock,
                )
                if session.step_phase() is None:
                    break

            assert bar["state"] == "finished"
            assert bar["headline"] == "between iterations · 0 running, 0 waiting"

    def test_says_why_it_stopped_only_while_it_stands_there(self) -> None:
        """Behind Restart "nothing is left to do" stood beside two waiting requests."""
        with make_session() as session:
            session.submit([[1, 2], [3]], max_tokens=3)
            session.run()
            assert bar_view(session)["stopped"] == "nothing is left to do"
            session.submit([4], max_tokens=3)
            assert bar_view(session)["stopped"] == ""
            session.run()
            session.restart()
            assert bar_view(session)["stopped"] == ""
            session.break_on("resolve")
            session.run()
            assert bar_view(session)["stopped"].startswith("breakpoint 1")
            session.step_phase()
            assert bar_view(session)["stopped"] == ""

    def test_has_a_place_that_differs_once_the_session_has_moved_on(self) -> None:
        """What a command had to say is shown until then; both sides name the place alike."""
        with make_session() as session:
            session.submit([1, 2], max_tokens=3)
            places = [bar_view(session)["place"]]
            commands = Commands(session)
            while session.state != "finished":
                notice = commands.run("step_phase")
                assert notice["place"] == bar_view(session)["place"]
                assert notice["command"] == "step_phase"
                places.append(notice["place"])

        assert len(set(places)) == len(places) > 10

    def test_goes_from_finished_to_paused_to_failed_to_closed(self) -> None:
        with make_session() as session:
            assert bar_view(session)["state"] == "finished"
            session.submit([1], max_tokens=9)
            assert bar_view(session)["state"] == "paused"
            mend = fail_in(session, Phase.RESOLVE)
            with pytest.raises(ZeroDivisionError):
                session.run()
            failed = bar_view(session)
            assert failed["state"] == "failed"
            assert failed["headline"] == "failed: ZeroDivisionError in resolve: planted"
            assert failed["stopped"] == ""  # said once
            mend()
            session.recover()
            assert bar_view(session)["state"] == "paused"
        assert bar_view(session)["state"] == "closed"

    def test_is_running_in_the_background_only_while_it_runs(self) -> None:
        async def work() -> list[str]:
            run = session.start()
            seen = [bar_view(session)["state"]]
            session.pause()
            await run
            return [*seen, bar_view(session)["state"], bar_view(session)["stopped"]]

        with make_session() as session:
            session.submit([1], max_tokens=60, ignore_eos=True)
            states = asyncio.run(work())

        assert states[:2] == ["running", "paused"]
        assert states[2].startswith("paused behind iteration")


class TestButtons:
    def test_of_an_empty_session_are_those_that_bring_something_in(self) -> None:
        with make_session() as session:
            assert set(bar_view(session)["can"]) == set(COMMANDS)
            assert wanted_now(session) == ALWAYS

    def test_drive_once_there_is_work_even_if_it_is_still_to_come(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, arrival=7.0)
            assert wanted_now(session) == ALWAYS | DRIVES | {"abort", "restart", "reset"}

    def test_save_needs_a_border_and_something_to_save(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(1)
            assert {"save", "choose"} <= wanted_now(session)
            session.step_phase()
            assert "save" not in wanted_now(session)
            assert wanted_now(session) >= DRIVES

    def test_of_a_failed_session_recover_and_start_over(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9)
            fail_in(session, Phase.ADMIT)
            with pytest.raises(ZeroDivisionError):
                session.run()

            assert {"recover", "reset", "restart"} <= wanted_now(session)
            assert not DRIVES & wanted_now(session)

    def test_of_a_running_session_is_pause_and_none_that_drives(self) -> None:
        async def work() -> set[str]:
            run = session.start()
            wanted = wanted_now(session)
            session.pause()
            await run
            return wanted

        with make_session() as session:
            session.submit([1], max_tokens=60, ignore_eos=True)
            wanted = asyncio.run(work())

        assert {"pause", "submit", "abort", "set_mode", "set_pace"} <= wanted
        assert not DRIVES & wanted

    def test_of_a_closed_session_only_look_back(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3)
            session.break_on("resolve")
            session.run()

        assert wanted_now(session) == {"choose", "save", "enable_stop", "remove_stop"}

    def test_of_breakpoints_need_one(self) -> None:
        with make_session() as session:
            assert not {"enable_stop", "remove_stop"} & wanted_now(session)
            session.break_on("resolve")
            assert {"enable_stop", "remove_stop"} <= wanted_now(session)


def badges(session: Session) -> list[str]:
    return [badge["text"] for badge in bar_view(session)["badges"]]


class TestBadges:
    @pytest.fixture(autouse=True)
    def _no_debugger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bar_module, "debugger_attached", lambda: False)  # coverage may trace this very test

    def test_a_plain_session_on_a_device_of_its_own_has_none(self) -> None:
        with make_session(device="cpu") as session:
            assert badges(session) == []

    def test_name_everything_that_voids_times(self) -> None:
        with make_session(device="inline", debug_invariants=True) as session:
            session.record_changes = True
            session.pace_s = 0.5
            session.recorder.enabled = False
            assert badges(session) == ["inline device", "changes recorded", "paced", "invariants", "recorder off"]
            session.record_changes, session.pace_s, session.recorder.enabled = False, 0.0, True
            assert badges(session) == ["inline device", "invariants"]

    def test_name_work_that_was_made_longer(self) -> None:
        with make_session(device="cpu") as session:
            with session.delayed({"resolve": 0.002}):
                assert badges(session) == ["delayed"]
            assert "resolve 2 ms" in bar_view(session)["badges"][0]["title"]

    def test_name_an_attached_debugger_and_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        former = sys.gettrace()
        with make_session(device="cpu") as session:
            sys.settrace(lambda *_: None)
            try:
                bar = bar_view(session)
            finally:
                sys.settrace(former)

        assert [badge["text"] for badge in bar["badges"]] == ["debugger"]
        assert "Detach it" in bar["badges"][0]["title"]


def what_a_switch_does(session: Session) -> list[tuple[int, str, str]]:
    """Ask for the other mode now and run: number, mode and order of each iteration from the next border on."""
    session.mode = other_mode(session.engine.controller.wanted_mode)
    first = session.engine.controller.next_index
    session.run()
    return [(one.iteration, one.mode, one.order) for one in session.iterations() if one.iteration >= first]


class TestSwitch:
    def test_of_an_idle_session_is_at_once(self) -> None:
        with make_session() as session:
            assert bar_view(session)["other_mode"] == "legacy"
            assert bar_view(session)["switch_text"] == (
                "At once, for no forward is pending: iteration 0 is the first in legacy."
            )

    def test_with_a_pending_forward_names_the_drain_that_then_comes(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(4)
            text = switch_text(session.engine)
            came = what_a_switch_does(session)

        assert text == (
            "Iteration 4 drains the forward of iteration 3 (sample → resolve → emit, nothing is launched); iteration 5 "
            "is the first in legacy."
        )
        assert came[:2] == [(4, "async", "drain"), (5, "legacy", "legacy")]

    @pytest.mark.parametrize("phases", [1, 2, 3, 4])
    def test_in_mid_iteration_comes_true_too(self, phases: int) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(4)
            for _ in range(phases):
                session.step_phase()
            text = switch_text(session.engine)
            came = what_a_switch_does(session)

        assert text == (
            "Iteration 4 goes on to its end in async; what it leaves pending is drained by iteration 5 (sample → "
            "resolve → emit, nothing is launched), and the iteration behind that is legacy."
        )
        assert came[:2] == [(5, "async", "drain"), (6, "legacy", "legacy")]

    @pytest.mark.parametrize("phases", [0, 1, 5])
    def test_from_legacy_needs_no_drain(self, phases: int) -> None:
        with make_session("legacy") as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(2)
            for _ in range(phases):
                session.step_phase()
            text = switch_text(session.engine)
            came = what_a_switch_does(session)

        first = 3 if phases else 2
        assert f"iteration {first} is " in text
        assert "drain" not in text
        assert came[0] == (first, "async", "primer")

    def test_that_is_asked_for_already_can_be_taken_back(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(4)
            session.mode = "legacy"
            bar = bar_view(session)
            assert (bar["mode"], bar["wanted_mode"], bar["other_mode"]) == ("async", "legacy", "async")
            assert bar["switch_text"].startswith("Takes the switch to legacy back")
            assert {mode for _, mode, _ in what_a_switch_does(session)} == {"async"}

    def test_of_a_failed_or_closed_engine_says_so(self) -> None:
        with make_session() as session:
            engine: Engine = session.engine
            session.submit([1], max_tokens=9)
            fail_in(session, Phase.SAMPLE)
            with pytest.raises(ZeroDivisionError):
                session.run()
            assert switch_text(engine).startswith("Behind recover() or reset()")
        assert switch_text(engine) == "The session is closed: no mode can be switched."
