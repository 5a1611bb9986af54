"""What the scheduler asks of the prefix cache: which blocks a request can skip, and which blocks now have names.

A block is named when the forward that fills it has been launched: whoever is admitted later reads it in a forward
launched behind that one. Blocks of generated tokens are named when their request gives them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.cache.blocks import BlockIds
from engine.cache.prefix import Digest, block_digests
from engine.cache.prefix_pool import PrefixPool
from engine.counters import Counters
from engine.request import Request
from engine.table import RequestTable

NO_BLOCKS: BlockIds = np.zeros(0, dtype=np.int32)


class Hit(NamedTuple):
    """What the cache knows of a request's tokens."""

    block_ids: BlockIds
    """[n] int32, blocks that hold the first n * block size of them."""
    num_idle: int
    """Of those, the ones nobody holds: they count as free until they are pinned."""


NO_HIT = Hit(NO_BLOCKS, 0)


class PrefixCache:
    """Joins the table's rows to the pool's names.

    A hit ends at a block's end and leaves at least one token to compute: the logits of a prompt's last token are what
    its first output is drawn from. So rows write only to blocks of their own, and no named block is written again
    (I17).
    """

    def __init__(self, table: RequestTable, pool: PrefixPool, block_size: int, counters: Counters) -> None:
        self.pool = pool
        self.counters = counters
        self._table = table
        self._block_size = block_size
        self._memo: tuple[tuple[int, int, int], BlockIds] | None = None
        self.epoch = 0
        """Resets so far; see :attr:`engine.request.Request.cache_epoch`."""
        self._coming: set[Digest] = set()
        """Names of blocks that rows placed in this round will fill."""

    def digest(self, request: Request) -> None:
        """Make the names of its full blocks that are not made yet; costs about a microsecond a block."""
        tokens = (*request.prompt_ids, *request.output_ids)
        request.digests = block_digests(tokens, self._block_size, salt=request.cache_salt, known=request.digests)

    def hit(self, request: Request) -> Hit:
        """Blocks that hold the beginning of its tokens; changes nothing.

        None while it owes prompt log probabilities: every prompt token has to be computed for those.
        """
        if request.owes_prompt_logprobs:
            return NO_HIT
        key = (request.key, request.num_tokens, self.pool.index.version)
        if self._memo is None or self._memo[0] != key:
            self._memo = key, self.pool.match(self.skippable(request))
        block_ids = self._memo[1]
        return Hit(block_ids, int(np.count_nonzero(self.pool.ref_counts[block_ids] == 0)))

    def skippable(self, request: Request) -> list[Digest]:
        """Names of the blocks that a hit could cover."""
        return request.digests[: (request.num_tokens - 1) // self._block_size]

    def begin_round(self) -> None:
        """An admission begins: nothing is on its way yet, also if what the round before placed was never launched."""
        self._coming.clear()

    def is_coming(self, request: Request, num_shared: int) -> bool:
        """Whether a row placed in this round computes the block behind its first ``num_shared`` ones."""
        names = self.skippable(request)
        return num_shared < len(names) and names[num_shared] in self._coming

    def take(self, request: Request, shared: BlockIds) -> None:
        """Hold the blocks of its hit, before new ones are taken."""
        self.pool.pin(shared)
        request.cache_epoch = self.epoch
        self.counters.prefix_query_tokens += request.num_tokens
        self.counters.prefix_hit_tokens += shared.size * self._block_size

    def expect(self, row: int) -> None:
        """A row was placed, or goes on to its next chunk."""
        request, table = self._table.requests[row], self._table
        assert request is not None
        first, end = int(table.chunk_done[row]) // self._block_size, int(table.chunk_end[row]) // self._block_size
        self._coming.update(request.digests[first:end])

    def name_read(self, rows: Iterable[int]) -> None:
        """Name the full blocks of prompts as far as the forward just launched reads them."""
        for row in rows:
            request = self._table.requests[row]
            if request is not None:
                self._name(request, int(self._table.chunk_end[row]))

    def name_written(self, request: Request) -> None:
        """Name all full blocks of a request that is about to give them back; its newest token is not in the cache.

        Of a request that failed all names are taken back: what spoilt its logits may be in its blocks.
        """
        row = request.row
        if row is None:
            return
        if request.finish_reason == "error":
            self.pool.disown(self._table.block_ids[row, : self._table.block_count[row]])
        elif self._table.is_prefill[row]:
            self._name(request, min(int(self._table.kv_len[row]), int(self._table.chunk_end[row])))
        else:
            self.digest(request)
            self._name(request, request.num_tokens - 1)

    def _name(self, request: Request, num_tokens: int) -> None:
        if request.cache_epoch != self.epoch:
            return
        row, count = request.row, min(num_tokens // self._block_size, len(request.digests))
        self.pool.name(request.digests[:count], self._table.block_ids[row, :count])

    def forget(self) -> int:
        """Forget every name, also of blocks that live requests hold: nothing computed so far is reused.

        Returns:
            Cached blocks that are free now.
        """
        self.epoch += 1
        return self.pool.forget_all()

    def reset(self) -> None:
        """Nothing is known; the pool is reset by its owner."""
        self.epoch += 1
        self._memo = None
        self._coming.clear()
