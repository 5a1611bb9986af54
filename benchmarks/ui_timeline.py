"""Frame times of the timeline widget in a headless Chromium with software rendering, and what an update costs Python.

    python -m benchmarks.ui_timeline --spans 100000

Needs the extra ui, which ``make test-ui`` brings, and Chromium. Each case moves the view once a frame; a browser paints
at most 60 frames a second, so 16.7 ms is the least. Where OUT is set, everything goes to $OUT/ui_timeline.json too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ui.browser import missing, opened_browser
from tests.ui.stub_page import StubPage, timeline_page
from tracing.records import BatchInfo, Category, GraphUse, IterationRecord, Span, UnfinishedWork
from workbench.widgets.timeline_stream import TimelineStream

STEP_NS = 1_000_000
SPANS_A_STEP = 12
FRAMES = 120
UPDATE = 600
"""Spans of one live update: fifty iterations."""


class RecordedTrace:
    """Stands for a recorder: steps of an overlapping decode, as many as are asked for."""

    lost_spans = 0

    def __init__(self, num_spans: int) -> None:
        self._spans: list[Span] = []
        self._iterations: list[IterationRecord] = []
        self.grow(num_spans)

    def grow(self, num_spans: int) -> None:
        for _ in range(num_spans // SPANS_A_STEP):
            number = len(self._iterations)
            self._spans += _step_spans(number)
            self._iterations.append(_record(number))

    def spans(self, newest: int | None = None) -> list[Span]:
        found = self._spans if newest is None else self._spans[-newest:]
        return sorted(found, key=lambda span: (span.start_ns, -span.end_ns, span.depth))

    def running(self) -> list[UnfinishedWork]:
        return []

    def iterations(self, newest: int | None = None) -> list[IterationRecord]:
        return list(self._iterations) if newest is None else self._iterations[-newest:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=100_000)
    options = parser.parse_args()
    if missing():
        raise SystemExit(f"ui_timeline: {missing()}")
    results = measure(options.spans)
    for name, values in results.items():
        print(f"{name:<44}" + "  ".join(f"{key} {value:,.2f}" for key, value in values.items()))
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "ui_timeline.json").write_text(json.dumps(results, indent=2))


def measure(num_spans: int) -> dict[str, dict[str, float]]:
    """Every case, by name; times in milliseconds."""
    trace = RecordedTrace(num_spans)
    stream = TimelineStream(trace)
    results: dict[str, dict[str, float]] = {}
    traits = {"max_spans": max(1_000, 2 * num_spans)}
    with opened_browser() as browser, timeline_page(browser, traits=traits) as page:
        begin = time.perf_counter()
        messages = stream.restart(num_spans)
        results[f"Python packs {num_spans:,} spans"] = {"ms": 1e3 * (time.perf_counter() - begin)}
        results["browser takes them in"] = {"ms": page.deliver(messages)}
        for shown in (num_spans, num_spans // 10, 1_000, 60):
            results |= _moves(page, shown)
        results |= _live(page, stream, trace)
        if page.errors:
            raise SystemExit(f"ui_timeline: the console says {page.errors}")
    return results


def _moves(page: StubPage, shown: int) -> dict[str, dict[str, float]]:
    results = {}
    end = page.page.evaluate("() => window.timeline.store.extent().to")
    for move in ("pan", "zoom"):
        page.show(end - shown / SPANS_A_STEP * STEP_NS, end)
        found = page.call("frames", move, FRAMES)
        results[f"{move}, {shown:,} spans in view"] = _frames(found)
    return results


def _frames(found: dict[str, list[float]]) -> dict[str, float]:
    times = sorted(found["times"])
    return {
        "frames/s": 1e3 / statistics.fmean(times),
        "median ms": statistics.median(times),
        "95 % ms": times[int(0.95 * len(times))],
        "worst ms": times[-1],
        "painting ms": statistics.median(found["paints"]),
    }


def _live(page: StubPage, stream: TimelineStream, trace: RecordedTrace) -> dict[str, dict[str, float]]:
    page.set("follow", True)
    python, browser = [], []
    for _ in range(10):
        trace.grow(UPDATE)
        begin = time.perf_counter()
        messages = stream.follow(UPDATE)
        python.append(1e3 * (time.perf_counter() - begin))
        browser.append(page.deliver(messages))
    microseconds = 1e3 * statistics.median(python) / UPDATE
    return {
        f"live update of {UPDATE} spans, Python": {"ms": statistics.median(python), "µs a span": microseconds},
        f"live update of {UPDATE} spans, browser": {"ms": statistics.median(browser)},
    }


def _step_spans(number: int) -> Sequence[Span]:
    base = number * STEP_NS
    host = [("prepare", 20, 80), ("sample", 85, 140), ("forward", 150, 250), ("resolve", 260, 900), ("emit", 910, 960)]
    spans = [_span(name, Category.PHASE, base, start, end, number) for name, start, end in host]
    spans += [
        _span("publish", Category.DETAIL, base, 160, 200, number, depth=1, phase="forward"),
        _span("fetch", Category.DETAIL, base, 100, 130, number, depth=1, phase="sample"),
        _span("samples", Category.WAIT, base, 265, 780, number, depth=1, phase="resolve"),
        _device("sample", base, 700, 760, number, enqueued=95),
        _device("publish", base, 765, 780, number, enqueued=170),
        _device("forward", base, 785, 1_690, number, enqueued=240),
        _device("fetch", base, 762, 770, number, enqueued=110, lane="copy"),
    ]
    return spans


def _span(name: str, category: Category, base: int, start_us: int, end_us: int, number: int, **rest: Any) -> Span:
    return Span(
        name=name,
        category=category,
        start_ns=base + 1_000 * start_us,
        end_ns=base + 1_000 * end_us,
        iteration=number,
        **{"lane": "host", "phase": name, **rest},
    )


def _device(
    name: str, base: int, start_us: int, end_us: int, number: int, *, enqueued: int, lane: str = "compute"
) -> Span:
    return _span(name, Category.DEVICE, base, start_us, end_us, number, lane=lane, enqueued_ns=base + 1_000 * enqueued)


def _record(number: int) -> IterationRecord:
    batch = BatchInfo(iteration=number, num_tokens=8, num_prefill=0, num_decode=8, request_ids=())
    return IterationRecord(
        iteration=number,
        mode="async",
        order="overlap" if number % 10 else "no_overlap",
        reason="decode rows only" if number % 10 else "prefill pending",
        begin_ns=number * STEP_NS,
        end_ns=number * STEP_NS + 970_000,
        consumed=batch,
        launched=batch,
        new_tokens=8,
        num_active=8,
        graph=GraphUse(label="CUDA graph", hit=True, dims=(8, 0, 8)),
    )


if __name__ == "__main__":
    main()
