"""Checks of the table's rows, of the blocks they hold and of the requests they belong to; see engine/invariants.py.

Tables are small in debug mode, and everything here runs at every border: columns are read once as lists, since each
look at a numpy scalar costs more than the check that follows.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.cache.prefix_pool import PrefixPool
from engine.invariants_device import require
from engine.phases import Order, Phase
from engine.request import Request, RequestState
from engine.table import _COLUMNS, RequestTable, Rows

if TYPE_CHECKING:
    from engine.controller import Border, Controller, Iteration
    from engine.engine import Engine

_FREE_BYTE = {name: b"\xff" if empty == -1 else b"\0" for name, (_, empty) in _COLUMNS.items()} | {"block_ids": b"\xff"}
"""What a free row is filled with; -1 has all bits set in every integer."""
_ALIVE = (RequestState.PREFILL, RequestState.DECODE, RequestState.PAUSED)
_OWNED = "key, max_output, num_output, is_fresh, is_watched"


@dataclass(frozen=True, slots=True)
class Standing:
    """What of the iteration in hand is half done at a border."""

    done: tuple[Phase, ...]
    """Its phases that have run."""
    is_staged: bool
    """Prepared and not launched."""
    unresolved: Mapping[int, int]
    """Of table rows sampled or verified and not resolved, the tokens that their length counts and the host does not
    know: one, with the drafts that were read beside it, from rewind on with the accepted ones."""
    is_rewound: bool
    """Rejected drafts are taken out of the lengths of these rows."""

    @staticmethod
    def at(border: Border) -> Standing:
        """The standing at a border."""
        iteration, phases = border.iteration, border.iteration.order.phases
        done = phases[: phases.index(border.phase) + (border.side == "after")]
        is_staged = iteration.plan is not None and Phase.PREPARE in done and Phase.FORWARD not in done
        is_rewound = Phase.REWIND in done
        is_resolved = Phase.RESOLVE in done
        return Standing(done, is_staged, {} if is_resolved else _unresolved(iteration, is_rewound), is_rewound)


def _unresolved(iteration: Iteration, is_rewound: bool) -> dict[int, int]:
    """See :attr:`Standing.unresolved`."""
    if iteration.verified is not None:
        first = iteration.verified.first_row
        counted = iteration.num_tokens if is_rewound else iteration.verified.num_drafts + 1
        return {} if counted is None else dict(enumerate(counted.tolist(), first))
    if iteration.sampled is not None:
        first = iteration.sampled.first_row
        return dict.fromkeys(range(first, first + iteration.sampled.num_rows), 1)
    return {}


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The live rows' columns, as lists."""

    key: list[int]
    kv_len: list[int]
    num_output: list[int]
    max_output: list[int]
    prompt_len: list[int]
    is_prefill: list[bool]
    is_fresh: list[bool]
    is_watched: list[bool]
    chunk_done: list[int]
    chunk_end: list[int]
    block_count: list[int]
    block_ids: list[list[int]]
    num_accepted: list[int]
    max_blocks: list[int]
    requests: list[Request | None]

    @staticmethod
    def of(table: RequestTable) -> LiveRows:
        """As they are now."""
        live = table.num_live
        return LiveRows(
            key=table.key[:live].tolist(),
            kv_len=table.kv_len[:live].tolist(),
            num_output=table.num_output[:live].tolist(),
            max_output=table.max_output[:live].tolist(),
            prompt_len=table.prompt_len[:live].tolist(),
            is_prefill=table.is_prefill[:live].tolist(),
            is_fresh=table.is_fresh[:live].tolist(),
            is_watched=table.is_watched[:live].tolist(),
            chunk_done=table.chunk_done[:live].tolist(),
            chunk_end=table.chunk_end[:live].tolist(),
            block_count=table.block_count[:live].tolist(),
            block_ids=table.block_ids[:live].tolist(),
            num_accepted=table.num_accepted[:live].tolist(),
            max_blocks=table.max_blocks[:live].tolist(),
            requests=table.requests[:live],
        )


# -- rows --------------------------------------------------------------------------------------------------------------


def check_rows(engine: Engine, rows: LiveRows, standing: Standing) -> None:
    """I1-I3, I5, I11 on the host: borders, unique owners, columns that belong to the row's request, free rows empty."""
    table = engine.table
    live = table.num_live
    require(0 <= table.num_paused <= live <= table.max_requests, "I1", "row borders out of order")
    is_settled = engine.controller.pending is None and not standing.unresolved
    if is_settled or Phase.PREPARE in standing.done[-2:]:
        # A stop string found in emit may move a launched prefill row into a hole; the next resolve makes all decode,
        # in overlap the next prepare.
        prefill = rows.is_prefill[table.num_paused :]
        require(prefill == sorted(prefill), "I1", "a prefill row stands before a decode row: {}", prefill)
    keys = set(rows.key)
    require(len(keys) == live and min(keys, default=0) >= 0, "I2", "row owners are not unique: {}", rows.key)
    for row, request in enumerate(rows.requests):
        _check_owner(engine, rows, row, request)
    waits_in_a_row = any(request.key in keys for request in engine.queue.waiting)
    require(not waits_in_a_row, "I2", "a request is in the queue and in the table")
    for name, column in table.columns():
        held = column[live:].tobytes()
        if held != _FREE_BYTE[name] * len(held):
            require(False, "I3", "a free row keeps {}: {}", name, column[live:].tolist())
    require(table.requests[live:].count(None) == table.max_requests - live, "I3", "a free row has a request")


def _check_owner(engine: Engine, rows: LiveRows, row: int, request: Request | None) -> None:
    require(request is not None and request.row == row, "I2", "row {} and its request disagree", row)
    assert request is not None
    require(engine._live.get(request.request_id) is request, "I2", "row {}: {} has ended", row, request.request_id)
    require(request.state in _ALIVE, "I2", "row {}: {} is {}", row, request.request_id, request.state.value)
    held = (rows.key[row], rows.max_output[row], rows.num_output[row], rows.is_fresh[row], rows.is_watched[row])
    is_fresh = request.state is RequestState.PREFILL
    wanted = (request.key, request.max_new_tokens, len(request.output_ids), is_fresh, request.is_watched)
    require(held == wanted, "I11", "row {}: {} are {}, of its request {}", row, _OWNED, held, wanted)
    prompt_len, done, end = rows.prompt_len[row], rows.chunk_done[row], rows.chunk_end[row]
    is_right = len(request.prompt_ids) <= prompt_len <= request.num_tokens
    require(is_right, "I11", "row {}: prompt_len is {}", row, prompt_len)
    require(0 <= done < end <= prompt_len, "I11", "row {}: its chunk is {} to {} of {}", row, done, end, prompt_len)
    is_last = end == prompt_len or row == engine.table.partial_row
    require(is_last, "I5", "row {} is partial and not the last one", row)


# -- blocks ------------------------------------------------------------------------------------------------------------


def check_blocks(engine: Engine, rows: LiveRows) -> None:
    """I7, I12-I14: every block is free or held, counted once for each row that lists it, never the dummy."""
    pool = engine.pool
    counts = [0] * pool.num_blocks
    for row, (ids, count) in enumerate(zip(rows.block_ids, rows.block_count, strict=True)):
        held = ids[:count]
        has_gaps = min(held, default=0) < 0 or ids.count(-1) != len(ids) - count
        require(not has_gaps, "I7", "row {}: block list has gaps: {}", row, ids)
        require(len(set(held)) == count, "I7", "row {}: a block twice: {}", row, held)
        require(max(held, default=0) < pool.num_blocks, "I7", "row {} holds the dummy block: {}", row, held)
        for block in held:
            counts[block] += 1
    references = pool.ref_counts.tolist()
    require(counts == references, "I13", "rows list {}, reference counts are {}", counts, references)
    free = pool.free_ids.tolist()
    free_set = set(free)
    require(len(free_set) == len(free) and pool.dummy not in free_set, "I14", "a block is free twice: {}", free)
    require(not any(counts[block] for block in free), "I14", "a free block is held")
    num_held = pool.num_blocks - references.count(0)
    require(pool.num_free + num_held == pool.num_blocks, "I12", "blocks are lost")
    if isinstance(pool, PrefixPool):
        _check_cached(pool, references, free_set)


def _check_cached(pool: PrefixPool, references: list[int], free: set[int]) -> None:
    """I14, I15: cached blocks are neither free nor held, and names are one to one."""
    try:
        pool.index.check()
    except AssertionError as error:
        require(False, "I15", "{}", error)
    idle = set(pool.index.idle)
    require(not idle & free, "I14", "a cached block is free: {}", idle & free)
    require(not any(references[block] for block in idle), "I14", "a cached block is held")
    require(len(free) + len(idle) == pool.num_free, "I12", "{} free, {} cached, {} takeable", free, idle, pool.num_free)


def check_own_blocks(engine: Engine, rows: LiveRows, planned: Rows) -> None:
    """I17: the forward about to be launched writes to blocks of one owner, which have no name."""
    pool, block_size = engine.pool, engine.config.block_size
    assert isinstance(pool, PrefixPool)
    for row in planned.tolist():
        first = rows.chunk_done[row] if rows.is_prefill[row] else rows.kv_len[row] - engine.config.decode_width
        for block in rows.block_ids[row][first // block_size : rows.block_count[row]]:
            is_mine = int(pool.ref_counts[block]) == 1
            require(is_mine, "I17", "row {} writes to block {}, which others hold", row, block)
            require(block not in pool.index, "I17", "row {} writes to block {}, which has a name", row, block)


# -- lengths -----------------------------------------------------------------------------------------------------------


def check_row_lengths(engine: Engine, border: Border, standing: Standing, rows: LiveRows) -> None:
    """I6, I8, I9: a row's length counts each launched token once, and agrees with its blocks and its request."""
    limit = engine.resolved.max_sequence_length
    ahead = _tokens_ahead(engine.controller, border, standing)
    for row, request in enumerate(rows.requests):
        assert request is not None
        kv_len, known = rows.kv_len[row], request.num_tokens
        reads = rows.chunk_done[row], rows.chunk_end[row]
        if not rows.is_prefill[row]:
            wanted: tuple[int, ...] = (known - 1 + ahead[row],)
        elif request.abort_requested:  # in overlap it may have been placed and then left out
            wanted = (0, *reads)
        elif Phase.PREPARE not in standing.done and request in border.iteration.admitted:
            wanted = (0,)  # placed by this iteration: the device does not know its row yet
        elif ahead[row]:
            wanted = reads[:1] if _goes_on(engine.controller, rows.key[row], border, standing) else reads[1:]
        else:  # its next chunk is placed and not prepared yet, or not even placed
            wanted = reads
        text = "row {}: {} cached tokens with {} known and {} launched and not resolved"
        require(kv_len in wanted, "I8", text, row, kv_len, known, ahead[row])
        require(len(request.output_ids) <= request.max_new_tokens, "I9", "row {} is past its budget", row)
        require(known <= limit, "I9", "{} exceeds max_sequence_length", request.request_id)
    _check_block_counts(engine, border, standing, rows)


def _check_block_counts(engine: Engine, border: Border, standing: Standing, rows: LiveRows) -> None:
    """I6: blocks for what is cached; with drafting also for rejected drafts, and for as many again behind them.

    Where lengths may be bounds, blocks may have been taken for the drafts of two forwards that were rejected since.
    """
    block_size, drafts = engine.config.block_size, engine.config.speculative_tokens
    launched = {row for row, _ in _in_flight(engine.controller, border, standing)}
    for row, kv_len in enumerate(rows.kv_len):
        if engine.config.counts_lengths and not rows.is_prefill[row]:
            _check_bounded_blocks(engine, rows, row)
            continue
        written = rows.chunk_end[row] if rows.is_prefill[row] else kv_len
        is_kept = row in launched or (row in standing.unresolved and not standing.is_rewound)
        if not (rows.is_prefill[row] or is_kept) and kv_len > rows.prompt_len[row]:
            written += drafts - rows.num_accepted[row]
        needed, held = -(-(written + drafts) // block_size), rows.block_count[row]
        require(held == needed, "I6", "row {}: {} blocks for {} tokens", row, held, kv_len)


def _check_bounded_blocks(engine: Engine, rows: LiveRows, row: int) -> None:
    drafts, kv_len, held = engine.config.speculative_tokens, rows.kv_len[row], rows.block_count[row]
    reach = kv_len + drafts, kv_len + 3 * drafts
    least, most = (min(-(-tokens // engine.config.block_size), rows.max_blocks[row]) for tokens in reach)
    require(least <= held <= most, "I6", "row {}: {} blocks for at most {} tokens", row, held, kv_len)


def _goes_on(controller: Controller, key: int, border: Border, standing: Standing) -> bool:
    """Its next chunk is placed beside the pending forward that reads the one before, and not prepared yet."""
    done, pending = standing.done, controller.pending
    is_between = border.iteration.order is Order.OVERLAP_ADMIT and Phase.ADMIT in done and Phase.PREPARE not in done
    return is_between and pending is not None and pending.partial_key == key


def _tokens_ahead(controller: Controller, border: Border, standing: Standing) -> list[int]:
    """For each row: tokens of forwards prepared, pending, sampled or verified that its length counts beside known ones.

    Of a row that reads its prompt only whether there are any means something.
    """
    ahead = [0] * controller.table.num_live
    for row, count in _in_flight(controller, border, standing):
        ahead[row] += count
    for row, count in standing.unresolved.items():
        if row < len(ahead):
            ahead[row] += count
    return ahead


def _in_flight(controller: Controller, border: Border, standing: Standing) -> list[tuple[int, int]]:
    """Table rows of the pending forward and of the prepared one, a row of both twice, and the tokens drawn for each.

    That is one, and for a row that decodes one a draft besides.
    """
    pending, plan, width = controller.pending, border.iteration.plan, controller.resolved.config.decode_width
    sources = [(pending.table_rows, pending.dims.num_decode)] if pending is not None else []
    if standing.is_staged and plan is not None:
        sources.append((plan.table_rows, plan.dims.num_decode))
    places = [(row, width if i < decode else 1) for rows, decode in sources for i, row in enumerate(rows.tolist())]
    return [(row, count) for row, count in places if 0 <= row < controller.table.num_live]


# -- requests ----------------------------------------------------------------------------------------------------------


def check_requests(engine: Engine) -> None:
    """I40, I43-I45: log probabilities, finish, times and what was handed out, of every live request."""
    for name, request in engine._live.items():
        num_output = len(request.output_ids)
        if request.params.logprobs is not None:
            made = len(request.logprobs)
            require(made == num_output, "I40", "{}: {} log probabilities, {} tokens", name, made, num_output)
        if request.prompt_logprobs and request.finish_reason is None:
            made, due = len(request.prompt_logprobs), _prompt_logprobs_due(engine, request)
            require(made in due, "I40", "{}: {} prompt log probabilities, due are {}", name, made, due)
        times = request.timings
        known = [t for t in (times.arrival_ns, times.admitted_ns, times.first_token_ns) if t is not None]
        require(known == sorted(known) and times.finished_ns is None, "I44", "{}: times run backwards", name)
        require(request.row is None or request.state is not RequestState.WAITING, "I2", "{} waits in a row", name)
        require(request.emitted_tokens <= num_output, "I45", "{}: a token was handed out too many", name)
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
