"""A fixed set of random schedules reaches every order, every reason, and an abort at every border of every order."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from engine.controller import Border
from engine.phases import Order, Phase, Reason
from engine.policy import never_overlap, prefer_overlap
from tests.oracle_world import World, oracle_engine, random_params, random_prompt

NUM_RUNS = 190
AT_LEAST = 50
UNREACHABLE = {Reason.CHUNK_IN_PROGRESS, Reason.PAUSED_ROWS, Reason.NOT_ENOUGH_BLOCKS}
"""Until chunked prefill and pausing exist, while admission reserves every block a request may need."""
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
    world = World(
        oracle_engine(
            mode=rng.choice(["async", "async", "legacy"]),
            policy=never_overlap if seed % 9 == 0 else prefer_overlap,
            max_requests=rng.randint(2, 4),
            num_blocks=rng.choice([25, 40]),
            nan_every=rng.choice([0, 31]),
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


@pytest.fixture(scope="module")
def tally() -> Tally:
    found = Tally()
    for seed in range(NUM_RUNS):
        run_one(seed, found)
    return found


class TestRandomSchedules:
    @pytest.mark.parametrize("order", list(Order))
    def test_take_every_order(self, tally: Tally, order: Order) -> None:
        assert tally.orders[order] >= AT_LEAST, tally.orders

    @pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in UNREACHABLE])
    def test_meet_every_reachable_reason(self, tally: Tally, reason: Reason) -> None:
        assert tally.reasons[reason] >= AT_LEAST, tally.reasons

    def test_never_meet_a_reason_of_a_later_feature(self, tally: Tally) -> None:
        assert not UNREACHABLE & set(tally.reasons)

    @pytest.mark.parametrize(
        "place", [place for order in Order for place in product([order], order.phases, ["before", "after"])], ids=str
    )
    def test_abort_at_every_border_of_every_order(self, tally: Tally, place: Place) -> None:
        assert tally.aborts[place] >= AT_LEAST, sorted(tally.aborts.items(), key=str)

    @pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
    def test_end_requests_in_every_way(self, tally: Tally, reason: str) -> None:
        assert tally.ended[reason] >= AT_LEAST, tally.ended
