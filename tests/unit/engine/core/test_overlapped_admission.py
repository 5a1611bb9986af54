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
from tests.planted_beside_faults import KEPT, KEPT_DRAFTS, play_kept

PARAMS = SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True, logprobs=1)
MTP: dict[str, Any] = {"kind": "mtp", "speculative_tokens": 3}
"""Drafts, and recurrent states behind each of them."""
ONE_DRAFT: dict[str, Any] = {"kind": "mtp", "speculative_tokens": 1, "late_rewind": False}
DRAFTING: dict[str, Any] = {"kind": "drafting", "speculative_tokens": 1}
WAYS = [({}, Order.OVERLAP_ADMIT), (ONE_DRAFT, Order.MTP_OVERLAP_ADMIT)]
BORDERS = [(options, order, phase) for options, order in WAYS for phase in order.phases]


def beside_world(**options: Any) -> World:
    return World(oracle_engine(**{"overlap_admission": True, "has_text": True, **options}))


def name_of(value: Any) -> str:
    return getattr(value, "value", "") if isinstance(value, Phase) else getattr(value, "label", "")


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
    @pytest.mark.parametrize(("options", "order"), WAYS, ids=name_of)
    def test_admits_while_a_forward_is_pending(self, options: dict[str, Any], order: Order) -> None:
        world = beside_world(**options)
        world.submit(prompt_of(5), PARAMS.replace(max_tokens=30))
        for _ in range(3):
            world.step()
        world.submit(prompt_of(6, 1), PARAMS.replace(max_tokens=30))
        found: list[tuple[Order, Reason]] = []
        world.on_border = lambda border: found.append((border.iteration.order, border.iteration.reason))
        for _ in range(3):
            world.step()

        assert list(dict.fromkeys(found)) == [
            (order, Reason.ADMITS_BESIDE),
            (Order.OVERLAP.with_drafting if options else Order.OVERLAP, Reason.STEADY_DECODE),
        ]
        assert world.engine.table.num_live == 2
        world.drain()

    def test_a_first_token_costs_no_exposed_iteration(self) -> None:
        world = beside_world()
        serve(world)
        orders = world.engine.counters.orders
        assert orders["no_overlap"] <= 3  # all rows were ending
        assert orders["overlap_admit"] >= 5
        plain = World(oracle_engine(overlap_admission=False))
        serve(plain)
        assert plain.engine.counters.orders["no_overlap"] > 15

    def test_a_first_token_costs_no_exposed_iteration_beside_drafts(self) -> None:
        world = beside_world(**MTP)
        serve(world, every=1)
        orders = world.engine.counters.orders
        assert orders["mtp_no_overlap"] <= 3
        assert orders["mtp_overlap_admit"] >= 5
        plain = World(oracle_engine(overlap_admission=False, **MTP))
        serve(plain, every=1)
        assert plain.engine.counters.orders["mtp_no_overlap"] > 10

    @pytest.mark.parametrize(("options", "budget"), [({}, 8), (ONE_DRAFT, 10)])
    def test_chunks_go_on_beside_the_pending_forward(self, options: dict[str, Any], budget: int) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=budget, **options)
        watch = ChunkWatch(world)
        serve(world, every=4)
        assert world.engine.counters.reasons.keys() & {"chunk_in_progress", "prefill_pending"} == set()
        assert watch.num_beside_decode > 5

    def test_is_what_async_does_unless_told_and_without_effect_in_legacy_mode(self) -> None:
        assert World(oracle_engine()).engine.config.overlap_admission
        world = beside_world(mode="legacy")
        assert serve(world) == plain_answers()
        assert set(world.engine.counters.orders) == {"legacy"}

    def test_a_policy_may_refuse_it(self) -> None:
        world = beside_world(policy=never_overlap)
        assert serve(world) == plain_answers()
        assert world.engine.counters.overlap_steps == 0

    def test_no_host_wait_comes_before_the_next_forward(self) -> None:
        assert Order.OVERLAP_ADMIT.phases.index(Phase.FORWARD) < Order.OVERLAP_ADMIT.phases.index(Phase.RESOLVE)

    def test_beside_drafts_admission_comes_behind_the_counts_and_before_the_tokens(self) -> None:
        """Before rewind lengths count drafts that may be rejected; behind resolve the device would have run empty."""
        verify, admit = (Phase.VERIFY, Phase.DRAFT, Phase.REWIND), (Phase.ADMIT, Phase.PREPARE, Phase.FORWARD)
        assert Order.MTP_OVERLAP_ADMIT.phases == (*verify, *admit, Phase.RESOLVE, Phase.EMIT)
        assert Order.MTP_OVERLAP_ADMIT.is_overlap
        assert Order.MTP_OVERLAP_ADMIT.without_drafting is Order.OVERLAP_ADMIT

    @pytest.mark.parametrize(("options", "order"), WAYS, ids=name_of)
    def test_admission_moves_and_releases_no_row_while_tokens_are_unresolved(
        self, options: dict[str, Any], order: Order
    ) -> None:
        """With drafts nothing is pending there, but the verified rows stand where their tokens will be given out."""
        world, checked = beside_world(**options), 0
        before: list[int] = []

        def look(border: Border) -> None:
            nonlocal before, checked
            if border.iteration.order is order and border.phase is Phase.ADMIT:
                keys = world.engine.table.key[: world.engine.table.num_live].tolist()
                if border.side == "before":
                    before = keys
                    world.abort(world.live_ids[0])
                else:
                    assert keys[: len(before)] == before
                    checked += len(keys) > len(before) > 0

        world.on_border = look
        serve(world)
        assert checked > 4


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
            {"kind": "hybrid", "prefix_caching": True, "chunked_prefill": True, "max_batch_tokens": 16},
        ],
        ids=str,
    )
    def test_with_legacy_mode(self, options: dict[str, Any], every: int) -> None:
        assert serve(beside_world(**options), every=every) == plain_answers()

    @pytest.mark.parametrize("every", [0, 2])
    @pytest.mark.parametrize(
        "options",
        [
            MTP,
            {**DRAFTING, "chunked_prefill": True, "max_batch_tokens": 10},
            {**MTP, "chunked_prefill": True, "max_batch_tokens": 19, "prefix_caching": True},
            {**MTP, "capacity_policy": "max_utilization", "num_blocks": 27, "paused_blocks": 5},
            {**MTP, "launch_ending_rows": True},
            {**MTP, "graphs": (16,), "graph_non_decode": False, "block_size": 16, "num_blocks": 20},
            {**MTP, "device": "cpu", "prefix_caching": True},
        ],
        ids=str,
    )
    def test_of_drafts_with_legacy_mode_without(self, options: dict[str, Any], every: int) -> None:
        world = beside_world(**options)
        assert serve(world, every=every) == plain_answers()
        assert world.engine.counters.orders["mtp_overlap_admit"] > 1

    @pytest.mark.parametrize(("options", "budget"), [({}, 8), (ONE_DRAFT, 10)])
    def test_mode_switches_in_mid_run_change_nothing(self, options: dict[str, Any], budget: int) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=budget, **options)
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
    @pytest.mark.parametrize(("options", "order", "phase"), BORDERS, ids=name_of)
    @pytest.mark.parametrize("side", ["before", "after"])
    @pytest.mark.parametrize("whom", ["new", "partial", "running", "waiting"])
    def test_at_every_border_take_effect_and_disturb_nobody(
        self, options: dict[str, Any], order: Order, phase: Phase, side: str, whom: str
    ) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=10, **options)
        aborted: list[str] = []

        def look(border: Border) -> None:
            is_here = border.iteration.order is order and (border.phase, border.side) == (phase, side)
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
        at, admit = (order.phases.index(one) for one in (phase, Phase.ADMIT))
        is_too_early = whom == "new" and (at, side == "after") <= (admit, False)
        assert bool(aborted) != is_too_early


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
    @pytest.mark.parametrize(("options", "order", "phase"), BORDERS, ids=name_of)
    @pytest.mark.parametrize("after", [False, True])
    def test_in_any_phase_are_recovered_from(
        self, options: dict[str, Any], order: Order, phase: Phase, after: bool
    ) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=10, prefix_caching=True, **options)
        for number in range(6):
            world.submit(prompt_of(5 + 7 * number, number), PARAMS.replace(seed=number))
            world.step()
        assert world.fail_in(phase, after=after)
        assert world.engine.failure is not None
        assert world.engine.failure.iteration is not None
        assert world.engine.failure.iteration.order is order
        world.engine.recover()
        world.drain()


class TestBlocks:
    @pytest.mark.parametrize("options", [KEPT, KEPT_DRAFTS, {**KEPT_DRAFTS, "late_rewind": True}], ids=str)
    def test_that_are_set_aside_for_newcomers_are_not_taken_by_rows_kept_beyond_their_end(
        self, options: dict[str, Any]
    ) -> None:
        """A row kept for study (launch_ending_rows) wanted a block more than admission knew of, and there was none."""
        play_kept(beside_world(**options))


class TestSchedules:
    @pytest.mark.parametrize(
        ("seed", "kind"), [*((seed, "plain") for seed in range(60)), *((seed, "drafting") for seed in range(25))]
    )
    def test_drawn_at_random_give_the_reference_s_answers(self, seed: int, kind: str) -> None:
        rng = random.Random(seed)
        budget = rng.choice([8, 20, 120, 120])
        max_requests = rng.choice([2, 4, 6])
        options: dict[str, Any] = {}
        if rng.random() < 0.4:
            options = {"capacity_policy": "max_utilization", "paused_blocks": rng.choice([0, 6])}
        if kind == "drafting":
            options |= rng.choice([MTP, DRAFTING])
            budget = max(budget, max_requests * (1 + options["speculative_tokens"]) + 2)
        world = World(
            oracle_engine(
                overlap_admission=True,
                num_blocks=rng.choice([28, 40, 60]),
                nan_every=rng.choice([0, 0, 31]),
                chunked_prefill=budget < 120,
                max_batch_tokens=budget,
                prefix_caching=rng.random() < 0.5,
                launch_ending_rows=rng.random() < 0.2,
                max_requests=max_requests,
                has_text=True,
                **options,
            )
        )
        play(world, rng, prompt=rng.choice([shared_prompt, random_prompt]), num_acts=40, text=True)

    @pytest.mark.parametrize(("options", "order"), WAYS, ids=name_of)
    def test_reach_every_border_with_prompts_being_read(self, options: dict[str, Any], order: Order) -> None:
        world = beside_world(chunked_prefill=True, max_batch_tokens=12, **options)
        rng, seen = random.Random(1), Counter[str]()

        def look(border: Border) -> None:
            verified = border.iteration.verified
            consumed = world.engine.pending if verified is None else verified.pending
            if consumed is not None and consumed.has_prefill and border.iteration.order.is_overlap:
                seen[f"{border.iteration.order.label} {border.phase.value} {border.side}"] += 1

        world.on_border = look
        for _ in range(60):
            world.submit(random_prompt(rng, 30), random_params(rng, max_tokens=12))
            for _ in range(rng.randint(1, 4)):
                world.step()
        world.drain()
        first = order.phases[: order.phases.index(Phase.FORWARD)]
        assert min(seen[f"{order.label} {phase.value} before"] for phase in first) > 10
        steady = Order.OVERLAP.with_drafting if options else Order.OVERLAP
        assert seen[f"{steady.label} prepare before"] > 10
