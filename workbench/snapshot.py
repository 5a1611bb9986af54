"""What there is to see of an engine at one border, as frozen values: taken in one go, never changed afterwards."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.cache.prefix_pool import PrefixPool
from engine.controller import Iteration
from engine.engine import Engine
from engine.plan import Plan
from engine.policy import overlap_refusal
from engine.request import Request, RequestState
from engine.results import PendingForward
from engine.table import RequestTable
from tracing.records import Category, Span, UnfinishedWork
from workbench.admissions import Admissions
from workbench.arrivals import Submission
from workbench.clock import Clock
from workbench.prospects import prospects, reason_text
from workbench.states import StateBook, StatesView

_TEXT_TOKENS = 12
"""Newest tokens shown as text in a row."""
_NEWEST_SPANS = 512
"""Recent records searched for the last iteration's spans."""
_HOST_WORK = (Category.PHASE, Category.WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedView:
    """A request without a row."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrival: float | None
    """On the session's clock; None: it is in the engine's queue already."""
    why: str
    """Why it waits, in a few words."""
    output_tokens: int = 0
    """Tokens it has already; a request that lost its row keeps them."""
    graph_wait_steps: int = 0
    """Iterations in a row in which it was next and no captured graph held it."""
    evicted_in: int | None = None
    """The iteration that sent it back to the queue for want of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """One row of the request table."""

    row: int
    state: str
    """``free``, or a :class:`engine.request.RequestState`'s value."""
    request_id: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Tokens whose values the host knows."""
    max_tokens: int = 0
    kv_len: int = 0
    """Cached tokens, those of a launched forward included."""
    num_cached_tokens: int = 0
    """Tokens that a prefix hit spared it when it was admitted last."""
    progress: str = ""
    """How far its prompt is read with its present chunk, as ``256 of 513``; empty if it is read in one go, or read."""
    evicted_in: int | None = None
    """The iteration that sent it back to the queue for want of blocks; it has been computed again since."""
    blocks: tuple[int, ...] = ()
    newest_token: int | None = None
    newest_text: str = ""
    in_pending: bool = False
    """Whether the pending forward computes its next token."""
    finish_reason: str | None = None

    @property
    def finished(self) -> bool:
        """Whether its request's end is known."""
        return self.finish_reason is not None

    @property
    def standing(self) -> str:
        """How it ended, or else its state, with its progress, and while it reads that it does so again."""
        again = " again" if self.evicted_in is not None and self.state == RequestState.PREFILL.value else ""
        return self.finish_reason or f"{self.state} {self.progress}".rstrip() + again


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingView:
    """A launched forward."""

    iteration: int
    """The iteration that launched it."""
    request_ids: tuple[str, ...]
    """One a batch row, at launch."""
    table_rows: tuple[int, ...]
    """Where each is in the table now; -1: dropped, its token will be wasted."""
    num_tokens: int
    num_prefill: int
    num_decode: int
    ran_as: str
    """``bucket 8 tokens``, ``CUDA graph ...``, or ``eager: reason``."""
    padding_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """How a forward uses ``max_batch_tokens``."""

    iteration: int
    """The one that launched it, or will."""
    is_launched: bool
    """Else it is prepared."""
    limit: int
    decode: int
    """Tokens of decode rows: one each, and their drafts."""
    num_decode: int
    prompt: int
    """Tokens of prompts and chunks."""
    num_prompts: int
    padding: int
    """Tokens that fill the captured size."""

    @property
    def unused(self) -> int:
        """What is left."""
        return self.limit - self.decode - self.prompt - self.padding


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """What the prefix cache has spared, since the engine was made or reset."""

    query_tokens: int
    """Tokens that requests had to have in the cache when they were admitted."""
    hit_tokens: int
    """Of those, the ones that were there."""
    waits: int
    """How often a request waited a round for a prefix that another one was computing."""
    evicted_blocks: int
    """Cached blocks whose place was needed."""

    @property
    def hit_rate(self) -> float | None:
        """Hit over query tokens; None before the first admission."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksView:
    """The KV block pool."""

    block_size: int
    num_blocks: int
    holders: tuple[tuple[str, ...], ...]
    """Requests that hold each block; empty: nobody does."""
    named: frozenset[int] | None
    """Blocks whose contents are known by name; None without prefix caching."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that hold nothing of use."""
        return self.holders.count(()) - self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that a later request may reuse."""
        return sum(self.is_cached(block) for block in self.named or ())

    @property
    def num_shared(self) -> int:
        """Blocks that several requests hold."""
        return sum(len(holders) > 1 for holders in self.holders)

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds it and a later request may reuse it."""
        return self.named is not None and block in self.named and not self.holders[block]

    def held_by(self, request_id: str) -> tuple[int, ...]:
        """Blocks of one request, ascending."""
        return tuple(block for block, holders in enumerate(self.holders) if request_id in holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The engine at one border. A prompt and ``print`` show it as text, a notebook as tables and a timeline."""

    model: str
    device: str
    mode: str
    wanted_mode: str
    """Differs from ``mode`` until a switch takes effect."""
    clock: str
    """Name and reading."""
    iteration: int | None
    """The one in hand; None between iterations."""
    iterations_begun: int
    order: str | None
    """Of the iteration in hand, or else of the last one."""
    reason: str | None
    phases: tuple[str, ...]
    """Of that order."""
    phase: str | None
    """The phase that ran last in the iteration in hand."""
    next_phase: str | None
    no_overlap_because: str | None
    """Between iterations in async, with a forward pending: why the next one may not overlap; None: it may."""
    queue: tuple[QueuedView, ...]
    rows: tuple[RowView, ...]
    """Live rows, in table order."""
    num_rows: int
    """Live and free ones."""
    blocks: BlocksView
    pending: PendingView | None
    budget: BudgetView | None
    """Of the forward that is prepared, or else of the one launched last; None: neither is known."""
    prefix: PrefixView | None
    """None without prefix caching."""
    states: StatesView | None
    """None where the model has no recurrent layers."""
    consumed: PendingView | None
    """The forward that the iteration in hand has sampled; its tokens are on their way, or known after resolve."""
    spans: tuple[Span, ...]
    """Of the iteration in hand, or else of the last one: its host spans, and all device work of its time or its own."""
    unfinished: tuple[UnfinishedWork, ...]
    """Device work launched and not ended, in that order."""
    taken_ns: int
    """When it was looked at, on the clock of the spans."""
    counters: dict[str, Any]
    failure: str | None
    headline: str
    """Where it stands, in one line."""

    def __str__(self) -> str:
        from workbench.display import snapshot_text

        return snapshot_text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from workbench.display import snapshot_html

        return snapshot_html(self)


def take_snapshot(
    engine: Engine,
    clock: Clock,
    coming: Sequence[Submission],
    last: Iteration | None,
    admissions: Admissions,
    states: StateBook,
) -> Snapshot:
    """Look at everything, from the engine's thread. Changes nothing and reads nothing on the device.

    Args:
        engine: What to look at.
        clock: The session's.
        coming: Requests that have not arrived.
        last: The iteration begun last, if any.
        admissions: Of the same engine.
        states: Of the same engine.
    """
    current = engine.in_hand
    phases = tuple(phase.value for phase in last.order.phases) if last is not None else ()
    next_phase = engine.next_phase.value if engine.next_phase else None
    unfinished = tuple(engine.recorder.running())  # before the spans: what ends in between is then in both
    spans = _spans_of(engine, last)
    return Snapshot(
        model=engine.loaded.name,
        device=engine.device.kind,
        mode=engine.mode,
        wanted_mode=engine.controller.wanted_mode,
        clock=f"{clock.name} {clock.now():.6g} {clock.unit}",
        iteration=current.index if current is not None else None,
        iterations_begun=engine.controller.next_index,
        order=last.order.label if last is not None else None,
        reason=last.reason.value if last is not None else None,
        phases=phases,
        phase=_phase_before(phases, next_phase) if current is not None else None,
        next_phase=next_phase,
        no_overlap_because=_overlap_refusal(engine),
        queue=(*queue_views(engine, admissions), *coming_views(coming, clock, engine.live_ids)),
        rows=tuple(row_view(engine, row, admissions) for row in range(engine.table.num_live)),
        num_rows=engine.table.max_requests,
        blocks=_blocks_view(engine),
        pending=pending_view(engine, engine.pending),
        budget=budget_view(engine, last),
        prefix=prefix_view(engine),
        states=states.view(),
        consumed=pending_view(engine, current.consumed if current is not None else None),
        spans=spans,
        unfinished=tuple(work for work in unfinished if not any(_is_of(span, work) for span in spans)),
        taken_ns=time.perf_counter_ns(),
        counters=engine.counters.to_dict(),
        failure=failure_text(engine),
        headline=headline(engine, last, len(coming)),
    )


def headline(engine: Engine, last: Iteration | None, num_coming: int) -> str:
    """Where the engine stands, in one line; ``last`` is the iteration begun last, if any."""
    failure, current = failure_text(engine), engine.in_hand
    if failure is not None:
        return f"failed: {failure}"
    if current is not None and last is not None:
        next_phase = engine.next_phase.value if engine.next_phase else None
        phase = _phase_before(tuple(one.value for one in last.order.phases), next_phase)
        done = f"after {phase}, " if phase else ""
        return f"iteration {current.index} {last.order.label} ({last.reason.value}): {done}before {next_phase}"
    state = f"{engine.table.num_live} running, {engine.queue.num_waiting + num_coming} waiting"
    return f"between iterations, {engine.controller.next_index} begun: {state}"


def row_view(engine: Engine, row: int, admissions: Admissions) -> RowView:
    """One row of the table; IndexError if there is none of that number."""
    table = engine.table
    if not 0 <= row < table.max_requests:
        raise IndexError(f"row must be within [0, {table.max_requests}), got {row}")
    request = table.requests[row]
    if request is None:
        return RowView(row=row, state="free")
    pending = engine.pending
    return RowView(
        row=row,
        state=request.state.value,
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        output_tokens=len(request.output_ids),
        max_tokens=request.max_new_tokens,
        kv_len=int(table.kv_len[row]),
        num_cached_tokens=admissions.skipped(request),
        progress=chunk_progress(table, row, admissions.skipped(request)),
        evicted_in=admissions.evicted_in(request),
        blocks=tuple(table.block_ids[row, : table.block_count[row]].tolist()),
        newest_token=request.output_ids[-1] if request.output_ids else None,
        newest_text=_newest_text(engine, request),
        in_pending=pending is not None and row in pending.table_rows,
        finish_reason=request.finish_reason,
    )


def chunk_progress(table: RequestTable, row: int, skipped: int) -> str:
    """See :attr:`RowView.progress`; the row's request skipped its first ``skipped`` tokens."""
    if not table.is_prefill[row]:
        return ""
    return progress_text(int(table.chunk_done[row]), int(table.chunk_end[row]), int(table.prompt_len[row]), skipped)


def progress_text(done: int, end: int, length: int, skipped: int) -> str:
    """Of a prompt of ``length`` tokens whose present chunk goes from ``done`` to ``end``.

    Empty where one chunk reads all of it, but for the ``skipped`` tokens of a cached prefix.
    """
    return "" if (done, end) == (skipped, length) else f"{end} of {length}"


def _newest_text(engine: Engine, request: Request) -> str:
    tokenizer = engine.loaded.tokenizer
    return "" if tokenizer is None else tokenizer.decode(request.output_ids[-_TEXT_TOKENS:])


def queue_views(engine: Engine, admissions: Admissions, most: int | None = None) -> list[QueuedView]:
    """Waiting requests, each with what holds it up: its own need, or the one before it that has to wait.

    Args:
        engine: Whose queue it is.
        admissions: Of the same engine.
        most: So many from the head; None: all.
    """
    views: list[QueuedView] = []
    for prospect in prospects(engine, most):
        request, why = prospect.request, reason_text(engine, prospect)
        evicted_in = admissions.evicted_in(request)
        if evicted_in is not None:
            why = f"{why} · evicted in iteration {evicted_in}"
        views.append(
            QueuedView(
                request_id=request.request_id,
                prompt_tokens=len(request.prompt_ids),
                max_tokens=request.max_new_tokens,
                arrival=None,
                why=why,
                output_tokens=len(request.output_ids),
                graph_wait_steps=request.graph_wait_steps,
                evicted_in=evicted_in,
            )
        )
    return views


def coming_views(coming: Sequence[Submission], clock: Clock, live_ids: Collection[str]) -> list[QueuedView]:
    """Requests that are not in the engine, each with when it comes.

    Args:
        coming: What they were submitted as.
        clock: Their arrivals are on it.
        live_ids: Names that are in use in the engine: who is called the same has to wait.
    """
    return [
        QueuedView(
            request_id=submission.request_id,
            prompt_tokens=len(submission.prompt_ids),
            max_tokens=submission.params.max_tokens,
            arrival=submission.arrival,
            why=_comes_when(submission, clock, submission.request_id in live_ids),
        )
        for submission in coming
    ]


def _comes_when(submission: Submission, clock: Clock, is_name_in_use: bool) -> str:
    if is_name_in_use and (submission.loop is not None or submission.arrival <= clock.now()):
        return "waits at the door: a request of its name was handed to the engine itself and has not ended"
    if submission.loop is not None:
        return f"enters when fewer than {submission.loop.limit} of its closed loop are live"
    return f"arrives at {submission.arrival:.6g} {clock.unit}"


def _blocks_view(engine: Engine) -> BlocksView:
    holders: list[tuple[str, ...]] = [()] * engine.pool.num_blocks
    for request in engine.table.live_requests():
        if request.state is not RequestState.FINISHED and request.row is not None:
            row = request.row
            for block in engine.table.block_ids[row, : engine.table.block_count[row]].tolist():
                holders[block] += (request.request_id,)
    pool, named = engine.pool, None
    if isinstance(pool, PrefixPool):
        named = frozenset(block for block in range(pool.num_blocks) if block in pool.index)
    return BlocksView(
        block_size=engine.config.block_size, num_blocks=pool.num_blocks, holders=tuple(holders), named=named
    )


def budget_view(engine: Engine, last: Iteration | None) -> BudgetView | None:
    """See :attr:`Snapshot.budget`; ``last`` is the iteration begun last."""
    current = engine.in_hand
    if current is not None and current.plan is not None and current.launched is None:
        return budget_of(engine, current.plan, current.index, is_launched=False)
    launched = engine.pending if last is None or last.launched is None else last.launched
    return None if launched is None else budget_of(engine, launched.plan, launched.iteration, is_launched=True)


def budget_of(engine: Engine, plan: Plan, iteration: int, *, is_launched: bool) -> BudgetView:
    """Of one forward."""
    dims, decode = plan.dims, plan.dims.num_decode * engine.config.decode_width
    return BudgetView(
        iteration=iteration,
        is_launched=is_launched,
        limit=engine.config.max_batch_tokens,
        decode=decode,
        num_decode=dims.num_decode,
        prompt=dims.num_tokens - decode,
        num_prompts=dims.num_prefill,
        padding=plan.shape.num_tokens - dims.num_tokens,
    )


def prefix_view(engine: Engine) -> PrefixView | None:
    """See :attr:`Snapshot.prefix`."""
    pool, counters = engine.pool, engine.counters
    if not isinstance(pool, PrefixPool):
        return None
    return PrefixView(
        query_tokens=counters.prefix_query_tokens,
        hit_tokens=counters.prefix_hit_tokens,
        waits=counters.prefix_waits,
        evicted_blocks=pool.num_evicted,
    )


def pending_view(engine: Engine, pending: PendingForward | None) -> PendingView | None:
    """A launched forward as it stands now; None for None."""
    if pending is None:
        return None
    plan, dims = pending.plan, pending.dims
    if plan.graph is None:
        ran_as = f"eager: {plan.miss_reason}"
    else:
        ran_as = f"{engine.device.graph_label} of {plan.graph.num_tokens} tokens, {plan.shape.num_kv_blocks} KV blocks"
    return PendingView(
        iteration=pending.iteration,
        request_ids=pending.request_ids,
        table_rows=tuple(pending.table_rows.tolist()),
        num_tokens=dims.num_tokens,
        num_prefill=dims.num_prefill,
        num_decode=dims.num_decode,
        ran_as=ran_as,
        padding_tokens=plan.shape.num_tokens - dims.num_tokens,
    )


def _phase_before(phases: tuple[str, ...], next_phase: str | None) -> str | None:
    if next_phase is None or next_phase not in phases:
        return None
    index = phases.index(next_phase)
    return phases[index - 1] if index else None


def _overlap_refusal(engine: Engine) -> str | None:
    if engine.in_hand is not None or engine.pending is None or engine.mode != "async":
        return None
    refused = overlap_refusal(engine.controller.order_state())
    return None if refused is None else refused.value


def _spans_of(engine: Engine, iteration: Iteration | None) -> tuple[Span, ...]:
    if iteration is None:
        return ()
    newest = engine.recorder.spans(_NEWEST_SPANS)
    host = [span for span in newest if span.iteration == iteration.index and span.category in _HOST_WORK]
    begin = min((span.start_ns for span in host), default=None)
    is_over = engine.in_hand is None
    until = max((span.end_ns for span in host), default=None) if is_over else time.perf_counter_ns()
    return tuple(span for span in newest if span.iteration == iteration.index or _is_within(span, begin, until))


def _is_within(span: Span, begin: int | None, until: int | None) -> bool:
    """Device work belongs to a time: while an iteration runs, the device may work on what an earlier one launched."""
    if span.category is not Category.DEVICE or begin is None or until is None:
        return False
    return span.end_ns > begin and span.start_ns < until


def _is_of(span: Span, work: UnfinishedWork) -> bool:
    return (span.name, span.lane, span.enqueued_ns) == (work.name, work.lane, work.enqueued_ns)


def failure_text(engine: Engine) -> str | None:
    """What stopped the engine and where, in one line; None if nothing did."""
    failure = engine.failure
    if failure is None:
        return None
    phase = failure.phase.value if failure.phase is not None else "between phases"
    return f"{type(failure.error).__name__} in {phase}: {failure.error}"
