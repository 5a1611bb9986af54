"""What the scheduler asks of the prefix cache: which blocks a request can skip, and which blocks now have names.

A block is named when the forward that fills it has been launched: whoever is admitted later reads it in a forward
launched behind that one. Blocks of generated tokens are named when their request gives them back.

For models with recurrent layers a prefix can be skipped only where a snapshot of their states is kept at its end
(``engine/cache/snapshots.py``). Forwards that read prompts make snapshots on the way (:meth:`PrefixCache.boundaries`);
they count from the launch on, as names do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from engine.cache.blocks import BlockIds
from engine.cache.prefix import Digest, block_digests
from engine.cache.prefix_pool import PrefixPool
from engine.cache.snapshots import SnapshotIndex
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
    state_from: int = -1
    """Slot of the snapshot at their end; -1 where there are no blocks, or the model has no recurrent layers."""


class StagedSnapshot(NamedTuple):
    """A state that the next forward keeps."""

    row: int
    """Table row that it is of."""
    after: int
    """Tokens of that row's chunk behind which it is taken, at least 1."""
    slot: int
    digest: Digest
    """Of the block that ends there."""


NO_HIT = Hit(NO_BLOCKS, 0)


class PrefixCache:
    """Joins the table's rows to the pool's names.

    A hit ends at a block's end and leaves at least one token to compute: the logits of a prompt's last token are what
    its first output is drawn from. So rows write only to blocks of their own, and no named block is written again
    (I17).
    """

    def __init__(
        self,
        table: RequestTable,
        pool: PrefixPool,
        block_size: int,
        counters: Counters,
        snapshots: SnapshotIndex | None = None,
    ) -> None:
        self.pool = pool
        self.snapshots = snapshots
        """Of recurrent layers; None where the model has none, and every prefix can be skipped."""
        if snapshots is not None:
            pool.index.on_forget = snapshots.forget
        self.staged: list[StagedSnapshot] = []
        """Snapshots of the forward that is prepared and not launched."""
        self.counters = counters
        self._table = table
        self._block_size = block_size
        self._memo: tuple[tuple[int, int, int, int], tuple[BlockIds, int]] | None = None
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
        changes = 0 if self.snapshots is None else self.snapshots.version
        key = (request.key, request.num_tokens, self.pool.index.version, changes)
        if self._memo is None or self._memo[0] != key:
            self._memo = key, self._find(request)
        block_ids, state_from = self._memo[1]
        return Hit(block_ids, int(np.count_nonzero(self.pool.ref_counts[block_ids] == 0)), state_from)

    def _find(self, request: Request) -> tuple[BlockIds, int]:
        """Blocks to skip, and the slot of the state behind them; as deep as every kind of layer can follow."""
        names = self.skippable(request)
        block_ids = self.pool.match(names)
        if self.snapshots is None:
            return block_ids, -1
        for depth in range(block_ids.size, 0, -1):
            slot = self.snapshots.find(names[depth - 1])
            if slot is not None:
                return block_ids[:depth], slot
        return NO_BLOCKS, -1

    def skippable(self, request: Request) -> list[Digest]:
        """Names of the blocks that a hit could cover."""
        return request.digests[: (request.num_tokens - 1) // self._block_size]

    def begin_round(self) -> None:
        """An admission begins: nothing is on its way yet, also if what the round before placed was never launched."""
        self._coming.clear()

    def is_coming(self, request: Request, num_shared: int) -> bool:
        """Whether a row placed in this round makes it possible to skip more than its first ``num_shared`` blocks."""
        names = self.skippable(request)
        if self.snapshots is not None:
            return not self._coming.isdisjoint(names[num_shared:])
        return num_shared < len(names) and names[num_shared] in self._coming

    def take(self, request: Request, shared: BlockIds) -> None:
        """Hold the blocks of its hit, before new ones are taken."""
        self.pool.pin(shared)
        if self.snapshots is not None and shared.size:
            self.snapshots.touch(request.digests[shared.size - 1])
        request.cache_epoch = self.epoch
        self.counters.prefix_query_tokens += request.num_tokens
        self.counters.prefix_hit_tokens += shared.size * self._block_size

    def expect(self, row: int) -> None:
        """A row was placed, or goes on to its next chunk."""
        request, table = self._table.requests[row], self._table
        assert request is not None
        if self.snapshots is not None:
            self._coming.update(request.digests[depth - 1] for depth in self.boundaries(row))
            return
        first, end = int(table.chunk_done[row]) // self._block_size, int(table.chunk_end[row]) // self._block_size
        self._coming.update(request.digests[first:end])

    # -- snapshots -------------------------------------------------------------------------------------------------

    def boundaries(self, row: int) -> list[int]:
        """Block borders of a row's present chunk where a snapshot is worth its slot, as numbers of blocks, ascending.

        The last one; the one before it where the prompt ends with a block, since a hit leaves a token to compute; and
        the end of what others have in common with it, where keys and values are known and the state was not.
        """
        table, request = self._table, self._table.requests[row]
        assert request is not None
        done, end = int(table.chunk_done[row]), int(table.chunk_end[row])
        last = end // self._block_size
        wanted = {last, len(self.pool.index.match(request.digests[:last]))}
        if end == table.prompt_len[row] and end % self._block_size == 0:
            wanted.add(last - 1)
        return sorted(k for k in wanted if done < k * self._block_size <= end and k <= len(request.digests))

    def stage_snapshots(self, rows: Iterable[int]) -> Sequence[StagedSnapshot]:
        """Settle which states the next forward keeps of the prompts it reads; called in prepare.

        Args:
            rows: Table rows that read a chunk in it.
        """
        index, table = self.snapshots, self._table
        if index is None:
            return ()
        self._give_back_staged()
        rows = list(rows)
        read = {int(table.state_from[row]) for row in rows}
        for row in rows:
            request = table.requests[row]
            if request is None or request.cache_epoch != self.epoch:
                continue
            for depth in self.boundaries(row):
                digest = request.digests[depth - 1]
                if digest in index or any(digest == other.digest for other in self.staged):
                    continue
                slot = index.reserve(read)
                if slot is None:
                    return self.staged
                after = depth * self._block_size - int(table.chunk_done[row])
                self.staged.append(StagedSnapshot(row, after, slot, digest))
        return self.staged

    def keep_snapshots(self) -> None:
        """The forward they were staged for is launched, and its blocks have names: others may go on from them."""
        for staged in self.staged:
            if self.snapshots is None:
                break
            if self.pool.index.knows(staged.digest):
                self.snapshots.keep(staged.digest, staged.slot)
                self.counters.snapshots_taken += 1
            else:  # another block has a name on the way to it, so its own has none
                self.snapshots.give_back(staged.slot)
        self.staged = []

    def _give_back_staged(self) -> None:
        """What was staged and never launched is void."""
        for staged in self.staged:
            if self.snapshots is not None:
                self.snapshots.give_back(staged.slot)
        self.staged = []

    # -- names -----------------------------------------------------------------------------------------------------

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
        self._give_back_staged()
        if self.snapshots is not None:
            self.snapshots.clear()
