from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tracing.nvtx_ranges import NoRanges, NvtxRanges, argb, attached_tool, colour_of, open_ranges
from tracing.recorder import Recorder
from tracing.records import PHASE_COLOURS, PHASES


class FakeLibrary:
    """The surface of ``nvtx._lib``, counting what is open."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.depth = 0

    def EventAttributes(self, message: str, color: int, category: int, payload: int | None) -> Any:
        return SimpleNamespace(message=message, color=color, category=category, payload=payload)

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


def fake_package() -> Any:
    domain = SimpleNamespace(handle="handle", get_registered_string=str, get_category_id=len)
    return SimpleNamespace(get_domain=lambda name: domain)


class TestNvtxRanges:
    def test_a_recorded_iteration_is_balanced_in_the_domain(self) -> None:
        library = FakeLibrary()
        recorder = Recorder(nvtx=NvtxRanges(fake_package(), library))
        recorder.begin_iteration(9, "LEGACY", "mode", "legacy")
        with recorder.phase("prepare"), recorder.phase("publish"):
            assert library.depth == 2
        recorder.end_iteration()
        assert library.depth == 0
        assert library.calls == [("start", 9), ("push", 9), ("push", 9), ("end", "token")]

    def test_two_sessions_never_share_a_payload(self) -> None:
        # The package's cached attributes are one object for all threads: the other session's number went out.
        sinks = [NvtxRanges(importlib.import_module("nvtx"), importlib.import_module("nvtx._lib")) for _ in range(2)]
        ours, theirs = (sink.attributes("prepare", "phase", "#000000") for sink in sinks)
        ours.payload, theirs.payload = 1, 2

        assert (ours.payload, theirs.payload) == (1, 2)

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
        loaded = importlib.import_module("nvtx._lib.lib").__file__  # any library that this process has loaded
        monkeypatch.delenv("NVTX_DISABLE", raising=False)
        monkeypatch.setenv("NVTX_INJECTION64_PATH", loaded)
        assert Recorder().nvtx_status == f"tool attached: {loaded}"

    def test_a_tool_that_was_not_loaded_is_not_called_attached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")
        is_attached, line = attached_tool()
        assert not is_attached
        assert line == "no tool attached: /opt/tool.so, which NVTX_INJECTION64_PATH names, was not loaded"

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

    def test_another_version_means_no_ranges_and_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = {"nvtx": fake_package(), "nvtx._lib": SimpleNamespace(EventAttributes=object, push_range=id)}
        monkeypatch.delenv("NVTX_DISABLE", raising=False)
        monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
        monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
        recorder = Recorder()
        with recorder.phase("prepare"):
            pass
        status = "off: this nvtx is not 0.2.11 (it lacks 'pop_range'); pip install nvtx==0.2.11"
        assert recorder.nvtx_status == status
        assert len(recorder.spans()) == 1

        monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")
        with pytest.warns(RuntimeWarning, match=r"no NVTX ranges: off: this nvtx is not 0\.2\.11"):
            Recorder()


class TestColours:
    def test_every_phase_has_a_colour_of_its_own(self) -> None:
        assert len({PHASE_COLOURS[name] for name in PHASES}) == len(PHASES)

    def test_a_name_without_a_colour_takes_its_categorys(self) -> None:
        assert colour_of("prepare", "phase") == PHASE_COLOURS["prepare"]
        assert colour_of("publish", "copy") == PHASE_COLOURS["copy"]
        assert colour_of("detokenise", "phase") == PHASE_COLOURS["other"]

    def test_colours_are_opaque(self) -> None:
        assert argb("#102030") == 0xFF102030
