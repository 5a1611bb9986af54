"""Runs what the phases decide: stages a step's inputs, launches forwards, sampling and row moves, returns results.

Everything here launches and nothing waits, but for :meth:`SampleResult.wait`, which the controller calls in resolve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchDimensions, BatchShape
from engine.columns import LAST_TOKEN, POSITION, DeviceColumns
from engine.config import ResolvedConfig
from engine.device import Device, Stream, TracedForwards
from engine.graphs import GraphSet, graph_list
from engine.layout import Layout, NewBlocks
from engine.models.base import Model
from engine.plan import (
    Plan,
    batch_rows_of,
    restage_decode,
    rows_owing_prompt_logprobs,
    stage_new,
    stage_padding,
    stage_prompt_rows,
    stage_rows,
    stage_tokens,
    step_fields,
)
from engine.request import Request
from engine.results import Logits, PendingForward, PromptValues, ResultBuffers, SampleResult
from engine.sampling.base import Sampler, SamplingNeeds
from engine.sampling.logprobs import prompt_logprobs
from engine.staging import Field, HostSlab, Slab
from engine.step_function import StepFunction, make_caches
from engine.table import Moves, RequestTable, Rows
from tracing.recorder import Recorder


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
    ) -> None:
        config = resolved.config
        self.resolved = resolved
        self.device = device
        self.model = model
        self.sampler = sampler
        self.recorder = recorder
        self.iteration = 0
        self.block_size = config.block_size
        self.caches = make_caches(model, device, resolved.num_blocks + 1, config.block_size)
        self._flat_caches = tuple(tensor for layer in self.caches for tensor in layer)
        self.columns = DeviceColumns(
            device,
            max_requests=config.max_requests,
            max_blocks=resolved.max_blocks_per_row,
            dummy_block=resolved.num_blocks,
            vocab_size=resolved.vocab_size,
        )
        self.step_slab = Slab(device, step_fields(config.max_requests, config.max_batch_tokens, config.block_size))
        self.index_slab = Slab(device, [Field("logits_row", (config.max_requests,), torch.int64)])
        self.move_slab = Slab(device, [Field("moves", (2, config.max_requests), torch.int64)])
        self._results = (ResultBuffers(device, config.max_requests), ResultBuffers(device, config.max_requests))
        self._next_result = 0
        self._needs: tuple[int, SamplingNeeds] | None = None
        self._known_ids: tuple[int, Rows, tuple[str, ...]] | None = None
        self.graphs = GraphSet(
            graph_list(config, resolved.max_sequence_length),
            max_blocks=resolved.max_blocks_per_row,
            buckets_kv=device.kind != "cuda",
        )
        device.synchronize()  # weights and buffers were filled on other streams

    def _launch(self, stream: Stream, name: str, work: Callable[[], None], sleep_s: float = 0.0) -> None:
        sleep_s += self.device.op_sleep_s.get(name, 0.0)
        timing = stream.launch(work, timed=self.recorder.enabled, sleep_s=sleep_s)
        if timing is not None:
            self.recorder.device(name, stream.name, self.iteration, timing)

    # -- prepare ---------------------------------------------------------------------------------------------------

    def plan(self, table: RequestTable, table_rows: Rows, new: Sequence[Request], new_blocks: NewBlocks) -> Plan:
        """Stage the inputs of a forward over ``table_rows`` (decode before prefill); host only.

        ``kv_len`` of the rows must already count this forward's tokens. Blocks only if the staging half's last
        copy is still queued, which two halves prevent in a healthy run.
        """
        is_prefill = table.is_prefill[table_rows]
        query_len = np.where(is_prefill, table.prompt_len[table_rows], 1).astype(np.int64)
        num_prefill = int(np.count_nonzero(is_prefill))
        dims = BatchDimensions(
            num_tokens=int(query_len.sum()), num_prefill=num_prefill, num_decode=table_rows.size - num_prefill
        )
        prompt_rows = rows_owing_prompt_logprobs(table, table_rows[dims.num_decode :])
        graph, miss_reason = (None, "prompt log probabilities") if prompt_rows else self.graphs.match(dims)
        shape = self._shape(dims, graph, query_len, int(table.block_count[table_rows].max()))
        layout = Layout(table_rows, batch_rows_of(dims, shape), query_len, shape)
        half = self.step_slab.acquire()
        if num_prefill or not restage_decode(half, table, layout):
            half.layout = None  # until all of it is staged: an interrupt in between must not leave a half that lies
            stage_rows(half, table, layout, self.columns.dummy_row)
            stage_tokens(half, table, layout, self.columns.dummy_row)
            half.layout = None if num_prefill else layout
        stage_new(half, new, new_blocks)
        extra_idx, extra_targets = stage_prompt_rows(half, layout, prompt_rows)
        rows_of_new = [request.row for request in new if request.row is not None]
        return Plan(
            table_rows=table_rows,
            dims=dims,
            graph=graph,
            miss_reason=miss_reason,
            shape=shape,
            half=half,
            new_rows=len(new),
            new_blocks=new_blocks,
            wide=self.columns.stage_wide(new, rows_of_new, self.resolved.eos_token_ids) if new else None,
            prompt_rows=prompt_rows,
            extra_idx=extra_idx,
            extra_targets=extra_targets,
        )

    def _shape(
        self, dims: BatchDimensions, graph: BatchDimensions | None, query_len: NDArray[np.int64], kv_blocks: int
    ) -> BatchShape:
        if graph is not None:
            return self.graphs.shape(graph, kv_blocks)
        return BatchShape(
            num_tokens=dims.num_tokens,
            num_decode=dims.num_decode,
            num_prefill=dims.num_prefill,
            max_query_len=int(query_len[dims.num_decode :].max()) if dims.num_prefill else 0,
            num_kv_blocks=kv_blocks,
        )

    # -- forward ---------------------------------------------------------------------------------------------------

    def launch_forward(self, plan: Plan, table: RequestTable) -> PendingForward:
        """Publish the staged inputs and launch the forward behind them; returns at once."""
        logits = Logits()
        self._launch(self.device.compute, "publish", lambda: self._publish(plan))
        plan.half.copied = self.device.compute.record()
        work = self._replay_work(plan, logits) if plan.graph is not None else self._eager_work(plan, logits)
        self._launch(self.device.compute, "forward", work, self.resolved.config.op_sleep_s)
        return PendingForward(
            iteration=self.iteration,
            plan=plan,
            logits=logits,
            table_rows=plan.table_rows.copy(),
            keys=table.key[plan.table_rows].copy(),
            request_ids=self._request_ids(table, plan.table_rows),
        )

    def _request_ids(self, table: RequestTable, rows: Rows) -> tuple[str, ...]:
        """The requests in ``rows``; in steady decode the same tuple step after step."""
        known = self._known_ids
        if known is None or known[0] != table.version or not np.array_equal(known[1], rows):
            requests = [table.requests[row] for row in rows.tolist()]
            ids = tuple(request.request_id for request in requests if request is not None)
            known = self._known_ids = (table.version, rows, ids)
        return known[2]

    def _publish(self, plan: Plan) -> None:
        plan.half.upload()
        fields = self.step_slab.device_fields
        if plan.wide is not None:
            n = plan.new_rows
            self.columns.write_rows(fields["new_row"][:n], fields["new_ints"][:n], fields["new_floats"][:n], plan.wide)
        if m := plan.new_blocks.rows.size:
            entries = fields["block_row"][:m], fields["block_col"][:m], fields["block_id"][:m]
            self.columns.add_blocks(*entries, plan.new_blocks)

    def _eager_work(self, plan: Plan, logits: Logits) -> Callable[[], None]:
        step = StepFunction(self.model, self.block_size, plan.shape)
        inputs = self._step_inputs(plan.shape)
        extra = plan.extra_idx

        def work() -> None:
            if extra is None:
                logits.rows = step(*inputs)
                return
            rows = plan.shape.num_rows
            wider = (*inputs[:8], torch.cat([inputs[8], extra.to(inputs[8].device, non_blocking=True)]), *inputs[9:])
            out = step(*wider)
            logits.rows, logits.prompt = out[:rows], out[rows:]

        return work

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
            f["logits_idx"][:n],
            self.columns.last_token,
            self.columns.block_table,
            *self._flat_caches,
        )

    # -- graphs ----------------------------------------------------------------------------------------------------

    def capture(self, traced: TracedForwards, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every size of the graph list; blocks. To be called before anything is launched."""
        shapes = self.graphs.shapes()
        for done, shape in enumerate(shapes):
            if progress is not None:
                progress(done, len(shapes))
            half = self.step_slab.acquire()
            stage_padding(half, shape, self.columns.dummy_row)
            self.device.compute.launch(half.upload)
            half.copied = self.device.compute.record()
            half.copied.wait()
            step = StepFunction(self.model, self.block_size, shape)
            self.graphs.add(shape, self.device.capture(step, self._step_inputs(shape), traced))
        if progress is not None and shapes:
            progress(len(shapes), len(shapes))

    # -- sample ----------------------------------------------------------------------------------------------------

    def launch_sample(self, pending: PendingForward, table: RequestTable) -> SampleResult:
        """Sample the pending logits for every active row and start the copy of the result; returns at once."""
        first, end = table.num_paused, table.num_live
        needs = self._sampling_needs(table)
        source = self._stage_logits_rows(pending, first, end)
        buffers = self._results[self._next_result]
        self._next_result ^= 1
        if needs.num_logprobs is not None:
            buffers.widen(needs.num_logprobs)
        values: list[PromptValues] = []
        fetched: list[PromptValues] = []
        self._launch(
            self.device.compute, "sample", lambda: self._sample(pending, first, end, needs, source, buffers, values)
        )
        if source is not None:
            source.copied = self.device.compute.record()
        sampled = self.device.compute.record()
        self.device.copy.wait_for(sampled)
        self._launch(self.device.copy, "fetch", lambda: self._fetch(buffers, needs, values, fetched))
        return SampleResult(
            pending=pending,
            first_row=first,
            num_rows=end - first,
            keys=table.key[first:end].copy(),
            num_logprobs=needs.num_logprobs,
            ready=self.device.copy.record(),
            buffers=buffers,
            prompt_values=fetched,
            on_device=values,
        )

    def _sampling_needs(self, table: RequestTable) -> SamplingNeeds:
        if self._needs is None or self._needs[0] != table.version:
            params = [request.params for request in table.live_requests()]
            processed = self.resolved.config.logprobs_mode == "processed"
            self._needs = (table.version, SamplingNeeds.of(params, processed))
        return self._needs[1]

    def _stage_logits_rows(self, pending: PendingForward, first: int, end: int) -> HostSlab | None:
        """Which logits row each table row samples from; None where they agree, and nothing needs sending."""
        rows = pending.table_rows
        count = end - first
        if rows.size >= count and np.array_equal(rows[:count], np.arange(first, end)):
            return None
        half = self.index_slab.acquire()
        live = rows >= 0
        half.fields["logits_row"][rows[live] - first] = np.flatnonzero(live)
        return half

    def _sample(
        self,
        pending: PendingForward,
        first: int,
        end: int,
        needs: SamplingNeeds,
        source: HostSlab | None,
        buffers: ResultBuffers,
        values: list[PromptValues],
    ) -> None:
        logits, count = pending.logits.rows, end - first
        assert logits is not None
        sources = None
        if source is not None:
            source.upload()
            sources = self.index_slab.device_fields["logits_row"][:count]
        columns = self.columns.rows(first, end)
        if not self.sampler.draw_in_place(logits, sources, columns, buffers.ints[0], needs):
            logits = logits[:count] if sources is None else logits.index_select(0, sources)
            rows = self.columns.sampling_rows(first, end, needs)
            sampled = self.sampler.sample(logits, rows, needs)
            self.sampler.accept(rows, sampled)
            buffers.store(sampled, count)
            columns.ints[:, LAST_TOKEN] = sampled.token_ids
            columns.ints[:, POSITION] += 1
        self._sample_prompts(pending, values)

    def _sample_prompts(self, pending: PendingForward, values: list[PromptValues]) -> None:
        if pending.logits.prompt is None or pending.plan.extra_targets is None:
            return
        targets = pending.plan.extra_targets.to(pending.logits.prompt.device, non_blocking=True)
        for prompt in pending.plan.prompt_rows:
            part = slice(prompt.start, prompt.start + prompt.count)
            values.append(prompt_logprobs(pending.logits.prompt[part], targets[part], prompt.num_logprobs))

    def _fetch(
        self,
        buffers: ResultBuffers,
        needs: SamplingNeeds,
        values: list[PromptValues],
        fetched: list[PromptValues],
    ) -> None:
        buffers.fetch(needs.num_logprobs)
        for chosen, top_ids, top_values in values:
            fetched.append((self._to_host(chosen), self._to_host(top_ids), self._to_host(top_values)))

    def _to_host(self, source: Tensor) -> Tensor:
        return self.device.host(tuple(source.shape), source.dtype).copy_(source, non_blocking=True)

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

    def release(self) -> None:
        """Let go of what takes memory; nothing may be launched afterwards."""
        self.caches.clear()
        self._flat_caches = ()
        self.graphs.clear()
