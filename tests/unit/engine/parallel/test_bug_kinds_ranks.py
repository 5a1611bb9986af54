"""Kinds of fault that other engines had between ranks, provoked here: numbers are those of the reference's list."""

from __future__ import annotations

from typing import Any

import pytest

from engine.request import SamplingParams
from tests.rank_world import rank_world

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, seed=0, ignore_eos=True)


class TestKind7RanksWithoutTokensReturnEarly:
    @pytest.mark.parametrize("graphs", [None, 1])
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_all_requests_are_one_ranks_and_all_of_another_have_ended(self, mode: Any, graphs: int | None) -> None:
        with rank_world(2, mode=mode, graphs=graphs, graph_non_decode=False) as worlds:
            worlds.on(1, lambda world: world.submit([3], GREEDY.replace(max_tokens=2)))
            worlds.on(0, lambda world: [world.submit([n, 2], GREEDY.replace(max_tokens=20)) for n in range(3)])
            worlds.drain()

            assert worlds.worlds[1].engine.counters.dummy_steps > 10


class TestKind53DummyWorkShiftsWhatRowsCarryOver:
    @pytest.mark.parametrize("skill", ["right", "mixed", "wrong"])
    def test_drafts_go_on_behind_dummy_iterations(self, skill: str) -> None:
        """Positions, drafts and states of a row that comes behind dummy ones, beside others, and once more."""
        with rank_world(2, kind="moe-mtp", skill=skill, speculative_tokens=3) as worlds:
            worlds.on(0, lambda world: world.submit([1] * 5, GREEDY.replace(max_tokens=40)))
            for number in range(3):
                worlds.step(3)
                worlds.on(1, lambda world, n=number: world.submit([n + 2] * (n + 1), GREEDY))  # type: ignore[misc]
                worlds.step(6)
            worlds.drain()

            assert worlds.worlds[1].engine.counters.dummy_steps > 0


class TestKind57OneRankDecidesByItself:
    @pytest.mark.parametrize("drafts", [0, 2])
    def test_an_abort_at_one_rank_leaves_the_others_in_step(self, drafts: int) -> None:
        """In every phase in which it may come."""
        for at in range(8):
            with rank_world(2, kind="moe-mtp", speculative_tokens=drafts) as worlds:
                worlds.on_all(lambda world, rank: world.submit([rank + 1] * 3, GREEDY, request_id="one"))
                worlds.step(3)

                def abort_at(border: Any, at: int = at, seen: list[int] | None = None) -> None:
                    world = worlds.worlds[1]
                    place = border.iteration.order.phases.index(border.phase)
                    if place == at and "one" in world.live_ids and border.side == "before":
                        world.abort("one")

                worlds.worlds[1].on_border = abort_at
                worlds.step(2)
                worlds.worlds[1].on_border = None
                worlds.drain()


class TestKind64DummyBatchesRunAnotherWay:
    @pytest.mark.parametrize("drafts", [0, 2])
    def test_a_dummy_issues_what_a_forward_issues(self, drafts: int) -> None:
        """Eager or captured, collective by collective."""
        for graphs in (None, 1):
            options: dict[str, Any] = {"graphs": graphs, "graph_non_decode": False, "speculative_tokens": drafts}
            with rank_world(2, kind="moe-mtp", **options) as worlds:
                worlds.on(0, lambda world: world.submit([1, 2], GREEDY))
                worlds.step(3)
                for ranks in worlds.ranks:
                    ranks.log.clear()
                worlds.step()

                own, others = (ranks.log.entries("device") for ranks in worlds.ranks)
                assert [one.key for one in own] == [one.key for one in others]
                assert not any(one.is_dummy for one in own)
                assert all(one.is_dummy for one in others)
                worlds.drain()
