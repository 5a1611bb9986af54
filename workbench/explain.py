"""Why a request is where it is, in one sentence. Reads the host's state and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.admission import Entry, Refusal
from engine.engine import Engine
from engine.phases import Phase
from engine.policy import NeverOverlap, PreferOverlap, overlap_refusal
from engine.request import Request, RequestState
from workbench.admissions import Admissions
from workbench.desk import Desk
from workbench.peek import SessionError, coming_phases
from workbench.prospects import Prospect, awaited_graph, blocks_needed, computing, graph_name, prospects
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
    sentence = _live(engine, request, desk.admissions)
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


def _live(engine: Engine, request: Request, admissions: Admissions) -> str:
    name = request.request_id
    if request.state is RequestState.WAITING:
        if request.abort_requested:
            return f"{name} waits and is aborted: the next admit or resolve ends it."
        return f"{name} waits{_kept(request, admissions)}: {_waiting_text(engine, request)}."
    row = f"has row {request.row}"
    if request.abort_requested:
        return f"{name} {row} and is to be aborted: the next admit or resolve ends it, and no token is given to it."
    if request.state is RequestState.PAUSED:
        return f"{name} {row} and is paused: {_paused_text(engine, request)}."
    if request.state is RequestState.PREFILL:
        return f"{name} {row} and reads {_read_text(request, admissions)}{_reading_text(engine, request, admissions)}."
    known = f"{len(request.output_ids)} of {request.max_new_tokens} tokens are known"
    evicted_in = admissions.evicted_in(request)
    again = "" if evicted_in is None else f" again, behind its eviction in iteration {evicted_in}"
    return f"{name} {row} and decodes{again}: {known}, and {_coming_token(engine, request, 'the next')}."


def _kept(request: Request, admissions: Admissions) -> str:
    """What it has, if it had a row before, and how it lost that."""
    count, evicted_in = len(request.output_ids), admissions.evicted_in(request)
    tokens = f"the {_tokens(count)} it has to be computed anew" if count else ""
    if evicted_in is None:
        return f" again, with {tokens}" if count else ""
    lost = f" again since iteration {evicted_in} took its row for want of blocks"
    return f"{lost}, with {tokens}" if count else lost


def _paused_text(engine: Engine, request: Request) -> str:
    """Rows to its right go on before it: they are the ones that paused last."""
    table, free = engine.table, engine.pool.num_free
    assert request.row is not None
    before = table.num_paused - 1 - request.row
    first = f", {before} paused behind it go{'es' if before == 1 else ''} on first" if before > 0 else ""
    held = _count(int(table.block_count[request.row]), "block")
    return (
        f"its next token needs a block, {_count(free, 'block')} {'is' if free == 1 else 'are'} free{first}; it keeps "
        f"its {held} and runs nothing until an admit finds it one, or sends it back to the queue"
    )


def _count(number: int, one: str) -> str:
    return f"{number} {one}{'' if number == 1 else 's'}"


def _tokens(count: int) -> str:
    return _count(count, "token")


def _read_text(request: Request, admissions: Admissions) -> str:
    """Of what it reads: the prompt, or behind an eviction or a recovery its output as well; and what it skips."""
    count, evicted_in = len(request.output_ids), admissions.evicted_in(request)
    what = f"its prompt of {len(request.prompt_ids)} tokens"
    if count:
        what = f"again {what} and the {_tokens(count)} it has"
    elif evicted_in is not None:
        what = f"again {what}"
    if evicted_in is not None:
        what += f", as iteration {evicted_in} evicted it"
    skipped = admissions.skipped(request)
    return f"{what}, of which the first {skipped} are cached and skipped" if skipped else what


def _reading_text(engine: Engine, request: Request, admissions: Admissions) -> str:
    """Where the prompt's reading is: all of it, its last chunk, or a chunk that gives no token yet."""
    table, row = engine.table, request.row
    first = "its next token" if request.output_ids else "its first token"
    if row is None or row != table.partial_row:
        is_last = row is not None and table.chunk_done[row] > admissions.skipped(request)
        how = f" in chunks, the last from token {int(table.chunk_done[row]) + 1} on" if is_last else ""
        return f"{how}: {_coming_token(engine, request, first)}"
    end = int(table.chunk_end[row])
    return f" in chunks: {_coming_chunk(engine, request, row, end)}, and the next admit goes on with it before all else"


def _coming_chunk(engine: Engine, request: Request, row: int, end: int) -> str:
    """Where a chunk that ends at token ``end``, and is not the last, is on its way.

    The pending forward may hold the chunk before it, where prompts are read beside that.
    """
    pending = engine.pending
    if engine.table.kv_len[row] < end:
        return f"the next forward reads up to token {end}"
    if _is_prepared(engine, request):
        return f"the forward that is prepared and not launched yet reads up to token {end}"
    if pending is not None and row in pending.table_rows:
        return f"the forward that iteration {pending.iteration} launched reads up to token {end}"
    return f"it is read up to token {end}, of which nothing is sampled"


def _is_prepared(engine: Engine, request: Request) -> bool:
    """Whether a forward that is prepared, and not launched yet, holds it."""
    current = engine.in_hand
    plan = current.plan if current is not None and current.launched is None else None
    return plan is not None and request.request_id in plan.request_ids


def _coming_token(engine: Engine, request: Request, token: str) -> str:
    """Where the token that comes next is on its way."""
    table, row, pending = engine.table, request.row, engine.pending
    prepared = f"{token} comes from the forward that is prepared and not launched yet"
    if row is not None and table.is_prefill[row]:  # of older forwards only chunks before its last
        if table.kv_len[row] < table.chunk_end[row]:
            return f"{token} comes from the next forward, which holds it"
        if _is_prepared(engine, request):
            return prepared
    if _is_sampled(engine, request):
        following = (
            ", and as its last it was left out of the forward behind it" if _was_left_out(engine, request) else ""
        )
        return f"{_drawn_text(engine, request, token)}{following}"
    if pending is not None and row in pending.table_rows:
        how = "verified" if engine.config.speculative_tokens else "sampled"
        return f"{token} comes from the forward that iteration {pending.iteration} launched, once it is {how}"
    return prepared if _is_prepared(engine, request) else f"{token} comes from the next forward, which holds it"


def _is_sampled(engine: Engine, request: Request) -> bool:
    """Whether the iteration in hand has sampled it and not resolved that yet."""
    current = engine.in_hand
    has_drawn = current is not None and (current.sampled is not None or current.verified is not None)
    consumed = current.consumed if current is not None and has_drawn else None
    if consumed is None or engine.next_phase is None or Phase.RESOLVE not in coming_phases(engine):
        return False
    return request.key in consumed.keys.tolist() and request.key != consumed.partial_key


def _was_left_out(engine: Engine, request: Request) -> bool:
    """Whether a forward was prepared behind the sampled one without this row, for it is known to end."""
    plan = engine.in_hand.plan if engine.in_hand is not None else None
    ends = request.remaining_tokens <= 1 + (_accepted(engine, request) or 0)
    return plan is not None and ends and request.request_id not in plan.request_ids


def _accepted(engine: Engine, request: Request) -> int | None:
    """Drafts of it that the iteration in hand accepted; None without any to accept, or while that is not known."""
    drafts = _drafts(engine, request)
    return None if drafts is None else drafts[1]


def _drafts(engine: Engine, request: Request) -> tuple[int, int | None] | None:
    """Drafts of it that the iteration in hand verifies, and how many of them it accepted, once that is known."""
    current = engine.in_hand
    if current is None or current.verified is None:
        return None
    places = np.flatnonzero(current.verified.keys == request.key)
    drafts = int(current.verified.num_drafts[places[0]]) if places.size else 0
    if not drafts:
        return None
    return drafts, None if current.num_tokens is None else int(current.num_tokens[places[0]]) - 1


def _drawn_text(engine: Engine, request: Request, token: str) -> str:
    drafts = _drafts(engine, request)
    if drafts is None:
        return f"{token} is sampled: resolve gives it to the request"
    count, accepted = drafts
    proposed = _count(count, "draft")
    if accepted is None:
        return f"{token} is drawn and its {proposed} verified: rewind learns how many are accepted"
    told = f"({accepted} of {proposed} accepted)"
    if not accepted:
        return f"{token} goes to the request in resolve, without a draft {told}"
    before = "draft" if accepted == 1 else f"{accepted} drafts"
    return f"{token} and the accepted {before} before it go to the request in resolve {told}"


# -- waiting -----------------------------------------------------------------------------------------------------------


def _waiting_text(engine: Engine, request: Request) -> str:
    """What admission would make of it now."""
    for prospect in prospects(engine):
        if prospect.request is not request:
            continue
        if prospect.behind is not None:
            return _behind_text(engine, prospect)
        if isinstance(prospect.found, Entry):
            return _admission_text(engine, _fit_text(prospect.found))
        return _refusal_text(engine, prospect)
    return "the next admit looks at it"  # it left the queue and has no row: between two statements of admit


def _behind_text(engine: Engine, prospect: Prospect) -> str:
    head = prospect.behind
    assert head is not None
    queue = [one for one in engine.queue.waiting if not one.abort_requested]
    ahead = queue.index(prospect.request)
    who = head.request_id if ahead == 1 else f"{head.request_id} and {ahead - 1} more"
    blocked = next(one.found for one in prospects(engine) if one.request is head)
    why = f" ({blocked.value})" if isinstance(blocked, Refusal) else ""
    return f"it is behind {who}, first in, first out, and {head.request_id} has to wait{why}"


def _fit_text(entry: Entry) -> str:
    fits = f"a chunk of {entry.chunk} of its {entry.num_tokens} tokens fits" if entry.is_partial else "it fits"
    return f"{fits}, {entry.done} tokens of its prefix are cached" if entry.done else fits


def _admission_text(engine: Engine, fits: str) -> str:
    """``fits`` says what of it fits: which admit takes it."""
    if not engine.queue.is_fifo:
        fits = f"{fits} once the admission policy chooses it"
    current, pending = engine.in_hand, engine.pending
    if current is not None:
        if Phase.ADMIT in coming_phases(engine):
            return f"{fits}, and the admit of iteration {current.index} takes it"
        return f"{fits}, and iteration {current.index} has no admit to come; the next admit takes it"
    if pending is None:
        return f"{fits}, and the next iteration admits it"
    return f"{fits}, and {_admission_beside(engine, pending.iteration)}"


def _admission_beside(engine: Engine, pending: int) -> str:
    """Between iterations, with the forward of iteration ``pending`` pending: when the next admit comes."""
    state, policy = engine.controller.order_state(), engine.controller.policy
    if state.wanted_mode != state.mode:
        return (
            f"the next iteration drains the forward of iteration {pending} for the switch to {state.wanted_mode}: the "
            "one behind it admits it"
        )
    behind = f"the next iteration samples the forward of iteration {pending} and then admits it"
    if not state.overlap_admission:
        return f"without overlap_admission async admits only when no forward is pending: {behind}"
    refusal = overlap_refusal(state)
    if refusal is not None:
        return f"nothing is admitted beside a forward while {refusal.value}: {behind}"
    beside = f"the next iteration admits it while the forward of iteration {pending} runs"
    if isinstance(policy, PreferOverlap):
        return beside
    if isinstance(policy, NeverOverlap):
        return f"the order policy refuses every overlap: {behind}"
    return f"{beside} if {type(policy).__name__} lets them overlap, else behind its sampling"


def _refusal_text(engine: Engine, prospect: Prospect) -> str:
    request, blocked, capacity = prospect.request, prospect.found, prospect.capacity
    if blocked is Refusal.NO_ROW:
        return f"all {engine.table.max_requests} rows are taken; {_who_frees(engine)}"
    if blocked is Refusal.BATCH_FULL:
        return _batch_full_text(engine, prospect)
    if blocked is Refusal.GRAPH_WAIT:
        return _graph_wait_text(prospect)
    if blocked is Refusal.ONE_TOKEN:
        return f"{blocked.value}: chunks of one token are not read; a later admit has more room"
    if blocked is Refusal.ROWS_PAUSED:
        return f"{_rows(capacity.num_paused)} for want of blocks and goes on first; nobody is admitted meanwhile"
    if blocked is Refusal.PREFIX_COMING:
        return _prefix_text(engine, prospect)
    free, needed = max(0, capacity.free_blocks), blocks_needed(prospect)
    if capacity.reserves:
        return (
            f"at its longest it needs {needed} blocks, and {free} of {engine.pool.num_blocks} are not reserved for "
            f"others; {_who_frees(engine)}"
        )
    hit = prospect.hit
    idle = f", {hit.num_idle} of them cached ones" if hit.num_idle else ""
    shared = f" beyond the {prospect.skipped} that are cached" if prospect.skipped else ""
    return (
        f"its {request.num_tokens} tokens{shared} need {needed} blocks{idle}, and {free} of {engine.pool.num_blocks} "
        f"are free and not wanted by others; {_who_frees(engine)}"
    )


def _batch_full_text(engine: Engine, prospect: Prospect) -> str:
    capacity, row = prospect.capacity, engine.table.partial_row
    reading = None if row is None else engine.table.requests[row]
    if row is not None and reading is not None and not capacity.free_tokens:
        progress = chunk_progress(engine.table, row, skipped=0)
        return f"the prompt of {reading.request_id} is read in chunks, {progress} tokens, and goes before it"
    limit, left = engine.config.max_batch_tokens, max(0, capacity.free_tokens)
    if capacity.chunked:
        return (
            f"{left} of max_batch_tokens={limit} are left in the next forward, too few for a chunk of its "
            f"{prospect.remaining}; a later admit has room"
        )
    return (
        f"it needs {prospect.remaining} tokens of the next forward and {left} of max_batch_tokens={limit} are left; "
        "the admit after that has room"
    )


def _prefix_text(engine: Engine, prospect: Prospect) -> str:
    by = computing(engine, prospect)
    who = "another request" if by is None else by
    first = prospect.skipped + 1
    return (
        f"{who} computes the block of its prefix that begins with token {first}, in the same round; the admit after "
        "that skips what is there then"
    )


def _graph_wait_text(prospect: Prospect) -> str:
    wanted, held = awaited_graph(prospect), prospect.capacity.held
    steps = prospect.request.graph_wait_steps
    waited = f"It has waited {_count(steps, 'iteration')} and enters when"
    if wanted is None:
        return (
            "with the output it has to read as well no captured forward holds it, even alone, so it is read eagerly "
            f"and beside no other prompt. {waited} the next forward holds no prompt yet"
        )
    return (
        f"no captured forward holds it beside {held.num_decode} decode and {held.num_prefill} prefill rows; alone it "
        f"would run in the graph of {graph_name(wanted)}. {waited} enough of those rows have ended"
    )


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
