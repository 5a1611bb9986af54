"""All requests, row by row: where each is, why it waits or how it ended, its newest tokens and its times."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from typing import TYPE_CHECKING

from engine.engine import Engine
from engine.request import Request, RequestState
from tracing.void_words import void_words
from workbench.admissions import Admissions
from workbench.arrivals import Submission
from workbench.book import RequestBook
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
    """The requests of one session. What does not change is made once: tokens, rows of those that wait or have ended.

    However many wait or have ended, a view takes the time of the rows that are shown.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tails = TokenTails(session.engine.loaded.tokenizer)
        self._ended = _EndedRequests(session._desk.book)
        self._known: dict[str, tuple[Hashable, RequestRow]] = {}
        """Rows that were shown last of requests without a row in the table, with all that they were made from."""
        self._used: dict[str, tuple[Hashable, RequestRow]] = {}
        """Those shown now."""
        self._advanced: set[int] = set()
        self._num_tokens = MOST_TOKENS

    def view(self, limit: int = MOST_ROWS) -> RequestsView:
        """Running requests, then waiting ones, then ended ones, the newest first; at most ``limit`` of them."""
        session = self._session
        engine, desk = session.engine, session._desk
        self._advanced = {request.key for request in session._watch.advanced}
        running = [request for request in engine.table.live_requests() if request.state is not RequestState.FINISHED]
        num_open = len(running) + engine.queue.num_waiting + len(desk.arrivals)
        ended = self._ended.newest(max(0, limit - num_open))
        self._num_tokens = max(_LEAST_TOKENS, min(MOST_TOKENS, _ALL_TOKENS // max(1, num_open + len(ended))))
        rows = [
            self._known_row(request, _running_text(engine, desk.admissions, request)) for request in running[:limit]
        ]
        queued = queue_views(engine, desk.admissions, limit - len(rows))
        rows += [
            self._waiting_row(request, one.why)
            for request, one in zip(engine.queue.waiting[: len(queued)], queued, strict=True)
        ]
        coming = coming_views(desk.arrivals.soonest(limit - len(rows)), desk.clock, engine.live_ids)
        rows += [self._coming_row(one) for one in coming]
        rows += [self._ended_row(submission, request) for submission, request in ended]
        self._known, self._used = self._used, {}
        self._tails.forget_unused()
        total = max(desk.book.num_submissions, num_open)
        return RequestsView(rows=rows, left_out=max(0, total - len(rows)), hint="" if rows else self._hint())

    def _hint(self) -> str:
        if self._session.engine.is_closed:
            return "The session is closed and had no requests."
        return "No request yet: type a prompt above and submit it, or call session.submit('Once upon a time')."

    # -- rows ------------------------------------------------------------------------------------------------------

    def _waiting_row(self, request: Request, why: str) -> RequestRow:
        made_from = (
            *(request.key, why, self._num_tokens, self._num_new(request), self._session.engine.is_closed),
            *(self._void_reasons(request), *_progress(request)),
        )
        name = request.request_id
        return self._kept(name, made_from) or self._keep(name, made_from, self._known_row(request, why))

    def _ended_row(self, submission: Submission, request: Request | None) -> RequestRow:
        name = submission.request_id
        if request is None:
            made_from: Hashable = submission.number
            return self._kept(name, made_from) or self._keep(
                name, made_from, self._without_request(submission, "finished", "aborted before it arrived", False)
            )
        if not _is_settled(request):
            return self._known_row(request, end_text(request))
        made_from = (request.key, self._num_tokens, self._num_new(request), self._void_reasons(request))
        return self._kept(name, made_from) or self._keep(name, made_from, self._known_row(request, end_text(request)))

    def _coming_row(self, one: QueuedView) -> RequestRow:
        name, made_from = one.request_id, (one.why, self._session.engine.is_closed)
        row = self._kept(name, made_from)
        if row is not None:
            return row
        submission = self._session._desk.book.submission(name)
        return self._keep(name, made_from, self._without_request(submission, "coming", one.why, not made_from[1]))

    def _kept(self, name: str, made_from: Hashable) -> RequestRow | None:
        """The row made of just this when it was shown last."""
        known = self._known.get(name)
        if known is None or known[0] != made_from:
            return None
        self._used[name] = known
        return known[1]

    def _keep(self, name: str, made_from: Hashable, row: RequestRow) -> RequestRow:
        self._used[name] = (made_from, row)
        return row

    def _without_request(self, submission: Submission, state: str, why: str, can_abort: bool) -> RequestRow:
        return RequestRow(
            request_id=submission.request_id,
            state=state,
            row=None,
            hue=hue_of(self._session, submission.request_id),
            prompt_tokens=len(submission.prompt_ids),
            cached_tokens=self._cached_tokens(None),
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
            cached_tokens=self._cached_tokens(request),
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

    def _cached_tokens(self, request: Request | None) -> int | None:
        if self._session.engine.prefix_cache is None:
            return None
        return 0 if request is None else self._session._desk.admissions.skipped(request)

    def _num_new(self, request: Request) -> int:
        """A stop string may have taken the newest token back."""
        return int(request.key in self._advanced and bool(request.output_ids))

    def _void_reasons(self, request: Request) -> tuple[str, ...]:
        """An iteration in hand marks its requests only when it ends."""
        current = self._session.engine.in_hand
        is_live = request.state is not RequestState.FINISHED
        in_hand = current.void_reasons if is_live and current is not None else frozenset()
        return tuple(sorted(request.void_reasons | in_hand))


class _EndedRequests:
    """Those of a book, by when they ended; each is looked at until it has ended, and filed once."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._generation = book.generation
        self._num_seen = 0
        self._open: list[Submission] = []
        self._filed: list[tuple[int, int, Submission, Request | None]] = []
        """When it ended, or was withdrawn before it came, and its number; the newest last."""

    def newest(self, count: int) -> list[tuple[Submission, Request | None]]:
        """At most ``count``, the newest first; None: it never came. A view without room for any looks at none."""
        if count < 1:
            return []
        unsettled = self._file_ended()
        found = [*unsettled, *((one, request) for _, _, one, request in reversed(self._filed[-count:]))]
        return found[:count]

    def _file_ended(self) -> list[tuple[Submission, Request | None]]:
        """Returns those whose last output is still owed: the newest of all, the last submitted first."""
        book = self._book
        if book.generation != self._generation:
            self._generation, self._num_seen, self._open, self._filed = book.generation, 0, [], []
        self._open += book.newest(book.num_submissions - self._num_seen)
        self._num_seen = book.num_submissions
        still_open: list[Submission] = []
        unsettled: list[tuple[Submission, Request | None]] = []
        for submission in self._open:
            request = book.request(submission.request_id)
            if request is not None and request.state is not RequestState.FINISHED:
                still_open.append(submission)
                continue
            ended_ns = _withdrawn_ns(book, submission) if request is None else request.timings.finished_ns
            if ended_ns is not None:
                insort(self._filed, (ended_ns, submission.number, submission, request))
                continue
            still_open.append(submission)
            if request is not None:
                unsettled.append((submission, request))
        self._open = still_open
        return unsettled[::-1]


def _withdrawn_ns(book: RequestBook, submission: Submission) -> int | None:
    output = book.output(submission.request_id)
    return None if output is None else output.timings.finished_ns


def _is_settled(request: Request) -> bool:
    """Whether nothing of it changes any more."""
    return request.timings.finished_ns is not None


def _progress(request: Request) -> tuple[Hashable, ...]:
    """What of a request without a row may change: a preempted one has tokens."""
    return len(request.output_ids), request.timings, request.state, request.abort_requested, request.finish_reason


def _ms(begin_ns: int | None, end_ns: int | None, *, over: int = 1) -> float | None:
    if begin_ns is None or end_ns is None or over < 1:
        return None
    return round((end_ns - begin_ns) / over / 1e6, 4)


def _running_text(engine: Engine, admissions: Admissions, request: Request) -> str:
    """Of a request with a row: that it is to end, that it is paused, or how far its prompt is read."""
    if request.abort_requested:
        return "aborted; the next admit or resolve ends it"
    if request.state is RequestState.PAUSED:
        return f"its next token needs a block, {engine.pool.num_free} free"
    if request.state is not RequestState.PREFILL or request.row is None:
        return ""
    evicted_in = admissions.evicted_in(request)
    again = [] if evicted_in is None else [f"computed again, evicted in iteration {evicted_in}"]
    progress = chunk_progress(engine.table, request.row, admissions.skipped(request))
    return " · ".join([f"prefill {progress}"] * bool(progress) + again)


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
