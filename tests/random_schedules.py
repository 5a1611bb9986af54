"""Random schedules: an engine, what is done to it, and a tally of what that reached, all drawn from one seed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from engine.cache.prefix_pool import PrefixPool
from engine.controller import Border
from engine.lifecycle import EngineState
from engine.phases import Order, Phase, Reason
from engine.policy import never_overlap, prefer_overlap
from tests.memory_world import SALTS, MemoryWorld, pieced_prompt
from tests.oracle_world import Kind, World, oracle_engine, random_params, random_prompt, shared_prompt

LONGEST = 40
SUSPENSIONS = ("persist", "offload", "recompute")
STANDSTILLS = ("pause", *SUSPENSIONS)
MEMORY = ("pauses", "resumes", "evictions", "hits", "prefix waits", "block evictions", "chunks")
ENDS = ("stop", "length", "abort", "error")
SNAPSHOTS = ("snapshots taken", "snapshot hits", "snapshot evictions")
ORDERS = tuple(order for order in Order if order.without_drafting is order and not order.needs_ranks)
"""Those of an engine that does not draft."""
PHASES = Order.LEGACY.phases
MOST_DRAFTS = 3
ABORTS = 0.08
"""Chance of an abort at a border where a schedule aborts at all."""
ACTS = {"serve": 52, "step_a_phase": 14, "switch": 18, "stand_still": 20, "fail": 4, "forget": 2, "reset": 2}
"""How often each is done, beside the others."""


class Tally:
    """What many schedules reached."""

    def __init__(self) -> None:
        self.schedules: set[tuple[int, int]] = set()
        """Seed and acts of each that came to its end."""
        self.iterations = 0
        self.orders: Counter[Order] = Counter()
        self.reasons: Counter[Reason] = Counter()
        self.ended: Counter[str] = Counter()
        self.memory: Counter[str] = Counter()
        self.accepted: Counter[tuple[int, int]] = Counter()
        """Rows verified, by drafts a step and how many of them were accepted."""
        self.rewinds = 0
        """Rows that went back behind a rejected draft."""
        self.kinds: Counter[Kind] = Counter()
        self.stood: Counter[str] = Counter()
        """By how, and those with a forward pending once more."""

    def count(self, world: World) -> None:
        """Add what a world's counters say; before a reset forgets it, and at its end."""
        counters, pool = world.engine.counters, world.engine.pool
        self.ended.update(counters.finished)
        for name in ("pauses", "resumes", "evictions", "prefix_waits"):
            self.memory[name.replace("_", " ")] += getattr(counters, name)
        if isinstance(pool, PrefixPool):
            self.memory["block evictions"] += pool.num_evicted
        self.memory["snapshots taken"] += counters.snapshots_taken
        cache = world.engine.prefix_cache
        if cache is not None and cache.snapshots is not None:
            self.memory["snapshot evictions"] += cache.snapshots.num_evicted

    def look(self, world: World, border: Border) -> None:
        """Add what a border shows."""
        iteration, table = border.iteration, world.engine.table
        if border.side == "before" and border.phase is iteration.order.phases[0]:
            self.iterations += 1
            self.orders[iteration.order] += 1
            self.reasons[iteration.reason] += 1
        if border.side == "after" and border.phase is Phase.ADMIT:
            entered = [request.row for request in iteration.admitted]
            self.memory["hits"] += sum(row is not None and bool(table.chunk_done[row] > 0) for row in entered)
            self.memory["snapshot hits"] += sum(row is not None and bool(table.state_from[row] >= 0) for row in entered)
            self.memory["chunks"] += table.partial_row is not None
        if border.side == "after" and border.phase is Phase.REWIND and iteration.verified is not None:
            assert iteration.num_tokens is not None
            drafts, accepted = iteration.verified.num_drafts.tolist(), (iteration.num_tokens - 1).tolist()
            self.accepted.update((most, count) for most, count in zip(drafts, accepted, strict=True) if most)
            self.rewinds += sum(count < most for most, count in zip(drafts, accepted, strict=True))

    def shortfalls(self, at_least: int) -> list[str]:
        """What was reached less often than it should."""
        wanted: list[tuple[str, int]] = [
            *((f"order {order.label}", self.orders[order]) for order in Order if not order.needs_ranks),
            *((f"reason {reason.name}", self.reasons[reason]) for reason in Reason if reason not in _OF_RANKS),
            *((f"end by {end}", self.ended[end]) for end in ENDS),
            *((name, self.memory[name]) for name in (*MEMORY, *SNAPSHOTS)),
            *((f"{count} of {most} drafts", self.accepted[most, count]) for most, count in _ACCEPTED),
            ("rewinds", self.rewinds),
            *((how, self.stood[how]) for how in (*STANDSTILLS, *(f"{how}, pending" for how in STANDSTILLS))),
        ]
        return [f"{name}: {count}" for name, count in wanted if count < at_least]


_OF_RANKS = (Reason.OTHERS_WORK,)
"""Reasons of engines among other ranks alone, whose schedules are in tests/unit/engine/parallel."""
_ACCEPTED = [(most, count) for most in range(1, MOST_DRAFTS + 1) for count in range(most + 1)]


class Schedule:
    """One life of one engine. The same seed is the same life, whatever ran before it.

    Args:
        seed: Of everything that is random.
        tally: Is added to.
    """

    def __init__(self, seed: str, tally: Tally) -> None:
        self.rng = random.Random(seed)
        self.tally = tally
        self.has_text = self.rng.random() < 0.25
        options = random_options(self.rng)
        self.is_tight = "paused_blocks" in options
        self.aborts = self.rng.random() < (0.2 if self.is_tight else 0.4)
        self.is_over = False
        """Whether requests come no more."""
        self.shares = bool(options.get("prefix_caching"))
        drafts = options.get("speculative_tokens", 0)
        self.phases = Order.MTP_LEGACY.phases if drafts else PHASES
        self.world = MemoryWorld(oracle_engine(has_text=self.has_text, **options))
        self.world.on_border = self._at_border

    def run(self, num_acts: int) -> None:
        """Live through so many acts, then let everything end."""
        for _ in range(num_acts):
            if self.world.engine.state is EngineState.RUNNING:
                act = self.rng.choices(list(ACTS), weights=list(ACTS.values()))[0]
                getattr(self, f"_{act}")()
            else:
                self._go_on()
        self.world.engine.resume()
        self.is_over = True
        self.world.drain(600)
        if self.rng.random() < 0.25:
            self._end_alone()
        self.tally.count(self.world)

    def _at_border(self, border: Border) -> None:
        world, rng = self.world, self.rng
        self.tally.look(world, border)
        if self.aborts and world.live_ids and rng.random() < ABORTS:
            world.abort(rng.choice(world.live_ids))
        if rng.random() < 0.01 and not self.is_over:
            self._submit()

    def _submit(self) -> None:
        rng = self.rng
        longest = rng.choice([12, 12, 24, LONGEST - 1])
        draw = rng.choice([shared_prompt, _pieced]) if self.shares and rng.random() < 0.8 else random_prompt
        params = random_params(rng, text=self.has_text, max_tokens=8)
        if rng.random() < (0.8 if self.is_tight else 0.5):
            params = params.replace(
                max_tokens=rng.randint(5, 20 if self.is_tight else 12),
                min_tokens=0,
                ignore_eos=True,
                stop_token_ids=None,
            )
        salt = rng.choice(SALTS)
        self.world.submit(draw(rng, longest), params, stream=rng.random() < 0.3, cache_salt=salt)

    # -- acts

    def _serve(self) -> None:
        missing = (5 if self.aborts or self.is_tight else 3) - len(self.world.live_ids)
        for _ in range(max(self.rng.choice([0, 0, 0, 1]), missing)):
            self._submit()
        for _ in range(self.rng.choice([1, 1, 2])):
            self.world.step()

    def _step_a_phase(self) -> None:
        self.world.step_phase()

    def _switch(self) -> None:
        engine = self.world.engine
        engine.set_mode("legacy" if engine.controller.wanted_mode == "async" else "async")
        self.world.step()

    def _stand_still(self) -> None:
        while self.world.engine.in_hand is not None:
            self.world.step_phase()
        engine, how = self.world.engine, self.rng.choice(STANDSTILLS)
        self.tally.stood[how] += 1
        self.tally.stood[f"{how}, pending"] += engine.pending is not None
        if how == "pause":
            engine.pause()
        else:
            engine.suspend(how)

    def _go_on(self) -> None:
        """Out of a standstill, perhaps with requests that come or leave meanwhile, or with none at all."""
        rng, world = self.rng, self.world
        if rng.random() < 0.3:
            self._submit()
        if rng.random() < 0.2 and world.live_ids:
            world.abort(rng.choice(world.live_ids))
        if rng.random() < 0.9:
            world.engine.resume()
            world.step()
        else:
            self._reset()

    def _fail(self) -> None:
        if self.world.fail_in(self.rng.choice(self.phases), after=self.rng.random() < 0.5):
            self.world.engine.recover()

    def _forget(self) -> None:
        self.world.forget()

    def _reset(self) -> None:
        self.tally.count(self.world)
        self.world.reset()
        self.world.engine.counters.reset()

    def _end_alone(self) -> None:
        """What is rare in company: a queue of nothing but an aborted request, and rows that all end with a forward."""
        world, rng = self.world, self.rng
        world.abort(world.submit([1], random_params(rng, text=self.has_text)))
        world.drain()
        world.engine.set_mode("async")
        world.submit([1], random_params(rng).replace(max_tokens=2, min_tokens=2))  # ends with its first decode
        world.drain()


def _pieced(rng: random.Random, longest: int) -> list[int]:
    return pieced_prompt(rng, longest)


def random_options(rng: random.Random) -> dict[str, Any]:
    """An engine's options; nearly half have too few blocks, a twelfth runs in buckets, some of which gate admission."""
    options: dict[str, Any] = {
        "mode": rng.choice(["async", "async", "legacy"]),
        "policy": rng.choice([prefer_overlap] * 6 + [never_overlap]),
        "overlap_admission": rng.random() < 0.5,
        "launch_ending_rows": rng.random() < 0.25,
        "prefix_caching": rng.random() < 0.6,
        "eviction_policy": rng.choice(["lru", "lru", "ref_zero"]),
        "max_sequence_length": LONGEST,
        "max_requests": rng.randint(2, 4),
        "num_blocks": rng.choice([15, 24]),
        "nan_every": rng.choice([0, 31]),
    }
    budget = rng.choice([None, None, 8, 11, 30])
    if budget is not None:
        options |= {"chunked_prefill": True, "max_batch_tokens": budget}
    memory = rng.random()
    if memory < 0.45:
        options |= {"capacity_policy": "max_utilization", "paused_blocks": rng.choice([0, 5, 10, 10])}
        options |= {"num_blocks": rng.choice([10, 10, 11, 13]), "max_requests": 4, "nan_every": 0}
    elif memory < 0.53:  # all of one shape, so that they share their traces
        options |= {"graphs": (4, 16), "num_blocks": 24, "max_requests": 4, "nan_every": 0}
        options |= {"chunked_prefill": True, "max_batch_tokens": 20, "graph_all_prefills": rng.random() < 0.5}
    return options | _random_model(rng, options)


def _random_model(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """A kind of model, and what the other options have to be for it."""
    kind: Kind = rng.choices(["oracle", "hybrid", "drafting", "mtp"], weights=[40, 25, 10, 25])[0]
    if "graphs" in options:  # traces take time and memory
        kind = rng.choice(["oracle", "mtp"])
    changes: dict[str, Any] = {"kind": kind}
    if kind in ("hybrid", "mtp") and options["prefix_caching"]:
        changes["mamba_cache_gb"] = rng.choice([None, None, 0.0])
    if kind in ("drafting", "mtp"):
        drafts = MOST_DRAFTS if "graphs" in options else rng.randint(1, MOST_DRAFTS)
        changes |= {"speculative_tokens": drafts, "num_blocks": options["num_blocks"] + 2}
        changes["late_rewind"] = rng.random() < 0.5
        if "graphs" not in options:  # of each there would be traces of its own
            changes["state_rewind"] = rng.choice(["stored", "replayed"])
        if "max_batch_tokens" in options:  # room for a chunk beside all rows with their drafts
            least = options["max_requests"] * (drafts + 1) + 2
            changes["max_batch_tokens"] = max(options["max_batch_tokens"], least)
    return changes
