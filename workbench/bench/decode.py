"""The benchmark ``decode``: closed batches of equal requests, in each mode, with and without graphs.

A cell generates twice from the same prompts, long and short, so that what a step costs comes out by difference; host
and device times of the steps come from the same runs. docs/metrics.md defines every column.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.progress import CaptureBar
from engine.request import SamplingParams
from engine.step_function import state_options
from workbench.bench.breakdown import Breakdown, steady_summary
from workbench.bench.decode_table import CELL_HEAD, PAIR_HEAD, PHASE_HEAD, cell_line, describe, pair_line, phase_line
from workbench.bench.floor import floor_ms
from workbench.bench.options import SEED, BenchOptions
from workbench.bench.pairs import DecodeCell, Pair, pairs_of
from workbench.bench.results import Leg, Result
from workbench.bench.workplace import Workplace

_BLOCK = 16
_DEFAULTS = {
    (True, False): ((1, 8, 32, 128, 256), 512, 128),
    (True, True): ((1, 8), 512, 16),
    (False, False): ((1, 8), 64, 64),
    (False, True): ((1, 8), 16, 8),
}
"""Batches, tokens in and out; by whether it is CUDA, and whether it is quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """The sizes of a run; see :class:`~workbench.bench.options.BenchOptions`."""

    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    repeats: int

    @classmethod
    def of(cls, options: BenchOptions) -> DecodePlan:
        """What was asked for, the rest by device."""
        batches, prompt, output = _DEFAULTS[options.is_cuda, options.quick]
        return cls(
            batches=options.batches or batches,
            prompt_len=options.prompt_len or prompt,
            output_len=options.output_len or output,
            repeats=options.repeats or (1 if options.quick else 3),
        )

    @property
    def lengths(self) -> str:
        """Tokens in and out, as results name them."""
        return f"{self.prompt_len}+{self.output_len}"

    @property
    def cached(self) -> float:
        """Tokens in the cache of a row half-way."""
        return self.prompt_len + self.output_len / 2


def decode_config(workplace: Workplace, plan: DecodePlan, mode: str, graphs: bool) -> EngineConfig:
    """Blocks for the largest batch and no more; each batch has a graph of its own size."""
    rows, longest = max(plan.batches), plan.prompt_len + plan.output_len + 1
    columns = -(-longest // _BLOCK)
    return workplace.config(
        mode=mode,
        block_size=_BLOCK,
        graphs=sorted(set(plan.batches)) if graphs else None,
        graph_non_decode=False,
        max_requests=rows,
        max_batch_tokens=max(16384 if workplace.options.is_cuda else 2048, columns * _BLOCK, rows),
        max_sequence_length=columns * _BLOCK,
        num_blocks=rows * columns,
    )


def random_prompts(engine: Engine, plan: DecodePlan, batch: int) -> list[list[int]]:
    """The same ids in every leg."""
    rng = random.Random(SEED)
    vocab_size = engine.resolved.vocab_size
    return [[rng.randrange(vocab_size) for _ in range(plan.prompt_len)] for _ in range(batch)]


def measure_decode(workplace: Workplace) -> Iterator[Result | str]:
    """A cell a batch and leg, then what the modes make of each other."""
    options = workplace.options
    plan = DecodePlan.of(options)
    bandwidth = workplace.bandwidth
    loaded = workplace.load(options.model_name)
    yield describe(loaded.name, options.device, plan.prompt_len, plan.output_len, bandwidth)
    yield CELL_HEAD
    cells: list[tuple[Leg, DecodeCell]] = []
    total = len(options.legs) * len(plan.batches) * (plan.repeats + 1)
    with workplace.bar(total, "decode", "pair of runs") as bar:
        for mode, graphs in options.legs:
            with Engine(loaded, decode_config(workplace, plan, mode, graphs), progress=CaptureBar()) as engine:
                leg = Leg.of(engine, "decode")
                for batch in plan.batches:
                    found = _measure_cell(engine, plan, batch, bandwidth, bar)
                    cells.append((leg, found))
                    yield _cell_result(leg, plan, found)
    yield PHASE_HEAD
    yield from (phase_line(leg, found) for leg, found in cells)
    pairs = pairs_of(cells)
    if pairs:
        yield PAIR_HEAD
    yield from (_pair_result(leg, plan, pair) for leg, pair in pairs)


def _measure_cell(engine: Engine, plan: DecodePlan, batch: int, bandwidth: float, bar: Any) -> DecodeCell:
    """The first pair of runs is warm-up: kernels load, memory is found."""
    prompts = random_prompts(engine, plan, batch)
    times = []
    for number in range(plan.repeats + 1):
        times.append((_seconds(engine, prompts, plan.output_len + 1), _seconds(engine, prompts, 1)))
        if number == 0:
            engine.device.synchronize()
            engine.recorder.clear()
        bar.update()
    engine.device.synchronize()
    long_s, short_s = zip(*times[1:], strict=True)
    return DecodeCell(
        batch=batch,
        tpot_ms=median(long - short for long, short in times[1:]) / plan.output_len * 1e3,
        prefill_ms=median(short_s) * 1e3,
        tokens_per_s=batch * (plan.output_len + 1) / median(long_s),
        floor_ms=floor_ms(
            engine.loaded.model,
            rows=batch,
            cached=plan.cached,
            bandwidth=bandwidth,
            states=state_options(engine.resolved.config),
        ),
        breakdown=Breakdown.of(steady_summary(engine.recorder.spans(), engine.recorder.iterations())),
        lost_iterations=engine.recorder.lost_iterations,
    )


def _seconds(engine: Engine, prompts: list[list[int]], outputs: int) -> float:
    """For ``outputs`` tokens of every prompt."""
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    engine.generate(prompts, params, progress=False)
    return time.perf_counter() - begin


def _cell_result(leg: Leg, plan: DecodePlan, found: DecodeCell) -> Result:
    return Result(
        benchmark="decode",
        metric="TPOT",
        leg=leg,
        batch=found.batch,
        lengths=plan.lengths,
        value=found.tpot_ms,
        unit="ms",
        line=cell_line(leg, found),
        details=found.to_dict(),
    )


def _pair_result(leg: Leg, plan: DecodePlan, pair: Pair) -> Result:
    return Result(
        benchmark="decode",
        metric="gain over legacy",
        leg=leg,
        batch=pair.batch,
        lengths=plan.lengths,
        value=pair.gain,
        unit="x",
        line=pair_line(leg, pair),
        details=pair.to_dict(),
        is_compared=False,
    )
