"""Which waiting request gets a row next. First in, first out, no skipping ahead (I47).

With chunked prefill a prompt that does not fit the forward's token budget is read in chunks, one such prompt at a
time; whole prompts take the same path, as one chunk.

Until pausing exists, admission reserves: a request enters only if the pool could hold every live request at its
longest, so a row that runs never lacks a block. See docs/decisions/0003.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from engine.cache.blocks import BlockPool
from engine.request import Request, RequestState
from engine.table import RequestTable


class Refusal(Enum):
    """Why the head of the queue has to wait."""

    NO_ROW = "no free row"
    BATCH_FULL = "the forward's token budget is used up"
    NO_BLOCKS = "not enough blocks for its longest output"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What admission may use now; a value, so that asking changes nothing (I19)."""

    free_rows: int
    free_tokens: int
    """Tokens left in the next forward."""
    unreserved_blocks: int
    """Blocks that no live request could ever need."""
    block_size: int
    chunked: bool = False
    """Whether a prompt may enter with a part of it."""

    def chunk(self, request: Request) -> int:
        """Tokens of ``request`` that the next forward could read; 0: none."""
        return chunk_size(request.num_tokens, self.free_tokens, chunked=self.chunked)

    def after(self, request: Request) -> Capacity:
        """What is left once ``request`` is in. Behind a partial chunk nobody enters: the rest comes first."""
        chunk = self.chunk(request)
        is_partial = chunk < request.num_tokens
        return replace(
            self,
            free_rows=self.free_rows - 1,
            free_tokens=0 if is_partial else self.free_tokens - chunk,
            unreserved_blocks=self.unreserved_blocks - blocks_for(request, self.block_size),
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


def refusal(request: Request, capacity: Capacity) -> Refusal | None:
    """Why ``request`` cannot enter now, None if it can. Pure: the overlap test and admission both ask here."""
    if capacity.free_rows < 1:
        return Refusal.NO_ROW
    if capacity.chunk(request) == 0:
        return Refusal.BATCH_FULL
    if blocks_for(request, capacity.block_size) > capacity.unreserved_blocks:
        return Refusal.NO_BLOCKS
    return None


class AdmissionQueue(Protocol):
    """The engine's side of the admit phase; called by the controller at one point of an order and nowhere else."""

    def admit(self) -> list[Request]:
        """Move new submissions to the queue and give rows to those that fit; returns the newly placed, in order.

        A prompt that is read in chunks goes on first.
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
        self, table: RequestTable, pool: BlockPool, *, max_batch_tokens: int, block_size: int, chunked: bool = False
    ) -> None:
        self._table = table
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._block_size = block_size
        self._chunked = chunked
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
        self._inbox.append(request)

    def requeue(self, requests: Iterable[Request]) -> None:
        """Put requests that lost their rows back in front, in the given order; for recovery."""
        self._waiting.extendleft(reversed(list(requests)))

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
        live = self._table.live_requests()
        reserved = sum(blocks_for(request, self._block_size) for request in live)
        return Capacity(
            free_rows=self._table.num_free,
            free_tokens=self._free_tokens(),
            unreserved_blocks=self._pool.num_blocks - reserved,
            block_size=self._block_size,
            chunked=self._chunked,
        )

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
        return None if head is None else refusal(head, self.capacity())

    def admit(self) -> list[Request]:
        """See :class:`AdmissionQueue`."""
        self._waiting.extend(self._inbox)
        self._inbox.clear()
        admitted: list[Request] = []
        capacity = self.capacity()  # before the next chunk is placed: it counts that one
        self._continue_chunk()
        now_ns = time.perf_counter_ns()
        while self._waiting and refusal(self._waiting[0], capacity) is None:
            request = self._waiting.popleft()
            chunk = capacity.chunk(request)
            capacity = capacity.after(request)
            self._place(request, chunk, now_ns)
            admitted.append(request)
        return admitted

    def _continue_chunk(self) -> None:
        row, table = self._table.partial_row, self._table
        if row is None:
            return
        end = int(table.chunk_end[row]) + self._next_chunk(row)[1]
        block_ids = self._pool.allocate(-(-end // self._block_size) - int(table.block_count[row]))
        assert block_ids is not None, "admission reserved too few blocks"
        table.begin_chunk(row, end, block_ids)

    def _place(self, request: Request, chunk: int, now_ns: int) -> None:
        block_ids = self._pool.allocate(-(-chunk // self._block_size))
        assert block_ids is not None, "fewer free blocks than unreserved ones"
        self._table.add(request, block_ids, prefill_len=request.num_tokens, chunk=chunk)
        request.move_to(RequestState.PREFILL)
        if request.timings.admitted_ns is None:
            request.timings = replace(request.timings, admitted_ns=now_ns)

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
