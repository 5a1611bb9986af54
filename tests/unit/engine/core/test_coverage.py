"""A fixed set of random schedules reaches every order, every reason, and an abort at every border of every order."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

from engine.controller import Border
from engine.phases import Order, Phase, Reason
from engine.policy import never_overlap, prefer_overlap
from tests.oracle_world import World, oracle_engine, random_params, random_prompt

NUM_RUNS = 210
AT_LEAST = 50
UNREACHABLE = {Reason.PAUSED_ROWS, Reason.NOT_ENOUGH_BLOCKS}
"""Until pausing exists, while admission reserves every block a request may need."""
CHANCE = {Order.DRAIN: 0.7, Order.OVERLAP: 0.3, Order.PRIMER: 0.25}

Place = tuple[Order, Phase, str]


class Tally:
    """What happened over all runs."""

    def __init__(self) -> None:
        self.orders: Counter[Order] = Counter()
        self.reasons: Counter[Reason] = Counter()
        self.aborts: Counter[Place] = Counter()
        self.ended: Counter[str] = Counter()


def run_one(seed: int, tally: Tally) -> None:
    rng = random.Random(seed)
    chunked = {"chunked_prefill": True, "max_batch_tokens": 8} if seed % 3 == 0 else {}
    world = World(
        oracle_engine(
            mode=rng.choice(["async", "async", "legacy"]),
            policy=never_overlap if seed % 9 == 0 else prefer_overlap,
            max_requests=rng.randint(2, 4),
            num_blocks=rng.choice([25, 40]),
            nan_every=rng.choice([0, 31]),
            **chunked,
        )
    )

    def at_border(border: Border) -> None:
        order = border.iteration.order
        if border.side == "before" and border.phase is order.phases[0]:
            tally.orders[order] += 1
            tally.reasons[border.iteration.reason] += 1
        place = (order, border.phase, border.side)
        # Rare orders get more, and places reached often enough let the others live.
        chance = CHANCE.get(order, 0.12) if tally.aborts[place] < AT_LEAST else 0.0
        if world.live_ids and rng.random() < chance:
            tally.aborts[place] += world.abort(rng.choice(world.live_ids))

    world.on_border = at_border
    for _ in range(rng.randint(10, 20)):
        for _ in range(max(rng.choice([0, 0, 0, 0, 1]), 3 - len(world.live_ids))):
            params = random_params(rng, max_tokens=12)
            if rng.random() < 0.6:
                params = params.replace(max_tokens=rng.randint(15, 60), ignore_eos=True)
            world.submit(random_prompt(rng, 24), params)
        if rng.random() < 0.35:
            world.engine.set_mode(rng.choice(["async", "async", "legacy"]))
        world.step()
    world.drain()
    world.abort(world.submit([1], random_params(rng)))  # the only request, gone before its first iteration
    world.drain()
    world.engine.set_mode("async")
    world.submit([1], random_params(rng).replace(max_tokens=2, min_tokens=2))  # ends with its first decode
    world.drain()
    tally.ended.update(world.engine.counters.finished)


def shortfalls(tally: Tally) -> list[str]:
    """What was reached less often than it should."""
    places = [place for order in Order for place in product([order], order.phases, ["before", "after"])]
    wanted: list[tuple[str, int]] = [
        *((f"order {order.label}", tally.orders[order]) for order in Order),
        *((f"reason {reason.name}", tally.reasons[reason]) for reason in Reason if reason not in UNREACHABLE),
        *((f"end by {reason}", tally.ended[reason]) for reason in ("stop", "length", "abort", "error")),
        *((f"abort at {place}", tally.aborts[place]) for place in places),
    ]
    return [f"{name}: {count}" for name, count in wanted if count < AT_LEAST]


class TestRandomSchedules:
    def test_reach_every_order_reason_and_end_and_abort_at_every_border(self) -> None:
        tally = Tally()
        for seed in range(NUM_RUNS):
            run_one(seed, tally)

        assert not shortfalls(tally)
        assert not UNREACHABLE & set(tally.reasons), "a reason of a later feature"
