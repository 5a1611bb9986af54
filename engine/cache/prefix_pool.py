"""A block pool that keeps named blocks when nobody holds them any more, until their place is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.cache.blocks import BlockIds, BlockPool
from engine.cache.prefix import Digest, EvictionPolicy, PrefixIndex


class PrefixPool(BlockPool):
    """Every block is free, held (``ref_counts``), or *cached*: named, and held by nobody (I12).

    Args:
        num_blocks: Usable ones.
        policy: Whether blocks are cached at all once nobody holds them.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy = EvictionPolicy.LRU) -> None:
        super().__init__(num_blocks)
        self.policy = policy
        self.index = PrefixIndex()
        self.num_evicted = 0
        """Cached blocks whose place was needed, since the pool was made or reset."""

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now: free and cached ones."""
        return self._num_free + self.index.num_idle

    @property
    def num_cached(self) -> int:
        """Named blocks that nobody holds."""
        return self.index.num_idle

    def allocate(self, count: int) -> BlockIds | None:
        """See :meth:`BlockPool.allocate`; cached blocks give way, the least recently used leaves first."""
        evicted = self.index.evict(max(0, count - self._num_free))
        if evicted:
            self._put_back(np.array(evicted, dtype=np.int32))
            self.num_evicted += len(evicted)
        return super().allocate(count)

    def match(self, digests: Sequence[Digest]) -> BlockIds:
        """Blocks of the longest known prefix; changes nothing."""
        return np.array(self.index.match(digests), dtype=np.int32)

    def pin(self, block_ids: BlockIds) -> None:
        """Hold matched blocks once more, so that taking new ones does not evict them; :meth:`release` undoes it."""
        np.add.at(self.ref_counts, block_ids, 1)
        self.index.hold(block_ids.tolist())

    def name(self, digests: Sequence[Digest], block_ids: BlockIds) -> None:
        """Name held blocks by what they hold; see :meth:`PrefixIndex.name`."""
        self.index.name(digests, block_ids)

    def _put_back(self, block_ids: BlockIds) -> None:
        self.index.let_go(block_ids.tolist())
        if self.policy is EvictionPolicy.REF_ZERO:
            self.index.forget_idle()
        free = [block for block in block_ids.tolist() if block not in self.index]
        super()._put_back(np.array(free, dtype=np.int32))

    def disown(self, block_ids: BlockIds) -> None:
        """Forget what these blocks hold, and all blocks whose prefix begins with theirs; holders keep them."""
        super()._put_back(np.array(self.index.disown(block_ids.tolist()), dtype=np.int32))

    def forget_all(self) -> int:
        """No block has a name any more; cached ones are free. Returns how many those were."""
        idle = np.array(self.index.idle, dtype=np.int32)
        self.index.clear()
        super()._put_back(idle)
        return int(idle.size)

    def reset(self) -> None:
        """Every block is free, and none has a name."""
        super().reset()
        self.index.clear()
        self.num_evicted = 0
