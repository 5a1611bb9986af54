"""What a rank had to do with the others, in order, and where two ranks' accounts first differ (I54).

The host's agreements and the device's collectives are two sequences: each is in order on every rank, and they are
compared apart, since a device works behind its host.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter_ns
from typing import Any, Literal

Place = Literal["host", "device"]


@dataclass(slots=True)
class Collective:
    """One thing that all ranks do together."""

    place: Place
    """Where it is waited for."""
    kind: str
    """``agree``, ``gather``, ``sum``, ``exchange``."""
    purpose: str
    """For what: an agreement's topic; ``forward`` or ``draft``, whichever the experts belong to."""
    iteration: int
    num_bytes: int
    """That this rank gives. Of an ``exchange``, whose sizes differ from rank to rank, of one token."""
    is_dummy: bool = False
    """Whether this rank had no work of its own in it; ranks may differ in that, and in times."""
    begin_ns: int = field(default=0, compare=False)
    """When this rank came to it, by the clock of its traces; 0: unknown, as of what a graph does by itself."""
    end_ns: int = field(default=0, compare=False)
    """When it went on: from then on all had come. 0: unknown, or it has not gone on. On CUDA the host's times, which
    only enqueues it."""

    def is_partner_of(self, other: Collective) -> bool:
        """Whether two ranks may do them together."""
        return self.key == other.key

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What must be the same on all ranks."""
        return self.place, self.kind, self.purpose, self.iteration, self.num_bytes

    def __str__(self) -> str:
        dummy = " (dummy)" if self.is_dummy else ""
        return f"{self.kind} for {self.purpose} in iteration {self.iteration}, {self.num_bytes:,} bytes{dummy}"


class CollectiveLog:
    """The newest collectives of one rank. Written by the rank's thread and by its device's.

    Args:
        capacity: How many are kept; the newest win.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Place, deque[Collective]] = {"host": deque(maxlen=capacity), "device": deque(maxlen=capacity)}
        self._counts: dict[Place, int] = {"host": 0, "device": 0}
        self._captured: list[Collective] | None = None
        self.purpose, self.iteration, self.is_dummy = "capture", -1, False
        """What the device's collectives are for at present; set by the work that issues them."""

    def add(self, place: Place, kind: str, purpose: str, iteration: int, num_bytes: int) -> Collective:
        """Note one that begins; who does it notes when it ends."""
        one = Collective(place, kind, purpose, iteration, num_bytes, begin_ns=perf_counter_ns())
        self._append(one)
        return one

    def add_device(self, kind: str, num_bytes: int) -> Collective:
        """Note one of the device that begins, for what it is at: :attr:`purpose`."""
        one = Collective("device", kind, self.purpose, self.iteration, num_bytes, self.is_dummy)
        if self._captured is None:
            one.begin_ns = perf_counter_ns()
            self._append(one)
        else:
            self._captured.append(one)
        return one

    def _append(self, one: Collective) -> None:
        with self._lock:
            self._kept[one.place].append(one)
            self._counts[one.place] += 1

    @contextmanager
    def during(self, purpose: str, iteration: int, *, is_dummy: bool = False) -> Iterator[None]:
        """The device's collectives in here are for that."""
        before = self.purpose, self.iteration, self.is_dummy
        self.purpose, self.iteration, self.is_dummy = purpose, iteration, is_dummy
        try:
            yield
        finally:
            self.purpose, self.iteration, self.is_dummy = before

    @contextmanager
    def capturing(self) -> Iterator[list[Collective]]:
        """What is issued in here runs with each replay of a graph, for which :meth:`replay` notes it."""
        found: list[Collective] = []
        self._captured = found
        try:
            yield found
        finally:
            self._captured = None

    def replay(self, captured: Sequence[Collective]) -> None:
        """Note the collectives that a captured graph repeats."""
        for one in captured:
            self.add_device(one.kind, one.num_bytes).begin_ns = 0

    def counts(self) -> dict[Place, int]:
        """How many there were since the log was made, those no longer kept included."""
        with self._lock:
            return dict(self._counts)

    def entries(self, place: Place | None = None) -> list[Collective]:
        """The newest ones, the oldest first: those of one place, or all, the host's before the device's."""
        with self._lock:
            places: tuple[Place, ...] = ("host", "device") if place is None else (place,)
            return [one for where in places for one in self._kept[where]]

    def clear(self) -> None:
        """Forget them; the counts go on."""
        with self._lock:
            for kept in self._kept.values():
                kept.clear()


@dataclass(slots=True)
class Issuing:
    """Captured work, with the collectives that it repeats unseen."""

    work: Callable[[], object]
    issued: list[Collective]

    def __call__(self) -> object:
        return self.work()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the accounts of two ranks part."""

    place: Place
    number: int
    """Of the collective, from 0."""
    ranks: tuple[int, int]
    collectives: tuple[Collective | None, Collective | None]
    """What each of them did there; None: nothing any more."""

    @property
    def iteration(self) -> int:
        """The first that either of them was in."""
        return min(one.iteration for one in self.collectives if one is not None)

    def __str__(self) -> str:
        did = [f"rank {rank}: {one or 'nothing'}" for rank, one in zip(self.ranks, self.collectives, strict=True)]
        return f"{self.place} collective {self.number} differs; {'; '.join(did)}"


def first_difference(logs: Sequence[Sequence[Collective]]) -> Difference | None:
    """Compare every rank's account with rank 0's: the first place where one differs, or None.

    Of the host's and the device's differences the one of the earlier iteration: what comes later follows from it.

    Args:
        logs: Of each rank, complete or all begun at the same iteration.
    """
    found: list[Difference] = []
    places: tuple[Place, ...] = ("host", "device")
    for place in places:
        accounts = [[one for one in log if one.place == place] for log in logs]
        found += [one for rank in range(1, len(logs)) if (one := _compared(place, accounts, rank)) is not None]
    return min(found, key=lambda one: (one.iteration, one.number)) if found else None


def _compared(place: Place, accounts: Sequence[Sequence[Collective]], rank: int) -> Difference | None:
    first, other = accounts[0], accounts[rank]
    for number in range(max(len(first), len(other))):
        pair = (first[number] if number < len(first) else None, other[number] if number < len(other) else None)
        if pair[0] is None or pair[1] is None or not pair[0].is_partner_of(pair[1]):
            return Difference(place, number, (0, rank), pair)
    return None


def to_rows(log: Sequence[Collective]) -> list[dict[str, Any]]:
    """Plain values, for files and for other processes."""
    return [asdict(one) for one in log]


def from_rows(rows: Sequence[Mapping[str, Any]]) -> list[Collective]:
    """What :func:`to_rows` made."""
    return [Collective(**row) for row in rows]
