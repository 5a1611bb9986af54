"""Which waiting request gets a row next. First in, first out, no skipping ahead (I47).

With chunked prefill a prompt that does not fit the forward's token budget is read in chunks, one such prompt at a
time; whole prompts take the same path, as one chunk.

How many blocks must be there is the capacity policy's: ``guaranteed_no_evict`` asks that the pool could hold every
live request at its longest, so a row that runs never lacks a block; ``max_utilization`` asks for the blocks of the
prompt, and rows pause when blocks run out (``engine/pausing.py``). See docs/decisions/0003 and 0013.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from engine.cache.blocks import BlockIds, BlockPool
from engine.pausing import Room, RoomKeeper
from engine.prefix_cache import NO_HIT, Hit, PrefixCache
from engine.request import Request, RequestState
from engine.table import RequestTable


class Refusal(Enum):
    """Why the head of the queue has to wait."""

    NO_ROW = "no free row"
    BATCH_FULL = "the forward's token budget is used up"
    ROWS_PAUSED = "paused rows go on first"
    NO_BLOCKS = "not enough blocks"
    PREFIX_COMING = "its prefix is being computed"


@dataclass(frozen=True, slots=True)
class Entry:
    """How a request would enter: which of its tokens it skips and reads, and the blocks that takes."""

    num_tokens: int
    """Tokens to have in the cache before it decodes; more than its prompt's if it comes back."""
    done: int
    """Of those, skipped: its prefix is cached."""
    end: int
    """Read once its first chunk has run."""
    shared: BlockIds
    """[done / block size] blocks of that prefix."""
    needed_blocks: int
    """What it takes of :attr:`Capacity.free_blocks`."""
    max_blocks: int
    """Blocks it holds at its longest."""

    @property
    def chunk(self) -> int:
        """Tokens it reads in the next forward."""
        return self.end - self.done

    @property
    def is_partial(self) -> bool:
        """Whether its prompt goes on in later forwards."""
        return self.end < self.num_tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """What admission may use now; a value, so that asking changes nothing (I19)."""

    free_rows: int
    free_tokens: int
    """Tokens left in the next forward."""
    free_blocks: int
    """Blocks that no live request needs: now, or where admission ``reserves`` ever."""
    block_size: int
    reserves: bool = True
    """Whether a request sets aside blocks for its longest output; else for its prompt alone."""
    num_paused: int = 0
    """Rows that wait for blocks."""
    chunked: bool = False
    """Whether a prompt may enter with a part of it."""

    def after(self, entry: Entry) -> Capacity:
        """What is left once a request is in. Behind a partial chunk nobody enters: the rest comes first."""
        return replace(
            self,
            free_rows=self.free_rows - 1,
            free_tokens=0 if entry.is_partial else self.free_tokens - entry.chunk,
            free_blocks=self.free_blocks - entry.needed_blocks,
        )


def chunk_size(remaining: int, budget: int, *, chunked: bool = True) -> int:
    """Tokens of a prompt's next chunk: what is left of it, or of the budget; 0: none now.

    Neither a chunk nor what it leaves is a single token. Prefill kernels of FlashAttention take a query of one token
    for a decode row (upstream's guard; ours read it rightly), and a lone last token would cost a forward of its own.
    """
    if remaining <= budget:
        return remaining
    if not chunked:
        return 0
    chunk = budget - (remaining - budget == 1)
    return chunk if chunk >= 2 else 0


def blocks_for(request: Request, block_size: int) -> int:
    """Blocks a request holds at most. Its last token is sampled but never cached."""
    longest = len(request.prompt_ids) + request.max_new_tokens - 1
    return -(-longest // block_size)


def consider(request: Request, capacity: Capacity, hit: Hit = NO_HIT) -> Entry | Refusal:
    """How ``request`` would enter now, or why it cannot. Pure: the overlap test and admission both ask here.

    Args:
        request: It waits.
        capacity: What there is.
        hit: Cached blocks that hold the beginning of its tokens.
    """
    if capacity.num_paused:
        return Refusal.ROWS_PAUSED
    if capacity.free_rows < 1:
        return Refusal.NO_ROW
    length, done = request.num_tokens, hit.block_ids.size * capacity.block_size
    chunk = chunk_size(length - done, capacity.free_tokens, chunked=capacity.chunked)
    if chunk == 0:
        return Refusal.BATCH_FULL
    most = blocks_for(request, capacity.block_size)
    # A partial prompt asks for the blocks of all its chunks: else others would use them up, and it would go back.
    needed = most if capacity.reserves else -(-length // capacity.block_size) - hit.block_ids.size + hit.num_idle
    if needed > capacity.free_blocks:
        return Refusal.NO_BLOCKS
    return Entry(length, done, done + chunk, hit.block_ids, needed, most)


class AdmissionQueue(Protocol):
    """The engine's side of the admit phase; called by the controller at one point of an order and nowhere else."""

    def admit(self) -> list[Request]:
        """Move new submissions to the queue and give rows to those that fit; returns the newly placed, in order.

        A prompt that is read in chunks goes on first.
        """
        ...

    def make_room(self) -> Room | None:
        """Let rows pause, go on or go back to the queue, so that every active one finds the block it needs next.

        Returns:
            What was done; None if nothing was to do.
        """
        ...

    def head_refusal(self) -> Refusal | None:
        """Why the head of the queue has to wait; None if it can enter now or nothing waits. Changes nothing."""
        ...

    def take_aborted(self) -> list[Request]:
        """Requests whose abort was asked for since the last call; those that waited have left the queue."""
        ...

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits that was not aborted."""
        ...

    @property
    def has_aborts(self) -> bool:
        """Whether :meth:`take_aborted` would return anything."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        ...


class RequestQueue:
    """Submissions on their way to rows. Submitting and aborting only leave a note; admit and resolve act on it."""

    def __init__(
        self,
        table: RequestTable,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        block_size: int,
        chunked: bool = False,
        cache: PrefixCache | None = None,
        room: RoomKeeper | None = None,
    ) -> None:
        self._table = table
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._block_size = block_size
        self._chunked = chunked
        self._cache = cache
        self._room = room
        self._waiting: deque[Request] = deque()
        self._inbox: deque[Request] = deque()
        self._aborted: list[Request] = []

    @property
    def waiting(self) -> list[Request]:
        """Everything without a row, in the order it will be considered."""
        return [*self._waiting, *self._inbox]

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting) + len(self._inbox)

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits that was not aborted."""
        return self._head() is not None

    @property
    def has_aborts(self) -> bool:
        """Whether :meth:`take_aborted` would return anything."""
        return bool(self._aborted)

    def submit(self, request: Request) -> None:
        """Leave a request for the next admit."""
        if self._cache is not None:
            self._cache.digest(request)
        self._inbox.append(request)

    def requeue(self, requests: Iterable[Request]) -> None:
        """Put requests that lost their rows back where they stood: in front, behind older ones that came back too."""
        for request in sorted(requests, key=lambda request: request.key, reverse=True):
            if self._cache is not None:
                self._cache.digest(request)
            place = 0
            while place < len(self._waiting) and self._waiting[place].key < request.key:
                place += 1
            self._waiting.insert(place, request)

    def make_room(self) -> Room | None:
        """See :class:`AdmissionQueue`."""
        if self._room is None:
            return None
        room = self._room.make(self._chunk_blocks())
        if room is not None and room.evicted:
            self.requeue(room.evicted)
        return room

    def abort(self, request: Request) -> None:
        """Leave an abort for the next admit or resolve."""
        request.abort_requested = True
        self._aborted.append(request)

    def take_aborted(self) -> list[Request]:
        """See :class:`AdmissionQueue`."""
        aborted, self._aborted = self._aborted, []
        if any(request.row is None for request in aborted):
            self._waiting = deque(r for r in self._waiting if not r.abort_requested)
            self._inbox = deque(r for r in self._inbox if not r.abort_requested)
        return aborted

    def capacity(self) -> Capacity:
        """What is free now, the active rows' next tokens and every live request's longest output set aside.

        Of a prompt that is read in chunks the next tokens are its next chunk; unless that is the last, nobody enters.
        """
        table = self._table
        return Capacity(
            free_rows=table.num_free,
            free_tokens=self._free_tokens(),
            free_blocks=self._free_blocks(),
            block_size=self._block_size,
            reserves=self._room is None,
            num_paused=table.num_paused,
            chunked=self._chunked,
        )

    def hit(self, request: Request) -> Hit:
        """Cached blocks that hold the beginning of its tokens; changes nothing."""
        return NO_HIT if self._cache is None else self._cache.hit(request)

    def _free_blocks(self) -> int:
        if self._room is None:
            return self._pool.num_blocks - int(self._table.max_blocks[: self._table.num_live].sum())
        return self._pool.num_free - int(self._room.needing().size) - self._chunk_blocks()

    def _chunk_blocks(self) -> int:
        """Blocks that the next chunk of a partial prompt takes."""
        row = self._table.partial_row
        return 0 if row is None else self._blocks_to_read(row, self._next_chunk(row)[1])

    def _blocks_to_read(self, row: int, chunk: int) -> int:
        end = int(self._table.chunk_end[row]) + chunk
        return -(-end // self._block_size) - int(self._table.block_count[row])

    def _free_tokens(self) -> int:
        row = self._table.partial_row
        if row is None:
            return self._max_batch_tokens - self._table.num_active
        remaining, chunk = self._next_chunk(row)
        return self._max_batch_tokens - (self._table.num_active - 1) - chunk if chunk == remaining else 0

    def _next_chunk(self, row: int) -> tuple[int, int]:
        """Prompt tokens that a partial row has still to read, and those of its next chunk: never none of them."""
        table = self._table
        remaining = int(table.prompt_len[row] - table.chunk_end[row])
        chunk = chunk_size(remaining, self._max_batch_tokens - (table.num_active - 1))
        assert chunk, "max_batch_tokens leaves no chunk beside decode rows"
        return remaining, chunk

    def head_refusal(self) -> Refusal | None:
        """See :class:`AdmissionQueue`."""
        head = self._head()
        if head is None:
            return None
        found = consider(head, self.capacity(), self.hit(head))
        return found if isinstance(found, Refusal) else None

    def admit(self) -> list[Request]:
        """See :class:`AdmissionQueue`."""
        self._waiting.extend(self._inbox)
        self._inbox.clear()
        admitted: list[Request] = []
        aside: list[Request] = []
        capacity = self.capacity()  # before the next chunk is placed: it counts that one
        self._continue_chunk()
        now_ns = time.perf_counter_ns()
        while self._waiting and len(aside) <= self._table.max_requests:  # no scan of a long queue
            request = self._waiting[0]
            found = self._consider(request, capacity)
            if found is Refusal.PREFIX_COMING:
                aside.append(self._waiting.popleft())
                continue
            if isinstance(found, Refusal):
                break
            self._waiting.popleft()
            capacity = capacity.after(found)
            self._place(request, found, now_ns)
            admitted.append(request)
        self._waiting.extendleft(reversed(aside))
        return admitted

    def _consider(self, request: Request, capacity: Capacity) -> Entry | Refusal:
        """As :func:`consider`; and while a prompt of this round computes the next block of its prefix it waits.

        In the next round it skips that block.
        """
        hit = self.hit(request)
        found = consider(request, capacity, hit)
        if self._cache is None or isinstance(found, Refusal) or request.owes_prompt_logprobs:
            return found
        if self._cache.is_coming(request, hit.block_ids.size):
            self._cache.counters.prefix_waits += 1
            return Refusal.PREFIX_COMING
        return found

    def _continue_chunk(self) -> None:
        row, table = self._table.partial_row, self._table
        if row is None:
            return
        chunk = self._next_chunk(row)[1]
        block_ids = self._pool.allocate(self._blocks_to_read(row, chunk))
        assert block_ids is not None, "too few blocks were set aside or made room for"
        table.begin_chunk(row, int(table.chunk_end[row]) + chunk, block_ids)
        if self._cache is not None:
            self._cache.expect(row)

    def _place(self, request: Request, entry: Entry, now_ns: int) -> None:
        if self._cache is not None:
            self._cache.take(request, entry.shared)
        block_ids = self._pool.allocate(-(-entry.end // self._block_size) - entry.shared.size)
        assert block_ids is not None, "fewer free blocks than were counted"
        row = self._table.add(
            request,
            np.concatenate([entry.shared, block_ids]),
            prefill_len=entry.num_tokens,
            chunk=(entry.done, entry.end),
            max_blocks=entry.max_blocks,
        )
        if self._cache is not None:
            self._cache.expect(row)
        request.move_to(RequestState.PREFILL)
        if request.timings.admitted_ns is None:
            request.timings = replace(request.timings, admitted_ns=now_ns)
            request.num_cached_tokens = entry.done

    def _head(self) -> Request | None:
        for request in (*self._waiting, *self._inbox) if self._aborted else (self._waiting or self._inbox):
            if not request.abort_requested:
                return request
        return None

    def clear(self) -> list[Request]:
        """Forget everything; returns what waited."""
        dropped = self.waiting
        self._waiting.clear()
        self._inbox.clear()
        self._aborted.clear()
        return dropped
