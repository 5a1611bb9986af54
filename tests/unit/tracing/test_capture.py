from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.nvtx.sink import RecordingSink
from tracing.recorder import Recorder


class LoggingSink(RecordingSink):
    """Writes starts and ends into a log that is shared with a profiler."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def start(self, attributes: Any, payload: int) -> int:
        self.log.append(f"range {attributes[0]}")
        return super().start(attributes, payload)

    def end(self, token: int) -> None:
        self.log.append("range ends")
        super().end(token)


def fake_torch(log: list[str], *, uses_cuda: bool) -> Any:
    profiler = SimpleNamespace(start=lambda: log.append("profiler"), stop=lambda: log.append("profiler ends"))
    return SimpleNamespace(cuda=SimpleNamespace(profiler=profiler, is_initialized=lambda: uses_cuda))


class TestCaptureRange:
    def test_lies_inside_the_cuda_profilers_stretch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log: list[str] = []
        monkeypatch.setitem(sys.modules, "torch", fake_torch(log, uses_cuda=True))

        with Recorder(nvtx=LoggingSink(log)).capture():
            log.append("work")

        assert log == ["profiler", "range capture", "work", "range ends", "profiler ends"]

    def test_leaves_cuda_alone_where_nothing_uses_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log: list[str] = []
        monkeypatch.setitem(sys.modules, "torch", fake_torch(log, uses_cuda=False))

        with Recorder(nvtx=LoggingSink(log)).capture():
            log.append("work")

        assert log == ["range capture", "work", "range ends"]

    def test_is_emitted_while_recording_is_off(self) -> None:
        sink = RecordingSink()

        with Recorder(enabled=False, nvtx=sink, session_id=2).capture():
            pass

        assert [(one.name, one.payload >> 40) for one in sink.ranges] == [("capture", 2)]
        assert sink.open_ranges() == []

    def test_costs_nothing_without_a_sink(self) -> None:
        with Recorder(nvtx=False).capture():
            pass
