"""Debuggers at phases, outside a notebook; tests/cpu/workbench/test_kernel.py has the notebook's."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.workbench.worlds import make_session, spread_workload, tokens
from workbench import debugging
from workbench.session import Session


@pytest.fixture
def _no_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "_shell", lambda: None)


def debug(session: Session, monkeypatch: pytest.MonkeyPatch, phase: str, *commands: str) -> str:
    """Enter the debugger at ``phase``, type ``commands``, and return all that it said."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*commands, ""])))
    monkeypatch.setattr(sys, "stdout", said)
    before = sys.gettrace()
    try:
        session.pdb(phase)
    finally:
        sys.settrace(before)
    return said.getvalue()


@pytest.mark.usefixtures("_no_ipython")
class TestPdb:
    @pytest.mark.parametrize("phase", ["admit", "prepare", "forward", "sample", "resolve", "emit"])
    def test_stops_at_the_first_line_of_the_phase_in_a_frame_of_its_name(
        self, phase: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_session("legacy") as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            said = debug(session, monkeypatch, phase, "p ('row 0', iteration.index, self.table.num_live)", "c")

            assert f"_{phase}()" in said.splitlines()[0]
            assert "controller.py" in said.splitlines()[0]
            assert f"('row 0', 0, {0 if phase == 'admit' else 1})" in said

    def test_steps_line_by_line_and_goes_on_to_the_end_of_the_phase(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session("legacy") as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            said = debug(session, monkeypatch, "sample", "n", "n", "p pending.iteration", "c")

            assert "(Pdb) 0" in said
            assert session.engine.next_phase is not None
            assert session.engine.next_phase.value == "resolve"
            assert len(session.run()) == 1

    @pytest.mark.parametrize("last", ["q", "c", "EOF"])
    def test_leaving_it_in_any_way_finishes_the_phase(self, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session(clock="iterations") as plain, make_session(clock="iterations") as session:
            for one in (plain, session):
                one.submit_workload(spread_workload())
            plain.run()
            for phase in ("prepare", "resolve", "forward", "emit", "sample"):
                debug(session, monkeypatch, phase, "n", *([] if last == "EOF" else [last]))
            session.run()

            assert session.last_failure is None
            assert tokens(session) == tokens(plain)

    def test_leaves_no_trace_function_and_voids_its_iteration_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            before = sys.gettrace()
            debug(session, monkeypatch, "resolve", "c")

            assert sys.gettrace() is before
            session.run(2)
            voids = [record.void_reasons for record in session.iterations()]
            assert voids[2] == ("debugger", "hand_stepped")
            assert before is not None or voids[1] == voids[3] == ()

    def test_needs_no_other_thread_on_the_inline_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = {thread.name for thread in threading.enumerate()}
        with make_session(device="inline") as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            said = debug(
                session,
                monkeypatch,
                "forward",
                "import threading",
                f"p sorted({{thread.name for thread in threading.enumerate()}} - {names!r})",
                "c",
            )

        assert "(Pdb) []" in said

    def test_an_exception_in_the_phase_is_the_engines_failure_as_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session() as session:
            name = session.submit([1], max_tokens=4, ignore_eos=True)
            runner = session.engine.controller.runner
            with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'plan'"):
                debug(session, monkeypatch, "prepare", "!self.runner = None", "c")

            assert session.state == "failed"
            session.engine.controller.runner = runner
            session.recover()
            session.run()
            assert len(session.outputs[name].token_ids) == 4

    def test_a_breakpoint_that_comes_first_is_told_instead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=4, ignore_eos=True)
            session.break_on("prepare")

            assert session.pdb("resolve") is None
            assert session.stopped is not None
            assert session.stopped.phase == "prepare"


class TestBreakpointHook:
    def test_is_left_alone_outside_a_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for shell in (None, SimpleNamespace()):
            monkeypatch.setattr(debugging, "_shell", lambda shell=shell: shell)
            before = sys.breakpointhook

            assert not debugging.revive_breakpoint()
            assert sys.breakpointhook is before

    def test_is_ours_in_a_kernel_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(debugging, "_shell", lambda: SimpleNamespace(kernel=object()))
        monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
        monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)

        assert debugging.revive_breakpoint()
        ours = sys.breakpointhook
        assert ours is not sys.__breakpointhook__
        assert debugging.revive_breakpoint()
        assert sys.breakpointhook is ours

    def test_keeps_what_the_environment_asks_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(debugging, "_shell", lambda: SimpleNamespace(kernel=object()))
        monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
        monkeypatch.setenv("PYTHONBREAKPOINT", "0")

        assert not debugging.revive_breakpoint()
        assert sys.breakpointhook is sys.__breakpointhook__

    def test_hands_over_to_an_attached_debugger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[Any] = []
        monkeypatch.setattr(debugging, "_shell", lambda: SimpleNamespace(kernel=object()))
        monkeypatch.setattr(sys, "breakpointhook", lambda *args: called.append(args))
        monkeypatch.setitem(sys.modules, "debugpy", SimpleNamespace(is_client_connected=lambda: True))
        monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
        debugging.revive_breakpoint()

        breakpoint("here")

        assert called == [("here",)]
