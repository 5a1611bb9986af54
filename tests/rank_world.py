"""Several ranks in one process: an engine on the oracle model with experts a thread, each in a checked world."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.parallel.local import LocalRanks
from engine.parallel.log import Collective, first_difference
from engine.parallel.shard import Shard, building
from tests.oracle_world import SMALL, Kind, World, make_oracle

T = TypeVar("T")

LIMIT_S = 60.0
"""After which a test of several ranks has hung."""
TIMEOUT_S = 20.0
"""After which a rank gives up on the others."""


@cache
def loaded_rank(rank: int, size: int, kind: Kind, skill: Any) -> LoadedModel:
    """The part of the oracle that one rank holds."""
    with building(Shard(rank, size)):
        return make_oracle(kind=kind, skill=skill)


class RankWorld:
    """``size`` ranks, each with a thread, an engine and a world of its own."""

    def __init__(self, size: int = 2, *, kind: Kind = "moe", skill: Any = "mixed", **options: Any) -> None:
        self.size = size
        self.ranks = LocalRanks.make(size, timeout_s=options.pop("timeout_s", TIMEOUT_S))
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in range(size)]
        config: dict[str, Any] = {**SMALL, "expert_parallel": size, **options}

        def make(rank: int) -> World:
            own = {name: value[rank] if isinstance(value, PerRank) else value for name, value in config.items()}
            loaded = loaded_rank(rank, size, kind, skill)
            return World(Engine(loaded, EngineConfig(**own), ranks=self.ranks[rank]))

        self.worlds: list[World] = []
        self.worlds = self._on_all(make)

    def on_all(self, do: Callable[[World, int], T]) -> list[T]:
        """``do(world, rank)`` on every rank at once; what the first of them raises is raised."""
        return self._on_all(lambda rank: do(self.worlds[rank], rank))

    def on(self, rank: int, do: Callable[[World], T]) -> T:
        """On one rank alone, while the others do nothing."""
        return results_of([self._threads[rank].submit(do, self.worlds[rank])])[0]

    def start(self, rank: int, do: Callable[[World], T]) -> Future[T]:
        """The same, without waiting for it."""
        return self._threads[rank].submit(do, self.worlds[rank])

    def _on_all(self, do: Callable[[int], T]) -> list[T]:
        return results_of([thread.submit(do, rank) for rank, thread in enumerate(self._threads)])

    def step(self, count: int = 1) -> None:
        """So many iterations, on all ranks."""
        for _ in range(count):
            self.on_all(lambda world, _: world.step())

    def drain(self) -> None:
        """Run all ranks until nobody has work; every answer is checked, and all did the same things together."""
        self.on_all(lambda world, _: world.drain())
        self.check_collectives()

    def logs(self) -> list[list[Collective]]:
        """What each rank did together with the others."""
        return [ranks.log.entries() for ranks in self.ranks]

    def check_collectives(self) -> None:
        """All ranks did the same, in the same order (I54)."""
        difference = first_difference(self.logs())
        assert difference is None, str(difference)

    def close(self) -> None:
        for ranks in self.ranks:
            ranks.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


def on_ranks(size: int, do: Callable[[LocalRanks], T]) -> list[T]:
    """``do`` on as many ranks, each on a thread of its own; what the first of them raises is raised."""
    ranks = LocalRanks.make(size, timeout_s=TIMEOUT_S)
    threads = [ThreadPoolExecutor(1) for _ in ranks]
    try:
        return results_of([thread.submit(do, one) for thread, one in zip(threads, ranks, strict=True)])
    finally:
        for one in ranks:
            one.close()
        for thread in threads:
            thread.shutdown(wait=False, cancel_futures=True)


def results_of(futures: Sequence[Future[T]]) -> list[T]:
    """Of all ranks, within the limit."""
    done, hanging = wait(futures, LIMIT_S)
    if hanging:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise AssertionError(f"{len(hanging)} of {len(futures)} ranks hang; all their stacks are on standard error")
    errors = [error for future in done if (error := future.exception()) is not None]
    if errors:  # what a rank raises by itself says more than what the others say of it
        raise min(errors, key=lambda error: type(error).__name__ == "RankError")
    return [future.result() for future in futures]


class PerRank(tuple[Any, ...]):
    """Values of an option, one a rank."""

    __slots__ = ()


@contextmanager
def rank_world(size: int = 2, **options: Any) -> Iterator[RankWorld]:
    """One that is closed at the end."""
    world = RankWorld(size, **options)
    try:
        yield world
    finally:
        world.close()
