"""The stamp: another one wherever a view is another one, and the same while nothing happens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.phases import Phase
from engine.policy import NeverOverlap
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.worlds import make_session, spread_workload
from workbench.panel.commands import Commands
from workbench.panel.messages import TABS
from workbench.panel.views import Views
from workbench.session import Session


class Look:
    """A session's views as a page would have them, with their stamp."""

    def __init__(self, session: Session) -> None:
        self.commands = Commands(session)
        self.views = Views(session, self.commands)

    def stamp(self) -> Any:
        return self.views.stamp()

    def shown(self) -> str:
        panes = {tab: self.views.pane(tab) for tab in TABS}
        return json.dumps([self.views.bar(), self.views.strip(), panes])


COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("step_phase", {}),
    ("step_phase", {}),
    ("step", {}),
    ("run", {"n": 2}),
    ("run_to", {"phase": "resolve"}),
    ("run_to", {"phase": "admit"}),
    ("pause", {}),
    ("set_mode", {}),
    ("set_pace", {"per_s": 4}),
    ("set_pace", {"per_s": 0}),
    ("submit", {"prompt": "1 2 3", "max_tokens": 4}),
    ("abort", {"request_id": "request-1"}),
    ("restart", {}),
    ("reset", {}),
    ("recover", {}),
    ("record_changes", {"wanted": True}),
    ("record_changes", {"wanted": False}),
    ("read_device", {"name": "last_token"}),
    ("break_on", {"phase": "forward"}),
    ("break_on", {"request": "request-0"}),
    ("enable_stop", {"id": 1, "enabled": False}),
    ("enable_stop", {"id": 1, "enabled": True}),
    ("remove_stop", {"id": 1}),
    ("choose", {"iteration": 1}),
    ("choose", {"iteration": None}),
]


def break_a_phase(session: Session) -> None:
    mend = fail_in(session, Phase.RESOLVE)
    try:
        session.step()
    except ZeroDivisionError:
        pass
    finally:
        mend()


def go_on(work: Callable[[Session], Any]) -> Callable[[Session], None]:
    def done(session: Session) -> None:
        with suppress(EngineError):  # it cannot be done as the session stands
            work(session)

    return done


CELLS: dict[str, Callable[[Session], Any]] = {
    "run": go_on(lambda session: session.run(3)),
    "submit": go_on(lambda session: session.submit([[5], [6]], max_tokens=3, ignore_eos=True)),
    "submit to the engine": go_on(lambda session: session.engine.add_request([1, 2])),
    "fail": go_on(break_a_phase),
    "clear_trace": go_on(lambda session: session.clear_trace()),
    "recorder off": lambda session: setattr(session.recorder, "enabled", not session.recorder.enabled),
    "policy": lambda session: setattr(session.engine.controller, "policy", NeverOverlap()),
    "watch": go_on(lambda session: session.watch("free", lambda s: s.engine.pool.num_free)),
}


class TestStamp:
    @given(steps=st.lists(st.one_of(st.sampled_from(COMMANDS), st.sampled_from(list(CELLS))), min_size=1, max_size=14))
    def test_is_another_one_where_any_view_is(self, steps: list[Any]) -> None:
        with make_session(clock="iterations", graphs=[1, 2], device="inline") as session:
            session.submit_workload(spread_workload(3))
            look = Look(session)
            stamp, shown = look.stamp(), look.shown()
            for step in steps:
                if isinstance(step, str):
                    CELLS[step](session)
                elif step[0] != "run":  # without a loop nothing runs in the background
                    look.commands.run(*step)
                else:
                    go_on(lambda session: session.run(2))(session)
                now = look.stamp()
                seen = look.shown()
                assert (now != stamp) >= (seen != shown), (step, _difference(shown, seen))
                assert look.stamp() == now
                stamp, shown = now, seen

    def test_stays_the_same_while_nothing_happens(self) -> None:
        with make_session(clock="iterations") as session:
            look = Look(session)
            session.submit_workload(spread_workload())
            while session.step_phase() is not None:
                assert look.stamp() == look.stamp()

    def test_is_another_one_behind_every_phase(self) -> None:
        with make_session(clock="iterations") as session:
            look, stamps = Look(session), []
            session.submit_workload(spread_workload())
            while session.step_phase() is not None:
                stamps.append(look.stamp())
        assert len(set(stamps)) == len(stamps)

    def test_changes_as_device_work_ends_in_a_session_that_stands(self) -> None:
        with make_session(device="cpu", op_sleep_s=0.05) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            look = Look(session)
            stamp = look.stamp()
            session.engine.device.synchronize()
            assert look.stamp() != stamp

    def test_tells_a_recorder_that_was_switched_off(self) -> None:
        """The badge that says why the timeline stands still came with the next iteration only."""
        with make_session() as session:
            look = Look(session)
            stamp, shown = look.stamp(), look.shown()
            session.recorder.enabled = False
            assert look.shown() != shown
            assert look.stamp() != stamp

    def test_tells_delays_a_cleared_trace_and_a_step_that_had_nothing_to_do(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3, ignore_eos=True)
            look = Look(session)
            session.run()
            stamps = [look.stamp()]
            session.step_phase()  # why the run stopped is said no longer
            stamps.append(look.stamp())
            with session.delayed({"resolve": 0.001}):
                stamps.append(look.stamp())
            session.clear_trace()
            stamps.append(look.stamp())
            assert len(set(stamps)) == 4

    def test_tells_a_debugger_that_came(self) -> None:
        with make_session() as session:
            look = Look(session)
            stamp, before = look.stamp(), sys.gettrace()
            sys.settrace(lambda *_: None)
            try:
                assert look.stamp() != stamp or before is not None
            finally:
                sys.settrace(before)


class TestPanes:
    def test_every_tab_but_figures_has_one(self, tmp_path: Path) -> None:
        with make_session() as session:
            views = Look(session).views
            assert [tab for tab in TABS if views.pane(tab) is None] == ["figures"]


def _difference(before: str, after: str) -> str:
    at = next((place for place, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
    return f"{before[max(0, at - 80) : at + 80]} -> {after[max(0, at - 80) : at + 80]}"


def test_a_session_that_is_closed_is_stamped_too() -> None:
    with make_session() as session:
        look = Look(session)
        stamp = look.stamp()
    assert look.stamp() != stamp
    assert "closed" in look.shown()


@pytest.mark.parametrize("count", [0, 1])
def test_a_stamp_is_hashable(count: int) -> None:
    with make_session() as session:
        session.submit([1], max_tokens=3)
        session.run(count)
        hash(Look(session).stamp())
