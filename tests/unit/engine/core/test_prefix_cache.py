"""Prefix caching: equal answers with fewer tokens computed, blocks that are shared and never written again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.cache.prefix import block_digests
from engine.errors import ConfigError, RequestError
from engine.phases import Phase
from engine.request import RequestOutput, SamplingParams
from tests.bug_kind_world import MODES
from tests.cache_watch import CacheWatch
from tests.chunk_watch import ChunkWatch
from tests.oracle_reference import VOCAB
from tests.oracle_world import World, oracle_engine, play, random_params, shared_prompt

BLOCK = 4
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, seed=0, ignore_eos=True)


def prefix_world(**options: Any) -> World:
    return World(oracle_engine(prefix_caching=True, **options))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * place * place + 3 * place + salt) % VOCAB for place in range(length)]


def one_by_one(world: World, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """Each served to its end before the next is handed in."""
    outputs = []
    for prompt in prompts:
        world.submit(prompt, params)
        world.drain()
        last = world.all[-1].last
        assert last is not None
        outputs.append(last)
    return outputs


def skipped(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


class TestHits:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("length", "hit"), [(15, 12), (16, 12), (17, 16), (32, 28), (3, 0), (4, 0), (5, 4)])
    def test_the_same_prompt_again_computes_its_last_block_at_most(self, mode: str, length: int, hit: int) -> None:
        """Bug kinds 8, 50, 58, 68: a prompt that is cached to its end left nothing to draw the first token from."""
        world = prefix_world(mode=mode)
        watch = ChunkWatch(world)
        found = one_by_one(world, [prompt_of(length)] * 3)

        assert skipped(found) == [0, hit, hit]
        assert list(watch.chunks.values()) == [[length], [length - hit], [length - hit]]
        assert len({output.token_ids for output in found}) == 1

    def test_a_longer_prompt_skips_what_is_the_same(self) -> None:
        world = prefix_world()
        assert skipped(one_by_one(world, [prompt_of(16), prompt_of(17), prompt_of(40)])) == [0, 16, 16]

    def test_a_prompt_that_differs_within_a_block_skips_the_blocks_before(self) -> None:
        other = prompt_of(32)
        other[13] += 1
        assert skipped(one_by_one(prefix_world(), [prompt_of(32), other])) == [0, 12]

    def test_a_prompt_that_differs_in_its_first_token_skips_nothing(self) -> None:
        other = prompt_of(32)
        other[0] += 1
        assert skipped(one_by_one(prefix_world(), [prompt_of(32), other])) == [0, 0]

    def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation(self) -> None:
        world = prefix_world()
        (first,) = one_by_one(world, [prompt_of(10)], GREEDY.replace(max_tokens=12))
        turn = [*prompt_of(10), *first.token_ids, 3, 1, 4]
        (second,) = one_by_one(world, [turn])

        assert second.num_cached_tokens == 20  # of 22; the newest token was never in the cache

    @pytest.mark.parametrize("mode", MODES)
    def test_blocks_are_shared_with_a_request_that_still_runs(self, mode: str) -> None:
        world = prefix_world(mode=mode)
        world.submit(prompt_of(20), GREEDY.replace(max_tokens=30))
        for _ in range(3):
            world.step()
        world.submit(prompt_of(21), GREEDY)
        held = world.engine.pool.num_free
        for _ in range(3):
            world.step()

        assert world.engine.counters.prefix_hit_tokens == 20
        assert held - world.engine.pool.num_free < 6
        world.drain()

    def test_nobody_shares_blocks_with_another_salt(self) -> None:
        world = prefix_world()
        for salt in ("", "one", "two", "one"):
            world.submit(prompt_of(20), GREEDY, cache_salt=salt)
            world.drain()
        assert skipped([one.last for one in world.all if one.last]) == [0, 0, 0, 16]

    def test_a_salt_is_a_string(self) -> None:
        world = prefix_world()
        with pytest.raises(RequestError, match="cache_salt must be a string"):
            world.engine.add_request([1], GREEDY, cache_salt=7)  # type: ignore[arg-type]
        assert not world.engine.has_unfinished()

    def test_without_the_option_nothing_is_skipped(self) -> None:
        assert skipped(one_by_one(World(oracle_engine()), [prompt_of(20)] * 2)) == [0, 0]

    def test_with_ref_zero_only_running_requests_share(self) -> None:
        world = prefix_world(eviction_policy="ref_zero")
        assert skipped(one_by_one(world, [prompt_of(20)] * 2)) == [0, 0]
        assert world.engine.pool.num_free == len(world.engine.pool.free_ids)
        world.submit(prompt_of(20), GREEDY.replace(max_tokens=30))
        for _ in range(3):
            world.step()
        assert skipped(one_by_one(world, [prompt_of(20)])) == [16]

    @pytest.mark.parametrize("mode", MODES)
    def test_prompt_log_probabilities_are_computed_for_every_token(self, mode: str) -> None:
        """Bug kind: a hit left holes in the prompt's log probabilities. The world checks them."""
        world = prefix_world(mode=mode)
        found = one_by_one(world, [prompt_of(20)] * 2, GREEDY.replace(prompt_logprobs=2))
        assert skipped(found) == [0, 0]
        assert skipped(one_by_one(world, [prompt_of(20)])) == [16]

    def test_the_policy_has_two_names(self) -> None:
        with pytest.raises(ConfigError, match="eviction_policy must be one of lru, ref_zero"):
            oracle_engine(prefix_caching=True, eviction_policy="fifo")


class TestRounds:
    @pytest.mark.parametrize("mode", MODES)
    def test_who_shares_a_prefix_being_computed_waits_one_round_and_hits(self, mode: str) -> None:
        world = prefix_world(mode=mode)
        watch = ChunkWatch(world)
        for _ in range(3):
            world.submit(prompt_of(20), GREEDY)
        world.submit(prompt_of(9, salt=1), GREEDY)
        world.drain()

        assert [set(forward) for forward in watch.forwards if forward] == [
            {"request-0", "request-3"},
            {"request-1", "request-2"},
        ]
        assert skipped([one.last for one in world.all if one.last]) == [0, 16, 16, 0]
        assert world.engine.counters.prefix_waits == 2

    def test_a_wait_changes_no_ones_place(self) -> None:
        world = prefix_world(max_requests=2)
        ids = [world.submit(prompt_of(20), GREEDY) for _ in range(4)]
        world.step()
        assert [request.request_id for request in world.engine.queue.waiting] == ids[1:]
        world.drain()

    def test_a_long_queue_of_one_prefix_is_not_gone_through_in_a_round(self) -> None:
        world = prefix_world(max_requests=2)
        for _ in range(200):
            world.submit(prompt_of(8), GREEDY.replace(max_tokens=1))
        world.step()
        assert world.engine.counters.prefix_waits <= 3
        world.drain()

    def test_an_aborted_prompt_leaves_nobody_waiting_for_its_blocks(self) -> None:
        world = prefix_world()
        first = world.submit(prompt_of(20), GREEDY)
        world.step()
        world.abort(first)
        assert skipped(one_by_one(world, [prompt_of(20)])) == [16]

    @pytest.mark.parametrize("budget", [5, 7, 8, 9, 12])
    @pytest.mark.parametrize("mode", MODES)
    def test_a_prompt_read_in_chunks_shares_what_its_chunks_filled(self, mode: str, budget: int) -> None:
        """Bug kind 15: chunks that end inside a block, and others that read it."""
        world = prefix_world(mode=mode, chunked_prefill=True, max_requests=3, max_batch_tokens=budget)
        writes = CacheWatch(world.engine)
        found = one_by_one(world, [prompt_of(30), prompt_of(31), prompt_of(22)])
        for length in (30, 33, 40):
            world.submit(prompt_of(length), GREEDY)
        world.drain()
        assert skipped(found) == [0, 28, 20]
        assert writes.eager


class TestMemory:
    def test_cached_blocks_give_way_and_only_leaves_go(self) -> None:
        world = prefix_world(num_blocks=12, max_sequence_length=40)
        one_by_one(world, [prompt_of(16), prompt_of(16, salt=1), prompt_of(16, salt=2)])
        pool: Any = world.engine.pool
        assert pool.num_evicted > 0
        pool.index.check()
        assert skipped(one_by_one(world, [prompt_of(16, salt=2)])) == [12]

    def test_matched_blocks_are_not_taken_as_new_ones(self) -> None:
        """Bug kind 69: the last cached blocks are the hit itself; taking new blocks first would have evicted them."""
        world = prefix_world(num_blocks=8, max_sequence_length=32)
        assert skipped(one_by_one(world, [prompt_of(20), prompt_of(28)], GREEDY.replace(max_tokens=1))) == [0, 20]

    def test_the_cache_can_be_forgotten_in_mid_run(self) -> None:
        world = prefix_world()
        one_by_one(world, [prompt_of(20)])
        world.submit(prompt_of(40, salt=1), GREEDY.replace(max_tokens=20))
        for _ in range(4):
            world.step()
        assert world.engine.reset_prefix_cache() == 5
        world.drain()
        assert skipped(one_by_one(world, [prompt_of(20), prompt_of(40, salt=1), prompt_of(20)])) == [0, 0, 16]

    def test_a_failed_request_takes_back_what_it_named(self) -> None:
        """What spoilt its logits may lie in its blocks, and would spoil everyone's who shares them."""
        world = World(oracle_engine(prefix_caching=True, nan_every=3))
        for length in range(8, 40):
            world.submit(prompt_of(length), GREEDY.replace(max_tokens=8))
            world.drain()
            last = world.all[-1].last
            assert last is not None
            if last.finish_reason == "error":
                assert world.engine.pool.match(world_digests(world, length)).size == 0  # type: ignore[attr-defined]
                break
        else:
            pytest.fail("no request failed")

    @pytest.mark.parametrize("mode", MODES)
    def test_recovery_begins_with_an_empty_cache(self, mode: str) -> None:
        world = prefix_world(mode=mode)
        one_by_one(world, [prompt_of(20)])
        world.submit(prompt_of(20), GREEDY.replace(max_tokens=9))
        world.step()
        assert world.fail_in(Phase.FORWARD, after=False)
        world.engine.recover()
        world.drain()
        assert world.all[-1].last is not None


def world_digests(world: World, length: int) -> list[bytes]:
    return block_digests(prompt_of(length), world.engine.config.block_size)


class TestSchedules:
    @pytest.mark.parametrize("seed", range(30))
    def test_drawn_at_random_give_the_reference_s_answers(self, seed: int) -> None:
        """Every answer, and every invariant at every border, is checked by the world."""
        rng = random.Random(seed)
        budget = rng.choice([9, 20, 120])
        world = prefix_world(
            mode=rng.choice(MODES),
            num_blocks=rng.choice([30, 60]),
            chunked_prefill=budget < 120,
            max_batch_tokens=budget,
            eviction_policy=rng.choice(["lru", "lru", "ref_zero"]),
        )
        play(world, rng, prompt=shared_prompt, num_acts=40)

    def test_reach_hits_waits_evictions_and_overlap(self) -> None:
        world, rng = prefix_world(num_blocks=70), random.Random(3)
        for _ in range(40):
            for _ in range(rng.randint(1, 4)):
                world.submit(shared_prompt(rng), random_params(rng))
            for _ in range(rng.randint(1, 6)):
                world.step()
        world.drain()
        pool: Any = world.engine.pool
        counters = world.engine.counters
        assert min(pool.num_evicted, counters.prefix_hit_tokens) > 20
        assert counters.prefix_waits > 0
        assert counters.overlap_steps > 20

    @pytest.mark.parametrize("graphs", [None, [1, 2, 4]])
    def test_on_the_thread_device(self, graphs: list[int] | None) -> None:
        world = prefix_world(device="cpu", graphs=graphs, debug_invariants=False)
        play(world, random.Random(5), prompt=shared_prompt, num_acts=60)
