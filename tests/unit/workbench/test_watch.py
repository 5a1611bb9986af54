"""What the session notes at borders."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from engine.controller import Border
from tests.unit.workbench.worlds import make_session
from workbench import watch
from workbench.watch import BorderWatch, debugger_attached


@pytest.fixture(autouse=True)
def _nothing_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own coverage or debugger is not what they are about."""
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(sys, "monitoring", None, raising=False)
    monkeypatch.delitem(sys.modules, "debugpy", raising=False)


class TestDebuggerAttached:
    def test_is_false_without_one(self) -> None:
        assert not debugger_attached()

    def test_sees_a_trace_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "gettrace", lambda: lambda *_: None)

        assert debugger_attached()

    @pytest.mark.parametrize(("tool", "expected"), [("pydb", True), (None, False)])
    def test_sees_a_debugger_that_uses_monitoring(
        self, tool: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tools = {0: tool, 1: "coverage"}
        monkeypatch.setattr(sys, "monitoring", SimpleNamespace(DEBUGGER_ID=0, get_tool=tools.get), raising=False)

        assert debugger_attached() is expected

    @pytest.mark.parametrize("connected", [True, False])
    def test_sees_debugpy_only_while_a_client_is_connected(
        self, connected: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A notebook kernel imports debugpy in any case.
        monkeypatch.setitem(sys.modules, "debugpy", SimpleNamespace(is_client_connected=lambda: connected))

        assert debugger_attached() is connected


class TestBorderWatch:
    def test_calls_the_watcher_that_was_there_at_every_border(self) -> None:
        with make_session() as session:
            seen: list[Border] = []
            session.engine.controller.watch = BorderWatch(seen.append, is_inline=True)
            session.submit([1], max_tokens=2)

            session.run(1)

            sides = [(border.phase.value, border.side) for border in seen]
            assert sides == [(phase, side) for phase in ("admit", "prepare", "forward") for side in ("before", "after")]

    def test_token_times_survive_being_sorted_by_request_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watch, "_FOLD_AT", 3)
        with make_session() as session:
            session.submit([[1], [2]], max_tokens=11, ignore_eos=True)
            session.run()

            assert [len(record.token_times_ns) for record in session.requests()] == [11, 11]
