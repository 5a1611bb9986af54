"""Small benchmarks: what the host costs, how much of it hides, and whether anything grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.request import SamplingParams
from tracing.recorder import Recorder
from workbench.bench.breakdown import Breakdown, steady_summary
from workbench.bench.results import Leg, Result, phases
from workbench.bench.workplace import Workplace
from workbench.environment import rss_bytes

PROMPT = 8
"""Tokens of a prompt here."""


def decode_config(workplace: Workplace, rows: int, mode: str = "async") -> EngineConfig:
    """``rows`` decode rows in one captured size, nothing waiting: the steady state."""
    return workplace.config(
        mode=mode,
        max_requests=rows,
        max_batch_tokens=max(256, 16 * rows),
        max_sequence_length=256,
        num_blocks=16 * rows,
        graphs=[rows],
        graph_non_decode=False,
    )


def serve_rows(engine: Engine, rows: int, output: int) -> None:
    """Generate ``output`` tokens in each of ``rows`` rows, greedily, and wait for the device."""
    prompts = [[(7 * row + place) % 60 + 1 for place in range(PROMPT)] for row in range(rows)]
    engine.generate(prompts, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True), progress=False)
    engine.device.synchronize()


def measure_host(workplace: Workplace) -> Iterator[Result]:
    """Host time of prepare and resolve, the two phases whose work grows with the rows."""
    loaded = workplace.load("oracle")
    output = 24 if workplace.options.quick else 192
    for rows in (8, 64, 256):
        with Engine(loaded, decode_config(workplace, rows)) as engine:
            serve_rows(engine, rows, output)
            host_us = Breakdown.of(steady_summary(engine.recorder.spans(), engine.recorder.iterations())).host_us
            leg = Leg.of(engine, "host", f", {rows} rows")
        work = [host_us[name] for name in ("prepare", "resolve") if name in host_us]
        yield Result(
            benchmark="host",
            metric="prepare + resolve, median",
            leg=leg,
            batch=rows,
            lengths=f"{PROMPT}+{output}",
            value=sum(work) if len(work) == 2 else None,
            unit="µs",
            note=f"oracle model; {phases(host_us)}",
            details={"host_us": host_us},
        )


def measure_hidden(workplace: Workplace) -> Iterator[Result]:
    """Hidden share in decode on SmolLM2 with 8 rows."""
    loaded = workplace.load("smollm2")
    for mode in ("legacy", "async"):
        yield _hidden(workplace, loaded, mode, output=12 if workplace.options.quick else 64)


def _hidden(workplace: Workplace, loaded: LoadedModel, mode: str, output: int) -> Result:
    with Engine(loaded, decode_config(workplace, 8, mode)) as engine:
        serve_rows(engine, 8, output)
        summary = steady_summary(engine.recorder.spans(), engine.recorder.iterations())
        leg = Leg.of(engine, "hidden")
    share, step = summary.host.hidden_share, summary.step
    return Result(
        benchmark="hidden",
        metric="hidden share, SmolLM2",
        leg=leg,
        batch=8,
        lengths=f"{PROMPT}+{output}",
        value=None if share is None else 100 * share,
        unit="%",
        note="no samples" if step is None else f"step {step.p50_ns / 1e6:.1f} ms over {step.count} iterations",
        is_compared=mode == "async",  # what little legacy hides by chance is nobody's aim
    )


def measure_steady(workplace: Workplace) -> Iterator[Result]:
    """Thousands of iterations with requests coming and going: blocks come back, memory stays."""
    iterations = 1_000 if workplace.options.quick else 10_000
    config = workplace.config(max_requests=8, max_batch_tokens=256, max_sequence_length=128, num_blocks=40)
    with Engine(workplace.load("oracle"), config, recorder=Recorder(capacity=5_000)) as engine:
        with workplace.bar(iterations, "steady", "iteration") as bar:
            early, late = _churn(engine, iterations, bar)
        lost = engine.pool.num_blocks - engine.pool.num_free
        note = f"oracle model, {engine.counters.finished.total()} requests"
        leg = Leg.of(engine, "steady")
    growth = None if early is None or late is None else (late - early) / 2**20
    for metric, value, unit in (
        ("blocks not given back", lost, ""),
        ("growth of memory after a tenth", growth, "MiB"),
    ):
        yield Result(
            benchmark="steady",
            metric=metric,
            leg=leg,
            batch=8,
            lengths=f"{iterations} iterations",
            value=value,
            unit=unit,
            note=note,
            is_compared=metric.startswith("blocks"),
        )


def _churn(engine: Engine, iterations: int, bar: Any) -> tuple[int | None, int | None]:
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
        bar.update()
        if engine.counters.steps == iterations // 10:
            early = rss_bytes()
    while engine.has_unfinished():
        engine.step()
    return early, rss_bytes()
