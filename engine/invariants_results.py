"""Checks of what a phase brought back: which rows were drawn from, who got the tokens, and who ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from engine.invariants_device import drawn_tokens, require
from engine.phases import Phase
from engine.request import Request
from engine.resolution import end_of
from engine.results import PendingForward, SampleResult
from engine.speculative import Verified

if TYPE_CHECKING:
    from engine.controller import Border, Iteration
    from engine.engine import Engine


def check_results(engine: Engine, border: Border) -> None:
    """I26, I40, I41, I42, I43 after a phase: who was drawn for, who took the tokens, and who ended."""
    iteration = border.iteration
    if border.phase is Phase.SAMPLE and iteration.sampled is not None:
        _check_drawn_rows(engine, iteration.sampled.pending, iteration.sampled)
    if border.phase is Phase.VERIFY and iteration.verified is not None:
        _check_drawn_rows(engine, iteration.verified.pending, iteration.verified)
        _check_drafts(engine, iteration.verified)
    if border.phase is Phase.REWIND:
        _check_rewound(engine, iteration)
    if border.phase is Phase.RESOLVE:
        _check_resolved(engine, iteration)
    if border.phase is Phase.EMIT:
        finished = [output.request_id for output in iteration.outputs if output.finished]
        require(len(set(finished)) == len(finished), "I43", "two last outputs of one request: {}", finished)
        ended = {request.key for request in iteration.ended}
        require(len(finished) >= len(ended), "I43", "{} requests ended, {} last outputs", len(ended), len(finished))
        left = [request.request_id for request in iteration.ended if engine._live.get(request.request_id) is request]
        require(not left, "I43", "ended requests are still live: {}", left)


def _check_drawn_rows(engine: Engine, consumed: PendingForward, drawn: SampleResult | Verified) -> None:
    """I26: every row of the forward but a partial one, and nobody who has ended."""
    owners, first = zip(consumed.table_rows.tolist(), consumed.keys.tolist(), strict=True), drawn.first_row
    rows = sorted(row for row, key in owners if row >= 0 and key != consumed.partial_key)
    require(len(rows) == drawn.num_rows, "I26", "a row sampled twice or never")
    require(rows == list(range(first, first + len(rows))), "I26", "rows {} were not the ones sampled", rows)
    for request in engine.table.requests[first : first + drawn.num_rows]:
        require(request is not None and request.finish_reason is None, "I26", "an ended request was sampled")


def _check_drafts(engine: Engine, verified: Verified) -> None:
    """I41: a decode row has all its drafts, a prompt none; accepted are those drawn one after the other.

    What was drawn can be read here on the inline device only.
    """
    first, drafts = verified.first_row, engine.config.speculative_tokens
    reading = set(verified.pending.table_rows[verified.pending.dims.num_decode :].tolist())
    is_prefill = [row in reading for row in range(first, first + verified.num_rows)]
    wanted = [0 if prompt else drafts for prompt in is_prefill]
    proposed = verified.num_drafts.tolist()
    require(proposed == wanted, "I41", "{} drafts verified, rows have {}", proposed, wanted)
    require(verified.has_decode == (not all(is_prefill)), "I41", "accepted counts though nothing could be accepted")
    columns = engine.runner.columns
    if engine.device.kind != "inline" or columns.drafts is None:
        return
    foreseen = columns.drafts[first : first + verified.num_rows].tolist()
    steps = verified.buffers.tokens_view[:, :2, : verified.num_rows].tolist()
    for i, count in enumerate(verified.buffers.accepted_view[: verified.num_rows].tolist()):
        right = 0
        while right < proposed[i] and steps[right][0][i] == foreseen[i][right] and not steps[right][1][i]:
            right += 1
        require(count == right, "I41", "row {}: {} drafts accepted, {} were drawn", first + i, count, right)


def _check_rewound(engine: Engine, iteration: Iteration) -> None:
    """I41: no more accepted than verified; rows remember how many. That lengths follow is I8."""
    verified, counts = iteration.verified, iteration.num_tokens
    require((verified is None) == (counts is None), "I41", "rewound without a verification")
    if verified is None or counts is None:
        return
    accepted, table = (counts - 1).tolist(), engine.table
    is_within = all(0 <= n <= most for n, most in zip(accepted, verified.num_drafts.tolist(), strict=True))
    require(is_within, "I41", "accepted {} of {} drafts", accepted, verified.num_drafts)
    kept = table.num_accepted[verified.first_row : verified.first_row + verified.num_rows].tolist()
    require(kept == accepted, "I41", "rows go on behind {} drafts, accepted are {}", kept, accepted)


def _check_resolved(engine: Engine, iteration: Iteration) -> None:
    advanced = [request.key for request in iteration.advanced]
    failed = {request.key for request in iteration.ended if request.finish_reason in ("abort", "error")}
    results = iteration.verified or iteration.sampled
    if results is not None:
        drawn = set(results.keys.tolist())
        require(set(advanced) <= drawn, "I26", "a request got a token that was not drawn for it")
        require(drawn <= set(advanced) | failed, "I26", "a drawn token reached nobody")
    ended = {request.key for request in iteration.ended}
    given = _tokens_given(iteration, ended)
    require(len(set(advanced)) == len(advanced), "I26", "a request advanced twice: {}", advanced)
    least, most = (sum(counts[end] for counts in given.values()) for end in (0, -1))
    require(least <= iteration.new_tokens <= most, "I60", "{} new tokens, {}", iteration.new_tokens, given)
    for request in iteration.advanced:
        num_new = given[request.key][0]
        _check_end(request, request.key in ended, engine.resolved.eos_token_ids, num_new)
        if request.params.logprobs is not None and request.logprobs:
            for place in range(-num_new, 0):
                _check_logprobs(request, place, engine.resolved.vocab_size)


def _tokens_given(iteration: Iteration, ended: set[int]) -> dict[int, list[int]]:
    """I41: how many of the tokens drawn for it each request may have taken: all, or if it ended the first ones.

    Several answers only where it ended with equal tokens one after the other.
    """
    verified, given = iteration.verified, dict[int, list[int]]()
    if verified is None:
        return {request.key: [1] for request in iteration.advanced}
    drawn = drawn_tokens(iteration)
    row_of = {key: verified.first_row + i for i, key in enumerate(verified.keys.tolist())}
    for request in iteration.advanced:
        tokens = drawn[row_of[request.key]]
        most, made = len(tokens), request.output_ids
        counts = range(1, most + 1) if request.key in ended else [most]
        taken = [count for count in counts if made[-count:] == tokens[:count]]
        require(taken, "I41", "{}: {} were drawn, its output ends {}", request.request_id, tokens, made[-most:])
        given[request.key] = taken
    return given


def _check_end(request: Request, has_ended: bool, eos: tuple[int, ...], num_new: int) -> None:
    end = end_of(request, eos)
    name = request.request_id
    if request.finish_reason not in ("abort", "error"):
        require((end is not None) == has_ended, "I42", "{}: should end with {}, ended: {}", name, end, has_ended)
        require(
            end is None or end[0] == request.finish_reason, "I43", "{}: {} but {}", name, end, request.finish_reason
        )
    for count in range(1, num_new):
        shorter = SimpleNamespace(
            output_ids=request.output_ids[:-count], params=request.params, max_new_tokens=request.max_new_tokens
        )
        end = end_of(cast(Request, shorter), eos)
        require(end is None, "I42", "{}: {} tokens behind its end with {}", name, count, end)
    require(not has_ended or request.row is None, "I58", "{} ended and keeps its row", name)


def _check_logprobs(request: Request, place: int, vocab_size: int) -> None:
    row, count = request.logprobs[place], request.params.logprobs or 0
    ids, values = list(row), list(row.values())
    require(ids[0] == request.output_ids[place], "I40", "{}: log probabilities of another token", request.request_id)
    top = min(count, vocab_size)
    require(top <= len(ids) <= top + 1, "I40", "{}: {} entries, {} asked for", request.request_id, len(ids), top)
    rest = values[1:]
    require(rest == sorted(rest, reverse=True), "I40", "{}: entries are not sorted", request.request_id)
    require(all(value <= 1e-6 for value in values), "I40", "{}: a probability above 1: {}", request.request_id, values)
