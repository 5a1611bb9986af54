"""Checks that run at every phase border in debug mode and in all tests. Numbers are those of docs/invariants.md.

They read host state; what lies on the device is checked in ``engine/invariants_device.py``. A failure is a fault of
the engine, or of a policy passed to it. Requests are few in tests, so plain Python is faster here than numpy.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cache.prefix_pool import PrefixPool
from engine.graph_gate import COMES_BACK, CONTINUING_CHUNK, is_gated
from engine.invariants_device import check_device, poison_void, require
from engine.phases import Order, Phase, Reason
from engine.plan import batch_rows_of
from engine.request import Request, RequestState
from engine.resolution import end_of
from engine.step_function import FROM_SAMPLE
from engine.table import Rows

if TYPE_CHECKING:
    from engine.controller import Border, Controller, Iteration
    from engine.engine import Engine

__all__ = ["check_border", "check_device", "check_idle"]


@dataclass(frozen=True, slots=True)
class Standing:
    """What of the iteration in hand is half done at a border."""

    is_staged: bool
    """Prepared and not launched."""
    is_unresolved: bool
    """Sampled and not resolved: the device knows one token more than the host."""

    @staticmethod
    def at(border: Border | None) -> Standing:
        """The standing at a border; None: between iterations."""
        if border is None:
            return Standing(is_staged=False, is_unresolved=False)
        done, iteration = _done_phases(border), border.iteration
        return Standing(
            is_staged=iteration.plan is not None and Phase.PREPARE in done and Phase.FORWARD not in done,
            is_unresolved=iteration.sampled is not None and Phase.SAMPLE in done and Phase.RESOLVE not in done,
        )


def check_border(engine: Engine, border: Border) -> None:
    """Run every check that must hold at a phase border, and poison what is void there.

    Raises:
        InvariantError: naming the invariant and what was found.
    """
    standing = Standing.at(border)
    if border.side == "before" and border.phase is border.iteration.order.phases[0]:
        check_probe(engine)
    check_rows(engine, border, standing)
    check_blocks(engine)
    check_row_lengths(engine, border, standing)
    check_requests(engine)
    check_pending(engine.controller)
    check_order(engine.controller, border)
    check_gate(engine, border)
    if standing.is_staged:
        check_staged(engine, border.iteration)
    if border.side == "after":
        check_results(engine, border)
    check_counters(engine, border)
    if engine.device.kind == "inline" and not standing.is_staged:
        check_device(engine, unresolved=_unresolved_rows(border, standing))
    poison_void(engine, border)


def _unresolved_rows(border: Border, standing: Standing) -> range:
    sampled = border.iteration.sampled
    if sampled is None or not standing.is_unresolved:
        return range(0)
    return range(sampled.first_row, sampled.first_row + sampled.num_rows)


def check_probe(engine: Engine) -> None:
    """I19: asking for the next order changes nothing, and says the same thing twice."""
    before = _digest(engine)
    first, second = engine.controller.order_state(), engine.controller.order_state()
    require(first == second, "I19", "the probe answers {}, then {}", first, second)
    require(before == _digest(engine), "I19", "asking for the next order changed the table, the pool or the queue")


def _digest(engine: Engine) -> tuple[Any, ...]:
    table, pool = engine.table, engine.pool
    columns = tuple(column.tobytes() for _, column in table.columns())
    waiting = tuple(request.key for request in engine.queue.waiting)
    counts = (table.version, table.num_paused, table.num_live, pool.num_free, getattr(pool, "num_evicted", 0))
    return (columns, counts, pool.ref_counts.tobytes(), pool.free_ids.tobytes(), waiting)


def check_rows(engine: Engine, border: Border, standing: Standing) -> None:
    """I1-I3, I5, I11 on the host: borders, unique owners, columns that belong to the row's request, free rows empty."""
    table = engine.table
    live = table.num_live
    require(0 <= table.num_paused <= live <= table.max_requests, "I1", "row borders out of order")
    is_settled = engine.controller.pending is None and not standing.is_unresolved
    if is_settled or Phase.PREPARE in _done_phases(border)[-2:]:
        # A stop string found in emit may move a launched prefill row into a hole; the next resolve makes all decode,
        # in overlap the next prepare.
        prefill = table.is_prefill[table.num_paused : live].tolist()
        require(prefill == sorted(prefill), "I1", "a prefill row stands before a decode row: {}", prefill)
    keys = table.key[:live].tolist()
    require(len(set(keys)) == live and min(keys, default=0) >= 0, "I2", "row owners are not unique: {}", keys)
    for row in range(live):
        _check_owner(engine, row)
    waiting = {request.key for request in engine.queue.waiting}
    require(not waiting & set(keys), "I2", "a request is in the queue and in the table")
    for name, column in table.columns():
        empty = -1 if name in ("key", "state_slot", "block_ids") else 0
        require((column[live:] == empty).all(), "I3", "a free row keeps {}: {}", name, column[live:].tolist())
    require(all(r is None for r in table.requests[live:]), "I3", "a free row has a request")


def _check_owner(engine: Engine, row: int) -> None:
    table = engine.table
    request = table.requests[row]
    require(request is not None and request.row == row, "I2", "row {} and its request disagree", row)
    assert request is not None
    require(engine._live.get(request.request_id) is request, "I2", "row {}: {} has ended", row, request.request_id)
    alive = (RequestState.PREFILL, RequestState.DECODE, RequestState.PAUSED)
    require(request.state in alive, "I2", "row {}: {} is {}", row, request.request_id, request.state.value)
    found = {
        "key": (int(table.key[row]), request.key),
        "max_output": (int(table.max_output[row]), request.max_new_tokens),
        "num_output": (int(table.num_output[row]), len(request.output_ids)),
        "is_fresh": (bool(table.is_fresh[row]), request.state is RequestState.PREFILL),
        "is_watched": (bool(table.is_watched[row]), request.is_watched),
    }
    for name, (held, wanted) in found.items():
        require(held == wanted, "I11", "row {}: {} is {}, its request has {}", row, name, held, wanted)
    prompt_len = int(table.prompt_len[row])
    require(
        len(request.prompt_ids) <= prompt_len <= request.num_tokens, "I11", "row {}: prompt_len is {}", row, prompt_len
    )
    done, end = int(table.chunk_done[row]), int(table.chunk_end[row])
    require(0 <= done < end <= prompt_len, "I11", "row {}: its chunk is {} to {} of {}", row, done, end, prompt_len)
    require(end == prompt_len or row == table.partial_row, "I5", "row {} is partial and not the last one", row)


def check_blocks(engine: Engine) -> None:
    """I7, I12-I14: every block is free or held, counted once for each row that lists it, never the dummy."""
    table, pool = engine.table, engine.pool
    counts = [0] * (pool.num_blocks + 1)
    for row in range(table.num_live):
        count, ids = int(table.block_count[row]), table.block_ids[row].tolist()
        held = ids[:count]
        require(
            all(i >= 0 for i in held) and set(ids[count:]) <= {-1}, "I7", "row {}: block list has gaps: {}", row, ids
        )
        require(len(set(held)) == count, "I7", "row {}: a block twice: {}", row, held)
        for block in held:
            require(block < pool.num_blocks, "I7", "row {} holds the dummy block", row)
            counts[block] += 1
    references = pool.ref_counts.tolist()
    require(counts[: pool.num_blocks] == references, "I13", "rows list {}, reference counts are {}", counts, references)
    free = pool.free_ids.tolist()
    require(len(set(free)) == len(free) and pool.dummy not in free, "I14", "a block is free twice: {}", free)
    require(not any(counts[block] for block in free), "I14", "a free block is held")
    num_held = sum(1 for count in references if count)
    require(pool.num_free + num_held == pool.num_blocks, "I12", "blocks are lost")
    if isinstance(pool, PrefixPool):
        _check_cached(engine, pool, set(free))


def _check_cached(engine: Engine, pool: PrefixPool, free: set[int]) -> None:
    """I14, I15: cached blocks are neither free nor held, and names are one to one."""
    try:
        pool.index.check()
    except AssertionError as error:
        require(False, "I15", "{}", error)
    idle = set(pool.index.idle)
    require(not idle & free, "I14", "a cached block is free: {}", idle & free)
    require(all(pool.ref_counts[block] == 0 for block in idle), "I14", "a cached block is held")
    require(len(free) + len(idle) == pool.num_free, "I12", "{} free, {} cached, {} takeable", free, idle, pool.num_free)


def _check_own_blocks(engine: Engine, rows: Rows) -> None:
    """I17: the forward about to be launched writes to blocks of one owner, which have no name."""
    table, pool, block_size = engine.table, engine.pool, engine.config.block_size
    assert isinstance(pool, PrefixPool)
    for row in rows.tolist():
        first = int(table.chunk_done[row]) if table.is_prefill[row] else int(table.kv_len[row]) - 1
        for block in table.block_ids[row, first // block_size : table.block_count[row]].tolist():
            mine = int(pool.ref_counts[block]) == 1
            require(mine, "I17", "row {} writes to block {}, which others hold", row, block)
            require(block not in pool.index, "I17", "row {} writes to block {}, which has a name", row, block)


def check_row_lengths(engine: Engine, border: Border, standing: Standing) -> None:
    """I6, I8, I9: a row's length counts each launched token once, and agrees with its blocks and its request."""
    table, block_size = engine.table, engine.config.block_size
    ahead = _tokens_ahead(engine.controller, border, standing)
    for row, request in enumerate(table.requests[: table.num_live]):
        assert request is not None
        kv_len, blocks = int(table.kv_len[row]), int(table.block_count[row])
        known = request.num_tokens
        reads = int(table.chunk_done[row]), int(table.chunk_end[row])
        if not table.is_prefill[row]:
            wanted: tuple[int, ...] = (known - 1 + ahead[row],)
        elif request.abort_requested:  # in overlap it may have been placed and then left out
            wanted = (0, *reads)
        elif _is_unpublished(request, border):
            wanted = (0,)
        elif ahead[row]:
            wanted = reads[:1] if _goes_on(engine.controller, row, border) else reads[1:]
        else:  # its next chunk is placed and not prepared yet, or not even placed
            wanted = reads
        require(
            kv_len in wanted,
            "I8",
            "row {}: {} cached tokens with {} known and {} launched and not resolved",
            row,
            kv_len,
            known,
            ahead[row],
        )
        needed = -(-(reads[1] if table.is_prefill[row] else kv_len) // block_size)
        require(blocks == needed, "I6", "row {}: {} blocks for {} tokens", row, blocks, kv_len)
        require(len(request.output_ids) <= request.max_new_tokens, "I9", "row {} is past its budget", row)
        limit = engine.resolved.max_sequence_length
        require(known <= limit, "I9", "{} exceeds max_sequence_length", request.request_id)


def _is_unpublished(request: Request, border: Border) -> bool:
    """Placed by this iteration and not prepared yet: the device does not know its row."""
    return request in border.iteration.admitted and Phase.PREPARE not in _done_phases(border)


def _goes_on(controller: Controller, row: int, border: Border) -> bool:
    """Its next chunk is placed beside the pending forward that reads the one before, and not prepared yet."""
    done, pending = _done_phases(border), controller.pending
    is_between = border.iteration.order is Order.OVERLAP_ADMIT and Phase.ADMIT in done and Phase.PREPARE not in done
    return is_between and pending is not None and pending.partial_key == int(controller.table.key[row])


def _tokens_ahead(controller: Controller, border: Border, standing: Standing) -> list[int]:
    """For each row: forwards that are prepared, pending or sampled and whose token the host does not know."""
    ahead = [0] * controller.table.num_live
    sources: list[list[int]] = []
    if controller.pending is not None:
        sources.append(controller.pending.table_rows.tolist())
    if standing.is_staged and border.iteration.plan is not None:
        sources.append(border.iteration.plan.table_rows.tolist())
    if standing.is_unresolved and border.iteration.sampled is not None:
        first = border.iteration.sampled.first_row
        sources.append(list(range(first, first + border.iteration.sampled.num_rows)))
    for rows in sources:
        for row in rows:
            if 0 <= row < len(ahead):
                ahead[row] += 1
    return ahead


def check_requests(engine: Engine) -> None:
    """I40, I43-I45: log probabilities, finish, times and what was handed out, of every live request."""
    for name, request in engine._live.items():
        params = request.params
        if params.logprobs is not None:
            made, wanted = len(request.logprobs), len(request.output_ids)
            require(made == wanted, "I40", "{}: {} log probabilities, {} tokens", name, made, wanted)
        if request.prompt_logprobs and request.finish_reason is None:
            made, due = len(request.prompt_logprobs), _prompt_logprobs_due(engine, request)
            require(made in due, "I40", "{}: {} prompt log probabilities, due are {}", name, made, due)
        times = request.timings
        known = [t for t in (times.arrival_ns, times.admitted_ns, times.first_token_ns) if t is not None]
        require(known == sorted(known) and times.finished_ns is None, "I44", "{}: times run backwards", name)
        require(request.row is None or request.state is not RequestState.WAITING, "I2", "{} waits in a row", name)
        require(request.emitted_tokens <= len(request.output_ids), "I45", "{}: a token was handed out too many", name)
        require(request.emitted_chars <= len(request.text), "I46", "{}: text was taken back", name)


def _prompt_logprobs_due(engine: Engine, request: Request) -> Container[int]:
    """All of a prompt; while it is first read, those that its chunks before the present one tell of, or that too.

    Where the next chunk is placed beside the pending forward, those of the chunk before may still be on their way.
    """
    length, row, table = len(request.prompt_ids), request.row, engine.table
    if row is None or not table.is_fresh[row]:
        return {length}
    ends = [min(int(end) + 1, length) for end in (table.chunk_done[row], table.chunk_end[row])]
    return {length, *range(1, ends[1] + 1)} if engine.config.overlap_admission else {length, *ends}


def check_pending(controller: Controller) -> None:
    """I25: the pending forward's rows are live rows of the generation they were launched for."""
    pending, table = controller.pending, controller.table
    if pending is None:
        return
    rows = pending.table_rows[pending.table_rows >= 0]
    require(rows.size > 0, "I25", "a forward is pending of which nothing is left to sample")
    require(len(set(rows.tolist())) == rows.size, "I25", "two pending rows claim one table row")
    require((rows < table.num_live).all(), "I25", "a pending row claims a free table row")
    live_keys = pending.keys[pending.table_rows >= 0]
    require(np.array_equal(table.key[rows], live_keys), "I25", "a pending row belongs to another generation")


def check_order(controller: Controller, border: Border) -> None:
    """I26-I29, I31, I33, I35, I58: what an order may have done by this border."""
    iteration, table = border.iteration, controller.table
    done = _done_phases(border)
    may_release = iteration.order is not Order.OVERLAP_ADMIT
    if iteration.launched is not None:
        require(Phase.FORWARD in done, "I27", "a forward outside the forward phase")
        _check_launched(controller, iteration)
    if border.side == "after" and border.phase is Phase.FORWARD and Phase.ADMIT in done:
        is_left = table.num_active > 0 and iteration.launched is None and not iteration.order.is_overlap
        require(not is_left, "I27", "rows were left without a forward")
    if iteration.order is Order.OVERLAP:
        require(not iteration.admitted, "I28", "admission in an overlap iteration")
        if Phase.PREPARE in done or not controller.resolved.config.overlap_admission:
            require(not table.is_prefill[: table.num_live].any(), "I28", "a prefill row in an overlap iteration")
    if iteration.order.is_overlap:
        require(table.num_paused == 0, "I28", "a paused row in an overlap iteration")
        require(Phase.SAMPLE not in done or iteration.consumed is not None, "I28", "overlap without a pending forward")
        require(Phase.FORWARD not in done or Phase.SAMPLE in done, "I31", "a forward ahead of the sampling it follows")
        require(Phase.RESOLVE not in done or Phase.FORWARD in done, "I33", "a wait before the next forward is enqueued")
    if iteration.order is Order.PRIMER:
        require(not iteration.outputs and iteration.new_tokens == 0, "I35", "a primer emitted something")
        require(iteration.consumed is None, "I35", "a primer while a forward was pending")
    if border.side == "before" and border.phase is Phase.SAMPLE and controller.pending is not None:
        _check_sampled_rows(controller, iteration)
    if border.side == "after" and (border.phase is Phase.RESOLVE or (border.phase is Phase.ADMIT and may_release)):
        aborted = [r.request_id for r in table.live_requests() if r.abort_requested]
        require(not aborted, "I58", "aborted requests keep their rows: {}", aborted)
    _check_admission(controller, border)


def check_gate(engine: Engine, border: Border) -> None:
    """I50, I53: a gated engine reads prompts in captured forwards; nobody waits for one longer than requests run."""
    config, plan = engine.resolved.config, border.iteration.plan
    if not is_gated(config, engine.runner.graphs.sizes):
        return
    if plan is not None and plan.dims.num_prefill and plan.graph is None:
        known = (CONTINUING_CHUNK, COMES_BACK, "prompt log probabilities")
        require(plan.miss_reason in known, "I50", "an eager prefill in a gated engine: {}", plan.miss_reason)
    # With another policy of either kind rows or requests may stand still.
    if config.capacity_policy == "guaranteed_no_evict" and engine.queue.is_fifo:
        limit = engine.resolved.max_sequence_length + 2
        for request in engine.queue.waiting:
            steps = request.graph_wait_steps
            require(steps <= limit, "I53", "{} has waited {} iterations for a graph", request.request_id, steps)


def _check_launched(controller: Controller, iteration: Iteration) -> None:
    launched, plan = iteration.launched, iteration.plan
    assert launched is not None
    require(plan is launched.plan, "I29", "the forward launched is not the one prepared")
    require(iteration.consumed is not launched or iteration.mode == "legacy", "I26", "a forward consumed at launch")
    if controller.pending is not None:
        require(controller.pending is launched, "I25", "an older forward is pending beside the one launched")


def _check_sampled_rows(controller: Controller, iteration: Iteration) -> None:
    pending, table = controller.pending, controller.table
    assert pending is not None
    rows = sorted(pending.table_rows[pending.table_rows >= 0].tolist())
    entered = {request.row for request in iteration.admitted} if iteration.order is Order.OVERLAP_ADMIT else set()
    active = [row for row in table.active_rows.tolist() if row not in entered]
    require(rows == active, "I25", "iteration {}: active rows {} but pending rows {}", iteration.index, active, rows)


def _check_admission(controller: Controller, border: Border) -> None:
    """I19: what the probe promised happens, unless the head was aborted meanwhile."""
    iteration = border.iteration
    if border.side != "after" or border.phase is not Phase.ADMIT or iteration.reason is not Reason.HEAD_ADMISSIBLE:
        return
    aborted = any(request.finish_reason == "abort" for request in iteration.ended)
    require(iteration.admitted or aborted, "I19", "the head was admissible, and nothing was admitted")


def check_staged(engine: Engine, iteration: Iteration) -> None:
    """I4, I29, I32, I48: staged inputs are those of the planned rows, which have not moved since prepare."""
    plan, table = iteration.plan, engine.table
    assert plan is not None
    dims, shape, rows = plan.dims, plan.shape, plan.table_rows
    at, staged = batch_rows_of(dims, shape), plan.half.fields
    require(dims.num_tokens <= engine.config.max_batch_tokens, "I4", "{} tokens in one forward", dims.num_tokens)
    require(dims.num_tokens <= shape.num_tokens and rows.size <= shape.num_rows, "I4", "the padded shape is smaller")
    require(rows.size == 0 or rows.max() < table.num_live, "I29", "a planned row is free")
    require(np.array_equal(staged["table_row"][at], rows), "I29", "rows moved between prepare and forward")
    lengths = table.kv_len[rows]
    require(np.array_equal(staged["kv_len"][at], lengths), "I29", "lengths changed between prepare and forward")
    last = staged["query_start"][at] + staged["query_len"][at] - 1
    require(np.array_equal(staged["positions"][last], lengths - 1), "I32", "a row's newest token at a wrong position")
    require(np.array_equal(staged["logits_idx"][: rows.size], last), "I32", "logits of a wrong token are asked for")
    is_decode = ~table.is_prefill[rows]
    require((staged["token_ids"][last[is_decode]] == FROM_SAMPLE).all(), "I32", "a decode row reads no sampled token")
    require(int(staged["query_len"][at].sum()) == dims.num_tokens, "I4", "query tokens do not sum up")
    if isinstance(engine.pool, PrefixPool):
        _check_own_blocks(engine, rows)
    for row, count in zip(rows[~is_decode].tolist(), staged["query_len"][at][~is_decode].tolist(), strict=True):
        length, left = int(table.prompt_len[row]), int(table.prompt_len[row] - table.chunk_end[row])
        is_all = int(table.chunk_done[row]) % engine.config.block_size == 0 and left == 0  # all that a prefix left over
        require(count != 1 or length == 1 or is_all, "I48", "row {}: a chunk of one token of {}", row, length)
        require(left != 1, "I48", "row {}: a chunk that leaves one token of {}", row, length)


def check_results(engine: Engine, border: Border) -> None:
    """I26, I40, I42, I43 after a phase: who took the sampled tokens, and who ended."""
    iteration = border.iteration
    sampled = iteration.sampled
    if border.phase is Phase.SAMPLE and sampled is not None:
        consumed = sampled.pending
        whole = consumed.table_rows >= 0
        if consumed.partial_key is not None:
            whole &= consumed.keys != consumed.partial_key
        require(np.count_nonzero(whole) == sampled.num_rows, "I26", "a row sampled twice or never")
        rows = sorted(consumed.table_rows[whole].tolist())
        first = sampled.first_row
        require(rows == list(range(first, first + len(rows))), "I26", "rows {} were not the ones sampled", rows)
        for request in engine.table.requests[sampled.first_row : sampled.first_row + sampled.num_rows]:
            require(request is not None and request.finish_reason is None, "I26", "an ended request was sampled")
    if border.phase is Phase.RESOLVE:
        _check_resolved(engine, iteration)
    if border.phase is Phase.EMIT:
        finished = [output.request_id for output in iteration.outputs if output.finished]
        require(len(set(finished)) == len(finished), "I43", "two last outputs of one request: {}", finished)
        ended = {request.key for request in iteration.ended}
        require(len(finished) >= len(ended), "I43", "{} requests ended, {} last outputs", len(ended), len(finished))
        left = [request.request_id for request in iteration.ended if engine._live.get(request.request_id) is request]
        require(not left, "I43", "ended requests are still live: {}", left)


def _check_resolved(engine: Engine, iteration: Iteration) -> None:
    advanced = [request.key for request in iteration.advanced]
    require(len(set(advanced)) == len(advanced) == iteration.new_tokens, "I60", "tokens and advanced requests differ")
    failed = {request.key for request in iteration.ended if request.finish_reason in ("abort", "error")}
    if iteration.sampled is not None:
        drawn = set(iteration.sampled.keys.tolist())
        require(set(advanced) <= drawn, "I26", "a request got a token that was not drawn for it")
        require(drawn <= set(advanced) | failed, "I26", "a drawn token reached nobody")
    ended = {request.key for request in iteration.ended}
    for request in iteration.advanced:
        _check_end(request, request.key in ended, engine.resolved.eos_token_ids)
        if request.params.logprobs is not None and request.logprobs:
            _check_logprobs(request, engine.resolved.vocab_size)


def _check_end(request: Request, has_ended: bool, eos: tuple[int, ...]) -> None:
    end = end_of(request, eos)
    name = request.request_id
    if request.finish_reason not in ("abort", "error"):
        require((end is not None) == has_ended, "I42", "{}: should end with {}, ended: {}", name, end, has_ended)
        require(
            end is None or end[0] == request.finish_reason, "I43", "{}: {} but {}", name, end, request.finish_reason
        )
    require(not has_ended or request.row is None, "I58", "{} ended and keeps its row", name)


def _check_logprobs(request: Request, vocab_size: int) -> None:
    row, count = request.logprobs[-1], request.params.logprobs or 0
    ids, values = list(row), list(row.values())
    require(ids[0] == request.output_ids[-1], "I40", "{}: log probabilities of another token", request.request_id)
    top = min(count, vocab_size)
    require(top <= len(ids) <= top + 1, "I40", "{}: {} entries, {} asked for", request.request_id, len(ids), top)
    rest = values[1:]
    require(rest == sorted(rest, reverse=True), "I40", "{}: entries are not sorted", request.request_id)
    require(all(value <= 1e-6 for value in values), "I40", "{}: a probability above 1: {}", request.request_id, values)


def check_counters(engine: Engine, border: Border) -> None:
    """I36, I60: every request is live or has ended once; every launched row is sampled, pending or counted as waste."""
    counters, iteration = engine.counters, border.iteration
    require(
        counters.submitted == counters.finished.total() + len(engine._live),
        "I60",
        "{} submitted, {} finished, {} live",
        counters.submitted,
        counters.finished.total(),
        len(engine._live),
    )
    may_move = iteration.rows_released > 0 or iteration.room is not None
    require(iteration.rows_moved == 0 or may_move, "I36", "rows moved though none was released")
    require(iteration.wasted.total() <= iteration.rows_released, "I36", "more rows wasted than released")
    if iteration.launched is not None:
        pending = engine.controller.pending
        in_flight = 0 if pending is None else int(np.count_nonzero(pending.table_rows >= 0))
        consumed = iteration.launched.dims.num_rows if iteration.consumed is iteration.launched else 0
        launched = iteration.launched.dims.num_rows
        require(
            launched == in_flight + consumed + iteration.wasted.total(),
            "I60",
            "{} rows launched, {} pending, {} sampled, {} wasted",
            launched,
            in_flight,
            consumed,
            iteration.wasted.total(),
        )
    if border.side == "before" and border.phase is iteration.order.phases[0]:
        orders, steps = counters.orders, counters.steps
        require(
            orders.total() == steps == counters.reasons.total(), "I36", "{} orders, {} steps", orders.total(), steps
        )
        require(counters.compaction_steps <= counters.overlap_steps, "I36", "more compactions than overlap steps")
        require(counters.wasted.total() == counters.rows_dropped, "I36", "wasted rows and their causes differ")
        require(counters.generated_tokens <= counters.sampled_rows, "I60", "more tokens than sampled rows")


def _done_phases(border: Border) -> tuple[Phase, ...]:
    phases = border.iteration.order.phases
    at = phases.index(border.phase)
    return phases[: at + 1] if border.side == "after" else phases[:at]


def check_idle(engine: Engine) -> None:
    """I20, I60: after the last output nothing is held, nothing is pending, every request has ended once."""
    table, pool, counters = engine.table, engine.pool, engine.counters
    require(table.num_live == 0, "I20", "{} rows are still held", table.num_live)
    require(pool.num_free == pool.num_blocks, "I20", "{} blocks are still held", pool.num_blocks - pool.num_free)
    require(engine.controller.pending is None, "I20", "a forward is still pending")
    require(engine.in_hand is None, "I20", "an iteration is still in hand")
    require(not engine.queue.waiting, "I20", "requests still wait")
    require(not engine._live and not engine.controller.unemitted, "I20", "requests still owe their last output")
    require(
        counters.finished.total() == counters.submitted,
        "I60",
        "{} submitted but {} finished",
        counters.submitted,
        dict(counters.finished),
    )
