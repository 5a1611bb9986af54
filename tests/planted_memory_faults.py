"""Faults of the prefix cache and of pausing; as ``planted_faults``, but played by ``memory_world.play_memory``."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import prefix_cache as prefix_module
from engine.admission import RequestQueue
from engine.cache.blocks import BlockPool
from engine.cache.prefix import PrefixIndex
from engine.cache.prefix_pool import PrefixPool
from engine.columns import LAST_TOKEN, DeviceColumns
from engine.controller import Controller
from engine.pausing import RoomKeeper
from engine.prefix_cache import NO_HIT, PrefixCache
from engine.runner import Runner
from engine.table import RequestTable
from tests.planted_faults import Fault, Patch, wrap

# -- hits --------------------------------------------------------------------------------------------------------------


def hit_not_capped(patch: Patch) -> None:
    patch.setattr(PrefixCache, "skippable", lambda self, request: request.digests)


def hit_one_block_too_long(patch: Patch) -> None:
    def hit(real: Any, self: PrefixCache, request: Any) -> Any:
        found = real(self, request)
        idle = [block for block in self.pool.index.idle if block not in found.block_ids]
        if not idle or (found.block_ids.size + 1) * self._block_size >= request.num_tokens:
            return found
        return found._replace(
            block_ids=np.append(found.block_ids, np.int32(idle[0])).astype(np.int32), num_idle=found.num_idle + 1
        )

    wrap(patch, PrefixCache, "hit", hit)


def hit_while_prompt_logprobs_are_owed(patch: Patch) -> None:
    def hit(real: Any, self: PrefixCache, request: Any) -> Any:
        if not request.owes_prompt_logprobs:
            return real(self, request)
        blocks = self.pool.match(self.skippable(request))
        return NO_HIT._replace(block_ids=blocks, num_idle=int(np.count_nonzero(self.pool.ref_counts[blocks] == 0)))

    wrap(patch, PrefixCache, "hit", hit)


def match_remembered_for_too_long(patch: Patch) -> None:
    def hit(real: Any, self: PrefixCache, request: Any) -> Any:
        if self._memo is not None and self._memo[0][0] == request.key:
            self._memo = (request.key, request.num_tokens, self.pool.index.version, 0), self._memo[1]
        return real(self, request)

    wrap(patch, PrefixCache, "hit", hit)


def hit_blocks_counted_as_free(patch: Patch) -> None:
    wrap(patch, PrefixCache, "hit", lambda real, *args: real(*args)._replace(num_idle=0))


def new_blocks_taken_before_the_hit_is_held(patch: Patch) -> None:
    late: list[tuple[Any, Any]] = []

    def pin(real: Any, self: PrefixPool, block_ids: Any) -> None:
        late.append((self, block_ids))

    def allocate(real: Any, self: PrefixPool, count: int) -> Any:
        taken = real(self, count)
        while late:
            real_pin(*late.pop())
        return taken

    real_pin = PrefixPool.pin
    wrap(patch, PrefixPool, "pin", pin)
    wrap(patch, PrefixPool, "allocate", allocate)


def hit_blocks_not_counted_as_held(patch: Patch) -> None:
    patch.setattr(PrefixIndex, "hold", lambda self, blocks: None)


def hit_blocks_held_twice(patch: Patch) -> None:
    def pin(real: Any, self: PrefixPool, block_ids: Any) -> None:
        real(self, block_ids)
        real(self, block_ids[:1])

    wrap(patch, PrefixPool, "pin", pin)


def shared_block_written_again(patch: Patch) -> None:
    def add(real: Any, self: RequestTable, *args: Any, chunk: Any, **options: Any) -> Any:
        done, end = chunk
        return real(self, *args, chunk=(max(0, done - 1), end), **options)

    wrap(patch, RequestTable, "add", add)


def shared_blocks_not_published(patch: Patch) -> None:
    def stage(real: Any, self: Runner, *args: Any) -> Any:
        wide = real(self, *args)
        wide.shared_blocks = None
        return wide

    wrap(patch, Runner, "_stage_wide", stage)


def shared_blocks_published_one_column_on(patch: Patch) -> None:
    def stage(real: Any, self: DeviceColumns, *args: Any) -> Any:
        rows, cols, ids = real(self, *args)
        cols += 1
        return rows, cols, ids

    wrap(patch, DeviceColumns, "stage_shared", stage)


def skipped_tokens_told_of_the_last_admission(patch: Patch) -> None:
    def take(real: Any, self: PrefixCache, request: Any, shared: Any) -> None:
        real(self, request, shared)
        request.num_cached_tokens = shared.size * self._block_size

    wrap(patch, PrefixCache, "take", take)


# -- names -------------------------------------------------------------------------------------------------------------


def named_before_the_launch(patch: Patch) -> None:
    def expect(real: Any, self: PrefixCache, row: int) -> None:
        real(self, row)
        self._name(self._table.requests[row], int(self._table.chunk_end[row]))

    wrap(patch, PrefixCache, "expect", expect)


def name_of_a_wrong_block(patch: Patch) -> None:
    def name(real: Any, self: PrefixPool, digests: Any, block_ids: Any) -> None:
        real(self, digests[1:], block_ids[:-1] if len(block_ids) else block_ids)

    wrap(patch, PrefixPool, "name", name)


def newest_token_counted_as_cached(patch: Patch) -> None:
    def name(real: Any, self: PrefixCache, request: Any, num_tokens: int) -> None:
        real(self, request, num_tokens + (num_tokens == request.num_tokens - 1))

    wrap(patch, PrefixCache, "_name", name)


def salt_ignored(patch: Patch) -> None:
    def digests(real: Any, *args: Any, salt: str = "", **options: Any) -> Any:
        return real(*args, **options)

    wrap(patch, prefix_module, "block_digests", digests)


def chain_without_its_parent(patch: Patch) -> None:
    def digests(real: Any, tokens: Any, size: int, *, salt: str = "", known: Any = ()) -> Any:
        return [real(tokens[at : at + size], size, salt=salt)[0] for at in range(0, len(tokens) - size + 1, size)]

    wrap(patch, prefix_module, "block_digests", digests)


def reset_forgets_only_what_nobody_holds(patch: Patch) -> None:
    patch.setattr(PrefixCache, "forget", lambda self: len(self.pool.index.forget_idle()))


def rows_of_before_a_reset_name_their_blocks(patch: Patch) -> None:
    def name(real: Any, self: PrefixCache, request: Any, num_tokens: int) -> None:
        request.cache_epoch = self.epoch
        real(self, request, num_tokens)

    wrap(patch, PrefixCache, "_name", name)


def names_of_a_failed_request_kept(patch: Patch) -> None:
    def disown(real: Any, self: PrefixPool, block_ids: Any) -> None:
        real(self, block_ids[1:])

    wrap(patch, PrefixPool, "disown", disown)


def disowned_without_those_that_follow(patch: Patch) -> None:
    def disown(real: Any, self: PrefixIndex, blocks: Any) -> Any:
        freed = []
        for named in list(self._named(blocks)):
            freed += [named.block] * named.is_idle
            self._forget(named)
        return freed

    wrap(patch, PrefixIndex, "disown", disown)


def prefix_wait_without_an_end(patch: Patch) -> None:
    def begin_round(real: Any, self: PrefixCache) -> None:
        coming = set(self._coming)
        real(self)
        self._coming |= coming

    wrap(patch, PrefixCache, "begin_round", begin_round)


# -- eviction of blocks ------------------------------------------------------------------------------------------------


def evicts_an_inner_block(patch: Patch) -> None:
    def evict(real: Any, self: PrefixIndex, count: int) -> Any:
        if count > self.num_idle:
            return None
        gone = []
        for named in sorted((self._by_block[block] for block in self.idle), key=lambda named: named.block)[:count]:
            for child in named.children:
                self._by_block[child].parent = None
            self._forget(named)
            gone.append(named.block)
        return gone

    wrap(patch, PrefixIndex, "evict", evict)


def evicts_the_newest(patch: Patch) -> None:
    def let_go(real: Any, self: PrefixIndex, blocks: Any) -> None:
        clock, self._clock = self._clock, -self._clock - 2
        real(self, blocks)
        self._clock = clock + 1

    wrap(patch, PrefixIndex, "let_go", let_go)


def evicts_a_held_block(patch: Patch) -> None:
    def evict(real: Any, self: PrefixIndex, count: int) -> Any:
        held = [named for named in self._by_block.values() if not named.is_idle and not named.children]
        if not count or not held:
            return real(self, count)
        rest = real(self, count - 1)
        if rest is None:
            return None
        self._forget(held[0])
        return [*rest, held[0].block]

    wrap(patch, PrefixIndex, "evict", evict)


def cached_blocks_free_as_well(patch: Patch) -> None:
    def put_back(real: Any, self: PrefixPool, block_ids: Any) -> None:
        self.index.let_go(block_ids.tolist())
        BlockPool._put_back(self, block_ids)

    wrap(patch, PrefixPool, "_put_back", put_back)


# -- pausing -----------------------------------------------------------------------------------------------------------


def paused_row_runs(patch: Patch) -> None:
    def rows(real: Any, self: Controller) -> Any:
        found = real(self)
        paused = np.arange(self.table.num_paused)
        return np.concatenate([paused, found]) if paused.size else found

    wrap(patch, Controller, "_continuing_rows", rows)


def paused_row_sampled(patch: Patch) -> None:
    def launch(real: Any, self: Any, pending: Any, table: Any) -> Any:
        paused, table.num_paused = table.num_paused, 0
        try:
            return real(self, pending, table)
        finally:
            table.num_paused = paused

    from engine.sample_launcher import SampleLauncher

    wrap(patch, SampleLauncher, "launch", launch)


def paused_row_needs_no_block(patch: Patch) -> None:
    def needing(real: Any, self: RoomKeeper) -> Any:
        return real(self)[1:]

    wrap(patch, RoomKeeper, "needing", needing)


def newest_token_of_a_resumed_row_lost(patch: Patch) -> None:
    def make(real: Any, self: Controller, iteration: Any) -> None:
        real(self, iteration)
        for request in iteration.room.resumed if iteration.room is not None else ():
            self.runner.columns.ints[request.row, LAST_TOKEN] = 0

    wrap(patch, Controller, "_make_room", make)


def paused_rows_do_not_move_on_the_device(patch: Patch) -> None:
    def make(real: Any, self: RequestQueue) -> Any:
        room = real(self)
        if room is not None:
            room.moves = None
        return room

    wrap(patch, RequestQueue, "make_room", make)


def paused_rows_hold_more_than_they_may(patch: Patch) -> None:
    def too_much(real: Any, self: RoomKeeper, rows: Any) -> bool:
        return bool(real(self, rows[1:]))

    wrap(patch, RoomKeeper, "_is_too_much", too_much)


def resumed_without_a_block(patch: Patch) -> None:
    def resume(real: Any, self: RoomKeeper, left: Any, already: int = 0) -> int:
        while left and already <= self._pool.num_free:
            left.pop()
            already += 1
        return already

    wrap(patch, RoomKeeper, "_resume", resume)


def partial_row_not_sent_back(patch: Patch) -> None:
    def make(real: Any, self: RoomKeeper, chunk_blocks: int) -> Any:
        row, table = self._table.partial_row, self._table
        if row is None:
            return real(self, chunk_blocks)
        end, table.chunk_end[row] = int(table.chunk_end[row]), table.prompt_len[row]
        try:
            return real(self, 0)
        finally:
            at = next(i for i, key in enumerate(table.key.tolist()) if key == table.key[table.num_live - 1])
            table.chunk_end[at] = end

    wrap(patch, RoomKeeper, "make", make)


# -- requests that go back ---------------------------------------------------------------------------------------------


def blocks_released_twice(patch: Patch) -> None:
    def send(real: Any, self: RoomKeeper, row: int, *rest: Any) -> None:
        held = self._table.held_blocks(np.array([row]))
        real(self, row, *rest)
        again = held[self._pool.ref_counts[held] > 0]
        self._pool.release(again)

    wrap(patch, RoomKeeper, "_send_back", send)


def blocks_kept(patch: Patch) -> None:
    def send(real: Any, self: RoomKeeper, row: int, *rest: Any) -> None:
        self._pool.ref_counts[self._table.block_ids[row, 0]] += 1
        real(self, row, *rest)

    wrap(patch, RoomKeeper, "_send_back", send)


def queued_behind_younger_ones(patch: Patch) -> None:
    def requeue(real: Any, self: RequestQueue, requests: Any) -> None:
        real(self, requests)
        if self._waiting.num_waiting > 1:
            self._waiting._queue.move_to_end(self.waiting[0].key)

    wrap(patch, RequestQueue, "requeue", requeue)


def newest_token_repeated(patch: Patch) -> None:
    def send(real: Any, self: RoomKeeper, row: int, *rest: Any) -> None:
        request = self._table.requests[row]
        real(self, row, *rest)
        if request is not None and request.output_ids:
            request.output_ids.append(request.output_ids[-1])

    wrap(patch, RoomKeeper, "_send_back", send)


def newest_token_given_up(patch: Patch) -> None:
    """It is drawn again, the same; but whoever streams was given it already."""

    def send(real: Any, self: RoomKeeper, row: int, *rest: Any) -> None:
        request = self._table.requests[row]
        real(self, row, *rest)
        if request is not None and request.output_ids:
            del request.output_ids[-1]

    wrap(patch, RoomKeeper, "_send_back", send)


def stream_starts_anew(patch: Patch) -> None:
    def send(real: Any, self: RoomKeeper, row: int, *rest: Any) -> None:
        request = self._table.requests[row]
        real(self, row, *rest)
        if request is not None:
            request.emitted_tokens = request.emitted_chars = 0

    wrap(patch, RoomKeeper, "_send_back", send)


def output_not_read_again(patch: Patch) -> None:
    def add(real: Any, self: RequestTable, request: Any, blocks: Any, **options: Any) -> Any:
        if request.output_ids and options["chunk"][1] == options["prefill_len"]:
            done, end = options["chunk"]
            if end - 1 > done:
                options |= {"prefill_len": end - 1, "chunk": (done, end - 1)}
        return real(self, request, blocks, **options)

    wrap(patch, RequestTable, "add", add)


def penalties_counted_twice(patch: Patch) -> None:
    def histories(real: Any, self: DeviceColumns, requests: Any) -> Any:
        mask, counts = real(self, requests)
        return mask, counts * 2

    wrap(patch, DeviceColumns, "_histories", histories)


def penalties_start_anew(patch: Patch) -> None:
    def histories(real: Any, self: DeviceColumns, requests: Any) -> Any:
        mask, counts = real(self, requests)
        return mask, counts * 0

    wrap(patch, DeviceColumns, "_histories", histories)


def prompt_logprobs_partly_kept(patch: Patch) -> None:
    def send(real: Any, self: RoomKeeper, row: int, *rest: Any) -> None:
        request = self._table.requests[row]
        assert request is not None
        kept = list(request.prompt_logprobs)
        real(self, row, *rest)
        request.prompt_logprobs[:] = kept

    wrap(patch, RoomKeeper, "_send_back", send)


def first_admission_timed_again(patch: Patch) -> None:
    from dataclasses import replace

    def send(real: Any, self: RoomKeeper, row: int, *rest: Any) -> None:
        request = self._table.requests[row]
        real(self, row, *rest)
        if request is not None:
            request.timings = replace(request.timings, admitted_ns=None)

    wrap(patch, RoomKeeper, "_send_back", send)


TIGHT: dict[str, Any] = {
    "num_blocks": 16,
    "max_sequence_length": 52,
    "capacity_policy": "max_utilization",
    "prefix_caching": True,
    "paused_blocks": 6,
}
NO_CACHE = {**TIGHT, "prefix_caching": False}
CHUNKED = {**TIGHT, "chunked_prefill": True, "max_batch_tokens": 8}
EXPOSED = {**TIGHT, "overlap_admission": False}
"""The first schedule asks for what rows of before a reset have read; with the default it takes 30."""
ROOMY = {**CHUNKED, "num_blocks": 22}
"""The first schedule sends back a prompt that has some of its log probabilities; in fewer blocks it takes 14."""

HITS = [
    Fault("hit not capped", hit_not_capped, TIGHT),
    Fault("hit one block too long", hit_one_block_too_long, TIGHT),
    Fault("hit while prompt log probabilities are owed", hit_while_prompt_logprobs_are_owed, TIGHT),
    Fault("match remembered for too long", match_remembered_for_too_long, TIGHT),
    Fault("hit blocks counted as free", hit_blocks_counted_as_free, TIGHT),
    Fault("new blocks taken before the hit is held", new_blocks_taken_before_the_hit_is_held, TIGHT),
    Fault("hit blocks not counted as held", hit_blocks_not_counted_as_held, TIGHT),
    Fault("hit blocks held twice", hit_blocks_held_twice, TIGHT),
    Fault("shared block written again", shared_block_written_again, TIGHT),
    Fault("shared blocks not published", shared_blocks_not_published, TIGHT),
    Fault("shared blocks published one column on", shared_blocks_published_one_column_on, TIGHT),
    Fault("skipped tokens told of the last admission", skipped_tokens_told_of_the_last_admission, TIGHT),
]
NAMES = [
    Fault("named before the launch", named_before_the_launch, TIGHT),
    Fault("name of a wrong block", name_of_a_wrong_block, TIGHT),
    Fault("newest token counted as cached", newest_token_counted_as_cached, TIGHT),
    Fault("salt ignored", salt_ignored, TIGHT),
    Fault("chain without its parent", chain_without_its_parent, TIGHT),
    Fault("reset forgets only what nobody holds", reset_forgets_only_what_nobody_holds, TIGHT),
    Fault("rows of before a reset name their blocks", rows_of_before_a_reset_name_their_blocks, EXPOSED),
    Fault("names of a failed request kept", names_of_a_failed_request_kept, {**TIGHT, "nan_every": 31}),
    Fault("disowned without those that follow", disowned_without_those_that_follow, {**TIGHT, "nan_every": 31}),
    Fault("prefix wait without an end", prefix_wait_without_an_end, TIGHT),
]
EVICTIONS = [
    Fault("evicts an inner block", evicts_an_inner_block, TIGHT),
    Fault("evicts the newest", evicts_the_newest, TIGHT),
    Fault("evicts a held block", evicts_a_held_block, TIGHT),
    Fault("cached blocks free as well", cached_blocks_free_as_well, TIGHT),
]
PAUSES = [
    Fault("paused row runs", paused_row_runs, NO_CACHE),
    Fault("paused row sampled", paused_row_sampled, NO_CACHE),
    Fault("paused row needs no block", paused_row_needs_no_block, NO_CACHE),
    Fault("newest token of a resumed row lost", newest_token_of_a_resumed_row_lost, NO_CACHE),
    Fault("paused rows do not move on the device", paused_rows_do_not_move_on_the_device, NO_CACHE),
    Fault("paused rows hold more than they may", paused_rows_hold_more_than_they_may, NO_CACHE),
    Fault("resumed without a block", resumed_without_a_block, NO_CACHE),
    Fault("partial row not sent back", partial_row_not_sent_back, {**CHUNKED, "prefix_caching": False}),
]
RETURNS = [
    Fault("blocks released twice", blocks_released_twice, TIGHT),
    Fault("blocks kept", blocks_kept, NO_CACHE),
    Fault("queued behind younger ones", queued_behind_younger_ones, NO_CACHE),
    Fault("newest token repeated", newest_token_repeated, NO_CACHE),
    Fault("newest token given up", newest_token_given_up, NO_CACHE),
    Fault("stream starts anew", stream_starts_anew, NO_CACHE),
    Fault("output not read again", output_not_read_again, NO_CACHE),
    Fault("penalties counted twice", penalties_counted_twice, NO_CACHE),
    Fault("penalties start anew", penalties_start_anew, NO_CACHE),
    Fault("prompt log probabilities partly kept", prompt_logprobs_partly_kept, ROOMY),
    Fault("first admission timed again", first_admission_timed_again, NO_CACHE),
]
MEMORY_FAULTS = HITS + NAMES + EVICTIONS + PAUSES + RETURNS
