"""What gives way when blocks run out: rows pause, and if that is not enough, requests go back to the queue.

Runs in the admit phase, where nothing is pending, so rows may change places freely. The rules are Megatron-LM's for
dynamic inference, but that a prompt being read in chunks goes back first: it is the youngest, and holds no token that
anybody has seen.

1. Decode rows whose next token needs a block pause, at the right end of those that are paused.
2. From the right, as many as there are blocks for go on.
3. If those that stay paused hold more than ``paused_blocks``, the largest left part within it may stay. Of the others
   the rightmost goes back to the queue, and its blocks let others go on, until none is left over. The same while no
   row runs at all.

A request that goes back keeps its tokens; its full blocks keep their names, so with prefix caching it may find them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.cache.blocks import BlockPool
from engine.prefix_cache import PrefixCache
from engine.request import Request, RequestState
from engine.table import Moves, RequestTable, Rows


@dataclass(slots=True)
class Room:
    """What was done to have blocks enough."""

    paused: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    evicted: list[Request] = field(default_factory=list)
    """They hold neither row nor blocks any more, and wait to be queued."""
    moves: Moves | None = None
    """Row moves that the device's columns must follow."""


class RoomKeeper:
    """Sees to it that prepare finds a block for every row that needs one.

    Args:
        table: Its rows are rearranged.
        pool: Blocks of requests that go back are released to it.
        block_size: Tokens of a block.
        paused_blocks: Blocks that paused rows may hold together, shared ones counted once.
        lookahead: Positions that a decode row's next step may write; no more than a block's.
        cache: Names blocks that are released; None without prefix caching.
    """

    def __init__(
        self,
        table: RequestTable,
        pool: BlockPool,
        *,
        block_size: int,
        paused_blocks: int,
        cache: PrefixCache | None,
        lookahead: int = 1,
    ) -> None:
        self._table = table
        self._pool = pool
        self._block_size = block_size
        self._paused_blocks = paused_blocks
        self._lookahead = lookahead
        self._cache = cache

    def needing(self) -> Rows:
        """[n] decode rows whose next step needs a block that they do not hold."""
        table = self._table
        rows = table.active_rows
        if table.partial_row is not None:
            rows = rows[:-1]
        return rows[table.kv_len[rows] + self._lookahead > table.block_count[rows] * self._block_size]

    def make(self, chunk_blocks: int) -> Room | None:
        """Pause, resume and send back what has to be; None if there is nothing to do.

        Args:
            chunk_blocks: Blocks that the next chunk of a partial prompt takes.
        """
        table = self._table
        needing = self.needing()
        wanted = table.num_paused + needing.size + chunk_blocks
        if table.num_paused == 0 and wanted <= self._pool.num_free:
            return None
        room, gone = Room(), set[int]()
        if table.partial_row is not None and wanted > self._pool.num_free:
            self._send_back(table.partial_row, room, gone)
        was_paused = table.num_paused
        left = [*range(was_paused), *needing.tolist()]
        num_running = table.num_active - needing.size - len(gone)
        num_resumed = self._resume(left)
        while left and (self._is_too_much(left) or num_running + num_resumed == 0):
            self._send_back(left.pop(), room, gone)
            num_resumed = self._resume(left, num_resumed)
        if not gone and left == [*range(was_paused)]:
            return None  # the same rows go on pausing
        self._settle(left, was_paused, room, gone)
        return room

    def _resume(self, left: list[int], already: int = 0) -> int:
        """Take from the right of ``left`` while there are blocks, one each; returns how many go on in all."""
        while left and already < self._pool.num_free:
            left.pop()
            already += 1
        return already

    def _is_too_much(self, rows: list[int]) -> bool:
        held = self._table.held_blocks(np.array(rows, dtype=np.int64))
        return int(np.unique(held).size) > self._paused_blocks

    def _send_back(self, row: int, room: Room, gone: set[int]) -> None:
        table, request = self._table, self._table.requests[row]
        assert request is not None
        if self._cache is not None:
            self._cache.name_written(request)
        self._pool.release(table.held_blocks(np.array([row], dtype=np.int64)))
        table.block_ids[row] = -1
        table.block_count[row] = 0
        request.drop_partial_prompt_logprobs()
        room.evicted.append(request)
        gone.add(row)

    def _settle(self, paused: list[int], was_paused: int, room: Room, gone: set[int]) -> None:
        """Put the rows into their order, paused ones first, and tell the requests."""
        table = self._table
        is_paused = set(paused)
        for row in paused:
            if row >= was_paused:
                room.paused.append(_owner(table, row))
        for row in range(was_paused):
            if row not in is_paused and row not in gone:
                room.resumed.append(_owner(table, row))
        running = [row for row in range(table.num_live) if row not in is_paused and row not in gone]
        room.moves = table.rearrange(np.array([*paused, *running], dtype=np.int64), num_paused=len(paused))
        for request in room.paused:
            request.move_to(RequestState.PAUSED)
        for request in room.resumed:
            request.move_to(RequestState.DECODE)
        for request in room.evicted:
            request.move_to(RequestState.WAITING)


def _owner(table: RequestTable, row: int) -> Request:
    request = table.requests[row]
    assert request is not None
    return request
