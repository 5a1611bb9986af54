from __future__ import annotations

import builtins
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tracing.nvtx_ranges import NoRanges, NvtxRanges, argb, colour_of, open_ranges
from tracing.recorder import Recorder
from tracing.records import PHASE_COLOURS, PHASES


class FakeLibrary:
    """The five functions of ``nvtx._lib``, counting what is open."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.depth = 0

    def push_range(self, attributes: Any, handle: Any) -> None:
        self.depth += 1
        self.calls.append(("push", attributes.payload))

    def pop_range(self, handle: Any) -> None:
        self.depth -= 1

    def start_range(self, attributes: Any, handle: Any) -> str:
        self.calls.append(("start", attributes.payload))
        return "token"

    def end_range(self, token: str) -> None:
        self.calls.append(("end", token))

    def mark(self, attributes: Any, handle: Any) -> None:
        self.calls.append(("mark", attributes.payload))


def fake_package(make_attributes: Any) -> Any:
    domain = SimpleNamespace(handle="handle", get_event_attributes=make_attributes)
    return SimpleNamespace(get_domain=lambda name: domain)


class TestNvtxRanges:
    def test_a_recorded_iteration_is_balanced_in_the_domain(self) -> None:
        library = FakeLibrary()
        package = fake_package(lambda *args: SimpleNamespace(payload=None))
        recorder = Recorder(nvtx=NvtxRanges(package, library))
        recorder.begin_iteration(9, "LEGACY", "mode", "legacy")
        with recorder.phase("prepare"), recorder.phase("publish"):
            assert library.depth == 2
        recorder.end_iteration()
        assert library.depth == 0
        assert library.calls == [("start", 9), ("push", 9), ("push", 9), ("end", "token")]

    def test_a_package_that_gives_no_attributes_without_a_tool_is_left_alone(self) -> None:
        library = FakeLibrary()
        recorder = Recorder(nvtx=NvtxRanges(fake_package(lambda *args: None), library))
        recorder.begin_iteration(0, "LEGACY", "mode", "legacy")
        with recorder.phase("prepare"):
            pass
        recorder.instant("abort")
        recorder.end_iteration()
        assert library.calls == []
        assert library.depth == 0

    def test_the_installed_package_takes_our_calls(self) -> None:
        sink = NvtxRanges(importlib.import_module("nvtx"), importlib.import_module("nvtx._lib"))
        attributes = sink.attributes("prepare", "phase", PHASE_COLOURS["prepare"])
        assert attributes.color == 0xFFE69F00
        sink.push(attributes, 3)
        assert attributes.payload == 3
        sink.pop()
        sink.end(sink.start(attributes, 4))
        sink.mark(attributes, (1 << 63) - 1)
        assert attributes.payload == (1 << 63) - 1


class TestOpenRanges:
    def test_the_pinned_package_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NVTX_DISABLE", raising=False)
        monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
        ranges = open_ranges()
        assert isinstance(ranges, NvtxRanges)
        assert ranges.status == "no tool attached"

    def test_an_attached_tool_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NVTX_DISABLE", raising=False)
        monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")
        assert Recorder().nvtx_status == "tool attached: /opt/tool.so"

    def test_nvtx_disable_is_honoured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVTX_DISABLE", "1")
        assert isinstance(open_ranges(), NoRanges)
        assert Recorder().nvtx_status == "NVTX_DISABLE is set"

    def test_a_missing_package_means_no_ranges_and_spans_as_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(name: str, package: str | None = None) -> Any:
            raise ImportError(f"No module named {name!r}")

        monkeypatch.delenv("NVTX_DISABLE", raising=False)
        monkeypatch.setattr(importlib, "import_module", refuse)
        recorder = Recorder()
        with recorder.phase("prepare"):
            pass
        assert recorder.nvtx_status == "nvtx is not installed"
        assert [span.name for span in recorder.spans()] == ["prepare"]

    def test_another_surface_is_refused_with_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = {"nvtx": fake_package(None), "nvtx._lib": SimpleNamespace(push_range=builtins.print)}
        monkeypatch.delenv("NVTX_DISABLE", raising=False)
        monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
        with pytest.raises(RuntimeError, match=r"lacks 'pop_range': pip install nvtx==0\.2\.11"):
            open_ranges()


class TestColours:
    def test_every_phase_has_a_colour_of_its_own(self) -> None:
        assert len({PHASE_COLOURS[name] for name in PHASES}) == len(PHASES)

    def test_a_name_without_a_colour_takes_its_categorys(self) -> None:
        assert colour_of("prepare", "phase") == PHASE_COLOURS["prepare"]
        assert colour_of("publish", "copy") == PHASE_COLOURS["copy"]
        assert colour_of("detokenise", "phase") == PHASE_COLOURS["other"]

    def test_colours_are_opaque(self) -> None:
        assert argb("#102030") == 0xFF102030
