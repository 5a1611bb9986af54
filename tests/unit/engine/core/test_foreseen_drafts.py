"""Drafts come back to the host beside the tokens that were drawn in their places."""

from __future__ import annotations

from itertools import product

import pytest

from engine.controller import Border
from engine.engine import Engine
from engine.models.oracle import Skill
from engine.phases import Phase
from engine.request import SamplingParams
from tests.drafting_world import GREEDY, PLAIN, RICH, SETTINGS, DraftingWorld, prompt_of, times_met
from tests.foreseen_drafts import SCHEDULES, ForeseenDrafts, watch_too
from tests.rank_world import rank_world

SKILLS: list[Skill] = ["right", "mixed", "wrong"]
ALL_PLAIN = [PLAIN.replace(seed=seed, max_tokens=3 + 2 * seed) for seed in range(3)] + [GREEDY] * 3


class Watched:
    """Compares at every resolve; more than four requests, so rows move and others enter them."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.foreseen = engine, ForeseenDrafts(engine)
        self.num_drafted = self.num_without = 0
        watch_too(engine, self._look)

    def _look(self, border: Border) -> None:
        self.foreseen(border)
        verified = border.iteration.verified
        if (border.phase, border.side) != (Phase.RESOLVE, "after") or verified is None:
            return
        drafts = self.engine.config.speculative_tokens
        told = verified.foreseen()
        assert told.shape == (drafts, verified.num_rows)
        for i, key in enumerate(verified.keys.tolist()):
            assert told[:, i].tolist() == self.foreseen.newest.get(key, [-1] * drafts)
            self.num_drafted += key in self.foreseen.newest
            self.num_without += key not in self.foreseen.newest


class TestDraftsOnTheHost:
    @pytest.mark.parametrize("params", [ALL_PLAIN, RICH], ids=["plain", "rich"])
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_are_those_that_were_verified_whatever_rows_do(self, setting: str, params: list[SamplingParams]) -> None:
        met = 0
        for schedule in SCHEDULES:
            world = DraftingWorld(3, **schedule, **SETTINGS[setting])
            watched = Watched(world.engine)
            world.serve(params)
            met += times_met(world, setting)
            assert watched.num_drafted > 10
            assert watched.num_without >= len(params)
        assert met > 0

    def test_are_so_for_every_head_and_count(self) -> None:
        for skill, drafts, schedule in product(SKILLS, (1, 2), SCHEDULES):
            world = DraftingWorld(drafts, skill=skill, **schedule)
            watched = Watched(world.engine)
            world.serve(ALL_PLAIN)
            assert watched.num_drafted > 10

    def test_are_so_on_the_thread_device(self) -> None:
        world = DraftingWorld(2, device="cpu", late_rewind=True)
        watched = Watched(world.engine)
        world.serve(ALL_PLAIN)
        assert watched.num_drafted > 10

    def test_are_so_where_the_mode_is_switched_and_a_request_aborted(self) -> None:
        world = DraftingWorld(2)
        watched = Watched(world.engine)
        gone = world.submit(prompt_of(9), GREEDY.replace(max_tokens=40))
        for _ in range(4):
            world.step()
        world.abort(gone)
        world.serve_switching(ALL_PLAIN, 3)
        assert watched.num_drafted > 10

    def test_are_so_on_each_rank_beside_ranks_that_have_nothing_to_do(self) -> None:
        for schedule in SCHEDULES:
            with rank_world(2, kind="moe-mtp", speculative_tokens=2, **schedule) as worlds:
                watched = worlds.on_all(lambda world, _: Watched(world.engine))
                worlds.on(0, lambda world: [world.submit(prompt_of(5 + n), one) for n, one in enumerate(ALL_PLAIN)])
                worlds.step(4)
                worlds.on(1, lambda world: world.submit(prompt_of(7), PLAIN))
                worlds.drain()
                assert all(one.num_drafted > 3 for one in watched)

    def test_are_none_where_nothing_was_drafted(self) -> None:
        """A primer and a drained engine verify nothing; a prompt's verification has rows and no drafts."""
        world = DraftingWorld(2)
        found: list[list[list[int]] | None] = []

        def look(border: Border) -> None:
            if border.side == "after" and border.phase is border.iteration.order.phases[-1]:
                verified = border.iteration.verified
                found.append(None if verified is None else verified.foreseen().tolist())

        watch_too(world.engine, look)
        world.submit(prompt_of(5), GREEDY.replace(max_tokens=1))
        world.drain()
        assert found == [None, [[-1], [-1]]]
