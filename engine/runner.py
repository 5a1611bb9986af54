"""Runs what the phases decide: stages a step's inputs, launches forwards, sampling and row moves, returns results.

Everything here launches and nothing waits, but for :meth:`SampleResult.wait`, which the controller calls in resolve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionPlanner, PlannerLimits, PrefillRows
from engine.batch import BatchDimensions, BatchShape, PrefillPlan
from engine.columns import DeviceColumns, WideRows
from engine.config import ResolvedConfig
from engine.device import Device, Stream, Timing, TracedForwards, Work, has_triton
from engine.errors import ConfigError
from engine.graph_gate import COMES_BACK, CONTINUING_CHUNK, is_gated
from engine.graphs import GraphSet, graph_list
from engine.layout import (
    NO_NEW_BLOCKS,
    NO_ROWS_AT_ALL,
    DecodeBatch,
    Layout,
    NewBlocks,
    are_neighbours,
    as_index,
)
from engine.models.base import DraftingModel, LayerCache, Model, PagedState, PlansPrefill
from engine.parallel.fleet import Agreed
from engine.parallel.log import Collective, Issuing
from engine.parallel.ranks import Ranks
from engine.plan import (
    SNAPSHOTS_PER_ROW,
    Plan,
    batch_rows_of,
    rejectable_states,
    restage_decode,
    rows_owing_prompt_logprobs,
    stage_new,
    stage_padding,
    stage_prompt_rows,
    stage_row_blocks,
    stage_rows,
    stage_snapshots,
    stage_states,
    stage_tokens,
    step_fields,
)
from engine.prefix_cache import StagedSnapshot
from engine.request import Request
from engine.results import Logits, PendingForward, SampleResult
from engine.routing_replay import GivenRouting, RoutingSizes
from engine.sample_launcher import SampleLauncher
from engine.sampling.base import Sampler
from engine.speculative import Speculator, Verified
from engine.staging import Field, HostSlab, Slab
from engine.step_function import (
    StepFunction,
    has_slots,
    layer_states,
    make_caches,
    state_options,
)
from engine.table import Moves, RequestTable, Rows
from tracing.nvtx_ranges import CATEGORY_OF_DETAIL
from tracing.recorder import Recorder
from tracing.records import BatchInfo

CaptureProgress = Callable[[int, int, int], None]
"""Called with (graphs captured, graphs in all, bytes they took so far)."""


WIDE_COLUMNS = ("stop_ids", "bias_ids", "bias_values", "output_counts", "prompt_mask")
"""Of :class:`DeviceColumns`: those that are made when a row first needs them."""


class Runner:
    """Owns the device side: model, caches, columns, slabs, graphs and sampler."""

    def __init__(
        self,
        *,
        resolved: ResolvedConfig,
        device: Device,
        model: Model,
        sampler: Sampler,
        recorder: Recorder,
        sizes: Sequence[BatchDimensions] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        config = resolved.config
        self.ranks = ranks
        """Who holds the other experts; None: all are here."""
        self._issued: dict[BatchShape, list[Collective]] = {}
        """What a captured CUDA graph does together with the other ranks."""
        self.resolved = resolved
        self.device = device
        self.model = model
        self.recorder = recorder
        self.iteration = 0
        self.block_size = config.block_size
        self.num_drafts = config.speculative_tokens
        self.decode_width = config.decode_width
        self.counts_lengths = config.counts_lengths
        """Whether forwards read the lengths of decode rows from the columns of the device."""
        self.state_options = state_options(config)
        self._routing = config.routing_replay
        keeps_routing = self._routing is not None
        self._layer_states = layout = layer_states(
            model, self.num_drafts, self.state_options, keeps_routing=keeps_routing
        )
        self.given_routing: GivenRouting | None = None
        """Where requests' own choices of experts go; only where they are replayed."""
        if self._routing == "replay":
            self.given_routing = GivenRouting(device, RoutingSizes.of(model), config.max_batch_tokens)
        self._has_slots = has_slots(layout)
        self.states_per_row = config.states_per_row if self._has_slots else 1
        """States that a row's slot holds; 1 where the model has no slots."""
        self._is_paged = tuple(isinstance(state, PagedState) for state in layout for _ in state.shapes)
        self.caches = self._make_caches()
        self._flat_caches = tuple(tensor for layer in self.caches for tensor in layer)
        self.columns = DeviceColumns(
            device,
            max_requests=config.max_requests,
            max_blocks=resolved.max_blocks_per_row,
            dummy_block=resolved.num_blocks,
            vocab_size=resolved.vocab_size,
            num_drafts=self.num_drafts,
        )
        self.planner = self._make_planner()
        sizes_of_step = config.max_requests, config.max_batch_tokens, config.block_size, self.decode_width
        self.step_slab = Slab(device, *step_fields(*sizes_of_step))
        self.move_slab = Slab(device, [Field("moves", (2, config.max_requests), torch.int64)])
        self.samples = SampleLauncher(
            resolved=resolved,
            device=device,
            columns=self.columns,
            sampler=sampler,
            launch=lambda stream, name, work: self._launch(stream, name, work),
        )
        self.speculator = self._make_speculator(sampler)
        self.graph_memory_bytes = 0
        self._known: DecodeBatch | None = None
        """The decode batch of the step before."""
        self.graphs = self._graph_set(graph_list(config, resolved.max_sequence_length) if sizes is None else sizes)
        self.enters_blocks = device.kind == "cuda" and has_triton() and not self.num_drafts
        """Whether captured decode forwards enter new blocks into the block table themselves."""
        device.synchronize()  # weights and buffers were filled on other streams

    def _make_speculator(self, sampler: Sampler) -> Speculator | None:
        if not self.num_drafts:
            return None
        assert isinstance(self.model, DraftingModel)
        return Speculator(
            resolved=self.resolved,
            device=self.device,
            model=self.model,
            columns=self.columns,
            sampler=sampler,
            launch=self._launch_drafting,
            ranks=self.ranks,
        )

    def _launch_drafting(self, stream: Stream, name: str, work: Work) -> Timing | None:
        if name in ("draft", "dummy_draft"):
            issued = work.issued if isinstance(work, Issuing) else ()
            work = self._together("draft", work, issued, is_dummy=name == "dummy_draft")
        return self._launch(stream, name, work)

    def _make_caches(self) -> list[LayerCache]:
        resolved = self.resolved
        num_slots = resolved.dummy_slot + 1 if self._has_slots else 0
        return make_caches(self._layer_states, self.device, resolved.num_blocks + 1, self.block_size, num_slots)

    def _make_planner(self) -> AttentionPlanner | None:
        if not isinstance(self.model, PlansPrefill):
            return None
        limits = PlannerLimits(self.block_size, self.resolved.config.max_requests, self.resolved.max_blocks_per_row)
        return self.model.make_planner(self.device, limits)

    def _graph_set(self, sizes: Sequence[BatchDimensions]) -> GraphSet:
        return GraphSet(
            sizes,
            max_blocks=self.resolved.max_blocks_per_row,
            buckets_kv=self.device.kind != "cuda",
            strict=self._has_slots or self.num_drafts > 0,
            snapshots_per_row=SNAPSHOTS_PER_ROW if self.resolved.num_snapshots else 0,
            decode_width=self.decode_width,
            states_per_row=self.states_per_row,
            is_shared=self.ranks is not None,
        )

    def _launch(
        self,
        stream: Stream,
        name: str,
        work: Work,
        sleep_s: float = 0.0,
    ) -> Timing | None:
        sleep_s += self.device.op_sleep_s.get(name, 0.0)
        with self.recorder.phase(name) if name in CATEGORY_OF_DETAIL else nullcontext():
            timing = stream.launch(work, timed=self.recorder.enabled, sleep_s=sleep_s)
        if timing is not None:
            self.recorder.device(name, stream.name, self.iteration, timing)
        return timing

    # -- prepare ---------------------------------------------------------------------------------------------------

    def plan(
        self,
        table: RequestTable,
        table_rows: Rows,
        new: Sequence[Request],
        new_blocks: NewBlocks,
        snapshots: Sequence[StagedSnapshot] = (),
        agreed: Agreed | None = None,
    ) -> Plan:
        """Stage the inputs of a forward over ``table_rows`` (decode before prefill); host only.

        ``kv_len`` of the rows must already count this forward's tokens. Blocks only if the staging half's last
        copy is still queued, which two halves prevent in a healthy run. With other ranks, ``agreed`` says what it is
        padded to.
        """
        decode = None
        if not new and not (agreed is not None and agreed.graph is not None and agreed.graph.num_prefill):
            decode = self._decode_batch(table, table_rows)
        if decode is not None:
            plan = self._plan_decode(table, decode, new_blocks, agreed)
        else:
            plan = self._plan_mixed(table, table_rows, new, new_blocks, snapshots, agreed)
        if self.given_routing is not None:
            self.given_routing.stage(plan.half, plan.shape, table)
        return plan

    def measure(self, table: RequestTable, table_rows: Rows) -> tuple[BatchDimensions, bool]:
        """How large a forward over ``table_rows`` is, and whether it can only be eager; at least one row."""
        is_prefill = table.is_prefill[table_rows]
        reading = table_rows[is_prefill]
        num_decode = table_rows.size - reading.size
        read = int((table.chunk_end[reading] - table.chunk_done[reading]).sum())
        dims = BatchDimensions(
            num_tokens=read + num_decode * self.decode_width, num_prefill=reading.size, num_decode=num_decode
        )
        return dims, bool(rows_owing_prompt_logprobs(table, reading))

    def plan_dummy(self, agreed: Agreed) -> Plan:
        """Stage a forward of padding, of the size that all ranks agreed on; host only."""
        if agreed.graph is not None:
            shape = self.graphs.shape(agreed.graph, 1)
        else:
            one_row = BatchDimensions(num_tokens=self.decode_width, num_prefill=0, num_decode=1)
            shape = self._shape(one_row, None, 0, 1, self.states_per_row - 1, agreed)
        half = self.step_slab.acquire()
        half.layout = None
        stage_padding(half, shape, self.columns.dummy_row, self.resolved.dummy_slot)
        if self.given_routing is not None:
            self.given_routing.stage(half, shape, None)
        return Plan(
            table_rows=NO_ROWS_AT_ALL,
            dims=BatchDimensions(num_tokens=0, num_prefill=0, num_decode=0),
            graph=agreed.graph,
            miss_reason=agreed.miss_reason,
            shape=shape,
            half=half,
            keys=NO_ROWS_AT_ALL,
            request_ids=(),
            is_in_order=True,
            prefill_plan=self._plan_prefill(shape, half, self._dummy_table(), is_captured=agreed.graph is not None),
        )

    def _dummy_table(self) -> NDArray[np.int32]:
        """The block table of a forward of padding."""
        widest = (self.columns.dummy_row + 1, self.resolved.config.max_batch_tokens)
        return np.broadcast_to(np.int32(self.columns.dummy_block), widest)

    def _decode_batch(self, table: RequestTable, table_rows: Rows) -> DecodeBatch | None:
        """The batch of these rows if all of them decode; the one of the step before if they are the same."""
        known = self._known
        if known is not None and known.version == table.version and np.array_equal(known.table_rows, table_rows):
            return known
        if table.is_prefill[table_rows].any():
            return None
        num_tokens = table_rows.size * self.decode_width
        dims = BatchDimensions(num_tokens=num_tokens, num_prefill=0, num_decode=table_rows.size)
        graph, miss_reason = self.graphs.match(dims)
        self._known = DecodeBatch(
            version=table.version,
            table_rows=table_rows,
            select=as_index(table_rows),
            dims=dims,
            graph=graph,
            miss_reason=miss_reason,
            keys=table.key[table_rows],
            request_ids=_request_ids(table, table_rows),
        )
        return self._known

    def _plan_decode(
        self, table: RequestTable, batch: DecodeBatch, new_blocks: NewBlocks, agreed: Agreed | None
    ) -> Plan:
        chosen = batch if agreed is None else agreed
        graph, miss_reason = chosen.graph, chosen.miss_reason
        needs_width = graph is None or self.graphs.buckets_kv
        kv_blocks = int(table.block_count[batch.select].max()) if needs_width else 0
        kept = batch.dims.num_decode * (self.states_per_row - 1)
        shape = self._shape(batch.dims, graph, 0, kv_blocks, kept, agreed)
        layout = batch.layout(shape)
        half = self.step_slab.acquire()
        if not restage_decode(half, table, batch, layout):
            self._stage(half, table, layout)
            if shape.num_snapshots:
                self._stage_snapshots(half, table, layout, ())
            half.layout = layout
        elif self._has_slots and self.num_drafts and not self.counts_lengths:
            self._stage_states(half, table, layout)
        if self.enters_blocks and graph is not None:
            stage_row_blocks(half, batch, shape, new_blocks)
            new_blocks = NO_NEW_BLOCKS
        stage_new(half, (), new_blocks)
        return Plan(
            table_rows=batch.table_rows,
            dims=batch.dims,
            graph=graph,
            miss_reason=miss_reason,
            shape=shape,
            half=half,
            keys=batch.keys,
            request_ids=batch.request_ids,
            is_in_order=isinstance(batch.select, slice),
            new_blocks=new_blocks,
        )

    def _stage(self, half: HostSlab, table: RequestTable, layout: Layout) -> None:
        half.layout = None  # until all of it is staged: an interrupt in between must not leave a half that lies
        stage_rows(half, table, layout, self.columns.dummy_row)
        stage_tokens(half, table, layout, self.columns.dummy_row)
        if self._has_slots:
            self._stage_states(half, table, layout)

    def _stage_states(self, half: HostSlab, table: RequestTable, layout: Layout) -> None:
        stage_states(
            half,
            table,
            layout,
            self.resolved.dummy_slot,
            states_per_row=self.states_per_row,
            counts_lengths=self.counts_lengths,
        )

    def _stage_snapshots(
        self, half: HostSlab, table: RequestTable, layout: Layout, snapshots: Sequence[StagedSnapshot]
    ) -> None:
        rejectable = rejectable_states(table, layout, self.states_per_row)
        stage_snapshots(half, layout, snapshots, self.resolved.dummy_slot, rejectable)

    def _plan_mixed(
        self,
        table: RequestTable,
        table_rows: Rows,
        new: Sequence[Request],
        new_blocks: NewBlocks,
        snapshots: Sequence[StagedSnapshot],
        agreed: Agreed | None,
    ) -> Plan:
        is_prefill = table.is_prefill[table_rows]
        chunk = table.chunk_end[table_rows] - table.chunk_done[table_rows]
        query_len = np.where(is_prefill, chunk, self.decode_width).astype(np.int64)
        num_prefill = int(np.count_nonzero(is_prefill))
        dims = BatchDimensions(
            num_tokens=int(query_len.sum()), num_prefill=num_prefill, num_decode=table_rows.size - num_prefill
        )
        prompt_rows = rows_owing_prompt_logprobs(table, table_rows[dims.num_decode :])
        graph, miss_reason = (None, "prompt log probabilities") if prompt_rows else self.graphs.match(dims)
        if agreed is not None:
            graph, miss_reason = agreed.graph, agreed.miss_reason
        elif graph is None and not prompt_rows and is_gated(self.resolved.config, self.graphs.sizes):
            miss_reason = CONTINUING_CHUNK if num_prefill > len(new) else COMES_BACK
        longest = int(query_len[dims.num_decode :].max()) if num_prefill else 0
        kept = len(snapshots) + dims.num_decode * (self.states_per_row - 1)
        shape = self._shape(dims, graph, longest, int(table.block_count[table_rows].max()), kept, agreed)
        layout = Layout(table_rows, batch_rows_of(dims, shape), query_len, shape)
        half = self.step_slab.acquire()
        self._stage(half, table, layout)
        if shape.num_snapshots:
            self._stage_snapshots(half, table, layout, snapshots)
        stage_new(half, new, new_blocks)
        extra_idx, extra_targets = stage_prompt_rows(half, layout, prompt_rows)
        return Plan(
            table_rows=table_rows,
            dims=dims,
            graph=graph,
            miss_reason=miss_reason,
            shape=shape,
            half=half,
            keys=table.key[table_rows],
            request_ids=_request_ids(table, table_rows),
            is_in_order=are_neighbours(table_rows),
            partial_key=None if table.partial_row is None else int(table.key[table.partial_row]),
            new_rows=len(new),
            new_blocks=new_blocks,
            wide=self._stage_wide(table, new) if new else None,
            prompt_rows=prompt_rows,
            extra_idx=extra_idx,
            extra_targets=extra_targets,
            prefill_plan=self._plan_prefill(shape, half, table.block_ids, is_captured=graph is not None),
        )

    def _stage_wide(self, table: RequestTable, new: Sequence[Request]) -> WideRows:
        rows = [request.row for request in new if request.row is not None]
        wide = self.columns.stage_wide(new, rows, self.resolved.eos_token_ids)
        shared = [table.block_ids[row, : table.chunk_done[row] // self.block_size] for row in rows]
        if any(blocks.size for blocks in shared):
            wide.shared_blocks = self.columns.stage_shared(rows, shared)
        return wide

    def _plan_prefill(
        self, shape: BatchShape, half: HostSlab, block_ids: NDArray[np.int32], *, is_captured: bool
    ) -> PrefillPlan | None:
        """Let the attention backend plan the prefill rows staged in ``half``, if it plans and there are any."""
        if self.planner is None or not shape.num_prefill or self.num_drafts:
            return None
        f, at = half.fields, slice(shape.num_decode, shape.num_rows)
        rows = PrefillRows(f["query_len"][at], f["kv_len"][at], f["table_row"][at], block_ids)
        return self.planner.plan(shape, rows, is_captured=is_captured)

    def _shape(
        self,
        dims: BatchDimensions,
        graph: BatchDimensions | None,
        longest_query: int,
        kv_blocks: int,
        num_snapshots: int = 0,
        agreed: Agreed | None = None,
    ) -> BatchShape:
        if graph is not None:
            return self.graphs.shape(graph, kv_blocks)
        return BatchShape(
            num_tokens=dims.num_tokens,
            num_decode=dims.num_decode,
            num_prefill=dims.num_prefill,
            max_query_len=longest_query,
            num_kv_blocks=kv_blocks,
            decode_width=self.decode_width,
            num_snapshots=num_snapshots,
            expert_tokens=0 if agreed is None else agreed.num_tokens,
        )

    # -- forward ---------------------------------------------------------------------------------------------------

    def launch_forward(self, plan: Plan) -> PendingForward:
        """Publish the staged inputs and launch the forward behind them; returns at once."""
        logits = self._launch_planned(plan, "forward")
        return PendingForward(
            iteration=self.iteration,
            plan=plan,
            logits=logits,
            table_rows=plan.table_rows.copy(),
            keys=plan.keys,
            request_ids=plan.request_ids,
            is_in_order=plan.is_in_order,
            info=BatchInfo(
                iteration=self.iteration,
                num_tokens=plan.dims.num_tokens,
                num_prefill=plan.dims.num_prefill,
                num_decode=plan.dims.num_decode,
                request_ids=plan.request_ids,
            ),
        )

    def launch_dummy(self, plan: Plan) -> None:
        """As :meth:`launch_forward`, the same work, of padding alone; nobody samples it."""
        self._launch_planned(plan, "dummy_forward")

    def _launch_planned(self, plan: Plan, name: str) -> Logits:
        compute, logits = self.device.compute, Logits(in_graph=plan.graph is not None)
        self._launch(compute, "publish", lambda: self._publish(plan))
        plan.half.copied = compute.record()
        if self.given_routing is not None:
            self.given_routing.note_copied(plan.half.copied)
        sleep_s = self.resolved.config.op_sleep_s
        if plan.graph is None:
            work = self._together("forward", self._eager_work(plan, logits), is_dummy=name != "forward")
            self._launch(compute, name, work, sleep_s)
        else:
            replay, issued = self._replay_work(plan, logits), self._issued.get(plan.shape, ())
            work = self._together("forward", replay, issued, is_dummy=name != "forward")
            with self.recorder.phase("replay"):
                self._launch(compute, name, work, sleep_s)
        return logits

    def _together(self, purpose: str, work: Work, issued: Sequence[Collective] = (), *, is_dummy: bool = False) -> Work:
        """``work``, which does something together with other ranks, if there are any: their log says what for.

        Args:
            purpose: ``forward`` or ``draft``.
            work: It.
            issued: What a captured graph repeats unseen.
            is_dummy: Whether no row of this rank is in it.
        """
        ranks, iteration = self.ranks, self.iteration
        if ranks is None:
            return work

        def logged() -> None:
            with ranks.log.during(purpose, iteration, is_dummy=is_dummy):
                ranks.log.replay(issued)
                work()

        return logged

    def _publish(self, plan: Plan) -> None:
        if self.resolved.config.debug_invariants:
            self.step_slab.poison()
        plan.half.upload(*self._counts(plan.shape, plan.new_rows, plan.new_blocks))
        if self.given_routing is not None:
            self.given_routing.upload(plan.shape.num_tokens)
        fields = self.step_slab.device_fields
        if plan.wide is not None:
            n = plan.new_rows
            starts = fields["new_row"][:n], fields["new_ints"][:n], fields["new_floats"][:n]
            self.columns.write_rows(*starts, plan.wide, fields["new_length"][:n])
        if m := plan.new_blocks.rows.size:
            entries = fields["block_row"][:m], fields["block_col"][:m], fields["block_id"][:m]
            self.columns.add_blocks(*entries, plan.new_blocks)

    def _counts(self, shape: BatchShape, new_rows: int, new_blocks: NewBlocks) -> tuple[int, int, int]:
        """How much of the staged parts a step reads; the seldom used one is taken whole or not at all."""
        is_plain = shape.num_decode == shape.num_rows and shape.decode_width == 1 and not shape.num_snapshots
        seldom = 0 if is_plain and not new_rows and not new_blocks.rows.size else self.step_slab.parts[1].stride // 8
        return max(shape.num_rows, new_rows), seldom, shape.num_tokens

    def _eager_work(self, plan: Plan, logits: Logits) -> Callable[[], None]:
        step = self._step_function(plan.shape, plan.prefill_plan)
        inputs = self._step_inputs(plan.shape)
        extra = plan.extra_idx

        def work() -> None:
            if extra is None:
                logits.rows = step(*inputs)
                return
            rows = plan.shape.num_logits
            wider = (*inputs[:8], torch.cat([inputs[8], extra.to(inputs[8].device, non_blocking=True)]), *inputs[9:])
            out = step(*wider)
            logits.rows, logits.prompt = out[:rows], out[rows:]

        return work

    def _step_function(self, shape: BatchShape, prefill_plan: PrefillPlan | None) -> StepFunction:
        return StepFunction(
            self.model,
            self.block_size,
            shape,
            prefill_plan,
            self.num_drafts,
            counts_lengths=self.counts_lengths,
            states=self.state_options,
            routing=self._routing,
            layout=self._layer_states,
        )

    def _replay_work(self, plan: Plan, logits: Logits) -> Callable[[], None]:
        replay = self.graphs.replay(plan.shape)

        def work() -> None:
            logits.rows = replay()

        return work

    def _step_inputs(self, shape: BatchShape) -> tuple[Tensor, ...]:
        f, t, n = self.step_slab.device_fields, shape.num_tokens, shape.num_rows
        return (
            f["token_ids"][:t],
            f["positions"][:t],
            f["token_row"][:t],
            f["batch_row"][:t],
            f["table_row"][:n],
            f["query_start"][:n],
            f["query_len"][:n],
            f["kv_len"][:n],
            f["logits_idx"][: shape.num_logits],
            f["row_block"][:n],
            self.columns.last_token,
            self.columns.block_table,
            *self._draft_inputs(),
            *self._state_inputs(shape),
            *(() if self.given_routing is None else (self.given_routing.device_TLK[:t],)),
            *self._flat_caches,
        )

    def _draft_inputs(self) -> tuple[Tensor, ...]:
        columns = self.columns
        if columns.drafts is None or columns.length is None or columns.accepted is None:
            return ()
        return columns.drafts, columns.length, columns.accepted

    def _state_inputs(self, shape: BatchShape) -> tuple[Tensor, ...]:
        if not self._has_slots:
            return ()
        f, n, m = self.step_slab.device_fields, shape.num_rows, shape.num_snapshots
        return f["state_from"][:n], f["state_to"][:n], f["snap_row"][:m], f["snap_after"][:m], f["snap_slot"][:m]

    # -- graphs ----------------------------------------------------------------------------------------------------

    def capture(self, traced: TracedForwards, progress: CaptureProgress | None = None) -> None:
        """Capture every size of the graph list; blocks. Nothing may be in flight or staged.

        On CUDA it draws: the columns of all rows are void afterwards.
        """
        if self.device.kind == "cuda":
            self.samples.capture_fetches()
        before_bytes = self.device.used_bytes()
        shapes, columns, dummies = self.graphs.shapes(), self.columns, self._dummy_table()
        for done, shape in enumerate(shapes):
            self.graph_memory_bytes = max(0, self.device.used_bytes() - before_bytes)
            if progress is not None:
                progress(done, len(shapes), self.graph_memory_bytes)
            half = self.step_slab.acquire()
            half.layout = None
            stage_padding(half, shape, columns.dummy_row, self.resolved.dummy_slot)
            self.device.compute.launch(half.upload)
            half.copied = self.device.compute.record()
            half.copied.wait()
            prefill_plan = self._plan_prefill(shape, half, dummies, is_captured=True)
            step = self._step_function(shape, prefill_plan)
            try:
                replay = self._captured(shape, step, traced)
            except RuntimeError as error:
                raise ConfigError(
                    f"graphs: a forward of {shape.num_tokens} tokens cannot be captured ({error}); use graphs=None"
                ) from error
            self.graphs.add(shape, replay)
            if self.device.kind == "cuda" and not shape.num_prefill:
                self._capture_behind(shape, replay)
        if shapes:
            self.graph_memory_bytes = max(0, self.device.used_bytes() - before_bytes)
            if progress is not None:
                progress(len(shapes), len(shapes), self.graph_memory_bytes)

    def _captured(self, shape: BatchShape, step: StepFunction, traced: TracedForwards) -> Callable[[], Tensor]:
        inputs = self._step_inputs(shape)
        if self.ranks is None or self.device.kind != "cuda":  # buckets say themselves what they do
            return self.device.capture(step, inputs, traced)
        with self.ranks.log.capturing() as issued:

            def noted(*inputs: Tensor) -> Tensor:
                issued.clear()  # it is run to warm up first; the graph is the last run
                return step(*inputs)

            replay = self.device.capture(noted, inputs, traced)
        self._issued[shape] = issued
        return replay

    def _capture_behind(self, shape: BatchShape, replay: Callable[[], Tensor]) -> None:
        if self.speculator is None:
            self.samples.capture(shape, replay)
        else:
            self.speculator.capture(shape, replay, self._head_caches)

    @property
    def _head_caches(self) -> list[LayerCache]:
        return self.caches[-2 * self.num_drafts :]

    # -- sample ----------------------------------------------------------------------------------------------------

    def launch_sample(self, pending: PendingForward, table: RequestTable) -> SampleResult:
        """See :meth:`engine.sample_launcher.SampleLauncher.launch`."""
        return self.samples.launch(pending, table)

    def launch_verify(self, pending: PendingForward, table: RequestTable) -> Verified:
        """See :meth:`engine.speculative.Speculator.launch_verify`."""
        assert self.speculator is not None
        return self.speculator.launch_verify(pending, table)

    def launch_draft(self, verified: Verified, table: RequestTable, num_rows: int = 0) -> None:
        """See :meth:`engine.speculative.Speculator.launch_draft`."""
        assert self.speculator is not None
        self.speculator.launch_draft(verified, table, self._head_caches, num_rows)

    def launch_dummy_draft(self, num_rows: int) -> None:
        """See :meth:`engine.speculative.Speculator.launch_dummy`."""
        assert self.speculator is not None
        self.speculator.launch_dummy(num_rows, self._head_caches)

    # -- resolve ---------------------------------------------------------------------------------------------------

    def launch_moves(self, moves: Moves) -> None:
        """Let the device's columns follow the table's compaction, behind whatever is launched."""
        count = moves.source.size
        if count == 0:
            return
        half = self.move_slab.acquire()
        half.fields["moves"][0, :count] = moves.source
        half.fields["moves"][1, :count] = moves.target

        def work() -> None:
            half.upload()
            pairs = self.move_slab.device_fields["moves"]
            self.columns.move(pairs[0, :count], pairs[1, :count])

        self._launch(self.device.compute, "compact", work)
        half.copied = self.device.compute.record()

    def recapture(self, traced: TracedForwards, progress: CaptureProgress | None = None) -> None:
        """Capture every size anew, as :meth:`capture`; those of before are let go of."""
        self._let_go_of_graphs()
        self.capture(traced, progress)

    def _let_go_of_graphs(self) -> None:
        self.graphs = self._graph_set(self.graphs.sizes)
        self.samples.clear()
        self._issued.clear()
        if self.speculator is not None:
            self.speculator.clear()
        self.graph_memory_bytes = 0

    # -- memory ----------------------------------------------------------------------------------------------------

    @property
    def kept_routing(self) -> Tensor | None:
        """[num_blocks + 1, block_size, L, K] int16, see :mod:`engine.routing_replay`; None while caches are let go of.

        None as well where nothing is recorded.
        """
        return None if self._routing is None or not self.caches else self.caches[-2 * self.num_drafts - 1][0]

    @property
    def cache_tensors(self) -> tuple[Tensor, ...]:
        """Of all layers, as :data:`engine.models.base.LayerCache`; empty while they are let go of."""
        return self._flat_caches

    @property
    def are_paged(self) -> tuple[bool, ...]:
        """Of each of :attr:`cache_tensors`, whether blocks index it; slots index the others."""
        return self._is_paged

    def let_go(self) -> None:
        """Give the memory of caches, graphs, planner and wide columns back; nothing may be in flight.

        Nothing may be launched before :meth:`take_again`. What they held is lost.
        """
        self.caches, self._flat_caches = [], ()
        self.planner = None
        self._let_go_of_graphs()
        for name in WIDE_COLUMNS:
            setattr(self.columns, name, None)
        self.device.give_memory_back()

    def take_again(self, traced: TracedForwards, progress: CaptureProgress | None = None) -> None:
        """Make caches, zeroed, and capture graphs, as at first; blocks.

        Raises:
            ConfigError: memory cannot be had; nothing is held then, and it can be tried again.
        """
        try:
            self.caches = self._make_caches()
            self._flat_caches = tuple(tensor for layer in self.caches for tensor in layer)
            self.planner = self._make_planner()
            self.device.synchronize()  # they were filled on another stream
            self.capture(traced, progress)
        except BaseException:
            self.let_go()
            raise

    def release(self) -> None:
        """Let go of what takes memory; nothing may be launched afterwards."""
        self.caches.clear()
        self._flat_caches = ()
        self.graphs.clear()
        self.samples.clear()
        self.planner = None


def _request_ids(table: RequestTable, rows: Rows) -> tuple[str, ...]:
    requests = [table.requests[row] for row in rows.tolist()]
    return tuple(request.request_id for request in requests if request is not None)
