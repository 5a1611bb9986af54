"""A profiler of our own for tests: ``recorder.c`` as a library that NVTX loads, and what it wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, by_start

SOURCE = Path(__file__).with_name("recorder.c")


def build_library(folder: Path) -> Path:
    """Compile the recorder; skips the test where there is no compiler, or no header of NVTX."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs gcc, on Linux: the tool that records NVTX ranges is compiled here")
    headers = _headers()
    if headers is None:
        pytest.skip("needs the C headers of NVTX: pip install nvidia-nvtx, which is in the extra dev")
    library = folder / "librecorder.so"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{headers}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True, timeout=120)
    return library


def _headers() -> Path | None:
    """Any version's: what is used of them has not changed since NVTX 3."""
    spec = find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for place in places for path in sorted(Path(place).glob("*/include/nvtx3/nvToolsExt.h"))]
    return found[0].parents[1] if found else None


def attached(library: Path, events: Path) -> dict[str, str]:
    """The environment of a process whose ranges go to ``events``."""
    kept = {name: value for name, value in os.environ.items() if name != "NVTX_DISABLE"}
    return {**kept, "NVTX_INJECTION64_PATH": str(library), "NVTX_RECORD_FILE": str(events)}


def read_events(path: Path) -> ImportedTrace:
    """What the library wrote, as any other tool's trace; on our clock, since both read CLOCK_MONOTONIC."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = {(e["domain"], e["category"]): e["name"] for e in events if e["event"] == "category"}
    stacks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    started: dict[int, dict[str, Any]] = {}
    spans = []
    for event in events:
        if event["event"] == "push":
            stacks[event["thread"]].append(event)
        elif event["event"] == "start":
            started[event["id"]] = event
        elif event["event"] == "pop":
            spans.append(_span(stacks[event["thread"]].pop(), event, names))
        elif event["event"] == "end":
            spans.append(_span(started.pop(event["id"]), event, names))
    assert not any(stacks.values()), "ranges were pushed and never popped"
    assert not started, "ranges were started and never ended"
    return ImportedTrace(source="recorder.c", spans=by_start(spans))


def _span(start: dict[str, Any], end: dict[str, Any], names: dict[tuple[str, int], str]) -> ImportedSpan:
    return ImportedSpan(
        kind=ImportedKind.RANGE,
        name=start["name"],
        start_ns=start["time_ns"],
        end_ns=end["time_ns"],
        domain=start["domain"],
        category=names[start["domain"], start["category"]],
        payload=start["payload"],
        thread=start["thread"],
    )
