"""The request table: one row a request that holds blocks, one column a fact about it.

    RequestTable   rows [0, num_paused) paused, then decode, then prefill up to num_live; then free. The last live row
                   may be partial: its prompt is read in chunks, and its sample means nothing until the last one.
                   R = max_requests, C = blocks a row
        key          [R]     int64   the request's unique key, its generation; -1 on free rows
        kv_len       [R]     int32   tokens whose cache entries exist or are written by a launched forward; with drafts
                                     that are not verified yet all of them, rejected ones until rewind takes them back
        num_output   [R]     int32   output tokens whose values the host knows
        max_output   [R]     int32   output tokens after which the request ends by length
        prompt_len   [R]     int32   tokens its prefill reads: the prompt, after recovery also earlier output
        is_prefill   [R]     bool    its newest forward, launched or to come, reads its prompt
        is_fresh     [R]     bool    its prompt's sample is not resolved yet
        block_count  [R]     int32   blocks held
        block_ids    [R, C]  int32   -1 past block_count
        state_slot   [R]     int32   recurrent-state slot; -1 where the model has none
        state_from   [R]     int32   slot of the snapshot that its next forward goes on from; -1: from its own slot
        num_accepted [R]     int32   drafts accepted when it was verified last; its recurrent state is so many further
        chunk_done   [R]     int32   prompt tokens in the cache before the present chunk: of its prefix, of chunks
        chunk_end    [R]     int32   prompt tokens read once the present chunk has run; prompt_len for the last one
        max_blocks   [R]     int32   blocks that admission set aside for it
        is_watched   [R]     bool    it streams, has stops of its own, or wants log probabilities

The columns are plain numpy: what the device reads is staged in a pinned slab (``engine/staging.py``), so nothing here
is ever the source of a copy in flight, and phases may change rows freely.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.slots import SlotPool
from engine.request import Request
from engine.token_log import TokenLog

Rows = NDArray[np.int64]

_COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "key": (np.int64, -1),
    "kv_len": (np.int32, 0),
    "num_output": (np.int32, 0),
    "max_output": (np.int32, 0),
    "prompt_len": (np.int32, 0),
    "is_prefill": (np.bool_, 0),
    "is_fresh": (np.bool_, 0),
    "block_count": (np.int32, 0),
    "state_slot": (np.int32, -1),
    "state_from": (np.int32, -1),
    "num_accepted": (np.int32, 0),
    "chunk_done": (np.int32, 0),
    "chunk_end": (np.int32, 0),
    "max_blocks": (np.int32, 0),
    "is_watched": (np.bool_, 0),
}
"""Every one-dimensional column: its type and what a free row holds."""


class Moves(NamedTuple):
    """Row moves of one compaction, all at once: row ``source[i]`` goes to ``target[i]``.

    The two sets are disjoint, but for a partial row that stays the last: what stood in its new place moves as well.
    """

    source: Rows
    target: Rows
    new_row: Rows
    """[rows before] where each old row is now, -1 if dropped."""


def fill_holes(alive: NDArray[np.bool_]) -> Rows:
    """The survivor order: which old row each new row holds (I10).

    Survivors among the first k rows stay; those beyond, in ascending order, fill the holes in ascending order.
    ``[0,1,1]`` gives ``[2,1]``.

    Args:
        alive: [n] bool, which rows survive.

    Returns:
        [k] int64, old row of each new row; k survivors.
    """
    num_alive = int(np.count_nonzero(alive))
    order = np.arange(num_alive, dtype=np.int64)
    holes = np.flatnonzero(~alive[:num_alive])
    order[holes] = np.flatnonzero(alive[num_alive:]) + num_alive
    return order


class RequestTable:
    """See the module's text for the map. All columns move together, in :meth:`rearrange` and nowhere else (I11)."""

    def __init__(self, max_requests: int, max_blocks_per_row: int, slots: SlotPool | None = None) -> None:
        self.max_requests = max_requests
        self.slots = slots
        """Of recurrent states, one a row; None where the model has none."""
        self.num_paused = 0
        self.num_live = 0
        self.version = 0
        """Changes whenever a row is added, dropped or moved."""
        self.requests: list[Request | None] = [None] * max_requests
        self.log = TokenLog()
        """Tokens of the active requests that they have not been handed yet."""
        self._active_requests: tuple[int, list[Request]] | None = None
        self._all_rows: Rows = np.arange(max_requests, dtype=np.int64)
        self._all_rows.flags.writeable = False
        self.block_ids: NDArray[np.int32] = np.full((max_requests, max_blocks_per_row), -1, dtype=np.int32)
        self.key: NDArray[np.int64] = _column("key", max_requests)
        self.kv_len: NDArray[np.int32] = _column("kv_len", max_requests)
        self.num_output: NDArray[np.int32] = _column("num_output", max_requests)
        self.max_output: NDArray[np.int32] = _column("max_output", max_requests)
        self.prompt_len: NDArray[np.int32] = _column("prompt_len", max_requests)
        self.is_prefill: NDArray[np.bool_] = _column("is_prefill", max_requests)
        self.is_fresh: NDArray[np.bool_] = _column("is_fresh", max_requests)
        self.block_count: NDArray[np.int32] = _column("block_count", max_requests)
        self.state_slot: NDArray[np.int32] = _column("state_slot", max_requests)
        self.state_from: NDArray[np.int32] = _column("state_from", max_requests)
        self.num_accepted: NDArray[np.int32] = _column("num_accepted", max_requests)
        self.chunk_done: NDArray[np.int32] = _column("chunk_done", max_requests)
        self.chunk_end: NDArray[np.int32] = _column("chunk_end", max_requests)
        self.max_blocks: NDArray[np.int32] = _column("max_blocks", max_requests)
        self.is_watched: NDArray[np.bool_] = _column("is_watched", max_requests)

    @property
    def num_active(self) -> int:
        """Rows that run: decode and prefill."""
        return self.num_live - self.num_paused

    @property
    def num_free(self) -> int:
        """Rows a new request could take."""
        return self.max_requests - self.num_live

    @property
    def active_rows(self) -> Rows:
        """[num_active] rows that run, decode before prefill; not to be written to."""
        return self._all_rows[self.num_paused : self.num_live]

    @property
    def partial_row(self) -> int | None:
        """The row whose present chunk is not its prompt's last one, if there is one: the last live row."""
        last = self.num_live - 1
        if last < self.num_paused or not self.is_prefill[last] or self.chunk_end[last] == self.prompt_len[last]:
            return None
        return last

    def begin_chunk(self, row: int, end: int, block_ids: NDArray[np.int32]) -> None:
        """Let a partial row read on to ``end`` prompt tokens, with more blocks."""
        self.chunk_done[row] = self.chunk_end[row]
        self.chunk_end[row] = end
        self.state_from[row] = -1
        count = int(self.block_count[row])
        self.block_ids[row, count : count + block_ids.size] = block_ids
        self.block_count[row] += block_ids.size

    def columns(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Every numpy column by name, the block table included."""
        for name in _COLUMNS:
            yield name, getattr(self, name)
        yield "block_ids", self.block_ids

    def live_requests(self) -> list[Request]:
        """The requests of all live rows, in row order."""
        return [request for request in self.requests[: self.num_live] if request is not None]

    def active_requests(self) -> list[Request]:
        """Of the active rows, in row order; the same list while rows stay as they are, not to be changed."""
        if self._active_requests is None or self._active_requests[0] != self.version:
            self._active_requests = (self.version, self.live_requests()[self.num_paused :])
        return self._active_requests[1]

    def add_tokens(self, tokens: NDArray[np.int64]) -> None:
        """One more token for each active row, in row order; [num_active] int64, copied."""
        self.num_output[self.num_paused : self.num_live] += 1
        self.log.append(self.active_requests(), tokens)

    def add_verified(
        self, tokens: NDArray[np.int64], num_tokens: NDArray[np.int64], num_drafts: NDArray[np.int64]
    ) -> None:
        """Tokens for each active row, in row order.

        Args:
            tokens: [num_active, W] int64, copied; -1 behind what a row gets.
            num_tokens: [num_active] that each gets: accepted drafts and one more.
            num_drafts: [num_active] that were verified for each.
        """
        self.num_output[self.num_paused : self.num_live] += num_tokens.astype(np.int32)
        self.log.append(self.active_requests(), tokens, (num_drafts, num_tokens - 1))

    def add(
        self,
        request: Request,
        block_ids: NDArray[np.int32],
        *,
        prefill_len: int,
        chunk: tuple[int, int] | None = None,
        max_blocks: int = 0,
        state_from: int = -1,
    ) -> int:
        """Append a prefill row holding ``block_ids``; returns its index. The caller checked that a row is free.

        Args:
            request: Its owner.
            block_ids: [count] int32, those it shares first, then those of the first chunk.
            prefill_len: Tokens to have in the cache before it decodes.
            chunk: Where the first chunk begins and ends; None: all of them.
            max_blocks: Blocks set aside for it.
            state_from: Slot that holds the state behind the tokens it skips; -1: it skips none, or has no state.
        """
        row = self.num_live
        assert row < self.max_requests, "no free row"
        self.log.hand_over()
        self.clear(row)
        self.requests[row] = request
        request.token_log = self.log
        self.key[row] = request.key
        self.num_output[row] = len(request.output_ids)
        self.max_output[row] = request.max_new_tokens
        self.prompt_len[row] = prefill_len
        self.chunk_done[row], self.chunk_end[row] = (0, prefill_len) if chunk is None else chunk
        self.max_blocks[row] = max_blocks
        self.is_prefill[row] = self.is_fresh[row] = True
        self.is_watched[row] = request.is_watched
        self.block_ids[row, : block_ids.size] = block_ids
        self.block_count[row] = block_ids.size
        if self.slots is not None:
            self.state_slot[row], self.state_from[row] = self.slots.take(), state_from
        self.num_live += 1
        self.version += 1
        request.row = row
        return row

    def append_blocks(self, rows: Rows, block_ids: NDArray[np.int32]) -> None:
        """Give each of ``rows`` one more block, in order."""
        self.block_ids[rows, self.block_count[rows]] = block_ids
        self.block_count[rows] += 1

    def held_blocks(self, rows: Rows) -> NDArray[np.int32]:
        """All block ids that ``rows`` hold, with repeats if shared."""
        held = self.block_ids[rows]
        return held[held >= 0]

    def keep(self, alive: NDArray[np.bool_]) -> Moves:
        """Drop the live rows that are not ``alive`` and close the holes; blocks must have been released.

        Args:
            alive: [num_live] bool.

        Returns:
            The moves made; also what the device's columns must follow.
        """
        paused = self.num_paused
        order = np.concatenate([fill_holes(alive[:paused]), paused + fill_holes(alive[paused:])])
        if self.partial_row is not None and alive[-1]:  # no other row may stand behind it
            place = int(np.flatnonzero(order == alive.size - 1)[0])
            order[place], order[-1] = order[-1], order[place]
        return self.rearrange(order, num_paused=int(np.count_nonzero(alive[:paused])))

    def rearrange(self, order: Rows, *, num_paused: int) -> Moves:
        """Let new row i be old row ``order[i]``; rows that are not in it are dropped, their blocks released before.

        Args:
            order: [k] int64, distinct live rows.
            num_paused: How many of them are paused, those in front.
        """
        self.log.hand_over()
        old_live = self.num_live
        dropped = np.ones(old_live, dtype=np.bool_)
        dropped[order] = False
        if self.slots is not None:
            self.slots.give_back(self.state_slot[:old_live][dropped])
        target = np.flatnonzero(order != np.arange(order.size)).astype(np.int64)
        source = order[target]
        for row in np.flatnonzero(dropped).tolist():
            request = self.requests[row]
            if request is not None:
                request.row = request.token_log = None
        for _, column in self.columns():
            column[target] = column[source]
        moved = [self.requests[row] for row in source.tolist()]
        for request, target_row in zip(moved, target.tolist(), strict=True):
            self.requests[target_row] = request
            if request is not None:
                request.row = target_row
        for row in range(order.size, old_live):
            self.clear(row)
        self.num_live, self.num_paused = order.size, num_paused
        self.version += 1
        new_row = np.full(old_live, -1, dtype=np.int64)
        new_row[order] = np.arange(order.size)
        return Moves(source, target, new_row)

    def clear(self, row: int) -> None:
        """Put the values of a free row into ``row`` (I3)."""
        self.requests[row] = None
        for name, (_, empty) in _COLUMNS.items():
            getattr(self, name)[row] = empty
        self.block_ids[row] = -1

    def reset(self) -> None:
        """Every row is free."""
        self.log.hand_over()
        for row in range(min(self.num_live + 1, self.max_requests)):  # an interrupt may have left one half entered
            request = self.requests[row]
            if request is not None:
                request.row = request.token_log = None
            self.clear(row)
        if self.slots is not None:
            self.slots.reset()
        self.num_live = 0
        self.num_paused = 0
        self.version += 1


def _column(name: str, max_requests: int) -> Any:
    dtype, empty = _COLUMNS[name]
    return np.full(max_requests, empty, dtype=dtype)
