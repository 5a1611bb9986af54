"""All requests, row by row: where each is, why it waits or how it ended, its newest tokens and its times."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.request import Request, RequestState
from engine.table import RequestTable
from tracing.void_words import void_words
from workbench.arrivals import Submission
from workbench.panel.hues import hue_of
from workbench.panel.messages import RequestRow, RequestsView
from workbench.panel.token_tails import TokenTails
from workbench.snapshot import QueuedView, chunk_progress, coming_views, queue_views

if TYPE_CHECKING:
    from workbench.session import Session

MOST_TOKENS = 24
"""Newest tokens shown of a request, where few requests are shown."""
_LEAST_TOKENS = 8
_ALL_TOKENS = 768
"""Shown of all requests together, so that many rows stay readable and quick to draw."""
MOST_ROWS = 128
"""Requests shown unless more are asked for."""


class RequestRows:
    """The requests of one session. What does not change any more is made once: tokens, and rows of ended requests."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tails = TokenTails(session.engine.loaded.tokenizer)
        self._ended_rows: dict[int, RequestRow] = {}
        """By the request's key, of those that were shown last."""
        self._advanced: set[int] = set()
        self._num_tokens = MOST_TOKENS

    def view(self, limit: int = MOST_ROWS) -> RequestsView:
        """Running requests, then waiting ones, then ended ones, the newest first; at most ``limit`` of them."""
        session = self._session
        engine, desk = session.engine, session._desk
        self._advanced = {request.key for request in session._watch.advanced}
        running = [request for request in engine.table.live_requests() if request.state is not RequestState.FINISHED]
        queued, coming = queue_views(engine), coming_views(desk.arrivals.coming, desk.clock)
        num_open = len(running) + len(queued) + len(coming)
        ended = self._newest_ended(max(0, limit - num_open))
        self._num_tokens = max(_LEAST_TOKENS, min(MOST_TOKENS, _ALL_TOKENS // max(1, num_open + len(ended))))
        rows: list[RequestRow] = []
        for request in running[:limit]:
            rows.append(self._known_row(request, _running_text(engine.table, request)))
        waiting = dict(zip((one.request_id for one in queued), engine.queue.waiting, strict=True))
        for one in queued[: limit - len(rows)]:
            rows.append(self._known_row(waiting[one.request_id], one.why))
        for one in coming[: limit - len(rows)]:
            rows.append(self._coming_row(one))
        rows += [self._ended_row(submission, request) for submission, request in ended]
        self._ended_rows = {
            key: self._ended_rows[key] for _, request in ended if (key := _settled(request)) is not None
        }
        self._tails.forget_unused()
        total = max(len(desk.book.submissions), num_open)
        return RequestsView(rows=rows, left_out=max(0, total - len(rows)), hint="" if rows else self._hint())

    def _hint(self) -> str:
        if self._session.engine.is_closed:
            return "The session is closed and had no requests."
        return "No request yet: type a prompt above and submit it, or call session.submit('Once upon a time')."

    # -- rows ------------------------------------------------------------------------------------------------------

    def _newest_ended(self, count: int) -> list[tuple[Submission, Request | None]]:
        if not count:
            return []
        newest = heapq.nlargest(count, self._ended(), key=lambda found: found[0])
        return [(submission, request) for _, submission, request in newest]

    def _ended(self) -> Iterator[tuple[tuple[int, int], Submission, Request | None]]:
        """Ended requests with when they ended; of those that never came with the time of their abort."""
        book = self._session._desk.book
        coming = {one.request_id for one in self._session._desk.arrivals.coming}
        for submission in book.submissions:
            request = book.request(submission.request_id)
            if request is not None and request.state is RequestState.FINISHED:
                # One whose last output is still owed is the newest of all.
                ended_ns = request.timings.finished_ns or 2**63
                yield (ended_ns, submission.number), submission, request
            elif request is None and submission.request_id not in coming:
                output = book.output(submission.request_id)
                ended_ns = 0 if output is None else output.timings.finished_ns or 0
                yield (ended_ns, submission.number), submission, None

    def _ended_row(self, submission: Submission, request: Request | None) -> RequestRow:
        if request is None:
            return self._without_request(submission, "finished", "aborted before it arrived", can_abort=False)
        key = _settled(request)
        if key is None:
            return self._known_row(request, end_text(request))
        row = self._ended_rows.get(key)
        if row is None:
            row = self._ended_rows[key] = self._known_row(request, end_text(request))
        tokens = self._tails.of(request, self._num_tokens)
        return {**row, "tokens": tokens, "num_new": self._num_new(request)}

    def _coming_row(self, one: QueuedView) -> RequestRow:
        submission = self._session._desk.book.submission(one.request_id)
        return self._without_request(submission, "coming", one.why, can_abort=not self._session.engine.is_closed)

    def _without_request(self, submission: Submission, state: str, why: str, *, can_abort: bool) -> RequestRow:
        return RequestRow(
            request_id=submission.request_id,
            state=state,
            row=None,
            hue=hue_of(self._session, submission.request_id),
            prompt_tokens=len(submission.prompt_ids),
            output_tokens=0,
            max_tokens=submission.params.max_tokens,
            kv_len=0,
            blocks=[],
            in_pending=False,
            tokens=[],
            num_new=0,
            why=why,
            queue_ms=None,
            ttft_ms=None,
            tpot_ms=None,
            is_void=False,
            why_void="",
            can_abort=can_abort,
        )

    def _known_row(self, request: Request, why: str) -> RequestRow:
        engine = self._session.engine
        table, row, pending = engine.table, request.row, engine.pending
        output_ids, times = request.output_ids, request.timings
        reasons = self._void_reasons(request)
        has_row = row is not None and request.state is not RequestState.FINISHED
        return RequestRow(
            request_id=request.request_id,
            state=request.state.value,
            row=row if has_row else None,
            hue=hue_of(self._session, request.request_id),
            prompt_tokens=len(request.prompt_ids),
            output_tokens=len(output_ids),
            max_tokens=request.max_new_tokens,
            kv_len=int(table.kv_len[row]) if has_row else 0,
            blocks=table.block_ids[row, : table.block_count[row]].tolist() if has_row else [],
            in_pending=has_row and pending is not None and row in pending.table_rows,
            tokens=self._tails.of(request, self._num_tokens),
            num_new=self._num_new(request),
            why=why,
            queue_ms=_ms(times.arrival_ns, times.admitted_ns),
            ttft_ms=_ms(times.arrival_ns, times.first_token_ns),
            tpot_ms=_ms(times.first_token_ns, times.finished_ns, over=len(output_ids) - 1),
            is_void=bool(reasons),
            why_void=void_words(reasons),
            can_abort=not engine.is_closed and request.finish_reason is None and not request.abort_requested,
        )

    def _num_new(self, request: Request) -> int:
        """A stop string may have taken the newest token back."""
        return int(request.key in self._advanced and bool(request.output_ids))

    def _void_reasons(self, request: Request) -> list[str]:
        """An iteration in hand marks its requests only when it ends."""
        current = self._session.engine.in_hand
        is_live = request.state is not RequestState.FINISHED
        in_hand = current.void_reasons if is_live and current is not None else frozenset()
        return sorted(request.void_reasons | in_hand)


def _settled(request: Request | None) -> int | None:
    """The key of a request of which nothing changes any more, else None."""
    return request.key if request is not None and request.timings.finished_ns is not None else None


def _ms(begin_ns: int | None, end_ns: int | None, *, over: int = 1) -> float | None:
    if begin_ns is None or end_ns is None or over < 1:
        return None
    return round((end_ns - begin_ns) / over / 1e6, 4)


def _running_text(table: RequestTable, request: Request) -> str:
    """Of a request with a row: that it is to end, or how far its prompt is read."""
    if request.abort_requested:
        return "aborted; the next admit or resolve ends it"
    progress = chunk_progress(table, request.row) if request.row is not None else ""
    return progress and f"prefill {progress}"


def end_text(request: Request) -> str:
    """How a request ended, in a few words."""
    count, stop = len(request.output_ids), request.stop_reason
    has = f"{count} token{'' if count == 1 else 's'}"
    if request.finish_reason == "abort":
        return f"aborted with {has}"
    if request.finish_reason == "error":
        return f"failed after {has}: {stop}"
    if request.finish_reason == "length":
        is_cut = request.max_new_tokens < request.params.max_tokens
        return f"the sequence is as long as it may be, {has}" if is_cut else f"all {has} of max_tokens"
    if isinstance(stop, str):
        return f"stop string {stop!r} after {has}"
    return f"stop id {stop} after {has}" if stop is not None else f"end of sequence after {has}"
