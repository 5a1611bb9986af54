"""The benchmark ``recorder``: what the instrument costs, by runs with it on and off that take turns in one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from engine.engine import Engine
from workbench.bench.results import Leg, Result
from workbench.bench.small import PROMPT, decode_config, serve_rows
from workbench.bench.workplace import Workplace

_PAIRS, _PAIRS_QUICK = 21, 3
_OUTPUT, _OUTPUT_QUICK = 160, 24


def measure_recorder(workplace: Workplace) -> Iterator[Result]:
    """For each batch the step with it on, with it off, and the median ratio of the pairs."""
    options = workplace.options
    loaded = workplace.load(options.model_name)
    output = _OUTPUT_QUICK if options.quick else _OUTPUT
    count = options.repeats or (_PAIRS_QUICK if options.quick else _PAIRS)
    for rows in options.batches or ((8, 256) if options.is_cuda else (8,)):
        with Engine(loaded, decode_config(workplace, rows)) as engine:
            with workplace.bar(count, f"recorder, {rows} rows", "pair") as bar:
                pairs = _measured_pairs(engine, rows, output, count, bar)
            leg = Leg.of(engine, "recorder", f", {rows} rows")
        yield from _results(leg, rows, output, pairs)


def _measured_pairs(engine: Engine, rows: int, output: int, count: int, bar: Any) -> list[tuple[float, float]]:
    """(on, off) in microseconds a step; whichever goes first may profit or suffer from it, so they swap."""
    serve_rows(engine, rows, output)
    pairs = []
    for number in range(count):
        found = {}
        for is_on in (True, False) if number % 2 else (False, True):
            engine.recorder.enabled = is_on
            engine.recorder.clear()
            found[is_on] = _step_us(engine, rows, output)
        pairs.append((found[True], found[False]))
        bar.update()
    return pairs


def _step_us(engine: Engine, rows: int, output: int) -> float:
    steps = engine.counters.steps
    begin_ns = time.perf_counter_ns()
    serve_rows(engine, rows, output)
    return (time.perf_counter_ns() - begin_ns) / (engine.counters.steps - steps) / 1e3


def _results(leg: Leg, rows: int, output: int, pairs: list[tuple[float, float]]) -> Iterator[Result]:
    ratio = median(on / off for on, off in pairs)
    for metric, value, unit, note in (
        ("step with it on, median", median(on for on, _ in pairs), "µs", ""),
        ("step with it off, median", median(off for _, off in pairs), "µs", ""),
        ("on / off, median of pairs", ratio, "x", f"{100 * (ratio - 1):+.1f} %, "),
    ):
        yield Result(
            benchmark="recorder",
            metric=metric,
            leg=leg,
            batch=rows,
            lengths=f"{PROMPT}+{output}",
            value=value,
            unit=unit,
            note=f"{note}{leg.model}, {len(pairs)} pairs",
            is_compared=value is ratio,
        )
