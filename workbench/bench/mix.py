"""The benchmark ``mix``: many requests of different lengths at once, drawn at temperature 0.6."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from engine.config import EngineConfig
from engine.engine import Engine
from engine.progress import CaptureBar
from engine.request import SamplingParams
from tracing.analysis import summarise
from workbench.bench.breakdown import Breakdown
from workbench.bench.options import SEED, BenchOptions
from workbench.bench.results import Leg, Result, cell, on_off, percent, phases
from workbench.bench.workplace import Workplace

HEAD = " reqs mode   graphs      tok/s     step     host   busy  hidden   hits  host by phase"
_BLOCK = 16
_DEFAULTS = {
    (True, False): (256, 100, 1024),
    (True, True): (64, 50, 256),
    (False, False): (32, 8, 64),
    (False, True): (8, 4, 16),
}
"""Requests, shortest and longest; by whether it is CUDA, and whether it is quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixPlan:
    """Requests, and the bounds of their uniform lengths in and out."""

    requests: int
    low: int
    high: int
    repeats: int

    @classmethod
    def of(cls, options: BenchOptions) -> MixPlan:
        """By device; small ones to see whether it works, and where there is no GPU."""
        requests, low, high = _DEFAULTS[options.is_cuda, options.quick]
        return cls(requests=requests, low=low, high=high, repeats=options.repeats or 1)

    def draw_lengths(self, rng: random.Random) -> list[tuple[int, int]]:
        """Tokens in and out of each request."""
        return [(rng.randint(self.low, self.high), rng.randint(self.low, self.high)) for _ in range(self.requests)]

    @property
    def num_blocks(self) -> int:
        """So many that all requests hold theirs at once."""
        return sum(-(-(before + after) // _BLOCK) for before, after in self.draw_lengths(random.Random(SEED)))


def mix_config(workplace: Workplace, plan: MixPlan, mode: str, graphs: bool) -> EngineConfig:
    """Every request at once; on the CPU devices, where each size is traced several times, two sizes only."""
    is_cuda = workplace.options.is_cuda
    sizes = -1 if is_cuda else sorted({plan.requests, plan.requests // 4})
    longest = -(-2 * plan.high // _BLOCK) * _BLOCK
    return workplace.config(
        mode=mode,
        block_size=_BLOCK,
        graphs=sizes if graphs else None,
        graph_distribution="linear",
        graph_non_decode=False,
        max_requests=plan.requests,
        max_batch_tokens=max(16384 if is_cuda else 2048, longest),
        max_sequence_length=longest,
        num_blocks=plan.num_blocks,
    )


def measure_mix(workplace: Workplace) -> Iterator[Result | str]:
    """One result a leg."""
    options = workplace.options
    plan = MixPlan.of(options)
    loaded = workplace.load(options.model_name)
    yield (
        f"mix: {loaded.name} on {options.device}, {plan.requests} requests at once, {plan.low} to {plan.high} tokens "
        "in and out, temperature 0.6; step in ms, host in µs, shares in %"
    )
    yield HEAD
    for mode, graphs in options.legs:
        with Engine(loaded, mix_config(workplace, plan, mode, graphs), progress=CaptureBar()) as engine:
            yield _measure_leg(engine, plan)


def _measure_leg(engine: Engine, plan: MixPlan) -> Result:
    """The first run is warm-up."""
    prompts, params = _requests(plan, engine.resolved.vocab_size)
    seconds = []
    for number in range(plan.repeats + 1):
        begin = time.perf_counter()
        engine.generate(prompts, params)
        seconds.append(time.perf_counter() - begin)
        if number == 0:
            engine.device.synchronize()
            engine.recorder.clear()
    engine.device.synchronize()
    times = Breakdown.of(summarise(engine.recorder.spans(), engine.recorder.iterations()))
    tokens_per_s = sum(one.max_tokens for one in params) / median(seconds[1:])
    leg = Leg.of(engine, "mix")
    return Result(
        benchmark="mix",
        metric="output tokens a second",
        leg=leg,
        batch=plan.requests,
        lengths=f"{plan.low}-{plan.high}",
        value=tokens_per_s,
        unit="1/s",
        line=(
            f"{plan.requests:5d} {leg.mode:6s} {on_off(leg.graphs):6s} {cell(tokens_per_s, 10, 0)} "
            f"{cell(times.step_ms, 8, 3)} {cell(times.host_sum_us, 8, 0)} {cell(percent(times.busy_share), 6, 1)} "
            f"{cell(percent(times.hidden_share), 7, 1)} {cell(percent(times.graph_hit_rate), 6, 1)}  "
            f"{phases(times.host_us)}"
        ),
        details={**times.to_dict(), "lost_iterations": engine.recorder.lost_iterations},
    )


def _requests(plan: MixPlan, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """The same in every leg: random ids, a seed a request."""
    rng = random.Random(SEED)
    lengths = plan.draw_lengths(rng)
    prompts = [[rng.randrange(vocab_size) for _ in range(before)] for before, _ in lengths]
    params = [
        SamplingParams(max_tokens=after, temperature=0.6, ignore_eos=True, seed=number)
        for number, (_, after) in enumerate(lengths)
    ]
    return prompts, params
