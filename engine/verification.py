"""What accepted drafts mean on the host: lengths that go back to the last accepted token, and tokens for requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.config import ResolvedConfig
from engine.counters import Counters
from engine.request import Request, RequestState
from engine.resolution import commit_prompts, end_of, fail, first_token, logprobs_of
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
) -> None:
    """Give each row's drawn tokens to its request, up to the first that ends it; what is behind that is nobody's."""
    now_ns = time.perf_counter_ns()
    num_tokens = verified.buffers.accepted_view[: verified.num_rows] + 1
    tokens = [step.ints_view[0, : verified.num_rows].tolist() for step in verified.buffers.steps]
    bad = np.stack([step.ints_view[1, : verified.num_rows] for step in verified.buffers.steps])
    for i in range(verified.num_rows):
        row = verified.first_row + i
        request = table.requests[row]
        if request is None or table.key[row] != verified.keys[i] or request.abort_requested:
            continue  # after an abort no token is given
        count = int(num_tokens[i])
        drawn = [step[i] for step in tokens[:count]]
        given = _commit_row(request, verified, i, drawn, bad[:count, i], iteration, resolved, now_ns)
        table.num_output[row] += given
        _count(request, int(verified.num_drafts[i]), count - 1, counters)
    commit_prompts(verified.pending.plan.prompt_rows, verified.prompt_values)
    rows = slice(verified.first_row, verified.first_row + verified.num_rows)
    table.is_prefill[rows] = table.is_fresh[rows] = False
    counters.sampled_rows += int(num_tokens.sum())
    for place, step in enumerate(verified.buffers.steps):  # what was drawn behind a rejected draft is nobody's
        counters.near_boundary += int(step.ints_view[2, : verified.num_rows][place < num_tokens].sum())


def _commit_row(
    request: Request,
    verified: Verified,
    index: int,
    drawn: list[int],
    bad: NDArray[np.int64],
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


def _count(request: Request, num_drafts: int, accepted: int, counters: Counters) -> None:
    """Acceptance by position: of those proposed at a place, how many were borne out."""
    for place in range(num_drafts):
        counters.drafts_proposed[place] += 1
        counters.drafts_accepted[place] += place < accepted
    request.num_drafted += num_drafts
    request.num_accepted += accepted
