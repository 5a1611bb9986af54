"""A long random life of one engine: arrivals, aborts, mode switches and resets, every answer checked as it comes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.controller import Border
from tests.device_worlds import oracle_world
from tests.oracle_world import World, random_params, random_prompt

NUM_PERIODS = 10
ARRIVALS = (0.02, 0.1, 0.3, 0.9)
"""Chance of a request an iteration; one is drawn for each stretch of ``STRETCH`` iterations, so load comes and goes."""
STRETCH = 50
MOST_LIVE = 14
"""More than the table's rows, so that some wait."""


@dataclass
class SoakReport:
    """What happened, so that a test can tell a busy life from an idle one."""

    iterations: int = 0
    orders: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    resets: int = 0
    graph_hits: int = 0
    rows_moved: int = 0
    num_near: int = 0
    num_waits: list[int] = field(default_factory=list)
    """How often the host waited for a staging half, by slab."""
    memory: list[int] = field(default_factory=list)
    """Bytes held by the drained engine after each tenth."""


class Soak:
    """One world and what is done to it, drawn from one seed."""

    def __init__(self, world: World, seed: int, measure: Callable[[], int]) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.measure = measure
        self.report = SoakReport()
        self.arrival = 0.0
        world.on_border = self._at_border

    def _at_border(self, border: Border) -> None:
        is_first = border.side == "before" and border.phase is border.iteration.order.phases[0]
        self.report.iterations += is_first
        if self.world.live_ids and self.rng.random() < 0.002:
            self.world.abort(self.rng.choice(self.world.live_ids))

    def run_until(self, iterations: int) -> None:
        """Go on until so many iterations have begun, then let everything end."""
        while self.report.iterations < iterations:
            self.arrival = self.rng.choice(ARRIVALS)
            until = min(iterations, self.report.iterations + STRETCH)
            while self.report.iterations < until:
                self.act()
        self._drain()

    def act(self) -> None:
        """Perhaps something from outside, then an iteration or one phase of it."""
        world, rng = self.world, self.rng
        if rng.random() < self.arrival and len(world.live_ids) < MOST_LIVE:
            self._submit()
        if rng.random() < 0.02 and world.live_ids:
            world.abort(rng.choice(world.live_ids))
        is_legacy = world.engine.controller.wanted_mode == "legacy"
        if rng.random() < (0.06 if is_legacy else 0.02):
            world.engine.set_mode("async" if is_legacy else "legacy")
            self.report.switches += 1
        if rng.random() < 0.003:
            self._tally()
            world.reset()
            self.report.resets += 1
        if rng.random() < 0.03:
            world.step_phase()
        else:
            world.step()

    def _submit(self) -> None:
        rng = self.rng
        params = random_params(rng, text=rng.random() < 0.7)
        if rng.random() < 0.5:  # the others are short, most of them of one to three tokens
            params = params.replace(max_tokens=rng.randint(max(10, params.min_tokens), 40))
        self.world.submit(random_prompt(rng), params, stream=rng.random() < 0.3)

    def _drain(self) -> None:
        """To the last output; the world then finds every block free and the device's rows right."""
        world, engine = self.world, self.world.engine
        world.drain()
        self._tally()
        engine.counters.reset()
        world.all.clear()
        world.current.clear()
        world.borders.clear()
        engine.device.synchronize()
        self.report.memory.append(self.measure())

    def _tally(self) -> None:
        """Add up what the engine has counted since it last started over."""
        counters, report = self.world.engine.counters, self.report
        report.orders += counters.orders
        report.finished += counters.finished
        report.graph_hits += counters.graph_hits
        report.rows_moved += counters.rows_moved


def soak(device: str, iterations: int, seed: int, *, measure: Callable[[], int] = int, **options: Any) -> SoakReport:
    """Live through ``iterations`` on the oracle, with invariants on; each tenth ends drained and checked.

    Args:
        device: As an engine's configuration names it.
        iterations: How many, in ten periods.
        seed: Of everything that is random; the same life on every device and in every run.
        measure: Bytes of device memory in use; the default measures nothing.
        **options: Of the engine; see :func:`oracle_world`.

    Raises:
        AssertionError: an answer is not the reference's, or something is held when nothing is live.
        InvariantError: a check of ``engine/invariants.py`` failed.
    """
    world = oracle_world(device, **options)
    life = Soak(world, seed, measure)
    with world.engine as engine:
        for period in range(1, NUM_PERIODS + 1):
            life.run_until(max(life.report.iterations, iterations * period // NUM_PERIODS))
        slabs = (engine.runner.step_slab, engine.runner.samples.index_slab, engine.runner.move_slab)
        life.report.num_waits = [slab.num_waits for slab in slabs]
    life.report.num_near = world.num_near
    return life.report
