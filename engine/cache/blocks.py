"""The pool of KV blocks: a stack of free ids, reference counts, and one dummy block for padding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]


class BlockPool:
    """Blocks ``[0, num_blocks)``; ``dummy`` is block ``num_blocks``, never handed out, where padding writes (I51).

    Only the host's books: a released block may still be written by a launched forward. That is safe because every
    later owner's first write is launched behind it on the same stream (I34).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.dummy = num_blocks
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return self._num_free

    @property
    def free_ids(self) -> BlockIds:
        """The free stack, bottom first; a copy."""
        return self._free[: self._num_free].copy()

    def allocate(self, count: int) -> BlockIds | None:
        """Take ``count`` free blocks, or none at all.

        Args:
            count: Blocks wanted. 0 gives an empty array.

        Returns:
            Block ids, shape [count], int32; None if fewer are free, with nothing changed.

        Raises:
            ValueError: ``count`` is negative, or exceeds the pool, so that no waiting would help.
        """
        if not 0 <= count <= self.num_blocks:
            raise ValueError(f"cannot take {count} of {self.num_blocks} blocks")
        if count > self._num_free:
            return None
        taken = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.ref_counts[taken] += 1
        return taken

    def release(self, block_ids: BlockIds) -> None:
        """Drop one reference of each block; those without any are free again, the last released on top.

        Raises:
            ValueError: a block is not held, or is the dummy.
        """
        if block_ids.size == 0:
            return
        if block_ids.min() < 0 or block_ids.max() >= self.num_blocks:
            raise ValueError(f"cannot release blocks {block_ids.tolist()} of a pool of {self.num_blocks}")
        np.subtract.at(self.ref_counts, block_ids, 1)
        if self.ref_counts[block_ids].min() < 0:
            np.add.at(self.ref_counts, block_ids, 1)
            raise ValueError(f"a block of {block_ids.tolist()} is released more often than it was taken")
        self._put_back(np.unique(block_ids[self.ref_counts[block_ids] == 0]))

    def _put_back(self, block_ids: BlockIds) -> None:
        """Blocks that nobody holds, each once, go on top of the stack."""
        self._free[self._num_free : self._num_free + block_ids.size] = block_ids
        self._num_free += block_ids.size

    def reset(self) -> None:
        """Every block is free again."""
        self.ref_counts[:] = 0
        self._free[:] = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_blocks
