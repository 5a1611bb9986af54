"""Which waiting request gets a row next: the policy's choice, by default first in, first out, nobody skipped (I47).

With chunked prefill a prompt that does not fit the forward's token budget is read in chunks, one such prompt at a
time; whole prompts take the same path, as one chunk.

How many blocks must be there is the capacity policy's: ``guaranteed_no_evict`` asks that the pool could hold every
live request at its longest, so a row that runs never lacks a block; ``max_utilization`` asks for the blocks of the
prompt, and rows pause when blocks run out (``engine/pausing.py``). See docs/decisions/0003 and 0013.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from engine.batch import BatchDimensions
from engine.cache.blocks import BlockIds, BlockPool
from engine.chunks import chunk_size
from engine.errors import PolicyError
from engine.graph_gate import NO_ROWS, Chunk, Deferral, GraphGate, joined
from engine.pausing import Room, RoomKeeper
from engine.prefix_cache import NO_HIT, Hit, PrefixCache
from engine.request import Request, RequestState
from engine.table import RequestTable
from engine.waiting import WaitingList, WaitingView


class Refusal(Enum):
    """Why the head of the queue has to wait."""

    NO_ROW = "no free row"
    BATCH_FULL = "the forward's token budget is used up"
    ROWS_PAUSED = "paused rows go on first"
    ONE_TOKEN = "the chunk, or what it leaves, would be one token"
    GRAPH_WAIT = "no captured graph holds it beside the rows that run"
    NO_BLOCKS = "not enough blocks"
    PREFIX_COMING = "its prefix is being computed"
    HELD_BACK = "the admission policy lets nobody in now"


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
    state_from: int = -1
    """Slot of the snapshot at the end of its prefix; -1 without one."""

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
    held: BatchDimensions = NO_ROWS
    """The next forward so far."""
    gate: GraphGate | None = None
    """Asks that a captured graph runs it; None: graphs are no matter."""
    chunked: bool = False
    """Whether a prompt may enter with a part of it."""
    drafts: int = 0
    """Draft tokens a step: their heads write so many positions behind a prompt, twice as many behind the output."""

    def after(self, entry: Entry) -> Capacity:
        """What is left once a request is in. Behind a partial chunk nobody enters: the rest comes first."""
        return replace(
            self,
            free_rows=self.free_rows - 1,
            free_tokens=0 if entry.is_partial else self.free_tokens - entry.chunk,
            held=joined(self.held, entry.chunk),
            free_blocks=self.free_blocks - entry.needed_blocks,
        )


def blocks_for(request: Request, block_size: int, drafts: int = 0) -> int:
    """Blocks a request holds at most. Its last token is sampled but never cached; ``drafts`` a step lie behind it."""
    longest = len(request.prompt_ids) + request.max_new_tokens - 1 + 2 * drafts
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
    chunk = _first_chunk(request, length - done, capacity)
    if isinstance(chunk, Refusal):
        return chunk
    most = blocks_for(request, capacity.block_size, capacity.drafts)
    # A partial prompt asks for the blocks of all its chunks: else others would use them up, and it would go back.
    at_once = -(-(length + capacity.drafts) // capacity.block_size) - hit.block_ids.size
    needed = most if capacity.reserves else at_once + hit.num_idle
    if needed > capacity.free_blocks:
        return Refusal.NO_BLOCKS
    return Entry(length, done, done + chunk, hit.block_ids, needed, most, hit.state_from)


def _first_chunk(request: Request, remaining: int, capacity: Capacity) -> int | Refusal:
    """Tokens that it reads in the next forward, or why none."""
    plain = chunk_size(remaining, capacity.free_tokens, chunked=capacity.chunked)
    if capacity.gate is None or plain == 0:
        return plain or Refusal.BATCH_FULL
    found = capacity.gate.chunk(capacity.held, remaining, capacity.free_tokens)
    if found.deferral is None:
        return found.tokens
    if found.deferral is not Deferral.NO_GRAPH:
        return Refusal.ONE_TOKEN if found.deferral is Deferral.ONE_TOKEN else Refusal.GRAPH_WAIT
    # At the door its prompt fitted a graph. With output to read as well it may not any more, and must not fail for it:
    # it goes eagerly, and by itself, for no graph has room beside it.
    return plain if capacity.held.num_prefill == 0 else Refusal.GRAPH_WAIT


class AdmissionPolicy(Protocol):
    """Who is next. Asked before each admission and, each iteration, by the overlap test; a researcher passes their own.

    It decides whose turn it is, not whether there is room: if whoever it chooses does not fit, nobody enters in this
    round. Asked twice about the same queue it must answer the same, and it changes nothing (I19).
    """

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        """One of ``waiting``; None: nobody now, also if nothing runs, which makes iterations that do nothing.

        Args:
            waiting: At least one request, the oldest first; those that gave way for want of blocks stand in front.
            capacity: What there is; :func:`consider` says of a request how it would enter.
        """
        ...


class FirstComeFirstServed:
    """The oldest, and nobody in its place (I47)."""

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        """The oldest."""
        return waiting[0]


first_come_first_served: AdmissionPolicy = FirstComeFirstServed()


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

    def chunk_blocks(self) -> int:
        """Blocks that the next chunk of a partial prompt takes; 0 without one."""
        ...

    def head_refusal(self) -> Refusal | None:
        """Why the head of the queue has to wait; None if it can enter now or nothing waits. Changes nothing."""
        ...

    def forget(self, request: Request) -> None:
        """It has ended and waits no more, if it waited."""
        ...

    def count_graph_wait(self) -> Request | None:
        """Count an iteration for the head if it waits for a graph, and return it; called once an iteration."""
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
        gate: GraphGate | None = None,
        policy: AdmissionPolicy | None = None,
        drafts: int = 0,
    ) -> None:
        self._table = table
        self._drafts = drafts
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._block_size = block_size
        self._chunked = chunked
        self._cache = cache
        self._room = room
        self._gate = gate
        self._policy = policy or first_come_first_served
        self._waiting = WaitingList()
        self._view = WaitingView(self._waiting)
        self._aborted: list[Request] = []

    @property
    def is_fifo(self) -> bool:
        """Whether the policy is the default one."""
        return self._policy is first_come_first_served

    @property
    def waiting(self) -> list[Request]:
        """Everything without a row, in order of arrival."""
        return self._waiting.everybody

    @property
    def newest(self) -> Request | None:
        """Submitted last, since the last admit."""
        return self._waiting.newest

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return self._waiting.num_waiting

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits that was not aborted."""
        return len(self._waiting) > 0

    @property
    def has_aborts(self) -> bool:
        """Whether :meth:`take_aborted` would return anything."""
        return bool(self._aborted)

    def submit(self, request: Request) -> None:
        """Leave a request for the next admit."""
        if self._cache is not None:
            self._cache.digest(request)
        self._waiting.submit(request)

    def requeue(self, requests: Iterable[Request]) -> None:
        """Put requests that lost their rows back where they stood: in front, behind older ones that came back too."""
        back = list(requests)
        if self._cache is not None:
            for request in back:
                self._cache.digest(request)
        self._waiting.put_back(back)

    def make_room(self) -> Room | None:
        """See :class:`AdmissionQueue`."""
        if self._room is None:
            return None
        room = self._room.make(self.chunk_blocks())
        if room is not None and room.evicted:
            self.requeue(room.evicted)
        return room

    def abort(self, request: Request) -> None:
        """Leave an abort for the next admit or resolve."""
        request.abort_requested = True
        self._waiting.note_abort(request)
        self._aborted.append(request)

    def take_aborted(self) -> list[Request]:
        """See :class:`AdmissionQueue`."""
        aborted, self._aborted = self._aborted, []
        self._waiting.drop(aborted)
        return aborted

    def capacity(self) -> Capacity:
        """What is free now, the active rows' next tokens and every live request's longest output set aside.

        Of a prompt that is read in chunks the next tokens are its next chunk; unless that is the last, nobody enters.
        """
        table = self._table
        held, free_tokens = self._next_forward()
        return Capacity(
            free_rows=table.num_free,
            free_tokens=free_tokens,
            held=held,
            gate=self._gate,
            free_blocks=self._free_blocks(),
            block_size=self._block_size,
            reserves=self._room is None,
            num_paused=table.num_paused,
            chunked=self._chunked,
            drafts=self._drafts,
        )

    def hit(self, request: Request) -> Hit:
        """Cached blocks that hold the beginning of its tokens; changes nothing."""
        return NO_HIT if self._cache is None else self._cache.hit(request)

    def _free_blocks(self) -> int:
        if self._room is None:
            return self._pool.num_blocks - int(self._table.max_blocks[: self._table.num_live].sum())
        return self._pool.num_free - int(self._room.needing().size) - self.chunk_blocks()

    def chunk_blocks(self) -> int:
        """See :class:`AdmissionQueue`."""
        row = self._table.partial_row
        return 0 if row is None else self._blocks_to_read(row, self._next_chunk(row)[1].tokens)

    def _blocks_to_read(self, row: int, chunk: int) -> int:
        end = int(self._table.chunk_end[row]) + chunk + self._drafts
        return -(-end // self._block_size) - int(self._table.block_count[row])

    def _next_forward(self) -> tuple[BatchDimensions, int]:
        """What the rows that are there make of the next forward, and the tokens it has left for others."""
        table, row = self._table, self._table.partial_row
        held = self._decoding(table.num_active - (row is not None))
        if row is None:
            return held, self._max_batch_tokens - held.num_tokens
        remaining, chunk = self._next_chunk(row)
        held = joined(held, chunk.tokens)
        # Behind a chunk that is not the last nobody enters, nor beside one that no graph runs.
        is_open = chunk.tokens == remaining and chunk.miss_reason is None
        return held, self._max_batch_tokens - held.num_tokens if is_open else 0

    def _next_chunk(self, row: int) -> tuple[int, Chunk]:
        """Prompt tokens that a partial row has still to read, and its next chunk: never none of them."""
        table, held = self._table, self._decoding(self._table.num_active - 1)
        remaining, budget = int(table.prompt_len[row] - table.chunk_end[row]), self._max_batch_tokens - held.num_tokens
        if self._gate is not None:
            return remaining, self._gate.continuing(held, remaining, budget)
        tokens = chunk_size(remaining, budget)
        assert tokens, "max_batch_tokens leaves no chunk beside decode rows"
        return remaining, Chunk(tokens=tokens)

    def _decoding(self, num_rows: int) -> BatchDimensions:
        return BatchDimensions(num_tokens=num_rows * (1 + self._drafts), num_prefill=0, num_decode=num_rows)

    def head_refusal(self) -> Refusal | None:
        """See :class:`AdmissionQueue`."""
        return self._probe()[1]

    def _probe(self) -> tuple[Request | None, Refusal | None]:
        """The head, and why it has to wait."""
        capacity = self.capacity()
        head = self._head(capacity)
        if head is None:
            return None, Refusal.HELD_BACK if self._waiting else None
        found = consider(head, capacity, self.hit(head))
        return head, found if isinstance(found, Refusal) else None

    def _head(self, capacity: Capacity) -> Request | None:
        """Whoever the policy takes next; None if nobody waits or it wants none of them."""
        if not self._waiting:
            return None
        chosen = self._policy.choose(self._view, capacity)
        if chosen is None or (isinstance(chosen, Request) and self._waiting.holds(chosen)):
            return chosen
        named = chosen.request_id if isinstance(chosen, Request) else f"{chosen!r:.60}"
        raise PolicyError(
            f"admission policy {type(self._policy).__name__} chose {named}, which does not wait (I2); it must return "
            "one of the requests it was given, or None"
        )

    def forget(self, request: Request) -> None:
        """See :class:`AdmissionQueue`."""
        self._waiting.drop([request])

    def count_graph_wait(self) -> Request | None:
        """See :class:`AdmissionQueue`."""
        head, refusal = self._probe() if self._gate is not None else (None, None)
        if head is None or refusal is not Refusal.GRAPH_WAIT:
            return None
        head.graph_wait_steps += 1
        return head

    def admit(self) -> list[Request]:
        """See :class:`AdmissionQueue`."""
        self._waiting.settle()
        if self._cache is not None:
            self._cache.begin_round()
        admitted: list[Request] = []
        aside: list[Request] = []
        capacity = self.capacity()  # before the next chunk is placed: it counts that one
        self._continue_chunk()
        now_ns = time.perf_counter_ns()
        while len(aside) <= self._table.max_requests:  # no scan of a long queue
            request = self._head(capacity)
            if request is None:
                break
            found = self._consider(request, capacity)
            if found is Refusal.PREFIX_COMING:
                self._waiting.take(request)
                aside.append(request)
                continue
            if isinstance(found, Refusal):
                break
            self._waiting.take(request)
            capacity = capacity.after(found)
            self._place(request, found, now_ns)
            admitted.append(request)
        self._waiting.put_back(aside)
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
        chunk = self._next_chunk(row)[1].tokens
        block_ids = self._pool.allocate(self._blocks_to_read(row, chunk))
        assert block_ids is not None, "too few blocks were set aside or made room for"
        table.begin_chunk(row, int(table.chunk_end[row]) + chunk, block_ids)
        if self._cache is not None:
            self._cache.expect(row)

    def _place(self, request: Request, entry: Entry, now_ns: int) -> None:
        if self._cache is not None:
            self._cache.take(request, entry.shared)
        block_ids = self._pool.allocate(-(-(entry.end + self._drafts) // self._block_size) - entry.shared.size)
        assert block_ids is not None, "fewer free blocks than were counted"
        row = self._table.add(
            request,
            np.concatenate([entry.shared, block_ids]),
            prefill_len=entry.num_tokens,
            chunk=(entry.done, entry.end),
            max_blocks=entry.max_blocks,
            state_from=entry.state_from,
        )
        if self._cache is not None:
            self._cache.expect(row)
        request.move_to(RequestState.PREFILL)
        if request.timings.admitted_ns is None:
            request.timings = replace(request.timings, admitted_ns=now_ns)
            request.num_cached_tokens = entry.done
        request.graph_wait_steps = 0

    def clear(self) -> list[Request]:
        """Forget everything; returns what waited."""
        dropped = self.waiting
        self._waiting.clear()
        self._aborted.clear()
        return dropped
