"""Host time of admission by the number of requests that wait: ``python -m benchmarks.traffic waiting``.

The table is full of rows that decode, so whatever waits is refused; the oracle model on the inline device, so that
nothing else runs. Each round makes an engine for every length of the queue and times one thing after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter_ns
from typing import Any

from benchmarks.traffic_tables import metric_row
from engine.config import EngineConfig
from engine.controller import Iteration
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.phases import Phase
from engine.request import SamplingParams
from tracing.recorder import Recorder
from workbench.legs import Leg, leg_config
from workbench.loading import load_for
from workbench.repeats import RepeatRow, format_few

SAMPLES = 40
"""Of each metric, engine and round."""
LONGEST = 1024
"""Tokens of a sequence: rows must outlive what is measured."""
Times = dict[str, float]
"""Medians in µs by metric."""


def measure_waiting(
    leg: Leg, rows: Sequence[int], waiting: Sequence[int], rounds: int, prompt_tokens: int
) -> dict[str, Any]:
    """Print a table for each number of rows; ratios are to the first length of the queue that is given.

    Args:
        leg: Its options; in async aborts are taken by resolve, so that row is for legacy.
        rows: Of the table, all taken.
        waiting: Lengths of the queue.
        rounds: Engines made for each.
        prompt_tokens: Of every request that waits.
    """
    base = EngineConfig(device="inline", max_batch_tokens=4096, max_sequence_length=LONGEST)
    loaded = load_for(base, "oracle")
    names, found = [f"{count:,} waiting" for count in waiting], []
    for num_rows in rows:
        config = leg_config(leg, base.replace(max_requests=num_rows), None)
        taken: list[list[Times]] = [[] for _ in waiting]
        for round_ in range(rounds):
            for place in range(len(waiting)):
                at = (place + round_) % len(waiting)
                taken[at].append(times_of(loaded, leg, config, waiting[at], prompt_tokens))
        table = waiting_rows(taken)
        print(f"\n{leg.name}, {num_rows} rows, all taken; prompts of {prompt_tokens} tokens wait; {rounds} rounds")
        print(format_few(names, table))
        found.append({"rows": num_rows, "metrics": [row.to_dict(names) for row in table]})
    return {"model": loaded.name, "leg": leg.name, "prompt_tokens": prompt_tokens, "waiting": found}


def waiting_rows(taken: Sequence[Sequence[Times]]) -> list[RepeatRow]:
    """One a metric; ``taken`` by length of the queue, then by round."""
    return [metric_row(name, [[times[name] for times in rounds] for rounds in taken]) for name in taken[0][0]]


def times_of(loaded: LoadedModel, leg: Leg, config: EngineConfig, waiting: int, prompt_tokens: int) -> Times:
    """Each metric's median in an engine with a full table and ``waiting`` requests behind it."""
    with Engine(loaded, config, recorder=Recorder(enabled=False), policy=leg.policy) as engine:
        crowd = _Crowd(engine, prompt_tokens)
        crowd.fill(waiting)
        gc.collect()
        gc.disable()  # ten thousand requests more are as many objects more to look at
        try:
            return {
                "order probe": _median_us(crowd.probe_ns() for _ in range(SAMPLES)),
                "order probe, an abort to come": _median_us(crowd.probe_with_abort_ns() for _ in range(SAMPLES)),
                "add_request": _median_us(crowd.submit_ns() for _ in range(SAMPLES)),
                "admit, table full": _median_us(crowd.admit_ns() for _ in range(SAMPLES)),
                "admit, one row free": _median_us(crowd.admit_with_a_row_ns() for _ in range(SAMPLES)),
                "admit, one in the queue aborted": _median_us(crowd.admit_after_abort_ns() for _ in range(SAMPLES)),
            }
        finally:
            gc.enable()


def _median_us(times_ns: Iterator[int]) -> float:
    return median(times_ns) / 1e3


class _Crowd:
    """An engine whose table is full, and whose queue keeps its length while things are timed."""

    def __init__(self, engine: Engine, prompt_tokens: int) -> None:
        self.engine = engine
        self.prompt = [1 + place % 60 for place in range(prompt_tokens)]

    def fill(self, waiting: int) -> None:
        """Every row decodes and ``waiting`` requests have left the inbox."""
        rows = self.engine.config.max_requests
        for _ in range(rows):
            self.submit([1, 2, 3])
        while self.engine.table.num_active < rows or self.engine.table.is_prefill[:rows].any():
            self.engine.step()
        for _ in range(waiting):
            self.submit(self.prompt)
        self.engine.step()
        self.engine.step()

    def submit(self, prompt: Sequence[int]) -> str:
        params = SamplingParams(max_tokens=LONGEST, temperature=0.0, ignore_eos=True)
        return self.engine.add_request(prompt, params)

    def probe_ns(self) -> int:
        begin = perf_counter_ns()
        self.engine.controller.order_state()
        return perf_counter_ns() - begin

    def probe_with_abort_ns(self) -> int:
        """The last in the queue is to be taken out."""
        self.engine.abort(self.submit(self.prompt))
        taken_ns = self.probe_ns()
        self.engine.step()
        return taken_ns

    def submit_ns(self) -> int:
        """Of handing one in; it is gone again before the next sample."""
        begin = perf_counter_ns()
        request_id = self.submit(self.prompt)
        taken_ns = perf_counter_ns() - begin
        self.engine.abort(request_id)
        self.engine.step()
        return taken_ns

    def admit_ns(self) -> int:
        """Nobody can enter."""
        with self._timing_admit() as times:
            while not times:
                assert self.engine.has_unfinished(), "the rows ended before they were measured"
                self.engine.step()
        return times[0]

    def admit_with_a_row_ns(self) -> int:
        """A row is let go of and the head of the queue gets it; another request takes the place behind."""
        self.submit(self.prompt)
        running = self.engine.table.requests[0]
        assert running is not None
        self.engine.abort(running.request_id)
        return self.admit_ns()

    def admit_after_abort_ns(self) -> int:
        """The last in the queue is taken out."""
        self.engine.abort(self.submit(self.prompt))
        return self.admit_ns()

    @contextmanager
    def _timing_admit(self) -> Iterator[list[int]]:
        phases = self.engine.controller.phase_functions
        admit: Callable[[Iteration], None] = phases[Phase.ADMIT]
        times: list[int] = []

        def timed(iteration: Iteration) -> None:
            begin = perf_counter_ns()
            admit(iteration)
            times.append(perf_counter_ns() - begin)

        phases[Phase.ADMIT] = timed
        try:
            yield times
        finally:
            phases[Phase.ADMIT] = admit
