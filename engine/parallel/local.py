"""Ranks that are threads of one process: for tests, and for looking at several ranks without starting any process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import RankError
from engine.parallel.ranks import Ranks


@dataclass
class _Meeting:
    """One collective: what each rank has brought, and how many have taken what there is."""

    brought: list[Any]
    num_brought: int = 0
    num_taken: int = 0


@dataclass
class _Hub:
    """Where the ranks meet; one condition for all of it, as nothing here takes long."""

    size: int
    condition: threading.Condition = field(default_factory=threading.Condition)
    meetings: dict[tuple[str, int], _Meeting] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    """Ranks that do not come any more, and why."""
    woken: int = -1

    def meet(self, rank: int, key: tuple[str, int], brings: Any, timeout_s: float, what: str) -> list[Any]:
        """Everybody's, once all have come."""
        until = time.monotonic() + timeout_s
        with self.condition:
            meeting = self.meetings.setdefault(key, _Meeting([None] * self.size))
            meeting.brought[rank] = brings
            meeting.num_brought += 1
            self.condition.notify_all()
            while meeting.num_brought < self.size:
                self._check(rank, what)
                if not self.condition.wait(until - time.monotonic()) and time.monotonic() >= until:
                    absent = [r for r in range(self.size) if meeting.brought[r] is None]
                    raise RankError(
                        f"rank {rank} waited {timeout_s:g} s for {what}; rank {', '.join(map(str, absent))} did not "
                        "come: it has died, hangs, or is not driven"
                    )
            meeting.num_taken += 1
            if meeting.num_taken == self.size:
                del self.meetings[key]
            return meeting.brought

    def _check(self, rank: int, what: str) -> None:
        for other, why in self.gone.items():
            if other != rank:
                raise RankError(f"rank {rank} waits for {what}, but rank {other} {why}")


class LocalRanks(Ranks):
    """A rank whose peers are threads of this process; :meth:`make` makes all of them."""

    def __init__(self, hub: _Hub, rank: int, timeout_s: float) -> None:
        super().__init__(rank, hub.size, timeout_s)
        self._hub = hub
        self._counts = {"host": 0, "device": 0}

    @classmethod
    def make(cls, size: int, *, timeout_s: float = 60.0) -> list[LocalRanks]:
        """``size`` ranks that know each other; each is to be used by a thread of its own."""
        hub = _Hub(size)
        return [cls(hub, rank, timeout_s) for rank in range(size)]

    def _meet(self, place: str, brings: Any, what: str) -> list[Any]:
        key = (place, self._counts[place])
        self._counts[place] += 1
        return self._hub.meet(self.rank, key, brings, self.timeout_s, what)

    def _exchange_values(self, mine: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        return np.stack(self._meet("host", mine, what))

    def _together(self, kind: str, brings: Any, make: Callable[[list[Any]], Tensor]) -> Tensor:
        if torch.cuda.is_available():  # the others read it on streams of their own
            torch.cuda.current_stream().synchronize()
        found = self._meet("device", (kind, brings), f"the {kind} of a {self.log.purpose}")
        kinds = {other for other, _ in found}
        if kinds != {kind}:
            raise RankError(f"rank {self.rank} is at a {kind}, others at {', '.join(sorted(kinds - {kind}))}")
        return make([one for _, one in found])

    def _gather(self, x: Tensor) -> Tensor:
        def make(all_: list[Tensor]) -> Tensor:
            shapes = {tuple(one.shape) for one in all_}
            if len(shapes) > 1:
                raise RankError(f"rank {self.rank} gathers {tuple(x.shape)}, others {sorted(shapes)}")
            return torch.cat(all_)

        return self._together("gather", x, make)

    def _sum(self, x: Tensor) -> Tensor:
        def make(all_: list[Tensor]) -> Tensor:
            mine = [one.chunk(self.size)[self.rank] for one in all_]
            total = mine[0].clone()
            for other in mine[1:]:
                total += other
            return total

        return self._together("sum", x, make)

    def _exchange(self, x: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        took: list[int] = []

        def make(all_: list[tuple[Tensor, list[int]]]) -> Tensor:
            parts = [rows.split(sizes)[self.rank] for rows, sizes in all_]
            took.extend(len(part) for part in parts)
            return torch.cat(parts)

        return self._together("exchange", (x, counts), make), took

    def wake(self, round_: int) -> None:
        with self._hub.condition:
            self._hub.woken = max(self._hub.woken, round_)
            self._hub.condition.notify_all()

    def sleep(self, round_: int, timeout_s: float | None) -> bool:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._hub.condition:
            while self._hub.woken < round_:
                if timeout_s == 0.0:
                    return False
                self._hub._check(self.rank, "a request at any rank")
                left_s = None if until is None else until - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._hub.condition.wait(left_s)
        return True

    def fail(self, iteration: int) -> None:
        """Those who wait hear of it at once, and whoever waits later."""
        self._leave(f"has failed in iteration {iteration}; see its own error, and start all anew")

    def close(self) -> None:
        self._leave("has left")

    def _leave(self, why: str) -> None:
        with self._hub.condition:
            self._hub.gone.setdefault(self.rank, why)
            self._hub.condition.notify_all()
