"""States kept at block borders, so that a recurrence can go on from a cached prefix.

A snapshot is the state of every recurrent layer behind the last token of a named block; it lies in a slot of its own
and goes by the block's name. It is kept while the name is known, and gives way, least recently used first, to a newer
one only while nobody holds its block (I23).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator

import numpy as np
from numpy.typing import NDArray

from engine.cache.prefix import Digest


class SnapshotIndex:
    """Which slot keeps the state behind which prefix; the host's books only.

    Args:
        first_slot: Its slots are ``[first_slot, first_slot + num_slots)``.
        num_slots: The budget.
        is_held: Whether somebody holds the block of that name.
    """

    def __init__(self, first_slot: int, num_slots: int, is_held: Callable[[Digest], bool]) -> None:
        self.first_slot = first_slot
        self.num_slots = num_slots
        self._is_held = is_held
        self._slots: OrderedDict[Digest, int] = OrderedDict()
        """The least recently used first."""
        self._free = list(range(first_slot + num_slots - 1, first_slot - 1, -1))
        self.version = 0
        """Changes whenever a snapshot comes or goes."""
        self.num_evicted = 0
        """Snapshots that gave way to others, since it was made or cleared."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Digest]:
        return iter(self._slots)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._slots

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slots that keep a state, ascending."""
        return np.array(sorted(self._slots.values()), dtype=np.int64)

    @property
    def num_free(self) -> int:
        """Slots that keep nothing and are promised to nobody."""
        return len(self._free)

    def find(self, digest: Digest) -> int | None:
        """Its slot; changes nothing (I19)."""
        return self._slots.get(digest)

    def touch(self, digest: Digest) -> None:
        """It was used just now."""
        self._slots.move_to_end(digest)

    def reserve(self, spare: Container[int]) -> int | None:
        """A slot for a state that a forward is going to make; :meth:`keep` or :meth:`give_back` follows.

        Args:
            spare: Slots that the same forward reads, which must not be written by it.

        Returns:
            A free slot, or that of the least recently used snapshot whose block nobody holds; None without either.
        """
        if self._free:
            return self._free.pop()
        for digest, slot in self._slots.items():
            if slot not in spare and not self._is_held(digest):
                del self._slots[digest]
                self.version += 1
                self.num_evicted += 1
                return slot
        return None

    def keep(self, digest: Digest, slot: int) -> None:
        """The forward that writes ``slot`` is launched, and the block of that name is known."""
        assert digest not in self._slots, "a prefix has two snapshots"
        self._slots[digest] = slot
        self.version += 1

    def give_back(self, slot: int) -> None:
        """What was reserved is not wanted."""
        self._free.append(slot)

    def forget(self, digest: Digest) -> None:
        """Its block lost its name."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._free.append(slot)
            self.version += 1

    def clear(self) -> None:
        """Nothing is kept; what is reserved has to be given back."""
        self._free += self._slots.values()
        self._slots.clear()
        self.version += 1
        self.num_evicted = 0

    def check(self, reserved: int) -> None:
        """Every slot is free, kept or reserved, once.

        Raises:
            AssertionError: one is not.
        """
        every = [*self._free, *self._slots.values()]
        assert len(set(every)) == len(every), "a snapshot slot is there twice"
        assert len(every) + reserved == self.num_slots, "a snapshot slot is lost"
        assert all(self.first_slot <= slot < self.first_slot + self.num_slots for slot in every), "a stray slot"
