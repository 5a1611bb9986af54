"""A fixed set of random schedules reaches every order, every reason, and an abort at every border of every order.

And every way in which memory is shared and runs out.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest

from engine.cache.prefix_pool import PrefixPool
from engine.controller import Border
from engine.phases import Order, Phase, Reason
from engine.policy import never_overlap, prefer_overlap
from tests.oracle_world import World, oracle_engine, random_params, random_prompt, shared_prompt
from tests.random_schedules import ORDERS

NUM_RUNS = 230
NUM_TIGHT_RUNS = 30
"""Without aborts, in pools that are too small."""
AT_LEAST = 50
MEMORY = ("pauses", "resumes", "evictions", "hits", "prefix_waits", "block_evictions")
CHANCE = {Order.DRAIN: 0.7, Order.OVERLAP: 0.3, Order.OVERLAP_ADMIT: 0.5, Order.PRIMER: 0.25}

Place = tuple[Order, Phase, str]


class Tally:
    """What happened over all runs."""

    def __init__(self) -> None:
        self.orders: Counter[Order] = Counter()
        self.reasons: Counter[Reason] = Counter()
        self.aborts: Counter[Place] = Counter()
        self.ended: Counter[str] = Counter()
        self.memory: Counter[str] = Counter()

    def count(self, world: World) -> None:
        """What a world's counters say at its end."""
        counters, pool = world.engine.counters, world.engine.pool
        self.ended.update(counters.finished)
        for name in ("pauses", "resumes", "evictions", "prefix_waits"):
            self.memory[name] += getattr(counters, name)
        if isinstance(pool, PrefixPool):
            self.memory["block_evictions"] += pool.num_evicted


def memory_options(seed: int, rng: random.Random, *, is_tight: bool) -> dict[str, Any]:
    """Half of the worlds share blocks; those that are tight run out of them."""
    options: dict[str, Any] = {
        "prefix_caching": seed % 2 == 0,
        "eviction_policy": rng.choice(["lru", "lru", "ref_zero"]),
    }
    if is_tight:
        options |= {"capacity_policy": "max_utilization", "paused_blocks": rng.choice([0, 8, 20, 20])}
        options |= {
            "num_blocks": rng.choice([16, 19, 22]),
            "max_sequence_length": 60,
            "max_requests": 4,
            "nan_every": 0,
        }
    return options


def run_one(seed: int, tally: Tally, *, is_tight: bool = False) -> None:
    rng = random.Random(seed)
    memory = memory_options(seed, rng, is_tight=is_tight)
    draw_prompt = shared_prompt if memory["prefix_caching"] else random_prompt
    chunked = {"chunked_prefill": True, "max_batch_tokens": 8} if seed % 3 == 0 else {}
    options: dict[str, Any] = {
        "mode": rng.choice(["async", "async", "legacy"]),
        "policy": never_overlap if seed % 9 == 0 else prefer_overlap,
        "max_requests": rng.randint(2, 4),
        "num_blocks": rng.choice([25, 40]),
        "nan_every": rng.choice([0, 31]),
        "overlap_admission": seed % 5 < 3,
    }
    world = World(oracle_engine(**{**options, **chunked, **memory}))

    def at_border(border: Border) -> None:
        order = border.iteration.order
        if border.side == "before" and border.phase is order.phases[0]:
            tally.orders[order] += 1
            tally.reasons[border.iteration.reason] += 1
        if border.side == "after" and border.phase is Phase.ADMIT:
            rows = [request.row for request in border.iteration.admitted]
            tally.memory["hits"] += sum(
                row is not None and bool(world.engine.table.chunk_done[row] > 0) for row in rows
            )
        place = (order, border.phase, border.side)
        # Rare orders get more, and places reached often enough let the others live.
        chance = CHANCE.get(order, 0.12) if tally.aborts[place] < AT_LEAST and not is_tight else 0.0
        if world.live_ids and rng.random() < chance:
            tally.aborts[place] += world.abort(rng.choice(world.live_ids))

    world.on_border = at_border
    for _ in range(rng.randint(10, 20)):
        for _ in range(max(rng.choice([0, 0, 0, 0, 1]), 3 - len(world.live_ids))):
            params = random_params(rng, max_tokens=12)
            if is_tight or rng.random() < 0.6:
                params = params.replace(max_tokens=rng.randint(15, 60), ignore_eos=True)
            world.submit(draw_prompt(rng, 24), params)
        if rng.random() < 0.35:
            world.engine.set_mode(rng.choice(["async", "async", "legacy"]))
        world.step()
    world.drain()
    world.abort(world.submit([1], random_params(rng)))  # the only request, gone before its first iteration
    world.drain()
    world.engine.set_mode("async")
    world.submit([1], random_params(rng).replace(max_tokens=2, min_tokens=2))  # ends with its first decode
    world.drain()
    tally.count(world)


NOT_HERE = (Reason.COUNTS_LATER, Reason.OTHERS_WORK)
"""Of engines with drafts, and of those among other ranks."""


def shortfalls(tally: Tally) -> list[str]:
    """What was reached less often than it should."""
    places = [place for order in ORDERS for place in product([order], order.phases, ["before", "after"])]
    wanted: list[tuple[str, int]] = [
        *((f"order {order.label}", tally.orders[order]) for order in ORDERS),
        *((f"reason {reason.name}", tally.reasons[reason]) for reason in Reason if reason not in NOT_HERE),
        *((f"end by {reason}", tally.ended[reason]) for reason in ("stop", "length", "abort", "error")),
        *((name, tally.memory[name]) for name in MEMORY),
        *((f"abort at {place}", tally.aborts[place]) for place in places),
    ]
    return [f"{name}: {count}" for name, count in wanted if count < AT_LEAST]


class TestRandomSchedules:
    @pytest.mark.timeout(1200)
    def test_reach_every_order_reason_end_pause_hit_and_eviction_and_an_abort_at_every_border(self) -> None:
        tally = Tally()
        for seed in range(NUM_RUNS):
            run_one(seed, tally)
        for seed in range(NUM_TIGHT_RUNS):
            run_one(seed, tally, is_tight=True)

        assert not shortfalls(tally)
