"""What a sampled token means for its request: commit, log probabilities, and whether it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.config import ResolvedConfig
from engine.counters import Counters
from engine.plan import PromptRow
from engine.request import Request, RequestState
from engine.results import PromptValues, ResultBuffers, SampleResult
from engine.sampling.logprobs import logprob_row
from engine.table import RequestTable

if TYPE_CHECKING:
    from engine.controller import Iteration


def end_of(request: Request, eos_token_ids: tuple[int, ...]) -> tuple[str, int | None] | None:
    """How the request ends with its newest token, if it does: (finish reason, stop id). Stop comes before length."""
    if not request.output_ids:
        return None
    token, params = request.output_ids[-1], request.params
    if len(request.output_ids) > params.min_tokens:
        if params.stop_token_ids and token in params.stop_token_ids:
            return "stop", token
        if not params.ignore_eos and token in eos_token_ids:
            return "stop", None
    if len(request.output_ids) >= request.max_new_tokens:
        return "length", None
    return None


def commit_results(
    result: SampleResult,
    table: RequestTable,
    iteration: Iteration,
    resolved: ResolvedConfig,
    counters: Counters,
    *,
    has_aborts: bool,
) -> None:
    """Give each sampled token to the request it was drawn for, and find those that end.

    Results are tied to generations: a row whose owner has changed since sampling takes nothing. Rows in plain decode
    need no more than their token; only the others are looked at closely.
    """
    rows = slice(result.first_row, result.first_row + result.num_rows)
    tokens, bad, near = result.buffers.ints_view[:, : result.num_rows]
    close = needs_a_closer_look(table, rows, tokens, 1, resolved.eos_token_ids)
    is_steady = result.version == table.version and result.num_rows == table.num_active
    if bad.any() or has_aborts or close.any() or not is_steady:
        owned = table.key[rows] == result.keys
        if bad.any():
            _fail_bad_rows(bad, table, result, iteration)
            owned &= bad == 0
        if has_aborts:
            close[:] = True
        requests = table.requests[rows]
        _commit_plain(requests, tokens, owned & ~close, iteration)
        table.num_output[rows] += owned & ~close
        _commit_close(requests, result, owned & close, table, iteration, resolved.eos_token_ids)
    else:  # the steady state, in which nothing is looked at but tokens
        table.add_tokens(tokens)
        iteration.advanced = table.active_requests()
        iteration.new_tokens += result.num_rows
    commit_prompts(result.pending.plan.prompt_rows, result.prompt_values)
    table.is_prefill[rows] = table.is_fresh[rows] = False
    counters.sampled_rows += result.num_rows
    counters.near_boundary += int(near.sum())


def _commit_plain(
    requests: list[Request | None], tokens: NDArray[np.int64], plain: NDArray[np.bool_], iteration: Iteration
) -> None:
    """Tokens for rows that certainly go on."""
    for i in np.flatnonzero(plain).tolist():
        request = requests[i]
        assert request is not None
        request.output_ids.append(int(tokens[i]))
        iteration.advanced.append(request)
        iteration.new_tokens += 1


def _commit_close(
    requests: list[Request | None],
    result: SampleResult,
    close: NDArray[np.bool_],
    table: RequestTable,
    iteration: Iteration,
    eos: tuple[int, ...],
) -> None:
    now_ns = time.perf_counter_ns()
    tokens = result.buffers.ints_view[0]
    for i in np.flatnonzero(close).tolist():
        request = requests[i]
        assert request is not None
        if request.abort_requested:
            continue  # after an abort no token is given
        table.num_output[result.first_row + i] += 1
        _commit_closely(request, result, i, int(tokens[i]), iteration, now_ns)
        _end(request, eos, iteration)


def _commit_closely(
    request: Request, result: SampleResult, index: int, token: int, iteration: Iteration, now_ns: int
) -> None:
    """A token for a row that is new, or whose request wants more than tokens."""
    wanted = request.params.logprobs
    row = None if wanted is None else logprobs_of(result.buffers, index, token, wanted)  # may fail: first
    request.output_ids.append(token)
    iteration.new_tokens += 1
    iteration.advanced.append(request)
    if request.stream or request.params.stop:
        iteration.speaking.append(request)
    if request.state is RequestState.PREFILL:
        first_token(request, now_ns, iteration.index)
    if row is not None:
        request.logprobs.append(row)


def needs_a_closer_look(
    table: RequestTable,
    rows: slice,
    tokens: NDArray[np.int64],
    num_tokens: NDArray[np.int64] | int,
    eos: tuple[int, ...],
) -> NDArray[np.bool_]:
    """Rows that may end, are new, or want more than tokens; all others certainly go on.

    Args:
        table: Holds them.
        rows: n of them.
        tokens: [n], or [W, n], of which some are -1.
        num_tokens: That they get; [n], or the same for all.
        eos: Ids that may end any row.
    """
    close: NDArray[np.bool_] = table.num_output[rows] + num_tokens >= table.max_output[rows]
    close |= table.is_watched[rows]
    close |= table.is_fresh[rows]
    for token_id in eos:
        is_end = tokens == token_id
        if is_end.any():
            close |= is_end if is_end.ndim == 1 else is_end.any(0)
    return close


def first_token(request: Request, now_ns: int, iteration: int) -> None:
    """Its prompt is read: it decodes from here on."""
    request.move_to(RequestState.DECODE)
    if request.timings.first_token_ns is None:
        request.timings = replace(request.timings, first_token_ns=now_ns, first_token_iteration=iteration)
    if request.params.prompt_logprobs is not None and len(request.prompt_ids) == 1:
        request.prompt_logprobs = [None]


def _end(request: Request, eos: tuple[int, ...], iteration: Iteration) -> None:
    end = end_of(request, eos)
    if end is not None:
        request.finish_reason, request.stop_reason = end
        iteration.ended.append(request)


def _fail_bad_rows(bad: NDArray[np.int64], table: RequestTable, result: SampleResult, iteration: Iteration) -> None:
    """A row whose logits hold NaN or nothing finite fails its own request; the others are not touched."""
    rows = np.arange(result.first_row, result.first_row + result.num_rows)
    keys = result.keys
    for i in np.flatnonzero((bad != 0) & (table.key[rows] == keys)).tolist():
        request = table.requests[int(rows[i])]
        if request is None or request.abort_requested:
            continue
        fail(request, iteration)


def fail(request: Request, iteration: Iteration) -> None:
    """End a request whose logits hold NaN or nothing finite."""
    request.finish_reason = "error"
    request.stop_reason = "the model's logits are NaN, infinite or all masked at this position"
    iteration.ended.append(request)


def logprobs_of(buffers: ResultBuffers, index: int, token: int, count: int) -> dict[int, float]:
    """Of one drawn token: its own log probability, and those of the ``count`` most likely."""
    top_ids = buffers.top_ids[1][index, :count].tolist()
    top_values = buffers.top_values[1][index, :count].tolist()
    return logprob_row(token, float(buffers.chosen[1][index]), top_ids, top_values, count)


def commit_prompts(prompt_rows: Sequence[PromptRow], prompt_values: Sequence[PromptValues]) -> None:
    """Give requests the log probabilities of prompt tokens that a forward told of."""
    for prompt, (chosen, top_ids, top_values) in zip(prompt_rows, prompt_values, strict=True):
        request, count = prompt.request, prompt.num_logprobs
        values, ids, tops = chosen.tolist(), top_ids.tolist(), top_values.tolist()
        tokens = request.prompt_ids[prompt.first : prompt.first + prompt.count]
        rows = [logprob_row(token, values[i], ids[i], tops[i], count) for i, token in enumerate(tokens)]
        if prompt.first == 1:
            request.prompt_logprobs = [None]
        request.prompt_logprobs += rows
