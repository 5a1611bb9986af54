"""Checks that run at every phase border in debug mode and in all tests. Numbers are those of the reference's §9.

They read host state, and device state only where ``check_device`` says so (it waits for the device). A failure is a
fault of the engine, or of a policy passed to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InvariantError
from engine.phases import Order, Phase
from engine.request import RequestState

if TYPE_CHECKING:
    from engine.controller import Border, Controller, Iteration
    from engine.engine import Engine


def _require(holds: object, number: str, text: str) -> None:
    if not holds:
        raise InvariantError(f"{number}: {text}")


def check_border(engine: Engine, border: Border) -> None:
    """Run every check that must hold at a phase border.

    Raises:
        InvariantError: naming the invariant and what was found.
    """
    controller = engine.controller
    check_rows(engine)
    check_blocks(engine)
    check_row_lengths(engine)
    check_requests(engine)
    check_pending(controller)
    check_order(controller, border)


def check_rows(engine: Engine) -> None:
    """I1-I3: borders, unique owners, free rows empty."""
    table = engine.table
    _require(0 <= table.num_paused <= table.num_live <= table.max_requests, "I1", "row borders out of order")
    live = slice(table.num_paused, table.num_live)
    prefill = table.is_prefill[live]
    _require(not np.any(prefill[:-1] & ~prefill[1:]), "I1", f"a prefill row stands before a decode row: {prefill}")
    keys = table.key[: table.num_live]
    _require(np.unique(keys).size == keys.size and (keys >= 0).all(), "I2", f"row owners are not unique: {keys}")
    for row, request in enumerate(table.requests[: table.num_live]):
        _require(request is not None and request.row == row, "I2", f"row {row} and its request disagree")
        _require(request is not None and request.key == table.key[row], "I11", f"row {row}: key column out of step")
    waiting = {request.key for request in engine.queue.waiting}
    _require(not waiting & set(keys.tolist()), "I2", "a request is in the queue and in the table")
    free = slice(table.num_live, None)
    _require((table.block_ids[free] == -1).all(), "I3", "a free row names blocks")
    _require((table.state_slot[free] == -1).all() and (table.key[free] == -1).all(), "I3", "a free row has an owner")
    _require(all(r is None for r in table.requests[free]), "I3", "a free row has a request")


def check_blocks(engine: Engine) -> None:
    """I7, I12-I14: every block is free or held, counted once for each row that lists it, never the dummy."""
    table, pool = engine.table, engine.pool
    held = table.block_ids[: table.num_live]
    flat = held[held >= 0]
    counts = np.bincount(flat, minlength=pool.num_blocks + 1)
    _require(counts[pool.dummy] == 0, "I7", "a row holds the dummy block")
    _require(np.array_equal(counts[: pool.num_blocks], pool.ref_counts), "I13", "reference counts and rows disagree")
    free = pool.free_ids
    _require(np.unique(free).size == free.size, "I14", "a block is free twice")
    _require((counts[free] == 0).all(), "I14", "a free block is held")
    _require(pool.num_free + np.count_nonzero(pool.ref_counts) == pool.num_blocks, "I12", "blocks are lost")
    for row in range(table.num_live):
        count = int(table.block_count[row])
        ids = table.block_ids[row]
        _require((ids[:count] >= 0).all() and (ids[count:] == -1).all(), "I7", f"row {row}: block list has gaps")
        _require(np.unique(ids[:count]).size == count, "I7", f"row {row}: a block twice")


def check_row_lengths(engine: Engine) -> None:
    """I4, I6, I8, I9: lengths of a row, its blocks and its request agree."""
    table, block_size = engine.table, engine.config.block_size
    live = slice(0, table.num_live)
    kv_len, blocks = table.kv_len[live], table.block_count[live]
    _require((kv_len <= blocks * block_size).all(), "I6", f"more tokens than blocks: {kv_len} in {blocks}")
    launched = kv_len > 0
    _require(((blocks - 1) * block_size < kv_len)[launched].all(), "I6", f"an unused block: {kv_len} in {blocks}")
    _require((table.num_output[live] <= table.max_output[live]).all(), "I9", "a row is past its budget")
    for row, request in enumerate(table.requests[live]):
        assert request is not None
        _require(len(request.output_ids) == table.num_output[row], "I8", f"row {row}: output count out of step")
        limit = engine.resolved.max_sequence_length
        _require(request.num_tokens <= limit, "I9", f"{request.request_id} exceeds max_sequence_length")
        ahead = int(table.kv_len[row]) - request.num_tokens
        _require(ahead <= 1, "I8", f"row {row}: {ahead} cached tokens beyond the known ones")


def check_requests(engine: Engine) -> None:
    """I40, I43, I44: log probabilities, finish and times of every live request."""
    for request in engine._live.values():
        params = request.params
        if params.logprobs is not None:
            _require(
                len(request.logprobs) == len(request.output_ids),
                "I40",
                f"{request.request_id}: {len(request.logprobs)} log probabilities, {len(request.output_ids)} tokens",
            )
        if request.prompt_logprobs:
            _require(
                len(request.prompt_logprobs) == len(request.prompt_ids),
                "I40",
                f"{request.request_id}: prompt log probabilities of the wrong length",
            )
        times = request.timings
        known = [t for t in (times.arrival_ns, times.admitted_ns, times.first_token_ns) if t is not None]
        _require(known == sorted(known), "I44", f"{request.request_id}: times run backwards")
        _require((request.row is None) or request.state is not RequestState.WAITING, "I2", "a waiting request in a row")


def check_pending(controller: Controller) -> None:
    """I25: the pending forward's rows are exactly the active rows it may be sampled for."""
    pending, table = controller.pending, controller.table
    if pending is None:
        return
    rows = pending.table_rows[pending.table_rows >= 0]
    _require(np.unique(rows).size == rows.size, "I25", "two pending rows claim one table row")
    _require((rows < table.num_live).all(), "I25", "a pending row claims a free table row")
    live_keys = pending.keys[pending.table_rows >= 0]
    _require(np.array_equal(table.key[rows], live_keys), "I25", "a pending row belongs to another generation")


def check_order(controller: Controller, border: Border) -> None:
    """I27-I29, I31, I33: what an order may have done by this border."""
    iteration, table = border.iteration, controller.table
    done = _done_phases(border)
    if Phase.FORWARD in done and iteration.plan is not None:
        _require(iteration.launched is not None, "I27", "prepared rows were not launched")
    if iteration.launched is not None:
        _require(Phase.FORWARD in done, "I27", "a forward outside the forward phase")
    if iteration.order is Order.OVERLAP:
        _require(not iteration.admitted, "I28", "admission in an overlap iteration")
        _require(not table.is_prefill[: table.num_live].any(), "I28", "a prefill row in an overlap iteration")
        _require(table.num_paused == 0, "I28", "a paused row in an overlap iteration")
    if iteration.order is Order.PRIMER:
        _require(not iteration.outputs and iteration.new_tokens == 0, "I35", "a primer emitted something")
    if border.side == "before" and border.phase is Phase.SAMPLE and controller.pending is not None:
        _check_sampled_rows(controller, iteration)


def _check_sampled_rows(controller: Controller, iteration: Iteration) -> None:
    pending, table = controller.pending, controller.table
    assert pending is not None
    rows = np.sort(pending.table_rows[pending.table_rows >= 0])
    _require(
        np.array_equal(rows, table.active_rows),
        "I25",
        f"iteration {iteration.index}: active rows {table.active_rows} but pending rows {rows}",
    )


def _done_phases(border: Border) -> tuple[Phase, ...]:
    phases = border.iteration.order.phases
    at = phases.index(border.phase)
    return phases[: at + 1] if border.side == "after" else phases[:at]


def check_idle(engine: Engine) -> None:
    """I20: after the last output nothing is held, nothing is pending, every request has ended once."""
    table, pool, counters = engine.table, engine.pool, engine.counters
    _require(table.num_live == 0, "I20", f"{table.num_live} rows are still held")
    _require(pool.num_free == pool.num_blocks, "I20", f"{pool.num_blocks - pool.num_free} blocks are still held")
    _require(engine.controller.pending is None, "I20", "a forward is still pending")
    _require(not engine.queue.waiting, "I20", "requests still wait")
    _require(
        counters.finished.total() == counters.submitted,
        "I60",
        f"{counters.submitted} submitted but {dict(counters.finished)} finished",
    )


def check_device(engine: Engine) -> None:
    """I32, I34 on the device: its block tables and newest tokens are the host's. Waits for the device."""
    engine.device.synchronize()
    table, columns = engine.table, engine.runner.columns
    block_table = columns.block_table.cpu().numpy()
    dummy = columns.block_table[columns.dummy_row].cpu().numpy()
    _require((dummy == columns.dummy_block).all(), "I51", "the dummy row names a real block")
    for row in range(table.num_live):
        if table.kv_len[row] == 0:
            continue  # admitted, not published yet
        count = int(table.block_count[row])
        _require(
            np.array_equal(block_table[row, :count], table.block_ids[row, :count]),
            "I11",
            f"row {row}: the device's block table is {block_table[row]}, the host's {table.block_ids[row]}",
        )
        _require(
            (block_table[row, count:] == columns.dummy_block).all(), "I3", f"row {row}: stale blocks on the device"
        )
