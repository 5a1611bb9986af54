"""All requests, row by row: where each is, why it waits or how it ended, its newest tokens and its times."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from engine.engine import Engine
from engine.request import Request, RequestState
from tracing.void_words import void_words
from workbench.admissions import Admissions
from workbench.arrivals import Submission
from workbench.drafted import RejectedDrafts
from workbench.panel.ended_requests import EndedRequests
from workbench.panel.hues import hue_of
from workbench.panel.messages import RejectedCell, RequestRow, RequestsView
from workbench.panel.token_texts import TokenTexts
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
    """The requests of one session. Rows of those that wait or have ended are made once, as long as nothing changes.

    However many wait or have ended, a view takes the time of the rows that are shown.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._texts = TokenTexts(session.engine.loaded.tokenizer)
        self._ended = EndedRequests(session._desk.book)
        self._known: dict[str, tuple[Hashable, RequestRow]] = {}
        """Rows that were shown last of requests without a row in the table, with all that they were made from."""
        self._used: dict[str, tuple[Hashable, RequestRow]] = {}
        """Those shown now."""
        self._advanced: set[int] = set()
        self._pending_rows: set[int] = set()
        self._num_tokens = MOST_TOKENS
        self._others: list[RequestRow] = []
        """Rows of those that did not run at the last view, and which they were."""
        self._others_of: Hashable = None

    def view(self, limit: int = MOST_ROWS, *, in_passing: bool = False) -> RequestsView:
        """Running requests, then waiting ones, then ended ones, the newest first; at most ``limit`` of them.

        Args:
            limit: Rows at most.
            in_passing: While the same requests run and as many wait, show the others as the view before did: why they
                wait changes slowly, and takes more time to tell than the rows that run.
        """
        session, engine, desk = self._session, self._session.engine, self._session._desk
        self._advanced = {request.key for request in session._watch.advanced}
        self._pending_rows = set() if engine.pending is None else {*engine.pending.table_rows.tolist()}
        running = [request for request in engine.table.live_requests() if request.state is not RequestState.FINISHED]
        num_open = len(running) + engine.queue.num_waiting + len(desk.arrivals)
        who = (
            *(limit, num_open, engine.queue.num_waiting, desk.book.generation, desk.book.num_submissions),
            *(engine.is_closed, tuple(request.key for request in running)),
        )
        if not in_passing or who != self._others_of:
            self._others, self._others_of = self._make_others(limit, len(running), num_open), who
        rows = [
            self._known_row(request, _running_text(engine, desk.admissions, request)) for request in running[:limit]
        ]
        rows += self._others
        total = max(desk.book.num_submissions, num_open)
        return RequestsView(rows=rows, left_out=max(0, total - len(rows)), hint="" if rows else self._hint())

    def _make_others(self, limit: int, num_running: int, num_open: int) -> list[RequestRow]:
        """Rows of those that do not run."""
        engine, desk = self._session.engine, self._session._desk
        ended = self._ended.newest(max(0, limit - num_open))
        self._num_tokens = max(_LEAST_TOKENS, min(MOST_TOKENS, _ALL_TOKENS // max(1, num_open + len(ended))))
        room = max(0, limit - num_running)
        queued = queue_views(engine, desk.admissions, room)
        rows = [
            self._waiting_row(request, one.why)
            for request, one in zip(engine.queue.waiting[: len(queued)], queued, strict=True)
        ]
        coming = coming_views(desk.arrivals.soonest(room - len(rows)), desk.clock, engine.live_ids)
        rows += [self._coming_row(one) for one in coming]
        rows += [self._ended_row(submission, request) for submission, request in ended]
        self._known, self._used = self._used, {}
        return rows

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
            token_ids=[],
            logprobs=[],
            num_new=0,
            accepted=[],
            rejected=[],
            drafts="",
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
        table, row = engine.table, request.row
        output_ids, times = request.output_ids, request.timings
        newest = output_ids[-self._num_tokens :]
        reasons = self._void_reasons(request)
        has_row = row is not None and request.state is not RequestState.FINISHED
        # What was noted by iteration is sorted by request when it is asked for: not where nothing was drafted.
        marks = self._session._watch.draft_marks(request, len(newest)) if request.num_drafted else None
        has_new = bool(self._num_new(request))
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
            in_pending=has_row and row in self._pending_rows,
            tokens=self._texts.of_all(newest),
            token_ids=newest,
            logprobs=_logprobs(request, newest),
            num_new=self._num_new(request) if marks is None else marks.num_newest * has_new,
            accepted=[] if marks is None else [at for at, is_draft in enumerate(marks.accepted) if is_draft],
            rejected=[] if marks is None else self._rejected(marks.rejected, len(output_ids) - len(newest)),
            drafts=_drafts_text(request),
            why=why,
            queue_ms=_ms(times.arrival_ns, times.admitted_ns),
            ttft_ms=_ms(times.arrival_ns, times.first_token_ns),
            tpot_ms=_ms(times.first_token_ns, times.finished_ns, over=len(output_ids) - 1),
            is_void=bool(reasons),
            why_void=void_words(reasons),
            can_abort=not engine.is_closed and request.finish_reason is None and not request.abort_requested,
        )

    def _rejected(self, drafts: Sequence[RejectedDrafts], first: int) -> list[RejectedCell]:
        """Of a row whose tokens begin at the place ``first`` of its output."""
        return [
            RejectedCell(
                at=one.at - first,
                place=one.place,
                tokens=self._texts.of_all(one.token_ids),
                token_ids=list(one.token_ids),
            )
            for one in drafts
        ]

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


def _drafts_text(request: Request) -> str:
    drafted, accepted = request.num_drafted, request.num_accepted
    return f"{accepted:,} of {drafted:,} drafts accepted ({100 * accepted / drafted:.0f} %)" if drafted else ""


def _logprobs(request: Request, newest: list[int]) -> list[float | None]:
    """Of its newest tokens; empty where it asked for none."""
    if not request.logprobs:
        return []
    first = len(request.output_ids) - len(newest)
    given = [tops.get(token_id) for token_id, tops in zip(newest, request.logprobs[first:], strict=False)]
    finite = [round(one, 4) if one is not None and isfinite(one) else None for one in given]
    return finite + [None] * (len(newest) - len(finite))


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
