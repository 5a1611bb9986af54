"""A pool too small for all: rows pause, requests go back to the queue, and every answer stays what it was."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from engine.controller import Border
from engine.errors import ConfigError
from engine.phases import Order, Phase, Reason
from engine.request import RequestState, SamplingParams
from tests.bug_kind_world import MODES
from tests.oracle_reference import PIECES, VOCAB
from tests.oracle_world import World, oracle_engine, play, shared_prompt

LONG = SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True)


def small_world(num_blocks: int = 14, **options: Any) -> World:
    """Four rows and blocks of four tokens for about two of them at their longest."""
    defaults: dict[str, Any] = {"capacity_policy": "max_utilization", "max_sequence_length": 52}
    return World(oracle_engine(num_blocks=num_blocks, **{**defaults, **options}))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * place * place + 3 * place + salt) % VOCAB for place in range(length)]


def serve(world: World, count: int = 4, length: int = 9) -> list[tuple[int, ...]]:
    for number in range(count):
        world.submit(prompt_of(length, number), LONG.replace(seed=number, logprobs=1))
    world.drain()
    return [one.last.token_ids for one in world.all if one.last is not None]


def seen(world: World, look: Callable[[Border], None]) -> None:
    world.on_border = look


@cache
def roomy_answers() -> list[tuple[int, ...]]:
    """Of the first six requests in a pool that is never short."""
    world = small_world(60)
    found = serve(world, 6)
    assert world.engine.counters.pauses == world.engine.counters.evictions == 0
    return found


class TestPausing:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("paused_blocks", [0, 5, 14])
    @pytest.mark.parametrize("num_blocks", [13, 17, 23])
    def test_changes_no_token(self, mode: str, paused_blocks: int, num_blocks: int) -> None:
        """Bug kinds 10, 31: a token twice, or a length that is off by one."""
        tiny = small_world(num_blocks, mode=mode, paused_blocks=paused_blocks)

        assert serve(tiny, 6) == roomy_answers()
        assert tiny.engine.counters.pauses + tiny.engine.counters.evictions > 0

    def test_more_requests_run_at_once_than_could_at_their_longest(self) -> None:
        running: dict[str, int] = {}
        for policy in ("max_utilization", "guaranteed_no_evict"):
            world = small_world(20, capacity_policy=policy)
            most = 0

            def look(border: Border, world: World = world) -> None:
                nonlocal most
                most = max(most, world.engine.table.num_active)

            seen(world, look)
            serve(world)
            running[policy] = most
        assert running == {"max_utilization": 4, "guaranteed_no_evict": 2}

    def test_a_paused_row_keeps_its_blocks_and_gets_nothing(self) -> None:
        world = small_world(20, paused_blocks=20)
        paused: dict[str, set[tuple[int, int]]] = defaultdict(set)
        since: dict[str, int] = {}

        def look(border: Border) -> None:
            table, number = world.engine.table, border.iteration.index
            for row in range(table.num_paused):
                request = table.requests[row]
                assert request is not None
                assert request.state is RequestState.PAUSED
                if (request.request_id, number - 1) in since.items():
                    paused[request.request_id].add((int(table.block_count[row]), len(request.output_ids)))
                if border.phase is border.iteration.order.phases[-1]:
                    since[request.request_id] = number

        seen(world, look)
        serve(world)
        assert paused
        assert world.engine.counters.pauses == world.engine.counters.resumes > 0

    def test_rows_that_need_no_block_go_on(self) -> None:
        """Only those at the end of a block pause."""
        world = small_world(20, paused_blocks=20)

        def look(border: Border) -> None:
            if border.phase is Phase.ADMIT and border.side == "after" and border.iteration.room is not None:
                for request in border.iteration.room.paused:
                    assert request.row is not None
                    assert int(world.engine.table.kv_len[request.row]) % 4 == 0

        seen(world, look)
        serve(world)
        assert world.engine.counters.pauses > 0

    def test_overlap_falls_back_with_its_reason_and_comes_back(self) -> None:
        world = small_world(20, paused_blocks=20)
        serve(world)
        reasons = world.engine.counters.reasons
        assert reasons[Reason.NOT_ENOUGH_BLOCKS.name.lower()] > 0
        assert reasons[Reason.PAUSED_ROWS.name.lower()] > 0
        assert world.engine.counters.overlap_steps > 0

    def test_nobody_enters_while_a_row_is_paused(self) -> None:
        world = small_world(20, paused_blocks=20)

        def look(border: Border) -> None:
            if world.engine.table.num_paused:
                assert not border.iteration.admitted or border.iteration.room is not None

        seen(world, look)
        serve(world, 8)
        assert world.engine.counters.pauses > 0

    def test_an_abort_of_a_paused_row_lets_the_others_go_on(self) -> None:
        world = small_world(20, paused_blocks=20)
        aborted: list[str] = []

        def look(border: Border) -> None:
            table = world.engine.table
            if table.num_paused and len(aborted) < 2:
                request = table.requests[0]
                assert request is not None
                if world.abort(request.request_id):
                    aborted.append(request.request_id)

        seen(world, look)
        serve(world, 6)
        assert len(aborted) == 2

    @pytest.mark.parametrize("mode", MODES)
    def test_works_where_nothing_reads_the_tokens_meanwhile(self, mode: str) -> None:
        """Checks read every request's tokens, and so had the log handed over that a row's pausing forgot."""
        world = small_world(20, paused_blocks=20, mode=mode, debug_invariants=False)
        assert serve(world) == roomy_answers()[:4]
        assert world.engine.counters.pauses > 0

    def test_goes_on_without_touching_the_table(self) -> None:
        world = small_world(20, paused_blocks=20)
        standing: list[bool] = []

        def look(border: Border) -> None:
            if border.phase is Phase.ADMIT and border.side == "after" and world.engine.table.num_paused:
                standing.append(border.iteration.room is None)

        seen(world, look)
        serve(world)
        assert any(standing)


class TestEviction:
    def test_goes_to_the_head_of_the_queue_in_order_of_arrival(self) -> None:
        world = small_world(14, paused_blocks=0)
        orders: list[list[int]] = []

        def look(border: Border) -> None:
            keys = [request.key for request in world.engine.queue.waiting]
            orders.append(keys)

        seen(world, look)
        serve(world, 6)
        assert world.engine.counters.evictions > 0
        assert all(keys == sorted(keys) for keys in orders)

    def test_keeps_what_was_emitted_and_repeats_nothing(self) -> None:
        """The world puts the pieces of streams together, and compares them."""
        world = small_world(14, paused_blocks=0, has_text=True)
        for number in range(5):
            world.submit(prompt_of(9, number), LONG.replace(seed=number), stream=True)
        world.drain()
        assert world.engine.counters.evictions > 0
        assert all(len(one.new_ids) == 30 for one in world.all)

    def test_in_the_iteration_whose_token_completes_a_stop_string_ends_the_request_for_good(self) -> None:
        """It stood in the queue, ended, and was admitted again."""
        found: list[tuple[int, list[int]]] = []

        def look(border: Border) -> None:
            room = border.iteration.room
            if border.phase is Phase.ADMIT and border.side == "after" and room is not None:
                found.extend((one.key, [*one.output_ids]) for one in room.evicted if one in border.iteration.advanced)

        def run(stops: dict[int, str]) -> World:
            world = small_world(14, paused_blocks=0, has_text=True)
            seen(world, look)
            for number in range(6):
                world.submit(prompt_of(9, number), LONG.replace(seed=number, stop=stops.get(number)))
            world.drain()
            return world

        run({})
        stops = {key: "".join(PIECES[i] for i in output[-2:]) for key, output in found if len(output) > 2}
        assert stops
        for key, stop in stops.items():
            last = run({key: stop}).all[key].last
            assert last is not None
            assert last.finish_reason == "stop"

    def test_of_every_row_at_once_leaves_somebody_running(self) -> None:
        world = small_world(13, paused_blocks=0, block_size=4, max_requests=4)
        assert len(serve(world, 4, length=12)) == 4
        assert world.engine.counters.evictions > 0

    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_finds_its_blocks_again_with_a_prefix_cache(self, prefix_caching: bool) -> None:
        world = small_world(16, paused_blocks=0, prefix_caching=prefix_caching)
        answers = serve(world, 4)
        assert answers == roomy_answers()[:4]
        assert (world.engine.counters.prefix_hit_tokens > 0) is prefix_caching

    @pytest.mark.parametrize("mode", MODES)
    def test_of_a_prompt_read_in_chunks_reads_it_anew(self, mode: str) -> None:
        world = small_world(13, mode=mode, chunked_prefill=True, max_batch_tokens=6, paused_blocks=0)
        evicted: Counter[bool] = Counter()

        def look(border: Border) -> None:
            if border.phase is Phase.ADMIT and border.side == "after" and border.iteration.room is not None:
                for request in border.iteration.room.evicted:
                    evicted[not request.output_ids] += 1

        seen(world, look)
        for number, length in enumerate((7, 20, 9, 22, 6, 23)):
            world.submit(prompt_of(length, number), LONG.replace(seed=number, max_tokens=20, prompt_logprobs=1))
        world.drain()
        assert evicted[True] > 0

    def test_keeps_the_count_of_tokens_that_a_hit_skipped_first(self) -> None:
        world = small_world(16, paused_blocks=0, prefix_caching=True)
        serve(world, 4)
        assert world.engine.counters.evictions > 0
        assert all(one.last.num_cached_tokens == 0 for one in world.all if one.last)


class TestOptions:
    def test_paused_blocks_need_the_policy_under_which_rows_pause(self) -> None:
        with pytest.raises(ConfigError, match="no row ever pauses with guaranteed_no_evict"):
            oracle_engine(paused_blocks=3)

    @pytest.mark.parametrize("value", [-1, True, 1.5])
    def test_paused_blocks_is_a_count(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="paused_blocks must be a whole number"):
            oracle_engine(capacity_policy="max_utilization", paused_blocks=value)


class TestSchedules:
    @pytest.mark.parametrize("seed", range(40))
    def test_drawn_at_random_give_the_reference_s_answers(self, seed: int) -> None:
        rng = random.Random(seed)
        budget = rng.choice([8, 20, 120])
        world = World(
            oracle_engine(
                mode=rng.choice(MODES),
                capacity_policy="max_utilization",
                num_blocks=rng.choice([25, 26, 30, 40]),
                paused_blocks=rng.choice([None, 0, 5, 20]),
                chunked_prefill=budget < 120,
                max_batch_tokens=budget,
                prefix_caching=rng.random() < 0.5,
                max_requests=rng.choice([2, 4, 6]),
                launch_ending_rows=rng.random() < 0.3,
            )
        )
        play(world, rng, prompt=shared_prompt, num_acts=40)

    def test_reach_pauses_resumes_and_evictions(self) -> None:
        counts: Counter[str] = Counter()
        orders: set[Order] = set()
        for paused_blocks in (4, 8, 20):
            world = small_world(20, paused_blocks=paused_blocks)
            serve(world, 10)
            counters = world.engine.counters
            counts.update(pauses=counters.pauses, resumes=counters.resumes, evictions=counters.evictions)
            orders |= {order for order, _, _ in world.borders}
        assert min(counts.values()) >= 10
        assert orders >= {Order.NO_OVERLAP, Order.OVERLAP, Order.PRIMER}

    @pytest.mark.parametrize("graphs", [None, [1, 2, 4]])
    def test_on_the_thread_device(self, graphs: list[int] | None) -> None:
        world = small_world(14, device="cpu", graphs=graphs, debug_invariants=False, paused_blocks=4)
        assert serve(world, 8) == serve(small_world(60), 8)
