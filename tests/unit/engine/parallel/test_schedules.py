"""Engines that share experts: whatever each of them has to do, all do the same together, and every token is right.

Each answer is compared with the oracle's as it comes (``tests/oracle_world.py``), with invariants checked at every
border; a token that came to a wrong expert, or a result that came back to a wrong token, would change it.
"""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

import numpy as np
import pytest

from engine.config import MODES, Mode
from engine.errors import ConfigError, EngineError, RankError
from engine.parallel.log import first_difference
from engine.phases import Order, Phase
from engine.request import SamplingParams
from tests.oracle_world import PlantedError, World, random_params, random_prompt, shared_prompt
from tests.rank_world import PerRank, RankWorld, rank_world

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
DRAFTS = [0, 2]
STANDS = ("busy", "primer", "draining", "idle")
"""What a rank may have to do in an iteration."""
AT = 3
"""The iteration in which it has."""


def world_of(mode: Mode, drafts: int, size: int = 2, **options: Any) -> RankWorld:
    kind = "moe-mtp" if drafts else "moe"
    return RankWorld(size, kind=kind, mode=mode, speculative_tokens=drafts, **options)


def prepare_stand(world: World, stand: str, iteration: int) -> None:
    """Hand in what makes a rank stand so at iteration ``AT``; called before each iteration up to that one."""
    if stand == "busy" and iteration == 0:
        world.submit([1, 2, 3], GREEDY.replace(max_tokens=30))
        world.submit([4] * 9, GREEDY.replace(max_tokens=30, temperature=1.0, seed=5))
    if stand == "draining" and iteration == AT - 1:
        world.submit([5, 6], GREEDY.replace(max_tokens=1))
    if stand == "primer" and iteration == AT:
        world.submit([7, 8, 9], GREEDY)


def settle_in(worlds: RankWorld, stands: tuple[str, ...]) -> None:
    for iteration in range(AT + 1):
        worlds.on_all(lambda world, rank, at=iteration: prepare_stand(world, stands[rank], at))  # type: ignore[misc]
        if iteration < AT:
            worlds.step()


def orders_of(world: World) -> list[str]:
    return [record.order for record in world.engine.recorder.iterations()]


class TestEveryMixOfRanks:
    @pytest.mark.parametrize("act", ["nothing", "switch", "persist", "offload", "recompute", "reset"])
    @pytest.mark.parametrize("drafts", DRAFTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_does_the_same_together(self, mode: Mode, drafts: int, act: str) -> None:
        """The cross product of what two ranks have to do, and of what is asked of both in the midst of it."""
        for stands in product(STANDS, repeat=2):
            worlds = world_of(mode, drafts)
            settle_in(worlds, stands)
            if act == "switch":
                worlds.on(0, lambda world: world.engine.set_mode("legacy" if mode == "async" else "async"))
            elif act == "reset":
                worlds.on_all(lambda world, _: world.reset())
            elif act != "nothing":
                worlds.on_all(lambda world, _: world.engine.suspend(act))
                worlds.on_all(lambda world, _: world.engine.resume())
            worlds.drain()
            if act == "switch" and set(stands) != {"idle"}:
                assert {world.engine.mode for world in worlds.worlds} == {"legacy" if mode == "async" else "async"}
            worlds.close()

    @pytest.mark.parametrize("drafts", DRAFTS)
    def test_takes_the_order_that_its_rank_calls_for(self, drafts: int) -> None:
        found = {}
        for stand in STANDS:
            worlds = world_of("async", drafts)
            settle_in(worlds, ("busy", stand))
            worlds.step()
            found[stand] = orders_of(worlds.worlds[1])[-1]
            worlds.drain()
            worlds.close()

        mtp = "mtp_" if drafts else ""
        assert found == {
            "busy": f"{mtp}overlap",
            "primer": f"{mtp}primer",
            "draining": f"{mtp}no_overlap",
            "idle": f"{mtp}dummy",
        }

    @pytest.mark.parametrize("mode", MODES)
    def test_drafts_before_the_forward_in_async_and_behind_it_in_legacy(self, mode: Mode) -> None:
        with rank_world(2, kind="moe-mtp", mode=mode, speculative_tokens=2) as worlds:
            settle_in(worlds, ("busy", "idle"))
            for ranks in worlds.ranks:
                ranks.log.clear()
            worlds.step()

            for log in worlds.logs():
                purposes = [one.purpose for one in log if one.place == "device"]
                drafted, forward = purposes.index("draft"), purposes.index("forward")
                assert (drafted < forward) is (mode == "async")
                assert purposes == sorted(purposes, reverse=mode == "legacy")
            worlds.drain()

    def test_launches_nothing_where_nobody_has_a_forward(self) -> None:
        with rank_world(2) as worlds:
            worlds.on_all(lambda world, _: world.submit([1], GREEDY.replace(max_tokens=1)))
            worlds.step()  # the primers
            before = worlds.ranks[0].log.counts()["device"]
            worlds.step()  # both drain
            assert worlds.ranks[0].log.counts()["device"] == before
            worlds.drain()

    @pytest.mark.parametrize("size", [1, 3, 4])
    def test_of_other_numbers_of_ranks(self, size: int) -> None:
        options: dict[str, Any] = {"expert_parallel": size} if size != 3 else {}
        if size == 3:
            with pytest.raises(ConfigError, match="8 experts cannot be shared out evenly"):
                RankWorld(3)
            return
        with rank_world(size, kind="moe-mtp", speculative_tokens=1, **options) as worlds:
            worlds.on(size - 1, lambda world: world.submit([1, 2, 3], GREEDY))
            worlds.step(2)
            worlds.on(0, lambda world: world.submit([5] * 20, GREEDY))
            worlds.drain()


class TestRequests:
    @pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
    @pytest.mark.parametrize("drafts", DRAFTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_get_the_tokens_of_one_rank_wherever_they_are(self, mode: Mode, drafts: int, dispatch: str) -> None:
        """Spread evenly, all on one rank, late, and of different lengths."""
        for places in ([0, 1] * 4, [0] * 8, [1] * 8):
            worlds = world_of(mode, drafts, expert_dispatch=dispatch)
            for number, place in enumerate(places):
                params = GREEDY.replace(max_tokens=2 + 3 * number, temperature=float(number % 2), seed=number)
                worlds.on(place, lambda world, n=number, p=params: world.submit([n + 1] * (3 * n + 1), p))  # type: ignore[misc]
                if number > 3:
                    worlds.step()
            worlds.drain()
            worlds.close()

    @pytest.mark.parametrize("device", ["inline", "cpu"])
    @pytest.mark.parametrize("drafts", DRAFTS)
    @pytest.mark.parametrize("seed", range(3))
    def test_of_random_schedules(self, seed: int, drafts: int, device: str) -> None:
        rng = random.Random(1000 * seed + drafts)
        options: dict[str, Any] = {
            "prefix_caching": bool(seed % 2),
            "chunked_prefill": seed > 0,
            "max_batch_tokens": 24 if seed > 0 else 120,
            "capacity_policy": "max_utilization" if seed == 2 else "guaranteed_no_evict",
            "num_blocks": 40 if seed == 2 else 60,
            "overlap_admission": seed != 1,
        }
        worlds = world_of(rng.choice(MODES), drafts, device=device, **options)  # type: ignore[arg-type]
        own = [random.Random(rng.random()) for _ in range(2)]

        def act(world: World, rank: int) -> None:
            mine = own[rank]
            for _ in range(mine.choice([0, 0, 1, 1, 2])):
                prompt = (shared_prompt if seed % 2 else random_prompt)(mine, 40)
                world.submit(prompt, random_params(mine, max_tokens=20), stream=mine.random() < 0.5)
            if world.live_ids and mine.random() < 0.1:
                world.abort(mine.choice(world.live_ids))

        for _ in range(25):
            worlds.on_all(act)
            if rng.random() < 0.1:
                mode, rank = rng.choice(MODES), rng.randrange(2)
                worlds.on(rank, lambda world, mode=mode: world.engine.set_mode(mode))  # type: ignore[misc]
            if rng.random() < 0.05:
                how = rng.choice(["persist", "recompute"])
                worlds.on_all(lambda world, _, how=how: world.engine.suspend(how))  # type: ignore[misc]
                worlds.on_all(lambda world, _: world.engine.resume())
            worlds.step()
        worlds.drain()
        worlds.close()

    def test_of_a_rank_without_any_wait_for_nobody(self) -> None:
        """``generate`` returns on all ranks once all are served."""
        with rank_world(2) as worlds:
            prompts: list[list[list[int]]] = [[[1, 2], [3]], []]

            found = worlds.on_all(lambda world, rank: world.engine.generate(prompts[rank], GREEDY, progress=False))

            assert [len(one) for one in found] == [2, 0]
            assert worlds.worlds[1].engine.counters.dummy_steps > 0
            worlds.check_collectives()


class TestGraphs:
    def test_are_the_same_on_all_ranks(self) -> None:
        """Decode rows of one rank, none of the other: both replay, and so they do beside a prompt."""
        sizes: dict[str, Any] = {"graphs": (4, 16), "max_sequence_length": 16, "max_batch_tokens": 16}
        with rank_world(2, **sizes) as worlds:
            worlds.on(0, lambda world: [world.submit([n], GREEDY.replace(max_tokens=6)) for n in range(3)])
            worlds.step(3)
            worlds.on(1, lambda world: world.submit([5] * 9, GREEDY.replace(max_tokens=4)))
            worlds.drain()

            for world in worlds.worlds:
                assert world.engine.counters.graph_misses == 0
                assert world.engine.counters.graph_hits > 0

    def test_are_agreed_on_from_what_all_have(self) -> None:
        """A prompt that fits a graph alone, but not beside the other rank's rows, is read eagerly by both."""
        sizes: dict[str, Any] = {"graphs": (4, 12), "max_sequence_length": 16, "max_batch_tokens": 16}
        with rank_world(2, **sizes) as worlds:
            worlds.on(0, lambda world: [world.submit([n], GREEDY.replace(max_tokens=6)) for n in range(4)])
            worlds.step(2)
            worlds.on(1, lambda world: world.submit([5] * 12, GREEDY.replace(max_tokens=3)))
            worlds.step()

            reasons = [world.engine.counters.miss_reasons for world in worlds.worlds]
            assert all(one["no graph holds what all ranks have"] == 1 for one in reasons)
            worlds.drain()

    def test_that_admission_waits_for_cost_no_collective(self) -> None:
        """Failed attempts to admit are the rank's own: each iteration has the same collectives as without any."""
        sizes: dict[str, Any] = {"graphs": (4, 8), "max_sequence_length": 16, "max_batch_tokens": 16}

        def collectives_of_ten_steps(*, has_waiting: bool) -> list[Any]:
            with rank_world(2, graph_all_prefills=True, **sizes) as worlds:
                worlds.on(0, lambda world: [world.submit([n], GREEDY.replace(max_tokens=14)) for n in range(2)])
                worlds.step(2)
                if has_waiting:
                    worlds.on(0, lambda world: world.submit([5] * 8, GREEDY.replace(max_tokens=2)))
                for ranks in worlds.ranks:
                    ranks.log.clear()
                worlds.step(10)
                waits = worlds.worlds[0].engine.counters.graph_wait_steps
                assert (waits > 5) is has_waiting
                found = [one.key for one in worlds.logs()[0]]
                worlds.drain()
                return found

        assert collectives_of_ten_steps(has_waiting=True) == collectives_of_ten_steps(has_waiting=False)


class TestDummyWork:
    @pytest.mark.parametrize("graphs", [None, 1])
    @pytest.mark.parametrize("drafts", DRAFTS)
    @pytest.mark.parametrize("mode", MODES)
    def test_changes_nothing_but_its_own_count(self, mode: Mode, drafts: int, graphs: int | None) -> None:
        """Of a rank that has cached prefixes, snapshots, and a request that waits to be handed its end (I56)."""
        options: dict[str, Any] = {"prefix_caching": True, "graphs": graphs, "graph_non_decode": False}
        options["debug_invariants"] = False  # it poisons what is void, again and again
        with rank_world(2, kind="moe-mtp", mode=mode, speculative_tokens=drafts, **options) as worlds:
            worlds.on_all(lambda world, _: world.submit([3] * 17, GREEDY.replace(max_tokens=5)))
            worlds.drain()
            worlds.on(0, lambda world: world.submit([9, 8, 7], GREEDY.replace(max_tokens=12)))
            before = everything_of(worlds.worlds[1])
            worlds.step(4)
            behind = everything_of(worlds.worlds[1])
            dummies = worlds.worlds[1].engine.counters.dummy_steps
            worlds.drain()

        assert dummies >= 4
        assert before.keys() == behind.keys()
        for name, value in before.items():
            assert np.array_equal(value, behind[name]), name

    def test_is_the_same_work_as_a_forward(self) -> None:
        """A dummy replays the graph that the others replay."""
        with rank_world(2, graphs=1, graph_non_decode=False) as worlds:
            worlds.on(0, lambda world: world.submit([1, 2], GREEDY))
            worlds.step(3)
            runner, replays = worlds.worlds[1].engine.runner, []
            real = runner.graphs.replay
            runner.graphs.replay = lambda shape: replays.append(shape) or real(shape)  # type: ignore[method-assign,func-returns-value]
            worlds.step()

            assert [shape.num_tokens for shape in replays] == [4]
            worlds.drain()


def everything_of(world: World) -> dict[str, Any]:
    """All that a rank keeps, but its count of dummies, and the places that padding is for."""
    engine = world.engine
    runner, columns = engine.runner, engine.runner.columns
    engine.device.synchronize()
    found: dict[str, Any] = {f"counter {name}": str(value) for name, value in engine.counters.to_dict().items()}
    del found["counter dummy_steps"]
    for name in ("block_table", "ints", "floats", "drafts", "length", "accepted"):
        column = getattr(columns, name)
        if column is not None:
            found[f"column {name}"] = column[: columns.dummy_row].numpy().copy()
    for number, (tensor, is_paged) in enumerate(zip(runner.cache_tensors, runner.are_paged, strict=True)):
        last = engine.resolved.num_blocks if is_paged else engine.resolved.dummy_slot
        found[f"cache {number}"] = tensor[:last].numpy().copy()
    table = engine.table
    for name in ("kv_len", "block_ids", "block_count", "state_slot", "num_output", "key"):
        found[f"table {name}"] = getattr(table, name).copy()
    found["live"], found["version"] = table.num_live, table.version
    found["pool"] = engine.pool.ref_counts.copy()
    found["free"] = engine.pool.num_free
    if engine.prefix_cache is not None:
        found["cached"] = str(sorted(engine.pool.index.idle)) if hasattr(engine.pool, "index") else ""
        if engine.prefix_cache.snapshots is not None:
            found["snapshots"] = np.sort(engine.prefix_cache.snapshots.slots)
    found["next key"], found["pending"] = engine._next_key, engine.pending is None
    return found


class TestModes:
    def test_switch_on_all_ranks_in_the_same_iteration_whoever_asks(self) -> None:
        with rank_world(2) as worlds:
            worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY.replace(max_tokens=20)))
            worlds.step(4)
            worlds.on(1, lambda world: world.engine.set_mode("legacy"))
            worlds.step(4)

            modes = [[record.mode for record in world.engine.recorder.iterations()] for world in worlds.worlds]
            assert modes[0] == modes[1]
            assert modes[0][-1] == "legacy"
            worlds.drain()

    def test_two_at_once_are_an_error_on_all_ranks(self) -> None:
        with rank_world(2) as worlds:
            worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY))
            worlds.step(2)
            worlds.on(0, lambda world: world.engine.set_mode("legacy"))
            worlds.on(1, lambda world: world.engine.set_mode("async"))

            with pytest.raises(RankError, match="ask for different modes at once"):
                worlds.step()

    def test_that_differ_at_the_start_are_an_error(self) -> None:
        with pytest.raises(ConfigError, match=r"rank \d differs from rank \d in mode"):
            RankWorld(2, mode=PerRank(("async", "legacy")))


class TestStandingStill:
    def test_is_done_by_all_or_waits_while_the_others_go_on(self) -> None:
        """A rank that pauses runs what the others need until they pause too; what it answers meanwhile is not lost."""
        with rank_world(2) as worlds:
            worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY, stream=True))
            worlds.step(2)
            pausing = worlds.start(0, lambda world: world.engine.pause())
            for _ in range(3):
                worlds.on(1, lambda world: world.step())
            assert not pausing.done()
            worlds.on(1, lambda world: world.engine.pause())
            pausing.result(10)

            assert [world.engine.state.value for world in worlds.worlds] == ["paused", "paused"]
            worlds.on_all(lambda world, _: world.engine.resume())
            worlds.drain()

    def test_in_two_ways_at_once_is_an_error(self) -> None:
        with rank_world(2) as worlds, pytest.raises(RankError, match=r"rank 0: pause, rank 1: suspend\(persist\)"):
            worlds.on_all(lambda world, rank: world.engine.suspend("persist") if rank else world.engine.pause())

    def test_with_new_weights_is_done_by_all(self) -> None:
        with rank_world(2) as worlds:
            worlds.on_all(lambda world, _: world.engine.pause())
            with pytest.raises(EngineError, match="weight_targets"):  # the oracle has none
                worlds.on_all(lambda world, _: world.engine.load_weights([]))
            worlds.on_all(lambda world, _: world.engine.resume())

    def test_at_the_end_waits_for_those_who_still_work(self) -> None:
        with rank_world(2) as worlds:
            worlds.on(1, lambda world: world.submit([1, 2], GREEDY))
            closing = worlds.start(0, lambda world: world.engine.close())
            worlds.on(1, lambda world: world.drain())
            closing.result(10)

            assert worlds.worlds[0].engine.is_closed

    def test_for_want_of_work_ends_with_a_request_at_any_rank(self) -> None:
        with rank_world(2) as worlds:
            worlds.drain()
            assert worlds.on_all(lambda world, _: world.engine.wait_for_work(0.01)) == [False, False]
            sleeping = worlds.start(0, lambda world: world.engine.wait_for_work(20))
            time.sleep(0.05)
            assert not sleeping.done()
            worlds.on(1, lambda world: world.submit([4, 5], GREEDY))

            assert sleeping.result(10)
            worlds.drain()
            assert worlds.worlds[0].engine.counters.dummy_steps > 0


class TestFailures:
    @pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.FORWARD, Phase.RESOLVE])
    def test_of_one_rank_are_told_to_the_others(self, phase: Phase) -> None:
        with rank_world(2, timeout_s=10) as worlds:
            worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY))
            worlds.step(2)

            def fail(world: World) -> None:
                with world.fault_in(phase, after=False):
                    world.step()

            failing = worlds.start(1, fail)
            others = worlds.start(0, lambda world: [world.step() for _ in range(3)])
            with pytest.raises(PlantedError):
                failing.result(10)
            with pytest.raises(EngineError, match=r"rank 1 has failed in iteration \d"):
                others.result(10)
            assert worlds.worlds[0].engine.failure is not None

    def test_cannot_be_recovered_from_by_one_rank(self) -> None:
        with rank_world(2, timeout_s=0.2) as worlds:
            worlds.on(0, lambda world: world.submit([1], GREEDY))
            with pytest.raises(RankError, match="rank 1 did not come"):
                worlds.on(0, lambda world: world.step())
            with pytest.raises(EngineError, match="make new engines on all of them"):
                worlds.on(0, lambda world: world.engine.recover())


class TestOptions:
    def test_that_need_other_ranks_say_how_to_start_them(self) -> None:
        from engine.config import EngineConfig
        from engine.engine import Engine
        from tests.oracle_world import loaded_oracle

        with pytest.raises(ConfigError, match="torchrun --nproc-per-node N"):
            Engine(loaded_oracle(kind="moe"), EngineConfig(expert_parallel=2))

    def test_need_a_model_with_experts(self) -> None:
        with pytest.raises(ConfigError, match="the model has no experts"):
            RankWorld(2, kind="oracle")

    def test_with_all_to_all_refuse_graphs(self) -> None:
        with pytest.raises(ConfigError, match="graphs cannot hold it"):
            RankWorld(2, expert_dispatch="all_to_all", graphs=4)

    def test_of_another_number_of_ranks_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="expert_parallel=4, but 2 ranks were started"):
            RankWorld(2, expert_parallel=4)


class TestTheChecker:
    def test_sees_a_rank_that_runs_no_dummy(self) -> None:
        """The fault of engines that return early where a rank has nothing to do."""
        with rank_world(2, timeout_s=2.0, device="cpu") as worlds:
            worlds.on(0, lambda world: world.submit([1, 2], GREEDY))
            worlds.worlds[1].engine.runner.launch_dummy = lambda plan: None  # type: ignore[method-assign]

            with pytest.raises(EngineError):
                worlds.drain()

            difference = first_difference(worlds.logs())
            assert difference is not None
            assert difference.place == "device"
            assert difference.collectives[1] is None

    def test_sees_a_rank_that_drafts_in_the_wrong_order(self) -> None:
        with rank_world(2, kind="moe-mtp", speculative_tokens=1, timeout_s=2.0, device="cpu") as worlds:
            settle_in(worlds, ("busy", "busy"))
            phases = worlds.worlds[1].engine.controller.phase_functions
            late: list[Any] = []
            draft, forward = phases[Phase.DRAFT], phases[Phase.FORWARD]
            phases[Phase.DRAFT] = late.append
            phases[Phase.FORWARD] = lambda iteration: (forward(iteration), draft(late.pop()))  # type: ignore[func-returns-value]

            with pytest.raises(EngineError):
                worlds.drain()

            difference = first_difference(worlds.logs())
            assert difference is not None
            assert [one.purpose for one in difference.collectives if one is not None] == ["draft", "forward"]


def test_every_order_among_ranks_is_taken_by_some_test_above() -> None:
    needing = {order for order in Order if order.needs_ranks}
    assert needing == {
        Order.DUMMY,
        Order.MTP_DUMMY,
        Order.MTP_LEGACY_DUMMY,
        Order.MTP_PRIMER,
        Order.SHARED_DRAIN,
        Order.MTP_SHARED_DRAIN,
    }
