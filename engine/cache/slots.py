"""The slots of recurrent states: one for each row, and one dummy slot for padding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SlotPool:
    """Slots ``[0, num_slots)`` of rows; only the host's books, as :class:`engine.cache.blocks.BlockPool`.

    There are as many as rows, so a row always finds one. A slot that is given back may be written by a forward that is
    launched already: its next owner's first forward is launched behind that, and starts from zeros or from a snapshot
    whatever the slot holds (I34). So nothing is ever zeroed, and no admission waits for a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: NDArray[np.int32] = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that no row has."""
        return self._num_free

    @property
    def free_ids(self) -> NDArray[np.int32]:
        """The free stack, bottom first; a copy."""
        return self._free[: self._num_free].copy()

    def take(self) -> int:
        """A slot for a new row; the caller knows that a row is free, and so is a slot."""
        assert self._num_free, "no free slot for a free row"
        self._num_free -= 1
        return int(self._free[self._num_free])

    def give_back(self, slots: NDArray[np.int32]) -> None:
        """Slots of rows that are no more, the last on top."""
        self._free[self._num_free : self._num_free + slots.size] = slots
        self._num_free += slots.size

    def reset(self) -> None:
        """Every slot is free again."""
        self._free[:] = np.arange(self.num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_slots
