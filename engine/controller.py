"""The schedule: ``Controller.iterate`` takes the phases of one order and yields at every border.

``Engine.step`` exhausts the generator; the stepper advances it by hand. There is one code path, so what is stepped
is what is run. What each phase may read and write is written down in docs/architecture.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.admission import AdmissionQueue
from engine.batch import BatchDimensions
from engine.cache.blocks import BlockPool
from engine.config import Mode, ResolvedConfig
from engine.counters import Counters
from engine.layout import NO_NEW_BLOCKS, NO_ROWS_AT_ALL, NewBlocks, as_index
from engine.parallel.fleet import NO_LOAD, Agreed, Fleet, Intent, Load, Vote
from engine.pausing import Room
from engine.phases import Order, Phase, Reason
from engine.plan import Plan
from engine.policy import OrderPolicy, OrderState, choose_order
from engine.prefix_cache import PrefixCache, StagedSnapshot
from engine.request import Request, RequestOutput, RequestState
from engine.resolution import commit_results
from engine.results import PendingForward, SampleResult
from engine.routing_replay import RoutingRecorder
from engine.runner import Runner
from engine.speculative import Verified
from engine.table import RequestTable, Rows
from engine.verification import commit_verified, rewind
from tracing.recorder import Recorder
from tracing.records import GraphUse


@dataclass(slots=True, repr=False)
class Iteration:
    """One iteration in hand or done: what it was to do and what it did."""

    index: int
    mode: Mode
    order: Order
    reason: Reason
    consumed: PendingForward | None = None
    """The forward whose logits this iteration samples."""
    sampled: SampleResult | None = None
    """Its sampling, between sample and resolve."""
    verified: Verified | None = None
    """With drafting, in its place: its verification, between verify and resolve."""
    num_tokens: NDArray[np.int64] | None = None
    """[rows of ``verified``] tokens that each of them gets, stops left out of account; known from rewind on."""
    plan: Plan | None = None
    dummy: Plan | None = None
    """In place of ``plan``: a forward of padding, which other ranks need."""
    launched: PendingForward | None = None
    """The forward this iteration launched."""
    admitted: list[Request] = field(default_factory=list)
    advanced: list[Request] = field(default_factory=list)
    """Requests that got a token in resolve."""
    speaking: list[Request] = field(default_factory=list)
    """Of those, the ones that want text as they go: they stream, or have stop strings."""
    ended: list[Request] = field(default_factory=list)
    """Requests whose end resolve found, or an abort; emit makes their last output."""
    outputs: list[RequestOutput] = field(default_factory=list)
    new_tokens: int = 0
    room: Room | None = None
    """Rows that paused, went on or went back to the queue for want of blocks."""
    rows_released: int = 0
    rows_moved: int = 0
    wasted: Counter[str] = field(default_factory=Counter)
    """Rows of the launched forward whose request ended, by cause."""
    void_reasons: set[str] = field(default_factory=set)
    checked: object = None
    """In debug mode, the books as the checks found them last in this iteration."""

    def done_before(self, phase: Phase) -> tuple[Phase, ...]:
        """Phases of its order that run before ``phase``."""
        return self.order.phases[: self.order.phases.index(phase)]

    def __repr__(self) -> str:
        return f"<Iteration {self.index} {self.order.label}: {self.reason.value}>"


class Border(NamedTuple):
    """A place where the generator stands still: just before or just after a phase."""

    phase: Phase
    side: Literal["before", "after"]
    iteration: Iteration

    def __repr__(self) -> str:
        iteration, phases = self.iteration, self.iteration.order.phases
        where = f"{self.side} {self.phase.value}"
        if self.side == "after":
            following = phases[phases.index(self.phase) + 1 :]
            where += f", before {following[0].value}" if following else ", the last phase"
        return f"<{where}: iteration {iteration.index} {iteration.order.label}>"


class Emitter(Protocol):
    """The engine's side of the emit phase."""

    def emit(self, iteration: Iteration) -> list[Request]:
        """Fill ``iteration.outputs``; returns requests found to end here (a stop string) that still have a row."""
        ...


log = logging.getLogger(__name__)
Watcher = Callable[[Border], None]


class Controller:
    """Chooses orders and runs phases over table, pool and runner; at most one forward is pending (I25)."""

    def __init__(
        self,
        *,
        resolved: ResolvedConfig,
        table: RequestTable,
        pool: BlockPool,
        runner: Runner,
        queue: AdmissionQueue,
        emitter: Emitter,
        counters: Counters,
        recorder: Recorder,
        policy: OrderPolicy,
        cache: PrefixCache | None = None,
        fleet: Fleet | None = None,
        routing: RoutingRecorder | None = None,
        watch: Watcher | None = None,
    ) -> None:
        self.resolved = resolved
        self.table = table
        self.pool = pool
        self.runner = runner
        self.queue = queue
        self.emitter = emitter
        self.counters = counters
        self.recorder = recorder
        self.policy = policy
        self.cache = cache
        """Names blocks as they are filled; None without prefix caching."""
        self.fleet = fleet
        """The other ranks that hold experts of the model; None: there are none."""
        self.routing = routing
        """Told of requests that are about to lose their blocks; None: no choices of experts are kept."""
        self.owes_outputs: Callable[[], bool] = lambda: True
        """With ``fleet``, whether some request of this rank still owes its last output."""
        self.watch = watch
        """Called at every border before it is yielded; the debug mode's invariant checks."""
        self.mode: Mode = resolved.config.mode
        self.wanted_mode: Mode = self.mode
        self.pending: PendingForward | None = None
        self.current: Iteration | None = None
        self.next_index = 0
        self.unemitted: list[Request] = []
        """Ended requests whose last output an earlier iteration could not make: a primer has no emit."""
        self.undelivered: list[RequestOutput] = []
        """Outputs that a failed iteration made and could not hand out; the next emit does."""
        self._graph_uses: dict[tuple[BatchDimensions | None, object], GraphUse] = {}
        self._phases: dict[Phase, Callable[[Iteration], None]] = {
            Phase.ADMIT: self._admit,
            Phase.PREPARE: self._prepare,
            Phase.FORWARD: self._forward,
            Phase.SAMPLE: self._sample,
            Phase.VERIFY: self._verify,
            Phase.DRAFT: self._draft,
            Phase.REWIND: self._rewind,
            Phase.RESOLVE: self._resolve,
            Phase.EMIT: self._emit,
        }

    @property
    def phase_functions(self) -> dict[Phase, Callable[[Iteration], None]]:
        """What each phase runs; a debugger may put a function of its own in a phase's place for a while."""
        return self._phases

    # -- the schedule ----------------------------------------------------------------------------------------------

    def order_state(self) -> OrderState:
        """The facts the next order depends on; changes nothing."""
        continuing = self._continuing_rows()
        partial = self.table.partial_row
        index = as_index(continuing if partial is None else continuing[:-1])
        blocks_full = self.table.block_count[index] * self.resolved.config.block_size
        lookahead = self.resolved.config.lookahead
        needed = np.count_nonzero(self.table.kv_len[index] + lookahead > blocks_full) + self.queue.chunk_blocks()
        has_waiting = self.queue.has_waiting
        return OrderState(
            mode=self.mode,
            wanted_mode=self.wanted_mode,
            has_pending=self.pending is not None,
            pending_has_prefill=self.pending is not None and self.pending.has_prefill,
            chunk_in_progress=partial is not None,
            num_paused=self.table.num_paused,
            num_active=self.table.num_active,
            num_continuing=continuing.size,
            blocks_needed=int(needed),
            blocks_available=self.pool.num_free,
            has_waiting=has_waiting,
            head_admissible=has_waiting and self.queue.head_refusal() is None,
            overlap_admission=self.resolved.config.overlap_admission,
            late_rewind=self.resolved.config.counts_lengths,
            num_lasting=self._num_lasting(continuing),
            has_others=self.fleet is not None,
            others_pending=self.fleet is not None and self.fleet.outlook.has_pending,
            owes_outputs=self.fleet is None or self.owes_outputs(),
        )

    def vote(self, intent: Intent = Intent.STEP) -> Vote:
        """What this rank says at the beginning of an iteration."""
        assert self.fleet is not None
        return Vote(
            intent=intent,
            has_work=self.owes_outputs(),
            has_pending=self.pending is not None,
            mode=self.mode,
            wanted=self.wanted_mode,
            switches=self.fleet.switches,
            draft_rows=self._draft_rows_ahead(),
        )

    def _draft_rows_ahead(self) -> int:
        """For how many rows the draft heads run before the next forward, padding of a captured pass included."""
        pending = self.pending
        if pending is None or not self.resolved.config.speculative_tokens or not pending.num_sampled:
            return 0
        shape = pending.plan.shape
        return shape.num_decode if pending.logits.in_graph and not shape.num_prefill else pending.num_sampled

    def order_here(self, order: Order, mode: Mode) -> Order:
        """What takes an order's place in this engine: with drafts, and among other ranks."""
        has_drafts = self.resolved.config.speculative_tokens > 0
        if has_drafts:
            order = order.with_drafting
        if self.fleet is None:
            return order
        return order.among_ranks(is_legacy=mode == "legacy", has_drafts=has_drafts)

    def take_mode(self) -> None:
        """Let the wanted mode be in force where nothing is pending, here or at another rank."""
        if self.fleet is not None:
            self.wanted_mode = self.fleet.outlook.newest.wanted
        if self.pending is None and not (self.fleet is not None and self.fleet.outlook.has_pending):
            self.mode = self.wanted_mode

    def iterate(self) -> Iterator[Border]:
        """Run one iteration, standing still before and after each phase.

        Yields:
            Each border. Advancing the generator from a "before" border runs the phase.
        """
        self.take_mode()
        order, reason = choose_order(self.order_state(), self.policy)
        order = self.order_here(order, self.mode)
        iteration = self._begin(order, reason)
        self._count_graph_wait()
        for phase in order.phases:
            yield self._border(phase, "before", iteration)
            with self.recorder.phase(phase.value), self.runner.device.active():
                self._phases[phase](iteration)
            yield self._border(phase, "after", iteration)
        self._finish(iteration)

    def _begin(self, order: Order, reason: Reason) -> Iteration:
        iteration = Iteration(self.next_index, self.mode, order, reason)
        self.next_index += 1
        if self.runner.device.kind == "inline":
            iteration.void_reasons.add("inline_device")
        self.current = iteration
        self.runner.iteration = iteration.index
        if self.recorder.enabled:
            self.runner.device.keep_time()
        self.recorder.begin_iteration(iteration.index, order.label, reason.value, self.mode)
        return iteration

    def _count_graph_wait(self) -> None:
        """One for the head that no graph holds, in every order; the probe counts nothing (I19)."""
        waiting = self.queue.count_graph_wait()
        if waiting is None:
            return
        self.counters.graph_wait_steps += 1
        often = max(100, self.resolved.max_sequence_length)
        if waiting.graph_wait_steps % often == 0:
            log.warning(
                "request %s has waited %d iterations for a captured graph; capture larger graphs (graphs, "
                "max_batch_tokens) or set graph_all_prefills=False",
                waiting.request_id,
                waiting.graph_wait_steps,
            )

    def _border(self, phase: Phase, side: Literal["before", "after"], iteration: Iteration) -> Border:
        border = Border(phase, side, iteration)
        if self.watch is not None:
            self.watch(border)
        return border

    def _finish(self, iteration: Iteration) -> None:
        if Phase.EMIT not in iteration.order.phases:
            self.unemitted.extend(iteration.ended)
        self._count(iteration)
        plan = iteration.plan
        self.recorder.end_iteration(
            consumed=iteration.consumed.info if iteration.consumed is not None else None,
            launched=iteration.launched.info if iteration.launched is not None else None,
            outputs=len(iteration.outputs),
            new_tokens=iteration.new_tokens,
            wasted_rows=iteration.wasted,
            graph=self._graph_use(plan) if plan is not None and iteration.launched is not None else None,
            rows_released=iteration.rows_released,
            rows_moved=iteration.rows_moved,
            void_reasons=tuple(sorted(iteration.void_reasons)),
            free_blocks=self.pool.num_free,
            num_waiting=self.queue.num_waiting,
            num_active=self.table.num_active,
        )
        self.current = None

    def _count(self, iteration: Iteration) -> None:
        c = self.counters
        if iteration.order.is_dummy:  # the rank had no work, and counts none
            return
        c.steps += 1
        c.orders[iteration.order.label] += 1
        c.reasons[iteration.reason.name.lower()] += 1
        c.primer_steps += iteration.order is Order.PRIMER
        c.legacy_steps += iteration.mode == "legacy"
        c.overlap_steps += iteration.order.is_overlap
        c.async_steps += iteration.mode == "async" and iteration.consumed is not None
        c.compaction_steps += iteration.order.is_overlap and iteration.rows_released > 0
        c.rows_released += iteration.rows_released
        c.rows_moved += iteration.rows_moved
        if iteration.room is not None:
            c.pauses += len(iteration.room.paused)
            c.resumes += len(iteration.room.resumed)
            c.evictions += len(iteration.room.evicted)
        if iteration.wasted:
            c.rows_dropped += iteration.wasted.total()
            c.wasted.update(iteration.wasted)
        c.generated_tokens += iteration.new_tokens
        if iteration.launched is not None and self.runner.graphs:
            plan = iteration.launched.plan
            c.graph_hits += plan.graph is not None
            c.graph_misses += plan.graph is None
            if plan.miss_reason is not None:
                c.miss_reasons[plan.miss_reason] += 1

    def _graph_use(self, plan: Plan) -> GraphUse:
        key = (plan.graph, plan.miss_reason if plan.graph is None else plan.dims.num_tokens)
        use = self._graph_uses.get(key)
        if use is None:
            use = self._graph_uses[key] = self._new_graph_use(plan)
        return use

    def _new_graph_use(self, plan: Plan) -> GraphUse:
        graph = plan.graph
        if graph is None:
            return GraphUse(label="eager", hit=False, miss_reason=plan.miss_reason)
        return GraphUse(
            label=self.runner.device.graph_label,
            hit=True,
            dims=(graph.num_tokens, graph.num_prefill, graph.num_decode),
            padding_tokens=graph.num_tokens - plan.dims.num_tokens,
        )

    # -- phases ----------------------------------------------------------------------------------------------------

    def _admit(self, iteration: Iteration) -> None:
        """Where all tokens are resolved rows may be released and moved (I29); in overlap they are only added."""
        if not iteration.order.is_overlap:
            self._end_aborted(iteration)
            self._release(iteration)
            self._make_room(iteration)
        iteration.admitted = self.queue.admit()

    def _make_room(self, iteration: Iteration) -> None:
        may_evict = self.resolved.config.capacity_policy == "max_utilization"
        holdings = self.routing.holdings() if self.routing is not None and may_evict else None
        room = self.queue.make_room()
        if room is None:
            return
        if self.routing is not None and room.evicted:  # nothing has been launched that could write their blocks
            self.routing.save(room.evicted, holdings)
        iteration.room = room
        if room.moves is not None:
            self.runner.launch_moves(room.moves)
            iteration.rows_moved += room.moves.source.size
        for kind, requests in (("pause", room.paused), ("resume", room.resumed), ("evict", room.evicted)):
            for request in requests:
                self.recorder.instant(kind, request_id=request.request_id, free_blocks=self.pool.num_free)

    def _continuing_rows(self) -> Rows:
        """Active rows that the next forward holds: all but those known to end with the pending one."""
        table = self.table
        rows = table.active_rows
        if self.pending is None or self.resolved.config.launch_ending_rows:
            return rows
        active = slice(table.num_paused, table.num_live)
        ends = table.num_output[active] + 1 >= table.max_output[active]
        ends[self.pending.num_sampled :] = False  # a partial row's sample is thrown away, and new rows have none
        return rows[~ends] if ends.any() else rows

    def _num_lasting(self, rows: Rows) -> int:
        """How many of ``rows`` go on however many drafts of the pending forward are accepted, where that matters."""
        config, table = self.resolved.config, self.table
        if not config.counts_lengths:
            return 0
        return int(np.count_nonzero(table.num_output[rows] + config.decode_width < table.max_output[rows]))

    def _rows_to_launch(self, iteration: Iteration) -> Rows:
        rows = self._continuing_rows()
        if iteration.order is Order.MTP_OVERLAP_LATE and self.resolved.config.launch_ending_rows:
            # A row's blocks are set aside for drafts behind its last token, not for a whole step more.
            rows = rows[self.table.num_output[rows] + 1 < self.table.max_output[rows]]
        if iteration.order.without_drafting is Order.OVERLAP_ADMIT and self.resolved.config.launch_ending_rows:
            rows = rows[self._is_set_aside(rows)]
        if iteration.verified is not None and Phase.RESOLVE not in iteration.done_before(Phase.PREPARE):
            rows = self._without_verified_ends(rows, iteration.verified, iteration.num_tokens)
        if not iteration.order.is_overlap or not self.queue.has_aborts:
            return rows
        requests = self.table.requests
        return np.array([r for r in rows.tolist() if not _is_aborted(requests[r])], dtype=np.int64)

    def _is_set_aside(self, rows: Rows) -> NDArray[np.bool_]:
        """[rows] whether admission set blocks aside for another step; who has just entered may hold all others."""
        config, table = self.resolved.config, self.table
        is_within: NDArray[np.bool_] = (
            table.kv_len[rows] + config.lookahead <= table.max_blocks[rows] * config.block_size
        )
        return is_within

    def _without_verified_ends(self, rows: Rows, verified: Verified, num_tokens: NDArray[np.int64] | None) -> Rows:
        """Without rows that end by length with the tokens just accepted, which are not resolved yet.

        Rows with tokens beyond their end are never launched: they would write beyond their block table.
        """
        if num_tokens is None:
            return rows
        table, at = self.table, slice(verified.first_row, verified.first_row + verified.num_rows)
        ending = np.zeros(table.num_live, dtype=np.bool_)
        ending[at] = table.num_output[at] + num_tokens >= table.max_output[at] + self.resolved.config.launch_ending_rows
        return rows[~ending[rows]]

    def _prepare(self, iteration: Iteration) -> None:
        """Every launched row advances: one token, or a chunk of its prompt; blocks follow; inputs are staged."""
        self._let_read_prompts_decode(iteration)
        rows = self._rows_to_launch(iteration) if iteration.order.launches else NO_ROWS_AT_ALL
        new_blocks = self._advance(rows) if rows.size else NO_NEW_BLOCKS
        agreed = None if self.fleet is None else self._agree(self.fleet, rows, iteration)
        if rows.size == 0:
            if agreed is not None and agreed.num_tokens:
                iteration.dummy = self.runner.plan_dummy(agreed)
            return
        snapshots: Sequence[StagedSnapshot] = ()
        if self.cache is not None and self.cache.snapshots is not None:
            snapshots = self.cache.stage_snapshots(rows[self.table.is_prefill[rows]].tolist())
        iteration.plan = self.runner.plan(self.table, rows, iteration.admitted, new_blocks, snapshots, agreed)

    def _agree(self, fleet: Fleet, rows: Rows, iteration: Iteration) -> Agreed:
        """Tell the other ranks how large this one's forward is, and hear of theirs: before anything is staged."""
        graphs, load = self.runner.graphs, NO_LOAD
        if rows.size:
            dims, must_be_eager = self.runner.measure(self.table, rows)
            sampled = rows.size - (self.table.partial_row is not None)
            drafts = sampled if self.mode == "legacy" and self.resolved.config.speculative_tokens else 0
            load = Load(dims=dims, must_be_eager=must_be_eager, draft_rows=drafts)
        width = self.resolved.config.decode_width
        return fleet.settle(load, iteration.index, graphs.sizes, strict=graphs.strict, decode_width=width)

    def _let_read_prompts_decode(self, iteration: Iteration) -> None:
        """Prompts that the forward before has read to the end, pending or just verified; resolve does it otherwise."""
        verified, pending, first = iteration.verified, self.pending, self.table.num_paused
        if verified is not None and iteration.order.is_overlap:
            if verified.pending.has_prefill:
                self.table.is_prefill[verified.first_row : verified.first_row + verified.num_rows] = False
        elif pending is not None and pending.has_prefill:
            self.table.is_prefill[first : first + pending.num_sampled] = False

    def _advance(self, rows: Rows) -> NewBlocks:
        table, index, config = self.table, as_index(rows), self.resolved.config
        prefill, width = table.is_prefill[index], config.decode_width
        if prefill.any():
            table.kv_len[index] = np.where(prefill, table.chunk_end[index], table.kv_len[index] + width)
            reading = rows[prefill]
            self.counters.prefill_tokens += int((table.chunk_end[reading] - table.chunk_done[reading]).sum())
        else:
            table.kv_len[index] += width
        reach = table.kv_len[index] + config.speculative_tokens
        growing = rows[(reach > table.block_count[index] * config.block_size) & self._may_grow(index)]
        entries = [] if growing.size == 0 else [self._grow(growing)]
        if prefill.any():
            entries += [self._blocks_of_chunk(row) for row in rows[prefill].tolist()]
        if not entries:
            return NO_NEW_BLOCKS
        parts = [np.concatenate(column) for column in zip(*entries, strict=True)]
        return NewBlocks(parts[0], parts[1], parts[2])

    def _may_grow(self, index: slice | Rows) -> NDArray[np.bool_] | bool:
        """Where lengths may be bounds, a row that may have ended holds all blocks that it could come to need."""
        if not self.resolved.config.counts_lengths:
            return True
        return self.table.block_count[index] < self.table.max_blocks[index]

    def _blocks_of_chunk(self, row: int) -> tuple[Rows, Rows, NDArray[np.int32]]:
        """Which row, which columns, which blocks: those that the row's present chunk is the first to write."""
        table = self.table
        first = -(-int(table.chunk_done[row]) // self.resolved.config.block_size)
        columns = np.arange(first, int(table.block_count[row]), dtype=np.int64)
        return np.full(columns.size, row, dtype=np.int64), columns, table.block_ids[row, columns].copy()

    def _grow(self, rows: Rows) -> tuple[Rows, Rows, NDArray[np.int32]]:
        """Give each row one more block; which row, which column, which block."""
        taken = self.pool.allocate(rows.size)
        assert taken is not None, "admission reserved too few blocks"
        columns = self.table.block_count[rows].astype(np.int64)
        self.table.append_blocks(rows, taken)
        return rows, columns, taken

    def _forward(self, iteration: Iteration) -> None:
        """Publish and launch. In overlap the sampling of the pending forward is already enqueued before it (I31)."""
        if iteration.dummy is not None:
            self.runner.launch_dummy(iteration.dummy)
            self.counters.dummy_steps += 1
        if iteration.plan is None:
            return
        iteration.launched = self.runner.launch_forward(iteration.plan)
        self.pending = iteration.launched
        if self.cache is not None and iteration.plan.dims.num_prefill:
            self.cache.name_read(iteration.plan.table_rows[iteration.plan.dims.num_decode :].tolist())
            self.cache.keep_snapshots()

    def _sample(self, iteration: Iteration) -> None:
        """The pending forward is consumed: sampled here, resolved later in this iteration (I26)."""
        pending = self.pending
        if pending is None:
            return
        iteration.consumed = pending
        iteration.sampled = self.runner.launch_sample(pending, self.table)
        self.pending = None

    def _verify(self, iteration: Iteration) -> None:
        """As :meth:`_sample`, for a forward whose rows read drafts."""
        pending = self.pending
        if pending is None:
            return
        iteration.consumed = pending
        iteration.verified = self.runner.launch_verify(pending, self.table)
        self.pending = None

    def _draft(self, iteration: Iteration) -> None:
        """The draft heads foresee what follows the newest tokens; the host does not wait for it, nor know it yet."""
        num_rows = 0
        if self.fleet is not None:
            drafted = self.fleet.agreed if iteration.mode == "legacy" else self.fleet.outlook
            num_rows = drafted.draft_rows
        if iteration.verified is not None and iteration.verified.num_rows:
            self.runner.launch_draft(iteration.verified, self.table, num_rows)
        elif num_rows:
            self.runner.launch_dummy_draft(num_rows)

    def _rewind(self, iteration: Iteration) -> None:
        """Rows go back to their last accepted token. The one wait before the next forward: for the counts (I33)."""
        if iteration.verified is None:
            return
        with self.recorder.wait("accepted"):
            iteration.verified.accepted_ready.wait()
        iteration.num_tokens = rewind(iteration.verified, self.table)

    def _resolve(self, iteration: Iteration) -> None:
        """The only wait of an iteration: for the sampled ids. In overlap the next forward is already enqueued."""
        if iteration.verified is not None:
            with self.recorder.wait("samples"):
                iteration.verified.wait()
            commit_verified(
                iteration.verified,
                self.table,
                iteration,
                self.resolved,
                self.counters,
                has_aborts=self.queue.has_aborts,
            )
        if iteration.sampled is not None:
            with self.recorder.wait("samples"):
                iteration.sampled.wait()
            commit_results(
                iteration.sampled,
                self.table,
                iteration,
                self.resolved,
                self.counters,
                has_aborts=self.queue.has_aborts,
            )
        self._end_aborted(iteration)
        self._release(iteration)

    def _end_aborted(self, iteration: Iteration) -> None:
        """Take over aborts asked for since the last admit or resolve."""
        if not self.queue.has_aborts:
            return
        for request in self.queue.take_aborted():
            if request.finish_reason is None:  # else it ended on its own meanwhile, and ends only once (I43)
                request.finish_reason = "abort"
                iteration.ended.append(request)

    def _release(self, iteration: Iteration) -> None:
        """Give back rows and blocks of ended requests and close the holes, on the host and behind the device's work.

        A row of the launched forward that is dropped here was computed for nothing; nobody samples it (I26). Its
        blocks may be taken by a new owner at once: what writes them next is enqueued behind that forward (I34).
        """
        table = self.table
        rows = [request.row for request in iteration.ended if request.row is not None]
        if rows:
            alive = np.ones(table.num_live, dtype=np.bool_)
            alive[rows] = False
            self._count_wasted(iteration, alive)
            if self.cache is not None:
                for request in iteration.ended:
                    self.cache.name_written(request)
            if self.routing is not None:
                self.routing.save(request for request in iteration.ended if request.timings.finished_ns is None)
            self.pool.release(table.held_blocks(np.array(rows, dtype=np.int64)))
            moves = table.keep(alive)
            self.runner.launch_moves(moves)
            iteration.rows_released += len(rows)
            iteration.rows_moved += moves.source.size
            self._remap_pending(moves.new_row)
        for request in iteration.ended:
            if request.state is RequestState.WAITING:  # it went back for want of blocks, and emit found its stop string
                self.queue.forget(request)
            if request.state is not RequestState.FINISHED:
                request.move_to(RequestState.FINISHED)

    def _count_wasted(self, iteration: Iteration, alive: NDArray[np.bool_]) -> None:
        if self.pending is None:
            return
        in_flight = set(self.pending.table_rows.tolist())
        for row in np.flatnonzero(~alive).tolist():
            request = self.table.requests[row]
            if row in in_flight and request is not None:
                iteration.wasted[_cause(request)] += 1

    def _remap_pending(self, new_row: Rows) -> None:
        if self.pending is None:
            return
        self.pending.follow(new_row)
        if not (self.pending.table_rows >= 0).any():
            self.pending = None  # it runs to its end on the device, and nobody waits for it

    def _emit(self, iteration: Iteration) -> None:
        """Host work that overlap hides. A stop string found here ends its row at once, behind what is launched."""
        iteration.ended = [*self.unemitted, *iteration.ended]
        iteration.outputs.extend(self.undelivered)
        self.unemitted, self.undelivered = [], []
        stopped = self.emitter.emit(iteration)
        if stopped:
            iteration.ended.extend(stopped)
            self._release(iteration)

    # -- recovery --------------------------------------------------------------------------------------------------

    def drop_pending(self) -> None:
        """Forget the pending forward and the iteration in hand, but not what it owes callers (I59, I43)."""
        if self.current is not None:
            owing = (request for request in self.current.ended if request.timings.finished_ns is None)
            self.unemitted.extend(request for request in owing if request not in self.unemitted)
            self.undelivered.extend(self.current.outputs)
        self.pending = None
        self.current = None


def _is_aborted(request: Request | None) -> bool:
    return request is not None and request.abort_requested


def _cause(request: Request) -> str:
    if request.finish_reason == "stop":
        return "stop_string" if isinstance(request.stop_reason, str) else "eos"
    return request.finish_reason or "error"
