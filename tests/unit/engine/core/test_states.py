"""Recurrent states: slots of rows, snapshots at block borders, and hits that go on from them (I21 to I24).

The hybrid oracle answers as the plain one while its rolling hash is that of the row's tokens, each read once in order.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine.controller import Border
from engine.errors import ConfigError
from engine.lifecycle import slots_in_use
from engine.models.base import StateOptions
from engine.models.oracle import Skill, rolling_hash
from engine.phases import Phase
from engine.request import RequestOutput
from engine.step_function import layer_states
from tests.bug_kind_world import MODES
from tests.drafting_world import (
    GREEDY,
    PLAIN,
    RICH,
    SETTINGS,
    DraftingWorld,
    all_foreseen,
    prompt_of,
    stand_still,
    times_met,
)
from tests.memory_world import MemoryWorld
from tests.oracle_world import Kind, loaded_oracle, oracle_engine

SLOT_GIB = 8 / 2**30
"""Of the hybrid oracle's state, one int64."""
KINDS: list[tuple[Kind, int]] = [("hybrid", 0), ("mtp", 3)]


def states_world(kind: Kind = "hybrid", drafts: int = 0, **options: Any) -> MemoryWorld:
    return MemoryWorld(oracle_engine(kind=kind, speculative_tokens=drafts, **options))


def cached_world(
    kind: Kind = "hybrid", drafts: int = 0, *, snapshots: int | None = None, **options: Any
) -> MemoryWorld:
    """With a prefix cache, and room for so many snapshots; None: as many as rows."""
    budget = None if snapshots is None else snapshots * SLOT_GIB * 1.001
    return states_world(kind, drafts, prefix_caching=True, mamba_cache_gb=budget, **options)


def one_by_one(world: MemoryWorld, prompts: list[list[int]], max_tokens: int = 3) -> list[RequestOutput]:
    outputs = []
    for prompt in prompts:
        world.submit(prompt, GREEDY.replace(max_tokens=max_tokens))
        world.drain()
        last = world.all[-1].last
        assert last is not None
        outputs.append(last)
    return outputs


def skipped(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def kept(world: MemoryWorld) -> int:
    """Snapshots there are."""
    cache = world.engine.prefix_cache
    assert cache is not None
    assert cache.snapshots is not None
    return len(cache.snapshots)


class TestSlots:
    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize("mode", MODES)
    def test_hold_what_makes_answers_those_of_a_plain_model(self, mode: str, setting: str) -> None:
        """In chunks, paused, evicted, hit, captured: a state is never lost, taken twice or another row's."""
        options = {**SETTINGS[setting], **({"num_blocks": 13} if setting == "prefix, pausing" else {})}
        world = DraftingWorld(0, kind="hybrid", mode=mode, **options)
        assert world.serve(RICH) == DraftingWorld(0, kind="oracle").serve(RICH)
        assert times_met(world, setting) > 0

    def test_go_to_new_rows_at_once_whatever_they_hold(self) -> None:
        """I34: nothing zeroes them; a row without history starts from zeros."""
        taken: Counter[int] = Counter()

        def look(border: Border) -> None:
            if border.side == "after" and border.phase is Phase.ADMIT:
                taken.update(int(world.engine.table.state_slot[r.row]) for r in border.iteration.admitted if r.row)

        world = states_world(max_requests=2)
        world.on_border = look
        for number in range(8):
            world.submit(prompt_of(1 + number, number), PLAIN.replace(seed=number, max_tokens=2 + number % 3))
        world.drain()
        assert max(taken.values()) > 1
        slots = world.engine.table.slots
        assert slots is not None
        assert slots.num_free == 2

    def test_are_none_for_models_without_states(self) -> None:
        world = states_world("drafting", 2)
        world.submit([1, 2], PLAIN)
        world.step()
        assert world.engine.table.slots is None
        assert world.engine.table.state_slot[0] == -1

    def test_are_one_for_each_token_of_a_step_with_drafts(self) -> None:
        """The memory that going back costs: a state behind each draft instead of one that is computed again."""
        plain, drafting = states_world().engine, states_world("mtp", 3, state_rewind="stored").engine
        rows = plain.config.max_requests
        assert plain.runner.cache_tensors[1].shape[0] == rows + 1
        assert drafting.runner.cache_tensors[1].shape[0] == 4 * rows + 1

    def test_are_one_for_each_row_where_accepted_tokens_are_replayed(self) -> None:
        """Beside it lie the tokens of its last forward."""
        engine = states_world("mtp", 3, state_rewind="replayed").engine
        shapes = [tuple(tensor.shape) for tensor in engine.runner.cache_tensors[1:3]]
        assert shapes == [(engine.config.max_requests + 1, 1), (engine.config.max_requests + 1, 4)]

    def test_survive_the_death_of_their_neighbours(self) -> None:
        for mode in MODES:
            world = states_world("mtp", 2, mode=mode)
            for number in range(4):
                world.submit(prompt_of(6, number), PLAIN.replace(seed=number, max_tokens=3 + 4 * (number % 2)))
            for _ in range(2):
                world.step()
            world.abort(world.live_ids[0])
            world.drain()


class TestReplay:
    """States that go back by replaying what was accepted: nothing else may be seen of it."""

    @pytest.mark.parametrize("skill", ["right", "mixed", "wrong"])
    @pytest.mark.parametrize(("mode", "late"), [("legacy", False), ("async", False), ("async", True)])
    def test_gives_the_answers_of_no_drafts_whatever_is_accepted(self, mode: str, late: bool, skill: Skill) -> None:
        plain = DraftingWorld(0, kind="oracle").serve(RICH)
        for drafts in (1, 3):
            world = DraftingWorld(drafts, skill=skill, mode=mode, state_rewind="replayed", late_rewind=late)
            assert world.serve(RICH) == plain
            assert skill != "mixed" or world.counts == set(range(drafts + 1))

    @pytest.mark.parametrize(
        ("setting", "late"),
        [(name, late) for name in SETTINGS for late in (False, True) if name not in ("plain", "buckets", "gated")]
        + [("buckets", False), ("gated", True)],
    )
    def test_goes_with_everything_else(self, setting: str, late: bool) -> None:
        """In chunks, paused, evicted, hit, captured."""
        world = DraftingWorld(3, state_rewind="replayed", late_rewind=late, **SETTINGS[setting])
        plain = DraftingWorld(0, kind="oracle").serve(RICH)
        assert world.serve(RICH) == plain
        assert world.serve(RICH) == [*plain, *plain]  # the second time cached, where there is a cache
        assert times_met(world, setting) > 0

    @pytest.mark.parametrize("how", ["pause", "persist", "offload", "recompute"])
    def test_goes_on_behind_a_standstill(self, how: Any) -> None:
        """Also with a forward pending, whose tokens nobody has counted yet."""
        for at in range(1, 6):
            world = cached_world("mtp", 2, state_rewind="replayed")
            for number in range(4):
                world.submit(prompt_of(9 + 4 * number, number % 2), PLAIN.replace(seed=number))
            for _ in range(at):
                world.step()
            stand_still(world.engine, how)
            world.drain()

    def test_follows_rows_that_move_and_new_ones_in_their_slots(self) -> None:
        rng = random.Random(5)
        for mode in MODES:
            world = states_world("mtp", 3, mode=mode, state_rewind="replayed", max_requests=3)
            for number in range(14):
                world.submit(
                    prompt_of(rng.randint(1, 9), number), PLAIN.replace(seed=number, max_tokens=3 + number % 5)
                )
                world.step()
                if number % 3 == 2 and world.live_ids:
                    world.abort(rng.choice(world.live_ids))
            world.drain()

    def test_without_drafts_or_states_is_nothing(self) -> None:
        """There is nothing to go back from: options and memory are those of any other."""
        for kind, drafts in (("hybrid", 0), ("drafting", 2)):
            world = states_world(kind, drafts, state_rewind="replayed")  # type: ignore[arg-type]
            world.submit([1, 2, 3], PLAIN)
            world.drain()
            assert all(tensor.shape[1:] != (3,) for tensor in world.engine.runner.cache_tensors)

    def test_needs_a_model_that_can(self) -> None:
        loaded = loaded_oracle(kind="mtp")

        class Elsewhere:
            """A model with slots of its own making."""

            def __getattr__(self, name: str) -> Any:
                if name == "state_layout":
                    raise AttributeError(name)
                return getattr(loaded.model, name)

        with pytest.raises(ConfigError, match="state_rewind='replayed' needs a model with state_layout; use 'stored'"):
            layer_states(Elsewhere(), 0, StateOptions(replay_width=3))  # type: ignore[arg-type]


class TestHits:
    @pytest.mark.parametrize(("kind", "drafts"), KINDS)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (33, 32)])
    def test_of_the_same_prompt_go_on_from_its_last_block_but_one(
        self, length: int, hit: int, mode: str, kind: Kind, drafts: int
    ) -> None:
        world = cached_world(kind, drafts, mode=mode)
        assert skipped(one_by_one(world, [prompt_of(length)] * 3)) == [0, hit, hit]

    @pytest.mark.parametrize(("kind", "drafts"), KINDS)
    @pytest.mark.parametrize("blocks", [1, 2, 5])
    def test_of_any_number_of_blocks_are_followed_by_what_a_cold_run_says(
        self, blocks: int, kind: Kind, drafts: int
    ) -> None:
        """Logits behind a hit are those of a fresh prefill, of the hit's last token and of all that follow."""
        base = prompt_of(4 * blocks)
        cold = one_by_one(states_world(), [[*base, 9, 8]], max_tokens=20)[0]
        world = cached_world(kind, drafts)
        warm = one_by_one(world, [[*base, 1], [*base, 9, 8]], max_tokens=20)[1]
        assert (warm.num_cached_tokens, warm.token_ids) == (4 * blocks, cold.token_ids)

    def test_go_no_deeper_than_a_snapshot_though_keys_are_there(self) -> None:
        """Prompts of 20 and 12 tokens in common: the state behind 12 was kept by nobody yet."""
        world = cached_world()
        other = [*prompt_of(12), *prompt_of(8, 31)]
        assert skipped(one_by_one(world, [prompt_of(20), other])) == [0, 0]

    def test_are_as_deep_as_where_prompts_part_from_the_third_on(self) -> None:
        """The second leaves a snapshot where keys were known and the state was not: the divergence point."""
        world = cached_world()
        prompts = [[*prompt_of(12), *prompt_of(8, 31 + tail)] for tail in range(4)]
        assert skipped(one_by_one(world, prompts)) == [0, 0, 12, 12]

    @pytest.mark.parametrize("budget", [6, 8, 11, 13])
    def test_find_the_snapshots_that_chunks_left_inside_them(self, budget: int) -> None:
        world = cached_world(snapshots=20, chunked_prefill=True, max_batch_tokens=budget)
        prompts = [prompt_of(22), prompt_of(40), [*prompt_of(22), 1, 1], prompt_of(40)]
        found = skipped(one_by_one(world, prompts))
        assert found[1] > 0
        assert found[2] >= 12
        assert found[3] == 36

    def test_of_generated_tokens_go_on_from_the_last_snapshot(self) -> None:
        world = cached_world()
        (first,) = one_by_one(world, [prompt_of(9)], max_tokens=12)
        (second,) = one_by_one(world, [[*prompt_of(9), *first.token_ids, 3]])
        assert second.num_cached_tokens == 8

    def test_are_none_without_a_snapshot(self) -> None:
        world = cached_world(snapshots=0)
        assert skipped(one_by_one(world, [prompt_of(20)] * 3)) == [0, 0, 0]
        assert world.engine.counters.snapshots_taken == 0

    def test_of_heads_that_are_always_right_with_states_and_a_cache_stay_right(self) -> None:
        """Drafts, states and the prefix cache together, in a pool that is short and in one that is not."""
        for setting in ("prefix", "prefix, pausing"):
            world = DraftingWorld(3, skill="right", **SETTINGS[setting])
            for _ in range(3):
                world.serve([PLAIN.replace(seed=seed, max_tokens=10) for seed in range(6)])
            assert all_foreseen(world)
            assert world.seen["hits"] > 2


class TestSnapshots:
    @pytest.mark.parametrize(("kind", "drafts"), KINDS)
    def test_are_the_states_behind_the_blocks_they_are_named_after(self, kind: Kind, drafts: int) -> None:
        world = cached_world(kind, drafts)
        one_by_one(world, [prompt_of(8), prompt_of(17, 5)], max_tokens=9)
        engine, cache = world.engine, world.engine.prefix_cache
        assert cache is not None
        assert cache.snapshots is not None
        hashes = engine.runner.cache_tensors[1][:, 0].tolist()
        found = sorted(hashes[slot] for slot in cache.snapshots.slots.tolist())
        wanted = [rolling_hash(prompt_of(4)), rolling_hash(prompt_of(8)), rolling_hash(prompt_of(17, 5)[:16])]
        assert found == sorted(wanted)

    def test_count_from_the_launch_of_the_forward_that_makes_them(self) -> None:
        """I23: before it they would be another's state."""
        kept_at: dict[tuple[Phase, str], int] = {}
        world = cached_world(mode="legacy")
        world.on_border = lambda border: kept_at.setdefault((border.phase, border.side), kept(world)) and None
        world.submit(prompt_of(9), GREEDY)
        world.step()
        assert (kept_at[Phase.PREPARE, "after"], kept_at[Phase.FORWARD, "after"]) == (0, 1)

    @pytest.mark.parametrize("snapshots", [1, 2, 3])
    def test_are_no_more_than_the_budget_and_the_least_recently_used_give_way(self, snapshots: int) -> None:
        world = cached_world(snapshots=snapshots)
        one_by_one(world, [prompt_of(9, salt) for salt in range(5)])
        assert kept(world) == snapshots
        newest = [skipped(one_by_one(world, [prompt_of(9, 4)]))[0]]
        oldest = skipped(one_by_one(world, [prompt_of(9, 0)]))
        assert (newest, oldest) == ([8], [0])

    def test_that_were_used_stay_longer_than_younger_ones(self) -> None:
        world = cached_world(snapshots=2)
        one_by_one(world, [prompt_of(9, 0), prompt_of(9, 1), prompt_of(9, 0), prompt_of(9, 2)])
        assert skipped(one_by_one(world, [prompt_of(9, 0)])) == [8]

    def test_of_blocks_that_somebody_holds_are_kept(self) -> None:
        """Rows that run hold their blocks; a newcomer finds no slot, and leaves no snapshot."""
        world = cached_world(snapshots=1)
        world.submit(prompt_of(9, 0), PLAIN.replace(max_tokens=30))
        world.step()
        world.submit(prompt_of(9, 1), PLAIN.replace(max_tokens=2))
        for _ in range(6):
            world.step()
        world.submit(prompt_of(9, 0), PLAIN.replace(max_tokens=2))
        world.drain()
        assert [one.last.num_cached_tokens for one in world.all if one.last is not None] == [0, 0, 8]

    def test_go_with_the_names_of_their_blocks(self) -> None:
        world = cached_world(num_blocks=25)
        one_by_one(world, [prompt_of(9, 0)])
        one_by_one(world, [prompt_of(97, 1)], max_tokens=3)
        assert world.engine.counters.evictions == 0
        assert skipped(one_by_one(world, [prompt_of(9, 0)])) == [0]

    def test_go_at_once_where_blocks_do(self) -> None:
        world = cached_world(eviction_policy="ref_zero")
        assert skipped(one_by_one(world, [prompt_of(9)] * 2)) == [0, 0]
        assert kept(world) == 0

    @pytest.mark.parametrize("how", ["forget", "reset"])
    def test_are_forgotten_with_the_cache(self, how: str) -> None:
        world = cached_world()
        one_by_one(world, [prompt_of(9)])
        assert kept(world) == 1
        world.forget() if how == "forget" else world.reset()
        assert kept(world) == 0
        assert skipped(one_by_one(world, [prompt_of(9)] * 2)) == [0, 8]

    @pytest.mark.parametrize(("kind", "drafts"), KINDS)
    def test_of_a_hit_that_waits_for_room_are_asked_for_again_and_again_and_cost_nothing(
        self, kind: Kind, drafts: int
    ) -> None:
        """Kind 60: a slot or a pin that a failed admission kept would be lost at every try."""
        world = cached_world(kind, drafts, num_blocks=16, max_sequence_length=48)
        one_by_one(world, [prompt_of(9)])
        world.submit(prompt_of(5, 1), PLAIN.replace(max_tokens=38))
        world.step()
        world.submit(prompt_of(9), PLAIN.replace(max_tokens=20))
        slots, pool = world.engine.table.slots, world.engine.pool
        assert slots is not None
        found = []
        while world.engine.queue.num_waiting:
            found.append((slots.num_free, kept(world)))
            world.step()
        assert len(found) > 8
        assert set(found) == {(world.engine.config.max_requests - 1, 2)}
        world.drain()
        assert world.all[-1].last is not None
        assert world.all[-1].last.num_cached_tokens == 8
        assert pool.num_free == pool.num_blocks

    def test_that_were_staged_are_given_back_if_their_forward_never_ran(self) -> None:
        world = cached_world(snapshots=2)
        for after in (False, True):
            world.submit(prompt_of(9), GREEDY)
            assert world.fail_in(Phase.PREPARE if after else Phase.FORWARD, after=after)
            world.engine.recover()
            world.drain()
        one_by_one(world, [prompt_of(9, 1), prompt_of(9, 2)])
        assert kept(world) == 2

    @pytest.mark.parametrize(("kind", "drafts"), KINDS)
    def test_and_rows_states_come_back_from_offload_bit_for_bit(self, kind: Kind, drafts: int) -> None:
        world = cached_world(kind, drafts)
        one_by_one(world, [prompt_of(13), prompt_of(17, 3)])
        for number in range(3):
            world.submit(prompt_of(15, number), PLAIN.replace(seed=number))
        for _ in range(3):
            world.step()
        engine = world.engine
        in_use = slots_in_use(engine.table, engine.prefix_cache, engine.resolved.config.states_per_row)
        before = engine.runner.cache_tensors[1][in_use].clone()
        engine.suspend("offload")
        assert engine.runner.cache_tensors == ()
        engine.resume()
        assert engine.runner.cache_tensors[1][in_use].tolist() == before.tolist()
        world.drain()
        assert skipped(one_by_one(world, [prompt_of(13)])) == [12]

    @pytest.mark.parametrize("how", ["pause", "persist", "recompute"])
    def test_and_answers_are_right_after_a_standstill(self, how: str) -> None:
        for at in range(1, 6):
            world = cached_world("mtp", 2)
            for number in range(4):
                world.submit(prompt_of(9 + 4 * number, number % 2), PLAIN.replace(seed=number))
            for _ in range(at):
                world.step()
            stand_still(world.engine, how)
            if how == "recompute":
                assert kept(world) == 0 or world.engine.pool.num_free == world.engine.pool.num_blocks
            world.drain()

    def test_budget_that_holds_none_is_a_clear_error(self) -> None:
        with pytest.raises(ConfigError, match="holds no state of 8 bytes"):
            states_world(prefix_caching=True, mamba_cache_gb=SLOT_GIB / 2)
        with pytest.raises(ConfigError, match="prefix_caching only"):
            states_world(mamba_cache_gb=1.0)
