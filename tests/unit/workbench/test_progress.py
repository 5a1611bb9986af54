"""The line for what takes long and cannot say how far it is."""

from __future__ import annotations

import io
import sys
import time

import pytest

from engine.config import EngineConfig
from tests.unit.workbench.worlds import oracle
from workbench import loading, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def look_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest puts its own standard error back after fixtures."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.01)
    return shown


class TestWaitingLine:
    def test_shows_the_time_of_what_takes_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = look_on(monkeypatch)
        with progress.waiting_line("loading smollm2"):
            time.sleep(0.3)

        assert "loading smollm2 00:00" in terminal.getvalue()
        assert terminal.getvalue().endswith("\r"), "and takes it away"

    def test_is_silent_for_what_is_quick_or_unwanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = look_on(monkeypatch)
        with progress.waiting_line("quick"):
            pass
        with progress.waiting_line("unwanted", wanted=False):
            time.sleep(0.3)

        assert terminal.getvalue() == ""

    def test_is_silent_where_nobody_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown = io.StringIO()
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr(progress, "_PATIENCE_S", 0.05)
        with progress.waiting_line("piped"):
            time.sleep(0.3)

        assert shown.getvalue() == ""

    def test_ends_with_what_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = look_on(monkeypatch)

        @progress.waiting_line("failing")
        def fail() -> None:
            time.sleep(0.2)
            raise RuntimeError("planted")

        with pytest.raises(RuntimeError, match="planted"):
            fail()

        assert terminal.getvalue().endswith("\r")


class TestLoading:
    def test_tells_that_a_slow_model_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``Session("smollm2")`` gave no sign for 25 s on a slow machine."""
        terminal = look_on(monkeypatch)

        def slow(*_: object, **more: object) -> object:
            time.sleep(0.3)
            return oracle()

        monkeypatch.setattr(loading, "load_model", slow)
        assert loading.load_for(EngineConfig(), None, progress=True) is oracle()
        assert "loading shipped 00:00" in terminal.getvalue()
