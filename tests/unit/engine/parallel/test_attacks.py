"""What users may do to engines that share experts, in an order that nobody planned."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from engine.config import MODES
from engine.errors import EngineError
from engine.request import SamplingParams
from tests.oracle_world import World, random_params, shared_prompt
from tests.rank_world import PerRank, rank_world

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)


def test_generate_on_one_rank_is_served_by_one_that_only_waits_for_work() -> None:
    with rank_world(2) as worlds:
        is_over = threading.Event()

        def serve(world: World) -> None:
            while not is_over.is_set():
                if world.engine.wait_for_work(0.1):
                    world.engine.step()

        serving = worlds.start(1, serve)
        for number in range(2):
            found = worlds.on(0, lambda world, n=number: world.engine.generate([[n + 1]], GREEDY, progress=False))  # type: ignore[misc]
            assert len(found[0].token_ids) == 8
        is_over.set()
        serving.result(10)
        worlds.check_collectives()


def test_a_stream_that_ends_first_leaves_its_rank_to_those_of_others_when_it_closes() -> None:
    with rank_world(2) as worlds:

        def read_to_the_end(world: World, rank: int) -> int:
            params = GREEDY.replace(max_tokens=3 + 10 * rank)
            found = sum(1 for _ in world.engine.stream([rank + 1], params))
            world.engine.close()
            return found

        assert worlds.on_all(read_to_the_end) == [3, 13]


def test_a_request_aborted_while_all_are_paused_ends_behind_the_pause() -> None:
    with rank_world(2) as worlds:
        ids = worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY))
        worlds.step(2)
        worlds.on_all(lambda world, _: world.engine.pause())
        worlds.on(0, lambda world: world.abort(ids[0]))
        worlds.on_all(lambda world, _: world.engine.resume())
        worlds.drain()


def test_a_rank_that_closes_in_mid_iteration_is_missed_by_the_others_at_once() -> None:
    with rank_world(2) as worlds:
        worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY))
        worlds.step(2)
        worlds.on_all(lambda world, _: world.step_phase())
        worlds.on(0, lambda world: world.engine.close())

        with pytest.raises(EngineError, match="rank 0 has left"):
            worlds.on(1, lambda world: [world.step() for _ in range(3)])


@pytest.mark.parametrize("seed", [0, 3])
def test_tiny_graphs_with_drafts_and_few_blocks_say_what_one_rank_says(seed: int) -> None:
    """Prompt log probabilities, penalties and chunks on some ranks while others replay; one rank has fewer blocks."""
    rng, drafts = random.Random(seed), 1 + seed % 3
    options: dict[str, Any] = {
        "graphs": 1 + seed % 2,
        "graph_non_decode": seed > 1,
        "max_sequence_length": 16,
        "max_batch_tokens": 24,
        "num_blocks": PerRank((9, 14)),
        "chunked_prefill": bool(seed % 2),
        "prefix_caching": True,
        "capacity_policy": "max_utilization",
    }
    mode, own = rng.choice(MODES), [random.Random(rng.random()) for _ in range(2)]
    with rank_world(2, kind="moe-mtp", mode=mode, speculative_tokens=drafts, **options) as worlds:

        def act(world: World, rank: int) -> None:
            mine = own[rank]
            if mine.random() < (0.3, 0.9)[rank]:
                prompt = shared_prompt(mine, 10)
                world.submit(prompt, random_params(mine, max_tokens=16 - len(prompt)))
            if world.live_ids and mine.random() < 0.1:
                world.abort(mine.choice(world.live_ids))

        for _ in range(15):
            worlds.on_all(act)
            worlds.step()
        worlds.drain()
