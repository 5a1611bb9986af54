"""Why a request is where it is, in one sentence. Reads the host's state and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from engine.admission import Capacity, Entry, Refusal, blocks_for, consider
from engine.batch import BatchDimensions
from engine.engine import Engine
from engine.phases import Phase
from engine.request import Request, RequestState
from workbench.desk import Desk
from workbench.peek import SessionError, coming_phases
from workbench.snapshot import chunk_progress

_NAMED = 3
"""Requests named before the rest is counted."""


def explain_request(engine: Engine, desk: Desk, request_id: str) -> str:
    """One sentence; of a failed engine a second one, which says what to do.

    Raises:
        SessionError: no request of that name was submitted.
    """
    if request_id not in desk.book:
        raise SessionError(f"there is no request {request_id!r} in this session")
    request = desk.book.request(request_id)
    if request is None:
        return _before_arrival(desk, request_id)
    if request.finish_reason is not None:
        return _ended(engine, request)
    sentence = _live(engine, request)
    if engine.failure is not None:
        sentence += " The engine has failed: recover() computes it again from the tokens it has."
    return sentence


def _before_arrival(desk: Desk, request_id: str) -> str:
    for coming in desk.arrivals.coming:
        if coming.request_id == request_id and coming.loop is not None:
            return (
                f"{request_id} has not arrived: its closed loop lets it in when fewer than {coming.loop.limit} of the "
                "loop's requests are live and all before it are in."
            )
        if coming.request_id == request_id:
            unit, now = desk.clock.unit, desk.clock.now()
            return f"{request_id} has not arrived: it comes at {coming.arrival:.6g} {unit}, now is {now:.6g}."
    return f"{request_id} was aborted before it arrived, so it has no tokens."


# -- ended -------------------------------------------------------------------------------------------------------------


def _ended(engine: Engine, request: Request) -> str:
    owed = "" if request.timings.finished_ns is not None else "; its last output comes with the next emit"
    return f"{request.request_id} has ended{_when(request)}: {_end_text(engine, request)}{owed}."


def _when(request: Request) -> str:
    index = request.timings.finished_iteration
    return f" in iteration {index}" if index is not None else ""


def _end_text(engine: Engine, request: Request) -> str:
    count, stop = len(request.output_ids), request.stop_reason
    has = f"{count} token{'' if count == 1 else 's'}"
    if request.finish_reason == "abort":
        return f"it was aborted and keeps the {has} it had"
    if request.finish_reason == "error":
        return f"it failed after {has} ({stop})"
    if request.finish_reason == "length":
        if request.max_new_tokens < request.params.max_tokens:
            return f"prompt and output fill max_sequence_length={engine.resolved.max_sequence_length} with {has}"
        return f"it has all {has} that max_tokens allows"
    if isinstance(stop, str):
        return f"its text holds the stop string {stop!r} after {has}"
    if stop is not None:
        return f"its token {count} is {stop}, one of its stop_token_ids"
    return f"its token {count} is an end-of-sequence id, {request.output_ids[-1]}"


# -- live --------------------------------------------------------------------------------------------------------------


def _live(engine: Engine, request: Request) -> str:
    name = request.request_id
    if request.state is RequestState.WAITING:
        if request.abort_requested:
            return f"{name} waits and is aborted: the next admit or resolve ends it."
        return f"{name} waits{_kept(request)}: {_waiting_text(engine, request)}."
    row = f"has row {request.row}"
    if request.abort_requested:
        return f"{name} {row} and is to be aborted: the next admit or resolve ends it, and no token is given to it."
    if request.state is RequestState.PAUSED:
        return f"{name} {row} and is paused: it keeps its blocks and runs nothing until blocks are free for all rows."
    if request.state is RequestState.PREFILL:
        return f"{name} {row} and reads its prompt of {request.num_tokens} tokens{_reading_text(engine, request)}."
    known = f"{len(request.output_ids)} of {request.max_new_tokens} tokens are known"
    return f"{name} {row} and decodes: {known}, and {_coming_token(engine, request, 'the next')}."


def _kept(request: Request) -> str:
    count = len(request.output_ids)
    return f" again, with the {count} tokens it has to be computed anew" if count else ""


def _reading_text(engine: Engine, request: Request) -> str:
    """Where the prompt's reading is: all of it, its last chunk, or a chunk that gives no token yet."""
    table, row = engine.table, request.row
    if row is None or row != table.partial_row:
        is_last = row is not None and table.chunk_done[row] > 0
        how = f" in chunks, the last from token {int(table.chunk_done[row]) + 1} on" if is_last else ""
        return f"{how}: {_coming_token(engine, request, 'its first token')}"
    end = int(table.chunk_end[row])
    return f" in chunks: {_coming_chunk(engine, request, row, end)}, and the next admit goes on with it before all else"


def _coming_chunk(engine: Engine, request: Request, row: int, end: int) -> str:
    """Where a chunk that ends at token ``end``, and is not the last, is on its way."""
    current, pending = engine.in_hand, engine.pending
    if pending is not None and row in pending.table_rows:
        return f"the forward that iteration {pending.iteration} launched reads up to token {end}"
    if engine.table.kv_len[row] < end:
        return f"the next forward reads up to token {end}"
    if current is not None and current.launched is None and current.plan is not None:
        return f"the forward that is prepared and not launched yet reads up to token {end}"
    return f"it is read up to token {end}, of which nothing is sampled"


def _coming_token(engine: Engine, request: Request, token: str) -> str:
    """Where the token that comes next is on its way."""
    current, pending = engine.in_hand, engine.pending
    if current is not None and current.sampled is not None and _is_sampled(engine, request):
        following = (
            ", and as its last it was left out of the forward behind it" if _was_left_out(engine, request) else ""
        )
        return f"{token} is sampled: resolve gives it to the request{following}"
    if pending is not None and request.row in pending.table_rows:
        return f"{token} comes from the forward that iteration {pending.iteration} launched, once it is sampled"
    plan = current.plan if current is not None and current.launched is None else None
    if plan is not None and request.request_id in plan.request_ids:
        return f"{token} comes from the forward that is prepared and not launched yet"
    return f"{token} comes from the next forward, which holds it"


def _is_sampled(engine: Engine, request: Request) -> bool:
    """Whether the iteration in hand has sampled it and not resolved that yet."""
    current = engine.in_hand
    assert current is not None
    is_open = engine.next_phase is not None and Phase.RESOLVE in coming_phases(engine)
    return is_open and current.consumed is not None and request.key in current.consumed.keys.tolist()


def _was_left_out(engine: Engine, request: Request) -> bool:
    """Whether a forward was prepared behind the sampled one without this row, for it is known to end."""
    plan = engine.in_hand.plan if engine.in_hand is not None else None
    return plan is not None and request.remaining_tokens == 1 and request.request_id not in plan.request_ids


# -- waiting -----------------------------------------------------------------------------------------------------------


def _waiting_text(engine: Engine, request: Request) -> str:
    """Admission is first in, first out: the head by its own need, all others behind it."""
    capacity = engine.queue.capacity()
    ahead: list[Request] = []
    for waiting in engine.queue.waiting:
        if waiting.abort_requested:
            continue
        found = consider(waiting, capacity, engine.queue.hit(waiting))
        if waiting is request:
            if isinstance(found, Entry):
                return _admission_text(engine, _fit_text(found))
            return _refusal_text(engine, request, found, capacity)
        ahead.append(waiting)
        if isinstance(found, Refusal):
            return _behind_text(engine, request, waiting, found)
        capacity = capacity.after(found)
    return "the next admit looks at it"  # it left the queue and has no row: between two statements of admit


def _behind_text(engine: Engine, request: Request, head: Request, blocked: Refusal) -> str:
    queue = [one for one in engine.queue.waiting if not one.abort_requested]
    ahead = queue.index(request)
    who = head.request_id if ahead == 1 else f"{head.request_id} and {ahead - 1} more"
    return f"it is behind {who}, first in, first out, and {head.request_id} has to wait ({blocked.value})"


def _fit_text(entry: Entry) -> str:
    fits = f"a chunk of {entry.chunk} of its {entry.num_tokens} tokens fits" if entry.is_partial else "it fits"
    return f"{fits}, {entry.done} tokens of its prefix are cached" if entry.done else fits


def _admission_text(engine: Engine, fits: str) -> str:
    """``fits`` says what of it fits: which admit takes it."""
    current, pending = engine.in_hand, engine.pending
    if current is not None:
        if Phase.ADMIT in coming_phases(engine):
            return f"{fits}, and the admit of iteration {current.index} takes it"
        return f"{fits}, and iteration {current.index} has no admit to come; the next admit takes it"
    if pending is not None:
        return (
            f"{fits}, and async admits only when no forward is pending: the next iteration samples the forward of "
            f"iteration {pending.iteration} and then admits it"
        )
    return f"{fits}, and the next iteration admits it"


def _refusal_text(engine: Engine, request: Request, blocked: Refusal, capacity: Capacity) -> str:
    if blocked is Refusal.NO_ROW:
        return f"all {engine.table.max_requests} rows are taken; {_who_frees(engine)}"
    if blocked is Refusal.BATCH_FULL and engine.table.partial_row is not None and not capacity.free_tokens:
        reading = engine.table.requests[engine.table.partial_row]
        assert reading is not None
        progress = chunk_progress(engine.table, engine.table.partial_row)
        return f"the prompt of {reading.request_id} is read in chunks, {progress} tokens, and goes before it"
    if blocked is Refusal.BATCH_FULL:
        limit = engine.config.max_batch_tokens
        if capacity.chunked:
            return (
                f"{capacity.free_tokens} of max_batch_tokens={limit} are left in the next forward, too few for a chunk "
                f"of its {request.num_tokens}; a later admit has room"
            )
        return (
            f"it needs {request.num_tokens} tokens of the next forward and {capacity.free_tokens} of "
            f"max_batch_tokens={limit} are left; the admit after that has room"
        )
    if blocked is Refusal.GRAPH_WAIT:
        return _graph_wait_text(request, capacity)
    if blocked is Refusal.ONE_TOKEN:
        return f"{blocked.value}: chunks of one token are not read; a later admit has more room"
    if blocked is Refusal.ROWS_PAUSED:
        return f"{_rows(capacity.num_paused)} for want of blocks and goes on first; {_who_frees(engine)}"
    if not capacity.reserves:
        needed = -(-request.num_tokens // capacity.block_size)
        return (
            f"its {request.num_tokens} tokens need {needed} blocks, and {max(0, capacity.free_blocks)} of "
            f"{engine.pool.num_blocks} are free and not wanted by rows that run; {_who_frees(engine)}"
        )
    needed = blocks_for(request, capacity.block_size)
    return (
        f"at its longest it needs {needed} blocks, and {max(0, capacity.free_blocks)} of "
        f"{engine.pool.num_blocks} are not reserved for others; {_who_frees(engine)}"
    )


def _graph_wait_text(request: Request, capacity: Capacity) -> str:
    assert capacity.gate is not None
    wanted, held = capacity.gate.alone(request.num_tokens).graph, capacity.held
    fits = "" if wanted is None else f"; alone it would run in the graph of {graph_name(wanted)}"
    return (
        f"no captured forward holds it beside {held.num_decode} decode and {held.num_prefill} prefill rows{fits}. It "
        f"has waited {request.graph_wait_steps} iterations and enters when enough of those rows have ended"
    )


def graph_name(dims: BatchDimensions) -> str:
    """A captured size in words."""
    return f"{dims.num_tokens} tokens, {dims.num_prefill} prefill, {dims.num_decode} decode"


def _rows(num_paused: int) -> str:
    return "a row is paused" if num_paused == 1 else f"each of {num_paused} rows is paused"


def _who_frees(engine: Engine) -> str:
    running = [request.request_id for request in engine.table.live_requests() if request.finish_reason is None]
    if not running:
        return "those it waits for have ended, and are released next"
    return f"it waits until {running[0] if len(running) == 1 else f'one of {_names(running)}'} ends"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
