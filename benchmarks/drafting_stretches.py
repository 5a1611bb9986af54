"""What ``benchmarks/drafting.py`` measures with: forced acceptance, engines full of rows, and stretches of their steps.

A stretch is some steps of one engine in which every row decodes. Its first steps are not counted: in them the stretch
before, at another acceptance or in another engine, is still on its way out.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine import draft_passes
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.request import SamplingParams
from workbench.bench.breakdown import Breakdown, steady_summary
from workbench.legs import Leg
from workbench.loading import session_config

BLOCK = 16
SEED = 0
OWN = "own"
"""A rate: accept what the model bears out."""
Rate = float | str | None
"""Chance of each draft behind accepted ones, :data:`OWN`, or None where nothing is drafted."""
_OWN_CHANCE = -1.0
_OF_DRAFTS = ("late_rewind", "state_rewind")
"""Options that mean nothing without drafts."""
_GUESS = 0.7
"""Share of drafts that a model's own draws are thought to bear out, where only a length depends on it."""


@contextmanager
def forced_acceptance(device: torch.device) -> Iterator[Tensor]:
    """While entered, verification accepts by a chance that is read on the device, so that captured graphs follow it.

    Yields:
        [] float32, the chance that a draft behind accepted ones is accepted; below 0 the model's own draws decide.
    """
    own = draft_passes.count_accepted
    chance = torch.full((), _OWN_CHANCE, device=device)

    def count_accepted(token_nW: Tensor, foreseen_nS: Tensor, may_nS: Tensor) -> Tensor:
        borne_out_nS = token_nW[:, :-1] == foreseen_nS
        drawn_nS = torch.rand(foreseen_nS.shape, device=token_nW.device) < chance
        taken_nS = torch.where(chance < 0, borne_out_nS, drawn_nS) & may_nS
        return taken_nS.to(torch.int64).cumprod(1).sum(1)

    draft_passes.count_accepted = count_accepted
    try:
        yield chance
    finally:
        draft_passes.count_accepted = own


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured at each batch."""

    steps: int
    """Counted steps of a stretch."""
    settle: int
    """Steps before them."""
    repeats: int
    """Stretches of each leg and rate."""
    cached: int
    """Tokens in the cache of a row in the middle of all that: 576 is 512 read and half of 128 written."""

    def prompt_len(self, drafts: int, rates: Sequence[Rate]) -> int:
        """So that the middle of what is expected to be written is where ``cached`` wants it."""
        warm = (self.settle + self.steps) * tokens_expected(rates[0], drafts)
        return max(BLOCK, round(self.cached - warm - self._written(drafts, rates) / 2))

    def output_len(self, drafts: int, rates: Sequence[Rate], filling: int) -> int:
        """More than a row can write, so that none ends; ``filling``: steps until all rows decode."""
        certain = (filling + self.settle + self.steps) * (drafts + 1)
        if OWN in rates:
            return certain + self._num_steps(rates) * (drafts + 1)
        chance = 6 * drafts * math.sqrt(self._num_steps(rates))  # six deviations at the least
        return certain + round(self._written(drafts, rates) + chance)

    def _num_steps(self, rates: Sequence[Rate]) -> int:
        return (self.steps + self.settle) * self.repeats * len(rates)

    def _written(self, drafts: int, rates: Sequence[Rate]) -> float:
        each = [tokens_expected(rate, drafts) for rate in rates]
        return self._num_steps(rates) * sum(each) / len(each)


def tokens_expected(rate: Rate, drafts: int) -> float:
    """Tokens of a row and step."""
    if isinstance(rate, float):
        return sum(rate**place for place in range(drafts + 1))
    return 1 + _GUESS * drafts


def engine_config(
    base: EngineConfig, leg: Leg, *, drafts: int, batch: int, sizes: Sizes, rates: Sequence[Rate]
) -> EngineConfig:
    """Of an engine for this batch and no other: a graph of its size, blocks for all that is written.

    Raises:
        ConfigError: the leg has an option that is unknown or does not fit; the message names it.
    """
    budget = max(16384 if base.device == "cuda" else 2048, batch * (drafts + 1) + 2)
    prompt_len = sizes.prompt_len(drafts, rates)
    filling = 4 + 2 * -(-batch * prompt_len // budget)  # decode rows take their share of each forward
    columns = -(-(prompt_len + sizes.output_len(drafts, rates, filling)) // BLOCK)
    changes = {name: value for name, value in leg.changes.items() if drafts or name not in _OF_DRAFTS}
    made = {
        "block_size": BLOCK,
        "speculative_tokens": drafts,
        "graphs": [batch * (drafts + 1)] if base.device == "cuda" else None,
        "graph_non_decode": False,
        "max_requests": batch,
        "max_batch_tokens": budget,
        "max_sequence_length": columns * BLOCK,
        "num_blocks": batch * (columns + 1),
        "chunked_prefill": True,
    }
    return session_config(base, leg.mode, {**made, **changes})


def check_options(base: EngineConfig, legs: Sequence[Leg]) -> None:
    """Refuse a leg whose option this engine does not have.

    Raises:
        ConfigError: naming the option.
    """
    for leg in legs:
        session_config(base, leg.mode, leg.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Counted steps of one engine at one rate."""

    step_ms: float
    """Wall time over steps."""
    tokens: int
    """Given to all rows together."""
    proposed: tuple[int, ...]
    """Drafts by place."""
    accepted: tuple[int, ...]
    cached: float
    """Tokens in the cache of a row, mean of before and after."""
    breakdown: Breakdown
    busy_ms: float | None
    """Time of a step in which the device computed; None where that is not told apart."""


class Seat:
    """An engine of one leg with as many rows as it takes, all of them decoding.

    Args:
        loaded: Shared.
        config: As :func:`engine_config` makes it.
        leg: Whose.
        chance: Of :func:`forced_acceptance`.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, leg: Leg, chance: Tensor) -> None:
        self.leg = leg
        self._chance = chance
        device = chance.device
        before = _allocated(device)
        begin = time.perf_counter()
        self.engine = Engine(loaded, config, policy=leg.policy)
        self.startup_s = time.perf_counter() - begin
        self.filling_s = 0.0
        self.engine_bytes = None if before is None else (_allocated(device) or 0) - before
        """Of the device, caches, buffers and what graphs hold together; None where nobody counts."""

    @property
    def state_bytes_per_row(self) -> float:
        """Of recurrent states: what lies in no block, the dummy's share included."""
        engine = self.engine
        paged = (engine.resolved.num_blocks + 1, engine.config.block_size)
        tensors = [tensor for layer in engine.runner.caches for tensor in layer if tensor.shape[:2] != paged]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / engine.config.max_requests

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the resolved configuration among them."""
        own = ("startup_s", "filling_s", "engine_bytes", "state_bytes_per_row")
        graph_bytes = self.engine.graph_memory_bytes
        values = {name: getattr(self, name) for name in own}
        return {"leg": self.leg.name, **values, "graph_bytes": graph_bytes, "config": self.engine.resolved.to_dict()}

    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Hand in the prompts and step until all rows decode."""
        begin = time.perf_counter()
        output_len = self.engine.resolved.max_sequence_length - len(prompts[0])
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self.engine.add_request(list(prompt), params)
        table = self.engine.table
        while (
            self.engine.queue.num_waiting or table.num_live < len(prompts) or table.is_prefill[: table.num_live].any()
        ):
            self.engine.step()
        self.engine.device.synchronize()
        self.filling_s = time.perf_counter() - begin

    def stretch(self, rate: Rate, sizes: Sizes) -> Stretch:
        """Step at ``rate``; waits for the device at the end."""
        engine, chance = self.engine, rate if isinstance(rate, float) else _OWN_CHANCE
        rows = engine.table.num_live
        engine.device.compute.launch(lambda: self._chance.fill_(chance))
        for _ in range(sizes.settle):
            engine.step()
        counted, cached = self._counted(), self._cached()
        begin_ns = time.perf_counter_ns()
        for _ in range(sizes.steps):
            engine.step()
        took_ns = time.perf_counter_ns() - begin_ns
        assert engine.table.num_live == rows, "a row ended in a stretch"
        engine.device.synchronize()
        records = [record for record in engine.recorder.iterations() if record.begin_ns >= begin_ns]
        summary = steady_summary(engine.recorder.spans(), records)
        engine.recorder.clear()
        tokens, *by_place = (after - before for after, before in zip(self._counted(), counted, strict=True))
        places, busy_ns = len(by_place) // 2, summary.device.busy_ns
        return Stretch(
            step_ms=took_ns / sizes.steps / 1e6,
            tokens=tokens,
            proposed=tuple(by_place[:places]),
            accepted=tuple(by_place[places:]),
            cached=(cached + self._cached()) / 2,
            breakdown=Breakdown.of(summary),
            busy_ms=busy_ns / summary.num_timed / 1e6 if busy_ns is not None and summary.num_timed else None,
        )

    def _counted(self) -> list[int]:
        """Tokens given; behind them drafts proposed by place, and drafts accepted by place."""
        counters, places = self.engine.counters, range(self.engine.config.speculative_tokens)
        by_place = [
            counts[place] for counts in (counters.drafts_proposed, counters.drafts_accepted) for place in places
        ]
        return [counters.generated_tokens, *by_place]

    def _cached(self) -> float:
        table = self.engine.table
        return float(table.kv_len[: table.num_live].mean())


class Prompts:
    """Where the model reads text, pieces of what it has not learned; else random ids. The same for every leg."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._vocab_size = loaded.vocab_size
        self._text = None if loaded.tokenizer is None else loaded.tokenizer.encode(_held_out())

    def make(self, batch: int, length: int) -> list[list[int]]:
        """``batch`` prompts of ``length`` tokens."""
        rng = random.Random(SEED)
        if self._text is None:
            return [[rng.randrange(self._vocab_size) for _ in range(length)] for _ in range(batch)]
        firsts = [rng.randrange(len(self._text) - length) for _ in range(batch)]
        return [self._text[first : first + length] for first in firsts]


def _held_out() -> str:
    """Of this Python's library, what the shipped model's training leaves out."""
    from tools.train_shipped.corpus import library_corpus

    return b"\n".join(library_corpus().held_out).decode()


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, ends and count, for JSON."""
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return {"median": middle, "min": ordered[0], "max": ordered[-1], "count": len(ordered)}
