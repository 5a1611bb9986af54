"""Checks that run at every phase border in debug mode and in all tests. Numbers are those of docs/invariants.md.

They read host state: here what iterations may do, in ``engine/invariants_rows.py`` what the table holds, in
``engine/invariants_results.py`` who gets which token. What lies on the device is checked in
``engine/invariants_device.py``, recurrent states and what drafting leaves in the caches in
``engine/invariants_states.py``. A failure is a fault of the engine, or of a policy passed to it. Requests are few in
tests, so plain Python is faster here than numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.cache.prefix_pool import PrefixPool
from engine.graph_gate import COMES_BACK, CONTINUING_CHUNK, is_gated
from engine.invariants_device import check_device, compare_device, drawn_tokens, poison_void, require
from engine.invariants_results import check_results
from engine.invariants_rows import (
    LiveRows,
    Standing,
    check_blocks,
    check_own_blocks,
    check_requests,
    check_row_lengths,
    check_rows,
)
from engine.invariants_states import check_states
from engine.parallel.fleet import NONE_HOLDS_ALL
from engine.phases import Order, Phase, Reason
from engine.plan import batch_rows_of
from engine.results import PendingForward
from engine.step_function import FROM_DRAFT, FROM_SAMPLE

if TYPE_CHECKING:
    from engine.controller import Border, Controller, Iteration
    from engine.engine import Engine

__all__ = ["check_border", "check_device", "check_idle"]


def check_border(engine: Engine, border: Border) -> None:
    """Run every check that must hold at a phase border, and poison what is void there.

    Between the border behind a phase and the one before the next only what watches has run: where that has left table,
    pool and queue alone, they are not looked at again.

    Raises:
        InvariantError: naming the invariant and what was found.
        DeviceError: work that was launched on the inline device raised.
    """
    if _is_first(border):
        check_probe(engine)
    books = _books(engine)
    if border.side == "after" or border.iteration.checked != books:
        _check_all(engine, border)
        border.iteration.checked = books
    _check_next(engine.controller, border)
    poison_void(engine, border)


def _check_all(engine: Engine, border: Border) -> None:
    standing, rows = Standing.at(border), LiveRows.of(engine.table)
    check_rows(engine, rows, standing)
    check_blocks(engine, rows)
    check_row_lengths(engine, border, standing, rows)
    check_requests(engine)
    check_pending(engine.controller, rows)
    check_order(engine.controller, border, standing, rows)
    check_gate(engine, border)
    if standing.is_staged:
        check_staged(engine, border.iteration, rows)
    if border.side == "after":
        check_results(engine, border)
    check_counters(engine, border)
    if engine.device.kind == "inline" and not standing.is_staged:
        engine.device.raise_error()  # all else that there would be to wait for has run
        compare_device(engine, rows, drawn_tokens(border.iteration) if standing.unresolved else {})
    check_states(engine, border)


def _is_first(border: Border) -> bool:
    return border.side == "before" and border.phase is border.iteration.order.phases[0]


def check_probe(engine: Engine) -> None:
    """I19: asking for the next order changes nothing, and says the same thing twice."""
    before = _books(engine)
    first, second = engine.controller.order_state(), engine.controller.order_state()
    require(first == second, "I19", "the probe answers {}, then {}", first, second)
    require(before == _books(engine), "I19", "asking for the next order changed the table, the pool or the queue")


def _books(engine: Engine) -> tuple[Any, ...]:
    """All of the table, the pool and the queue that a fault could have changed, to be compared."""
    table, pool = engine.table, engine.pool
    columns = b"".join([column.data for _, column in table.columns()])
    waiting = [request.key for request in engine.queue.waiting]
    counts = (table.version, table.num_paused, table.num_live, pool.num_free, getattr(pool, "num_evicted", 0))
    slots = b"" if table.slots is None else table.slots.free_ids.tobytes()
    return (columns, counts, pool.ref_counts.tobytes(), pool.free_ids.tobytes(), slots, waiting)


def check_pending(controller: Controller, rows: LiveRows) -> None:
    """I25: the pending forward's rows are live rows of the generation they were launched for."""
    pending = controller.pending
    if pending is None:
        return
    held = [(row, key) for row, key in zip(pending.table_rows.tolist(), pending.keys.tolist(), strict=True) if row >= 0]
    places = {row for row, _ in held}
    require(held, "I25", "a forward is pending of which nothing is left to sample")
    require(len(places) == len(held), "I25", "two pending rows claim one table row")
    require(max(places) < len(rows.key), "I25", "a pending row claims a free table row")
    is_own = all(rows.key[row] == key for row, key in held)
    require(is_own, "I25", "a pending row belongs to another generation")


def check_order(controller: Controller, border: Border, standing: Standing, rows: LiveRows) -> None:
    """I26-I29, I31, I33, I35, I58: what an order may have done by this border."""
    iteration, table, done = border.iteration, controller.table, standing.done
    may_release = not iteration.order.is_overlap
    if iteration.launched is not None:
        require(Phase.FORWARD in done, "I27", "a forward outside the forward phase")
        _check_launched(controller, iteration)
    if border.side == "after" and border.phase is Phase.FORWARD and Phase.ADMIT in done:
        is_left = table.num_active > 0 and iteration.launched is None and not iteration.order.is_overlap
        require(not is_left, "I27", "rows were left without a forward")
    if iteration.order in (Order.OVERLAP, Order.MTP_OVERLAP, Order.MTP_OVERLAP_LATE):
        require(not iteration.admitted, "I28", "admission in an overlap iteration")
        if Phase.PREPARE in done or not controller.resolved.config.overlap_admission:
            require(not any(rows.is_prefill), "I28", "a prefill row in an overlap iteration")
    if iteration.order.is_overlap:
        require(table.num_paused == 0, "I28", "a paused row in an overlap iteration")
        is_drawn = Phase.SAMPLE in done or Phase.VERIFY in done
        require(not is_drawn or iteration.consumed is not None, "I28", "overlap without a pending forward")
        require(Phase.FORWARD not in done or is_drawn, "I31", "a forward ahead of the sampling it follows")
        is_bound = iteration.order is Order.MTP_OVERLAP_LATE or Phase.VERIFY not in iteration.order.phases
        is_rewound = Phase.PREPARE not in done or Phase.REWIND in done or is_bound
        require(is_rewound, "I8", "lengths advanced before rejected drafts were taken out")
        if iteration.order is Order.MTP_OVERLAP_LATE:
            is_behind = Phase.REWIND not in done or Phase.FORWARD in done
            require(is_behind, "I33", "accepted counts were waited for before the next forward was enqueued")
        require(Phase.RESOLVE not in done or Phase.FORWARD in done, "I33", "a wait before the next forward is enqueued")
    if iteration.order is Order.PRIMER:
        require(not iteration.outputs and iteration.new_tokens == 0, "I35", "a primer emitted something")
        require(iteration.consumed is None, "I35", "a primer while a forward was pending")
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
        known = (CONTINUING_CHUNK, COMES_BACK, "prompt log probabilities", NONE_HOLDS_ALL)
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


def _check_next(controller: Controller, border: Border) -> None:
    """I25: before rows are sampled, they are all of those that run."""
    is_next = border.side == "before" and border.phase in (Phase.SAMPLE, Phase.VERIFY)
    if is_next and controller.pending is not None:
        _check_sampled_rows(controller, border.iteration)


def _check_sampled_rows(controller: Controller, iteration: Iteration) -> None:
    pending, table = controller.pending, controller.table
    assert pending is not None
    rows = sorted(_rows_left(pending))
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


def check_staged(engine: Engine, iteration: Iteration, rows: LiveRows) -> None:
    """I4, I29, I32, I48: staged inputs are those of the planned rows, which have not moved since prepare."""
    plan, table = iteration.plan, engine.table
    assert plan is not None
    dims, shape, planned = plan.dims, plan.shape, plan.table_rows.tolist()
    at, fields = batch_rows_of(dims, shape), plan.half.fields
    require(dims.num_tokens <= engine.config.max_batch_tokens, "I4", "{} tokens in one forward", dims.num_tokens)
    is_padded = dims.num_tokens <= shape.num_tokens and len(planned) <= shape.num_rows
    require(is_padded, "I4", "the padded shape is smaller")
    require(max(planned, default=-1) < table.num_live, "I29", "a planned row is free")
    require(fields["table_row"][at].tolist() == planned, "I29", "rows moved between prepare and forward")
    lengths, counts = fields["kv_len"][at].tolist(), fields["query_len"][at].tolist()
    is_same = lengths == [rows.kv_len[row] for row in planned]
    require(is_same, "I29", "lengths changed between prepare and forward")
    _check_reads(engine, iteration, rows, lengths)
    require(sum(counts) == dims.num_tokens, "I4", "query tokens do not sum up")
    if isinstance(engine.pool, PrefixPool):
        check_own_blocks(engine, rows, plan.table_rows)
    for row, count in zip(planned, counts, strict=True):
        if rows.is_prefill[row]:
            _check_chunk(engine, rows, row, count)


def _check_reads(engine: Engine, iteration: Iteration, rows: LiveRows, lengths: list[int]) -> None:
    """I32: decode rows read their newest token and the drafts behind it, and logits are asked of each of these."""
    plan, width = iteration.plan, engine.config.decode_width
    assert plan is not None
    planned, fields = plan.table_rows.tolist(), plan.half.fields
    at = batch_rows_of(plan.dims, plan.shape)
    last = (fields["query_start"][at] + fields["query_len"][at] - 1).tolist()
    is_newest = fields["positions"][last].tolist() == [length - 1 for length in lengths]
    require(is_newest, "I32", "a row's newest token at a wrong position")
    asked: list[int] = []
    for row, end in zip(planned, last, strict=True):
        first = end if rows.is_prefill[row] else end - width + 1
        asked += range(first, end + 1)
        if not rows.is_prefill[row]:
            ids = fields["token_ids"][first : end + 1].tolist()
            wanted = [FROM_SAMPLE, *(FROM_DRAFT - i for i in range(width - 1))]
            require(ids == wanted, "I32", "row {}: a decode row reads {} and not its newest token and drafts", row, ids)
    is_asked = fields["logits_idx"][: len(asked)].tolist() == asked
    require(is_asked, "I32", "logits of a wrong token are asked for")


def _check_chunk(engine: Engine, rows: LiveRows, row: int, count: int) -> None:
    """I48: neither a chunk nor what it leaves is one token."""
    length, left = rows.prompt_len[row], rows.prompt_len[row] - rows.chunk_end[row]
    is_all = rows.chunk_done[row] % engine.config.block_size == 0 and left == 0  # all that a prefix left over
    require(count != 1 or length == 1 or is_all, "I48", "row {}: a chunk of one token of {}", row, length)
    require(left != 1, "I48", "row {}: a chunk that leaves one token of {}", row, length)


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
        in_flight = 0 if pending is None else len(_rows_left(pending))
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
    if _is_first(border):
        orders, steps = counters.orders, counters.steps
        require(
            orders.total() == steps == counters.reasons.total(), "I36", "{} orders, {} steps", orders.total(), steps
        )
        require(counters.compaction_steps <= counters.overlap_steps, "I36", "more compactions than overlap steps")
        require(counters.wasted.total() == counters.rows_dropped, "I36", "wasted rows and their causes differ")
        require(counters.generated_tokens <= counters.sampled_rows, "I60", "more tokens than sampled rows")
        _check_acceptance(engine)


def _check_acceptance(engine: Engine) -> None:
    """I41: of the drafts at a place no more are accepted than were proposed, nor than at the place before."""
    counters, drafts = engine.counters, engine.config.speculative_tokens
    proposed = [counters.drafts_proposed[place] for place in range(drafts)]
    accepted = [counters.drafts_accepted[place] for place in range(drafts)]
    require(len(set(proposed)) <= 1, "I41", "drafts are proposed at all places or none, not {}", proposed)
    is_falling = accepted == sorted(accepted, reverse=True) and max(accepted, default=0) <= max(proposed, default=0)
    require(is_falling, "I41", "accepted drafts {} of {}", accepted, proposed)
    require(counters.drafts_proposed.total() == sum(proposed), "I41", "drafts at places that nobody drafts")
    for request in engine.table.live_requests():
        made = len(request.output_ids)
        is_told = 0 <= request.num_accepted <= min(request.num_drafted, made)
        require(is_told, "I41", "{}: {} of {} drafts", request.request_id, request.num_accepted, request.num_drafted)


def _rows_left(pending: PendingForward) -> list[int]:
    """Table rows of the pending forward that were not dropped."""
    return [row for row in pending.table_rows.tolist() if row >= 0]


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
