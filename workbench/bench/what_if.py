"""The benchmark ``whatif``: a step time that the trace of a run predicts, beside a run that really has the delay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from engine.controller import Border
from engine.engine import Engine
from engine.phases import Phase
from tracing.records import IterationRecord
from tracing.summary import Spread
from tracing.what_if import WhatIf, what_if
from workbench.bench.results import Leg, Result
from workbench.bench.small import PROMPT, decode_config, serve_rows
from workbench.bench.workplace import Workplace
from workbench.delays import delayed, host_pause

_PAIRS, _PAIRS_QUICK = 5, 1
_OUTPUT, _OUTPUT_QUICK = 32, 12
_DEVICE_SLEEP_S = {"forward": 0.02, "sample": 0.004}
"""Of the thread device: work whose length other jobs on the machine do not change, for it is the dependencies that are
checked. On CUDA the work is the model's own."""
_DELAYS = (0.5, 2.0)
"""Of the median step: in async one that hides behind the device, and one that does not."""
_WORKS = ("prepare", "resolve", "device forward")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A run as it is, and one with a delay."""

    prediction: WhatIf
    """From the first run, for the delay that the second one had."""
    measured: Spread
    """Step time of the second run."""
    makespan_ns: int
    """Of the second run."""

    @property
    def ratio(self) -> float:
        """Predicted over measured median step."""
        assert self.prediction.after is not None
        return self.prediction.after.p50_ns / self.measured.p50_ns

    @property
    def makespan_ratio(self) -> float:
        """The same of the makespan."""
        return self.prediction.makespan_after_ns / self.makespan_ns


def measure_what_if(workplace: Workplace) -> Iterator[Result]:
    """For each mode, delayed work and delay: predicted over measured median step."""
    options = workplace.options
    loaded = workplace.load(options.model_name)
    for rows in options.batches or (8,):
        for mode in dict.fromkeys(options.modes):
            with Engine(loaded, decode_config(workplace, rows, mode)) as engine:
                if not options.is_cuda:
                    engine.device.op_sleep_s = _DEVICE_SLEEP_S
                yield from _leg_results(workplace, engine, rows)


def _leg_results(workplace: Workplace, engine: Engine, rows: int) -> Iterator[Result]:
    options = workplace.options
    if engine.device.kind == "inline":
        return  # its iterations are void: host and device time are one
    output = _OUTPUT_QUICK if options.quick else _OUTPUT
    count = options.repeats or (_PAIRS_QUICK if options.quick else _PAIRS)
    leg = Leg.of(engine, "whatif", f", {rows} rows")
    serve_rows(engine, rows, output)
    step_s = _median_step_s(engine, rows, output)
    cases = [(work, factor) for work in _WORKS for factor in _DELAYS]
    with workplace.bar(len(cases) * count, f"whatif, {engine.mode}, {rows} rows", "pair") as bar:
        for work, factor in cases:
            pairs = []
            for _ in range(count):
                pairs.append(_measured_pair(engine, work, factor * step_s, rows, output))
                bar.update()
            yield _result(leg, work, factor, rows, output, pairs)


def _median_step_s(engine: Engine, rows: int, output: int) -> float:
    step = Spread.of(record.duration_ns for record in _served(engine, rows, output))
    assert step is not None
    return step.p50_ns / 1e9


def _served(engine: Engine, rows: int, output: int) -> list[IterationRecord]:
    engine.recorder.clear()
    serve_rows(engine, rows, output)
    return engine.recorder.iterations()


def _measured_pair(engine: Engine, work: str, delay_s: float, rows: int, output: int) -> _Pair:
    records = _served(engine, rows, output)
    spans = engine.recorder.spans()
    with _delayed(engine, work, delay_s) as taken_ns:
        after = _served(engine, rows, output)
    mean_ns = round(sum(taken_ns) / len(taken_ns)) if taken_ns else round(delay_s * 1e9)
    step = Spread.of(record.duration_ns for record in after)
    assert step is not None
    return _Pair(
        prediction=what_if(spans, records, add_ns={work: mean_ns}),
        measured=step,
        makespan_ns=after[-1].end_ns - after[0].begin_ns,
    )


def _delayed(engine: Engine, work: str, delay_s: float) -> AbstractContextManager[list[int]]:
    """While it is entered, the work takes so much longer; gives a list of what each host delay really took."""
    if work != "device forward":
        return _delayed_phase(engine, Phase(work), delay_s)
    return _delayed_kernels(engine, delay_s) if engine.device.kind == "cuda" else _delayed_worker(engine, delay_s)


@contextmanager
def _delayed_phase(engine: Engine, phase: Phase, delay_s: float) -> Iterator[list[int]]:
    """At the border behind the phase; for the schedule that is a longer phase."""
    pause = host_pause(engine)
    taken_ns: list[int] = []

    def watch(border: Border) -> None:
        if border.phase is phase and border.side == "after":
            begin_ns = time.perf_counter_ns()
            pause(delay_s)
            taken_ns.append(time.perf_counter_ns() - begin_ns)

    before, engine.controller.watch = engine.controller.watch, watch
    try:
        yield taken_ns
    finally:
        engine.controller.watch = before


@contextmanager
def _delayed_worker(engine: Engine, delay_s: float) -> Iterator[list[int]]:
    with delayed(engine, {"device forward": delay_s}):
        yield []


@contextmanager
def _delayed_kernels(engine: Engine, delay_s: float) -> Iterator[list[int]]:
    """A kernel that spins stands before the forward's own, inside its timed group."""
    cycles = round(delay_s * _cycles_per_s())
    launch: Callable[..., Any] = engine.runner._launch

    def slow(stream: Any, name: str, work: Callable[[], object], *args: Any, **options: Any) -> Any:
        def spin_and_work() -> None:
            torch.cuda._sleep(cycles)
            work()

        return launch(stream, name, spin_and_work if name == "forward" else work, *args, **options)

    setattr(engine.runner, "_launch", slow)  # noqa: B010 - replaced on this one object, for as long as it is entered
    try:
        yield []
    finally:
        delattr(engine.runner, "_launch")


def _cycles_per_s() -> float:
    """Of the clock that ``torch.cuda._sleep`` counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return float(cycles / (start.elapsed_time(end) / 1e3))


def _result(leg: Leg, work: str, factor: float, rows: int, output: int, pairs: list[_Pair]) -> Result:
    ratio = median(pair.ratio for pair in pairs)
    steps_ms = {
        "before_ms": median(_p50_ms(pair.prediction.before) for pair in pairs),
        "predicted_ms": median(_p50_ms(pair.prediction.after) for pair in pairs),
        "measured_ms": median(_p50_ms(pair.measured) for pair in pairs),
    }
    makespan = median(pair.makespan_ratio for pair in pairs)
    return Result(
        benchmark="whatif",
        metric=f"{work} + {factor:g} steps",
        leg=leg,
        batch=rows,
        lengths=f"{PROMPT}+{output}",
        value=ratio,
        unit="x",
        note="step {before_ms:.2f} ms, predicted {predicted_ms:.2f}, measured {measured_ms:.2f}".format(**steps_ms)
        + f"; makespan {makespan:.3f}x, {len(pairs)} pairs",
        details={**steps_ms, "makespan_ratio": makespan, "ratios": [pair.ratio for pair in pairs]},
    )


def _p50_ms(spread: Spread | None) -> float:
    assert spread is not None
    return spread.p50_ns / 1e6
