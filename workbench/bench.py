"""Benchmarks: what the host costs, how much of it hides, what the instrument costs, and whether anything grows.

They record, they assert nothing: hardware, versions and seeds stand beside the numbers in a JSON file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import SamplingParams
from tracing.analysis import summarise
from tracing.recorder import Recorder
from tracing.summary import Summary
from workbench.environment import environment, rss_bytes
from workbench.loading import load_for
from workbench.runs import jsonable
from workbench.session import Session
from workbench.workloads import WorkloadError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table."""

    what: str
    value: float | None
    unit: str
    note: str = ""
    benchmark: str = ""
    """Filled in by :func:`run_benchmarks`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in ("benchmark", "what", "value", "unit", "note")}


def run_benchmarks(names: Sequence[str] | None, *, device: str, out: Path, quick: bool, say: Say) -> Path:
    """Run some or all, print a table, write ``out/bench-TIME.json``; returns its path.

    Raises:
        WorkloadError: a name is unknown.
        EngineError: a model or the device is not there.
    """
    chosen = list(_BENCHMARKS) if names is None else [name.strip() for name in names]
    unknown = [name for name in chosen if name not in _BENCHMARKS]
    if unknown:
        raise WorkloadError(f"benchmark {unknown[0]!r} is unknown; known are {', '.join(_BENCHMARKS)}")
    results: list[Result] = []
    for name in chosen:
        for found in _BENCHMARKS[name](device, quick):
            result = replace(found, benchmark=name)
            results.append(result)
            shown = "no samples" if result.value is None else f"{result.value:,.4g}"
            say(f"{result.benchmark:<9} {result.what:<46} {shown:>12} {result.unit:<4} {result.note}".rstrip())
    out.mkdir(parents=True, exist_ok=True)
    path = out / time.strftime("bench-%Y%m%d-%H%M%S.json")
    document = {
        "environment": environment(),
        "device": device,
        "seed": 0,
        "quick": quick,
        "results": [one.to_dict() for one in results],
    }
    path.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    say(f"written: {path}")
    return path


def _decode_config(rows: int, device: str, mode: str = "async") -> EngineConfig:
    """``rows`` decode rows in one captured size, nothing waiting: the steady state."""
    return EngineConfig.from_mapping(
        {
            "mode": mode,
            "device": device,
            "max_requests": rows,
            "max_batch_tokens": max(256, 16 * rows),
            "max_sequence_length": 256,
            "num_blocks": 16 * rows,
            "graphs": [rows],
            "graph_non_decode": False,
        }
    )


def _serve_rows(session: Session, rows: int, output: int) -> None:
    prompts = [[(7 * row + place) % 60 + 1 for place in range(8)] for row in range(rows)]
    session.submit(prompts, max_tokens=output, temperature=0.0, ignore_eos=True)
    session.run()


def _decode_summary(session: Session) -> Summary:
    """Of the steady iterations alone: decode rows consumed and launched."""
    session.engine.device.synchronize()
    steady = [
        record
        for record in session.iterations()
        if record.launched is not None
        and record.launched.kind == "decode"
        and record.consumed is not None
        and record.consumed.kind == "decode"
    ]
    return summarise(session.spans(), steady)


def _host(device: str, quick: bool) -> Iterator[Result]:
    """Host time of prepare and resolve, the two phases whose work grows with the rows."""
    loaded = load_for(EngineConfig.from_mapping({"device": device}), "oracle")
    output = 24 if quick else 192
    for rows in (8, 64, 256):
        with Session(loaded, config=_decode_config(rows, device)) as session:
            _serve_rows(session, rows, output)
            phases = {phase.name: phase.host.p50_ns / 1e3 for phase in _decode_summary(session).host.phases}
        work = [phases[name] for name in ("prepare", "resolve") if name in phases]
        note = "oracle model, async; " + ", ".join(f"{name} {value:.0f}" for name, value in phases.items())
        total = sum(work) if len(work) == 2 else None
        yield Result(what=f"prepare + resolve, {rows} rows, median", value=total, unit="µs", note=note)


def _hidden(device: str, quick: bool) -> Iterator[Result]:
    """Hidden share in decode on SmolLM2 with 8 rows."""
    loaded = load_for(EngineConfig.from_mapping({"device": device}), "smollm2")
    for mode in ("legacy", "async"):
        with Session(loaded, config=_decode_config(8, device, mode)) as session:
            _serve_rows(session, 8, 12 if quick else 64)
            summary = _decode_summary(session)
        share, step = summary.host.hidden_share, summary.step
        note = "no samples" if step is None else f"step {step.p50_ns / 1e6:.1f} ms over {step.count} iterations"
        value = None if share is None else 100 * share
        yield Result(what=f"hidden share, SmolLM2, 8 rows, {mode}", value=value, unit="%", note=note)


def _recorder(device: str, quick: bool) -> Iterator[Result]:
    """The same run with the recorder on and off, taking turns in one engine."""
    loaded = load_for(EngineConfig.from_mapping({"device": device}), "shape:tiny")
    with Session(loaded, config=_decode_config(8, device)) as session:
        _serve_rows(session, 8, 16)
        on: list[float] = []
        off: list[float] = []
        for pair in range(3 if quick else 21):
            # Whichever goes first in a pair may profit or suffer from it, so they swap.
            for enabled in (True, False) if pair % 2 else (False, True):
                session.reset()
                session.recorder.enabled = enabled
                (on if enabled else off).append(_step_us(session, 24 if quick else 160))
    pairs = list(zip(on, off, strict=True))
    note = f"shape:tiny, 8 rows, async, {len(pairs)} pairs"
    yield Result(what="step with it on, median", value=median(on), unit="µs", note=note)
    yield Result(what="step with it off, median", value=median(off), unit="µs", note=note)
    ratio = 100 * (median(a / b for a, b in pairs) - 1)
    yield Result(what="cost, median of the pairs' ratios", value=ratio, unit="%", note=note)


def _step_us(session: Session, output: int) -> float:
    begin_ns = time.perf_counter_ns()
    _serve_rows(session, 8, output)
    return (time.perf_counter_ns() - begin_ns) / session.engine.counters.steps / 1e3


def _steady(device: str, quick: bool) -> Iterator[Result]:
    """Thousands of iterations with requests coming and going: blocks come back, memory stays."""
    loaded = load_for(EngineConfig.from_mapping({"device": device}), "oracle")
    iterations = 1_000 if quick else 10_000
    config = EngineConfig.from_mapping(
        {"device": device, "max_requests": 8, "max_batch_tokens": 256, "max_sequence_length": 128, "num_blocks": 40}
    )
    with Engine(loaded, config, recorder=Recorder(capacity=5_000)) as engine:
        memory = _churn(engine, iterations)
        free = engine.pool.num_free
        finished = engine.counters.finished.total()
    note = f"oracle, {iterations} iterations, {finished} requests"
    lost = config.num_blocks - free if config.num_blocks is not None else None
    yield Result(what="blocks not given back at the end", value=lost, unit="", note=note)
    early, late = memory
    growth = None if early is None or late is None else (late - early) / 2**20
    what = "growth of the resident set after the first tenth"
    yield Result(what=what, value=growth, unit="MiB", note=note)


def _churn(engine: Engine, iterations: int) -> tuple[int | None, int | None]:
    """Keep twelve requests about for so many iterations, then let them end; memory after a tenth and at the end."""
    early: int | None = None
    number = 0
    while engine.counters.steps < iterations:
        while engine.queue.num_waiting + engine.table.num_live < 12:
            prompt = [(number + place) % 63 for place in range(1 + number % 40)]
            params = SamplingParams(max_tokens=1 + number % 60, temperature=0.7, seed=number)
            engine.add_request(prompt, params)
            number += 1
        engine.step()
        if engine.counters.steps == iterations // 10:
            early = rss_bytes()
    while engine.has_unfinished():
        engine.step()
    return early, rss_bytes()


_BENCHMARKS: dict[str, Callable[[str, bool], Iterator[Result]]] = {
    "host": _host,
    "hidden": _hidden,
    "recorder": _recorder,
    "steady": _steady,
}
