"""What accepted drafts mean on the host: lengths that go back to the last accepted token, and tokens for requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.config import ResolvedConfig
from engine.counters import Counters
from engine.request import Request, RequestState
from engine.resolution import commit_prompts, end_of, fail, first_token, logprobs_of, needs_a_closer_look
from engine.speculative import Verified
from engine.table import RequestTable

if TYPE_CHECKING:
    from engine.controller import Iteration


def rewind(verified: Verified, table: RequestTable) -> NDArray[np.int64]:
    """Take rejected drafts out of the rows' lengths; waits for the accepted counts.

    A row that read its prompt has no drafts, and is left as it is. What rejected drafts wrote lies behind the new
    length, where the next forward writes anew before anything reads; a recurrent state goes on from the one kept
    behind the last accepted token (``num_accepted``).

    Returns:
        [n] tokens that each of the verified rows gets, stops left out of account: accepted drafts and one more.

    Raises:
        DeviceError: the forward or the verification raised.
    """
    accepted = verified.accepted()
    rows = slice(verified.first_row, verified.first_row + verified.num_rows)
    table.kv_len[rows] -= (verified.num_drafts - accepted).astype(np.int32)
    table.num_accepted[rows] = accepted
    return accepted + 1


def commit_verified(
    verified: Verified,
    table: RequestTable,
    iteration: Iteration,
    resolved: ResolvedConfig,
    counters: Counters,
    *,
    has_aborts: bool,
) -> None:
    """Give each row's drawn tokens to its request, up to the first that ends it; what is behind that is nobody's.

    As in :func:`engine.resolution.commit_results`, rows that certainly go on take their tokens without a closer look.
    """
    n = verified.num_rows
    rows = slice(verified.first_row, verified.first_row + n)
    num_tokens = verified.buffers.accepted_view[:n] + 1
    num_given = int(num_tokens.sum())
    is_steady = verified.version == table.version and n == table.num_active
    ids, bad, near = (verified.buffers.tokens_view[:, kind, :n] for kind in range(3))
    is_given = np.arange(len(ids))[:, None] < num_tokens  # no draft behind a rejected one
    tokens = np.where(is_given, ids, -1)
    close = needs_a_closer_look(table, rows, tokens, num_tokens, resolved.eos_token_ids)
    if has_aborts or bad.any():
        close[:] = True
    if is_steady and not close.any():
        table.add_verified(tokens.T, num_tokens, verified.num_drafts)
        iteration.advanced = table.active_requests()
        iteration.new_tokens += num_given
        _count(verified.num_drafts, num_tokens - 1, counters)
    else:
        _commit_each(verified, table, num_tokens, close, iteration, resolved, counters)
    commit_prompts(verified.pending.plan.prompt_rows, verified.prompt_values)
    table.is_prefill[rows] = table.is_fresh[rows] = False
    counters.sampled_rows += num_given
    if near.any():
        counters.near_boundary += int(near[is_given].sum())


def _commit_each(
    verified: Verified,
    table: RequestTable,
    num_tokens: NDArray[np.int64],
    close: NDArray[np.bool_],
    iteration: Iteration,
    resolved: ResolvedConfig,
    counters: Counters,
) -> None:
    """Rows one by one; those that are not ``close`` take their tokens and no more."""
    now_ns = time.perf_counter_ns()
    n, first = verified.num_rows, verified.first_row
    drawn, bad = (verified.buffers.tokens_view[:, kind, :n].T.tolist() for kind in range(2))
    is_owned = table.key[first : first + n] == verified.keys
    for i in np.flatnonzero(is_owned).tolist():
        request = table.requests[first + i]
        if request is None or request.abort_requested:
            is_owned[i] = False  # after an abort no token is given
            continue
        count, num_drafts = int(num_tokens[i]), int(verified.num_drafts[i])
        tokens = drawn[i][:count]
        if close[i]:
            count_given = _commit_row(request, verified, i, tokens, bad[i], iteration, resolved, now_ns)
        else:
            request.output_ids.extend(tokens)
            iteration.advanced.append(request)
            iteration.new_tokens += count
            count_given = count
        table.num_output[first + i] += count_given
        request.note_drafts(num_drafts, count - 1)
    _count(verified.num_drafts[is_owned], num_tokens[is_owned] - 1, counters)


def _commit_row(
    request: Request,
    verified: Verified,
    index: int,
    drawn: list[int],
    bad: list[int],
    iteration: Iteration,
    resolved: ResolvedConfig,
    now_ns: int,
) -> int:
    """Returns how many tokens the request took."""
    wanted, given = request.params.logprobs, 0
    for place, token in enumerate(drawn):
        if bad[place]:
            fail(request, iteration)
            break
        row = None
        if wanted is not None:
            row = logprobs_of(verified.buffers.steps[place], index, token, wanted)
        request.output_ids.append(token)
        given += 1
        if row is not None:
            request.logprobs.append(row)
        if request.state is RequestState.PREFILL:
            first_token(request, now_ns, iteration.index)
        end = end_of(request, resolved.eos_token_ids)
        if end is not None:
            request.finish_reason, request.stop_reason = end
            iteration.ended.append(request)
            break
    iteration.new_tokens += given
    if given:
        iteration.advanced.append(request)
        if request.stream or request.params.stop:
            iteration.speaking.append(request)
    return given


def _count(num_drafts: NDArray[np.int64], accepted: NDArray[np.int64], counters: Counters) -> None:
    """Acceptance by position: of those proposed at a place, how many were borne out."""
    with_drafts, with_accepted = np.bincount(num_drafts).tolist(), np.bincount(accepted).tolist()
    for place in range(len(with_drafts) - 1):
        counters.drafts_proposed[place] += sum(with_drafts[place + 1 :])
        counters.drafts_accepted[place] += sum(with_accepted[place + 1 :])
