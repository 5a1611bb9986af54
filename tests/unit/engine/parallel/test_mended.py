"""What once broke engines that share experts, each as it was found."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from engine.errors import EngineError, RankError
from engine.request import SamplingParams
from tests.oracle_world import World
from tests.rank_world import RankWorld, rank_world

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)


def serve(world: World, is_over: threading.Event) -> None:
    """Step wherever there is work, and sleep else; to be ended while all sleep."""
    while not is_over.is_set():
        if world.engine.wait_for_work(0.05):
            world.engine.step()


def pause_while_the_other_goes_on(worlds: RankWorld) -> None:
    """Rank 0 runs three iterations for rank 1 in the meantime; then both go on."""
    pausing = worlds.start(0, lambda world: world.engine.pause())
    for _ in range(3):
        worlds.on(1, lambda world: world.engine.step())
    worlds.on(1, lambda world: world.engine.pause())
    pausing.result(10)
    worlds.on_all(lambda world, _: world.engine.resume())


class TestOutputsOfARankThatIsAboutToStandStill:
    def test_come_once_to_a_stream(self) -> None:
        with rank_world(2) as worlds:
            streams = worlds.on_all(lambda world, rank: world.engine.stream([rank + 1], GREEDY))
            worlds.on_all(lambda _, rank: next(streams[rank]))
            pause_while_the_other_goes_on(worlds)

            lengths = worlds.on_all(lambda _, rank: [len(output.token_ids) for output in streams[rank]])

        assert lengths == [[2, 3, 4, 5, 6, 7, 8]] * 2

    def test_come_phase_by_phase_too(self) -> None:
        with rank_world(2) as worlds:
            worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY.replace(max_tokens=4)))
            worlds.step(2)
            pausing = worlds.start(0, lambda world: world.engine.pause())
            for _ in range(3):
                worlds.on(1, lambda world: world.step())
            worlds.on(1, lambda world: world.engine.pause())
            pausing.result(10)
            worlds.on_all(lambda world, _: world.engine.resume())

            def run_phases(world: World, _: int) -> list[str]:
                while world.engine.has_unfinished():
                    if world.step_phase() is None:
                        break
                return world.live_ids

            assert worlds.on_all(run_phases) == [[], []]

    def test_come_in_front_of_a_reset(self) -> None:
        with rank_world(2) as worlds:
            worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY.replace(max_tokens=3)))
            worlds.step(2)
            resetting = worlds.start(0, lambda world: world.reset())
            for _ in range(3):
                worlds.on(1, lambda world: world.step())
            worlds.on(1, lambda world: world.reset())
            resetting.result(10)
            worlds.drain()


class TestAnIdleFleet:
    def test_is_paused_although_the_others_sleep_again(self) -> None:
        with rank_world(2) as worlds:
            worlds.drain()

            def serve_then_pause(world: World) -> None:
                for _ in range(3):
                    if world.engine.wait_for_work(0.1):
                        world.engine.step()
                world.engine.pause()

            others = worlds.start(1, serve_then_pause)
            worlds.on(0, lambda world: world.engine.pause())
            others.result(10)
            assert [world.engine.state.value for world in worlds.worlds] == ["paused", "paused"]

    def test_is_paused_by_nobody_if_only_one_asks(self) -> None:
        with rank_world(2, timeout_s=2.0) as worlds:
            worlds.drain()
            is_over = threading.Event()
            serving = worlds.start(1, lambda world: serve(world, is_over))
            with pytest.raises(RankError, match="pause: no other rank came to it within"):
                worlds.on(0, lambda world: world.engine.pause())
            is_over.set()
            serving.result(10)
            worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY))
            worlds.drain()

    def test_hears_of_a_request_that_comes_as_it_falls_asleep(self) -> None:
        """From another thread, between a rank's vote and the others'."""
        with rank_world(2) as worlds:
            is_over, until = threading.Event(), time.monotonic() + 20
            engines = [world.engine for world in worlds.worlds]
            first = worlds.start(0, lambda world: serve(world, is_over))
            time.sleep(0.1)
            engines[0].add_request([1, 2], GREEDY.replace(max_tokens=3))
            second = worlds.start(1, lambda world: serve(world, is_over))
            while not engines[0].counters.finished or any(one.fleet and one.fleet._is_awake for one in engines):
                assert time.monotonic() < until, "nobody was woken"
                time.sleep(0.01)
            is_over.set()
            first.result(15)
            second.result(15)

    def test_switches_by_two_ranks_one_behind_the_other(self) -> None:
        with rank_world(2) as worlds:
            worlds.drain()
            for rank, mode in enumerate(("legacy", "async")):
                worlds.on(rank, lambda world, mode=mode: world.engine.set_mode(mode))  # type: ignore[misc]
                worlds.step()
                assert [world.engine.mode for world in worlds.worlds] == [mode, mode]


def test_ranks_that_want_different_things_leave_the_others_running() -> None:
    with rank_world(4, timeout_s=5) as worlds:
        worlds.on_all(lambda world, rank: world.submit([rank + 1], GREEDY))
        worlds.step(2)
        asking: list[Any] = [
            worlds.start(0, lambda world: world.engine.pause()),
            worlds.start(1, lambda world: world.engine.suspend("persist")),
        ]
        stepping = [worlds.start(rank, lambda world: world.step()) for rank in (2, 3)]
        for one in asking:
            with pytest.raises(RankError, match="want different things at once"):
                one.result(10)
        for one in stepping:
            one.result(10)
        worlds.drain()


def test_what_one_rank_alone_could_not_do_ends_the_work_of_all() -> None:
    """New weights that one rank refused: going on, some experts would be old and some new."""
    with rank_world(2) as worlds:
        worlds.on_all(lambda world, _: world.engine.pause())
        lifecycle = worlds.worlds[1].engine._lifecycle
        lifecycle.load_weights = lambda source: None  # type: ignore[method-assign]

        with pytest.raises(EngineError):
            worlds.on_all(lambda world, _: world.engine.load_weights([]))

        for rank in range(2):
            with pytest.raises(EngineError, match="make new engines on all ranks"):
                worlds.on(rank, lambda world: world.engine.resume())


def test_a_gated_engine_reads_eagerly_what_fits_no_graph_beside_others() -> None:
    sizes: dict[str, Any] = {"graphs": (4, 12), "max_sequence_length": 16, "max_batch_tokens": 16}
    with rank_world(2, graph_all_prefills=True, **sizes) as worlds:
        worlds.on(0, lambda world: [world.submit([n], GREEDY.replace(max_tokens=6)) for n in range(4)])
        worlds.step(2)
        worlds.on(1, lambda world: world.submit([5] * 12, GREEDY.replace(max_tokens=3)))
        worlds.drain()

        assert worlds.worlds[1].engine.counters.miss_reasons["no graph holds what all ranks have"] == 1
