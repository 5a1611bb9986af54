"""Prompts that enter while the pending forward runs: the same answers, and hardly an exposed iteration."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from engine.controller import Border
from engine.phases import Order, Phase, Reason
from engine.policy import never_overlap
from engine.request import SamplingParams
from tests.cache_watch import CacheWatch
from tests.chunk_watch import ChunkWatch
from tests.oracle_reference import VOCAB
from tests.oracle_world import World, oracle_engine, play, random_params, random_prompt, shared_prompt

PARAMS = SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True, logprobs=1)


def beside_world(**options: Any) -> World:
    return World(oracle_engine(**{"overlap_admission": True, "has_text": True, **options}))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * place * place + 3 * place + salt) % VOCAB for place in range(length)]


def serve(world: World, *, every: int = 2, count: int = 14, length: int = 11) -> list[tuple[int, ...]]:
    """A request every few iterations; lengths of prompts and outputs differ."""
    for number in range(count):
        params = PARAMS.replace(
            seed=number, max_tokens=1 + (5 * number) % 17, prompt_logprobs=1 if number % 5 == 0 else None
        )
        world.submit(prompt_of(1 + (length * number) % 37, number), params)
        for _ in range(every):
            world.step()
    world.drain()
    return [one.last.token_ids for one in world.all if one.last is not None]


@cache
def plain_answers() -> list[tuple[int, ...]]:
    return serve(World(oracle_engine(mode="legacy")))


class TestOrder:
    def test_admits_while_a_forward_is_pending(self) -> None:
        world = beside_world()
        world.submit(prompt_of(5), PARAMS.replace(max_tokens=30))
        for _ in range(3):
            world.step()
        world.submit(prompt_of(6, 1), PARAMS.replace(max_tokens=30))
        found: list[tuple[Order, Reason]] = []
        world.on_border = lambda border: found.append((border.iteration.order, border.iteration.reason))
        for _ in range(3):
            world.step()

        assert list(dict.fromkeys(found)) == [
            (Order.OVERLAP_ADMIT, Reason.ADMITS_BESIDE),
            (Order.OVERLAP, Reason.STEADY_DECODE),
        ]
        assert world.engine.table.num_live == 2
        world.drain()

    def test_a_first_token_costs_no_exposed_iteration(self) -> None:
        world = beside_world()
        serve(world)
        orders = world.engine.counters.orders
        assert orders["no_overlap"] <= 3  # all rows were ending
        assert orders["overlap_admit"] >= 5
        plain = World(oracle_engine())
        serve(plain)
        assert plain.engine.counters.orders["no_overlap"] > 15

    def test_chunks_go_on_beside_the_pending_forward(self) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=8)
        watch = ChunkWatch(world)
        serve(world, every=4)
        assert world.engine.counters.reasons.keys() & {"chunk_in_progress", "prefill_pending"} == set()
        assert watch.num_beside_decode > 5

    def test_off_by_default_and_without_effect_in_legacy_mode(self) -> None:
        assert not World(oracle_engine()).engine.config.overlap_admission
        world = beside_world(mode="legacy")
        assert serve(world) == plain_answers()
        assert set(world.engine.counters.orders) == {"legacy"}

    def test_a_policy_may_refuse_it(self) -> None:
        world = beside_world(policy=never_overlap)
        assert serve(world) == plain_answers()
        assert world.engine.counters.overlap_steps == 0

    def test_no_host_wait_comes_before_the_next_forward(self) -> None:
        assert Order.OVERLAP_ADMIT.phases.index(Phase.FORWARD) < Order.OVERLAP_ADMIT.phases.index(Phase.RESOLVE)


class TestEquality:
    @pytest.mark.parametrize("every", [0, 1, 2, 5])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"chunked_prefill": True, "max_batch_tokens": 7},
            {"chunked_prefill": True, "max_batch_tokens": 16, "prefix_caching": True},
            {"prefix_caching": True},
            {"capacity_policy": "max_utilization", "num_blocks": 26, "paused_blocks": 5},
            {"launch_ending_rows": True},
            {"graphs": (1, 2, 4, 8, 16), "block_size": 16, "num_blocks": 16},
            {"graphs": (1, 2, 4, 40), "graph_all_prefills": True, "block_size": 16, "num_blocks": 16},
            {"device": "cpu"},
        ],
        ids=str,
    )
    def test_with_legacy_mode(self, options: dict[str, Any], every: int) -> None:
        assert serve(beside_world(**options), every=every) == plain_answers()

    def test_mode_switches_in_mid_run_change_nothing(self) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=8)
        rng = random.Random(4)

        def look(_: Border) -> None:
            if rng.random() < 0.05:
                world.engine.set_mode(rng.choice(["async", "legacy"]))

        world.on_border = look
        assert serve(world) == plain_answers()

    def test_forwards_write_to_their_own_blocks_only(self) -> None:
        world = World(
            oracle_engine(overlap_admission=True, chunked_prefill=True, max_batch_tokens=9, prefix_caching=True)
        )
        watch = CacheWatch(world.engine)
        serve(world)
        assert watch.eager > 20


class TestAborts:
    @pytest.mark.parametrize("phase", Order.OVERLAP_ADMIT.phases)
    @pytest.mark.parametrize("side", ["before", "after"])
    @pytest.mark.parametrize("whom", ["new", "partial", "running", "waiting"])
    def test_at_every_border_take_effect_and_disturb_nobody(self, phase: Phase, side: str, whom: str) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=10)
        aborted: list[str] = []

        def look(border: Border) -> None:
            is_here = border.iteration.order is Order.OVERLAP_ADMIT and (border.phase, border.side) == (phase, side)
            if is_here and len(aborted) < 4:
                table = world.engine.table
                rows = {
                    "new": border.iteration.admitted,
                    "partial": [] if table.partial_row is None else [table.requests[table.partial_row]],
                    "running": table.live_requests()[:1],
                    "waiting": world.engine.queue.waiting[:1],
                }[whom]
                for request in rows:
                    assert request is not None
                    if world.abort(request.request_id):
                        aborted.append(request.request_id)

        world.on_border = look
        serve(world, every=2)
        assert aborted or (whom, phase, side) in {("new", Phase.ADMIT, "before")}


class TestPrefixes:
    def test_of_a_request_that_entered_and_was_never_launched_keep_nobody_waiting(self) -> None:
        """Its abort comes between admit and prepare; whoever has the same prompt waited for its blocks for ever."""
        world = beside_world(prefix_caching=True)
        world.submit(prompt_of(5), PARAMS.replace(max_tokens=40))
        for _ in range(3):
            world.step()
        gone = world.submit(prompt_of(20, 1), PARAMS)

        def look(border: Border) -> None:
            if border.phase is Phase.ADMIT and border.side == "after" and border.iteration.admitted:
                world.abort(gone)

        world.on_border = look
        world.step()
        world.on_border = None
        twin = world.submit(prompt_of(20, 1), PARAMS)
        for _ in range(2):
            world.step()
        assert world.engine._live[twin].row is not None
        world.drain()


class TestFailures:
    @pytest.mark.parametrize("phase", Order.OVERLAP_ADMIT.phases)
    @pytest.mark.parametrize("after", [False, True])
    def test_in_any_phase_are_recovered_from(self, phase: Phase, after: bool) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=10, prefix_caching=True)
        for number in range(6):
            world.submit(prompt_of(5 + 7 * number, number), PARAMS.replace(seed=number))
            world.step()
        assert world.fail_in(phase, after=after)
        world.engine.recover()
        world.drain()


class TestSchedules:
    @pytest.mark.parametrize("seed", range(60))
    def test_drawn_at_random_give_the_reference_s_answers(self, seed: int) -> None:
        rng = random.Random(seed)
        budget = rng.choice([8, 20, 120, 120])
        options: dict[str, Any] = {}
        if rng.random() < 0.4:
            options = {"capacity_policy": "max_utilization", "paused_blocks": rng.choice([0, 6])}
        world = World(
            oracle_engine(
                overlap_admission=True,
                num_blocks=rng.choice([26, 40, 60]),
                nan_every=rng.choice([0, 0, 31]),
                chunked_prefill=budget < 120,
                max_batch_tokens=budget,
                prefix_caching=rng.random() < 0.5,
                launch_ending_rows=rng.random() < 0.2,
                max_requests=rng.choice([2, 4, 6]),
                has_text=True,
                **options,
            )
        )
        play(world, rng, prompt=rng.choice([shared_prompt, random_prompt]), num_acts=40, text=True)

    def test_reach_every_border_with_prompts_in_the_pending_forward(self) -> None:
        world, rng, seen = beside_world(chunked_prefill=True, max_batch_tokens=12), random.Random(1), Counter[str]()

        def look(border: Border) -> None:
            pending = world.engine.pending
            if pending is not None and pending.has_prefill and border.iteration.order.is_overlap:
                seen[f"{border.iteration.order.label} {border.phase.value} {border.side}"] += 1

        world.on_border = look
        for _ in range(60):
            world.submit(random_prompt(rng, 30), random_params(rng, max_tokens=12))
            for _ in range(rng.randint(1, 4)):
                world.step()
        world.drain()
        assert min(seen[f"overlap_admit {phase.value} before"] for phase in Order.OVERLAP_ADMIT.phases[:3]) > 10
        assert seen["overlap prepare before"] > 10
