"""Runs what the phases decide: stages a step's inputs, launches forwards, sampling and row moves, returns results.

Everything here launches and nothing waits, but for :meth:`SampleResult.wait`, which the controller calls in resolve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchDimensions, BatchShape, ForwardBatch
from engine.columns import NUM_FLOATS, NUM_INTS, DeviceColumns, WideRows, row_floats, row_ints
from engine.config import ResolvedConfig
from engine.device import Device, Event, Stream
from engine.graphs import graph_list, kv_bucket, kv_buckets, match_graph
from engine.models.base import LayerCache, Model
from engine.request import Request
from engine.sampling.base import Sampled, Sampler, SamplingNeeds
from engine.sampling.logprobs import prompt_logprobs
from engine.staging import Field, HostSlab, Slab
from engine.table import Moves, RequestTable, Rows
from tracing.recorder import Recorder


PromptValues = tuple[Tensor, Tensor, Tensor]
"""Chosen log probability [L], top ids [L, n], top log probabilities [L, n] of a prompt's tokens but the first."""


@dataclass(slots=True)
class PromptRow:
    """A prefill row whose prompt log probabilities are wanted: its part of the extra logits rows."""

    request: Request
    start: int
    """First extra logits row."""
    count: int
    """Prompt tokens but the first."""
    num_logprobs: int


@dataclass(slots=True)
class Logits:
    """Filled by the forward in stream order; only launched work may look inside."""

    rows: Tensor | None = None
    """[N, V], one row a real batch row, padding behind."""
    prompt: Tensor | None = None
    """[extra, V] of rows that want prompt log probabilities."""


@dataclass(slots=True)
class Plan:
    """What ``prepare`` decided and staged, and ``forward`` launches."""

    table_rows: Rows
    """[n] table row of each real batch row, decode before prefill."""
    dims: BatchDimensions
    """Real size."""
    graph: BatchDimensions | None
    """The captured size it runs in; None is eager."""
    miss_reason: str | None
    shape: BatchShape
    """Size launched, padding included."""
    half: HostSlab
    new_rows: int
    new_blocks: int
    wide: WideRows | None
    prompt_rows: list[PromptRow]
    extra_idx: Tensor | None
    extra_targets: Tensor | None


@dataclass(slots=True)
class PendingForward:
    """A launched forward whose logits have not been sampled (I25, I26)."""

    iteration: int
    plan: Plan
    logits: Logits
    table_rows: Rows
    """[n] table row now of each batch row, -1 once dropped. Kept up by every compaction."""
    keys: NDArray[np.int64]
    """[n] the generation each batch row belongs to."""
    request_ids: tuple[str, ...]
    launched: Event | None = None

    @property
    def dims(self) -> BatchDimensions:
        """Real size at launch."""
        return self.plan.dims

    @property
    def has_prefill(self) -> bool:
        """Whether it holds prefill rows."""
        return self.plan.dims.num_prefill > 0


@dataclass(slots=True)
class SampleResult:
    """One sampling's results on their way to the host. Arrays may be read after :meth:`wait` (I30)."""

    pending: PendingForward
    first_row: int
    num_rows: int
    keys: NDArray[np.int64]
    """[num_rows] generation of each sampled row; what comes back belongs to it or to nobody (I26)."""
    num_logprobs: int | None
    ready: Event
    buffers: ResultBuffers
    prompt_values: list[PromptValues]
    """On the host once ready: one entry a row of ``pending.plan.prompt_rows``."""
    on_device: list[PromptValues]
    """Keeps the sources of the copies alive until they have run."""

    def wait(self) -> None:
        """Block until the copies have arrived.

        Raises:
            DeviceError: the forward, the sampler or a copy raised.
        """
        self.ready.wait()


class ResultBuffers:
    """One of two sets of fixed device and host tensors that sampling results pass through."""

    def __init__(self, device: Device, max_requests: int) -> None:
        self._device = device
        self._rows = max_requests
        self.ints = (device.zeros((3, max_requests), torch.int64), device.host((3, max_requests), torch.int64))
        """token id, bad, near boundary."""
        self.chosen = (device.zeros(max_requests, torch.float32), device.host(max_requests, torch.float32))
        self.top_ids = self._pair(1, torch.int64)
        self.top_values = self._pair(1, torch.float32)

    def _pair(self, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._device.zeros((self._rows, width), dtype), self._device.host((self._rows, width), dtype)

    def widen(self, num_logprobs: int) -> None:
        """Make room for ``num_logprobs`` top ids; the set must not be in flight."""
        if num_logprobs > self.top_ids[0].shape[1]:
            self.top_ids = self._pair(num_logprobs, torch.int64)
            self.top_values = self._pair(num_logprobs, torch.float32)

    def store(self, sampled: Sampled, count: int) -> None:
        """Device side: keep a sampling's outputs."""
        ints = self.ints[0]
        ints[0, :count] = sampled.token_ids
        ints[1, :count] = sampled.bad
        ints[2, :count] = sampled.near_boundary
        if sampled.chosen_logprob is not None:
            self.chosen[0][:count] = sampled.chosen_logprob
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            width = sampled.top_ids.shape[1]
            self.top_ids[0][:count, :width] = sampled.top_ids
            self.top_values[0][:count, :width] = sampled.top_logprobs

    def fetch(self, num_logprobs: int | None) -> None:
        """Copy stream: device to host."""
        self.ints[1].copy_(self.ints[0], non_blocking=True)
        if num_logprobs is not None:
            self.chosen[1].copy_(self.chosen[0], non_blocking=True)
            self.top_ids[1].copy_(self.top_ids[0], non_blocking=True)
            self.top_values[1].copy_(self.top_values[0], non_blocking=True)


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
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        config = resolved.config
        self.resolved = resolved
        self.device = device
        self.model = model
        self.sampler = sampler
        self.recorder = recorder
        self.iteration = 0
        self.block_size = config.block_size
        self.dummy_block = resolved.num_blocks
        self.max_requests = config.max_requests
        self.caches = make_caches(model, device, resolved.num_blocks + 1, config.block_size)
        self.columns = DeviceColumns(
            device,
            max_requests=config.max_requests,
            max_blocks=resolved.max_blocks_per_row,
            dummy_block=self.dummy_block,
            vocab_size=resolved.vocab_size,
        )
        self.step_slab = Slab(device, _step_fields(config.max_requests, config.max_batch_tokens, config.block_size))
        self.index_slab = Slab(device, [Field("logits_row", (config.max_requests,), torch.int64)])
        self.move_slab = Slab(device, [Field("moves", (2, config.max_requests), torch.int64)])
        self._results = (ResultBuffers(device, config.max_requests), ResultBuffers(device, config.max_requests))
        self._next_result = 0
        self._needs: tuple[int, SamplingNeeds] | None = None
        self.graphs = graph_list(config, resolved.max_sequence_length)
        self._replays: dict[tuple[BatchDimensions, int], Callable[[], Tensor]] = {}
        self._capture_all(progress)

    def _launch(self, stream: Stream, name: str, work: Callable[[], None], sleep_s: float = 0.0) -> None:
        timing = stream.launch(work, timed=self.recorder.enabled, sleep_s=sleep_s)
        if timing is not None:
            self.recorder.device(name, stream.name, self.iteration, timing)

    # -- prepare ---------------------------------------------------------------------------------------------------

    def plan(self, table: RequestTable, table_rows: Rows, new: Sequence[Request], new_blocks: NewBlocks) -> Plan:
        """Stage the inputs of a forward over ``table_rows`` (decode before prefill); host only.

        ``kv_len`` of the rows must already count this forward's tokens. Blocks only if the staging half's last
        copy is still queued, which two halves prevent in a healthy run.
        """
        query_len = np.where(table.is_prefill[table_rows], table.prompt_len[table_rows], 1).astype(np.int64)
        num_prefill = int(np.count_nonzero(table.is_prefill[table_rows]))
        dims = BatchDimensions(
            num_tokens=int(query_len.sum()), num_prefill=num_prefill, num_decode=table_rows.size - num_prefill
        )
        prompt_rows = _prompt_rows(table, table_rows[dims.num_decode :])
        graph, miss_reason = self._match(dims, bool(prompt_rows))
        kv_blocks = int(table.block_count[table_rows].max())
        shape = self._shape(dims, graph, query_len, kv_blocks)
        half = self.step_slab.acquire()
        batch_rows = _batch_rows(dims, shape)
        self._stage_rows(half, table, table_rows, batch_rows, query_len, shape)
        self._stage_tokens(half, table, table_rows, batch_rows, query_len, shape)
        self._stage_new(half, new, new_blocks)
        extra_idx, extra_targets = self._stage_prompt_rows(half, batch_rows, dims, prompt_rows, table)
        rows_of_new = [request.row for request in new if request.row is not None]
        return Plan(
            table_rows=table_rows,
            dims=dims,
            graph=graph,
            miss_reason=miss_reason,
            shape=shape,
            half=half,
            new_rows=len(new),
            new_blocks=new_blocks.rows.size,
            wide=self.columns.stage_wide(new, rows_of_new, self.resolved.eos_token_ids) if new else None,
            prompt_rows=prompt_rows,
            extra_idx=extra_idx,
            extra_targets=extra_targets,
        )

    def _match(self, dims: BatchDimensions, has_prompt_rows: bool) -> tuple[BatchDimensions | None, str | None]:
        if not self.graphs:
            return None, "graphs are off"
        if has_prompt_rows:
            return None, "prompt log probabilities"
        graph = match_graph(dims, self.graphs)
        if graph is None:
            return None, "prefill not captured" if dims.num_prefill else "larger than every graph"
        return graph, None

    def _shape(
        self, dims: BatchDimensions, graph: BatchDimensions | None, query_len: NDArray[np.int64], kv_blocks: int
    ) -> BatchShape:
        size = graph or dims
        longest = int(query_len[dims.num_decode :].max()) if dims.num_prefill else 0
        if graph is not None:
            longest = graph.num_tokens - graph.num_decode if graph.num_prefill else 0
            kv_blocks = self.kv_columns(kv_blocks)
        return BatchShape(
            num_tokens=size.num_tokens,
            num_decode=size.num_decode,
            num_prefill=size.num_prefill,
            max_query_len=longest,
            num_kv_blocks=kv_blocks,
        )

    def kv_columns(self, kv_blocks: int) -> int:
        """Block-table columns a graph reads: all on CUDA, where lengths live on the device; a bucket on the CPU."""
        longest = self.resolved.max_blocks_per_row
        return longest if self.device.kind == "cuda" else kv_bucket(kv_blocks, longest)

    def _stage_rows(
        self,
        half: HostSlab,
        table: RequestTable,
        table_rows: Rows,
        batch_rows: Rows,
        query_len: NDArray[np.int64],
        shape: BatchShape,
    ) -> None:
        f, n = half.fields, shape.num_rows
        f["table_row"][:n] = self.columns.dummy_row
        f["table_row"][batch_rows] = table_rows
        f["kv_len"][:n] = 1
        f["kv_len"][batch_rows] = table.kv_len[table_rows]
        lengths = np.zeros(n, dtype=np.int64)
        lengths[: shape.num_decode] = 1
        lengths[batch_rows] = query_len
        starts = np.cumsum(lengths) - lengths
        f["query_len"][:n] = lengths
        f["query_start"][:n] = starts
        f["logits_idx"][:n] = 0
        f["logits_idx"][: table_rows.size] = (starts + lengths - 1)[batch_rows]

    def _stage_tokens(
        self,
        half: HostSlab,
        table: RequestTable,
        table_rows: Rows,
        batch_rows: Rows,
        query_len: NDArray[np.int64],
        shape: BatchShape,
    ) -> None:
        f, t = half.fields, shape.num_tokens
        f["token_ids"][:t] = 0
        f["positions"][:t] = 0
        f["token_row"][:t] = self.columns.dummy_row
        f["batch_row"][:t] = shape.num_rows - 1
        f["batch_row"][: shape.num_decode] = np.arange(shape.num_decode)
        starts = f["query_start"][batch_rows]
        ones = np.flatnonzero(~table.is_prefill[table_rows])
        at = starts[ones]
        f["token_ids"][at] = FROM_SAMPLE
        f["positions"][at] = table.kv_len[table_rows[ones]] - 1
        f["token_row"][at] = table_rows[ones]
        f["batch_row"][at] = batch_rows[ones]
        for i in np.flatnonzero(table.is_prefill[table_rows]).tolist():
            row, start, length = int(table_rows[i]), int(starts[i]), int(query_len[i])
            request = table.requests[row]
            assert request is not None
            f["token_ids"][start : start + length] = (*request.prompt_ids, *request.output_ids)
            f["positions"][start : start + length] = np.arange(length)
            f["token_row"][start : start + length] = row
            f["batch_row"][start : start + length] = batch_rows[i]

    def _stage_new(self, half: HostSlab, new: Sequence[Request], new_blocks: NewBlocks) -> None:
        f, m = half.fields, new_blocks.rows.size
        f["block_row"][:m] = new_blocks.rows
        f["block_col"][:m] = new_blocks.cols
        f["block_id"][:m] = new_blocks.ids
        if new:
            f["new_row"][: len(new)] = [request.row for request in new]
            f["new_ints"][: len(new)] = [row_ints(request) for request in new]
            f["new_floats"][: len(new)] = [row_floats(request.params) for request in new]

    def _stage_prompt_rows(
        self,
        half: HostSlab,
        batch_rows: Rows,
        dims: BatchDimensions,
        prompt_rows: Sequence[PromptRow],
        table: RequestTable,
    ) -> tuple[Tensor | None, Tensor | None]:
        if not prompt_rows:
            return None, None
        starts = half.fields["query_start"][batch_rows]
        place = {int(row): i for i, row in enumerate(half.fields["table_row"][batch_rows].tolist())}
        idx: list[NDArray[np.int64]] = []
        targets: list[int] = []
        for prompt in prompt_rows:
            start = int(starts[place[prompt.request.row or 0]])
            prompt.start = len(targets)
            idx.append(np.arange(start, start + prompt.count))
            targets.extend(prompt.request.prompt_ids[1:])
        return torch.from_numpy(np.concatenate(idx)), torch.tensor(targets, dtype=torch.int64)

    # -- forward ---------------------------------------------------------------------------------------------------

    def launch_forward(self, plan: Plan, table: RequestTable) -> PendingForward:
        """Publish the staged inputs and launch the forward behind them; returns at once."""
        logits = Logits()
        self._launch(self.device.compute, "publish", lambda: self._publish(plan))
        plan.half.copied = self.device.compute.record()
        work = self._replay_work(plan, logits) if plan.graph is not None else self._eager_work(plan, logits)
        self._launch(self.device.compute, "forward", work, self.resolved.config.op_sleep_s)
        requests = [table.requests[row] for row in plan.table_rows.tolist()]
        return PendingForward(
            iteration=self.iteration,
            plan=plan,
            logits=logits,
            table_rows=plan.table_rows.copy(),
            keys=table.key[plan.table_rows].copy(),
            request_ids=tuple(request.request_id for request in requests if request is not None),
        )

    def _publish(self, plan: Plan) -> None:
        self.step_slab.upload(plan.half)
        fields = self.step_slab.device_fields
        if plan.wide is not None:
            n = plan.new_rows
            self.columns.write_rows(fields["new_row"][:n], fields["new_ints"][:n], fields["new_floats"][:n], plan.wide)
        if plan.new_blocks:
            m = plan.new_blocks
            self.columns.add_blocks(fields["block_row"][:m], fields["block_col"][:m], fields["block_id"][:m])

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
        assert plan.graph is not None
        replay = self._replays[plan.graph, plan.shape.num_kv_blocks]

        def work() -> None:
            logits.rows = replay()

        return work

    def _step_inputs(self, shape: BatchShape) -> tuple[Tensor, ...]:
        f, t, n = self.step_slab.device_fields, shape.num_tokens, shape.num_rows
        caches = tuple(tensor for layer in self.caches for tensor in layer)
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
            *caches,
        )

    # -- graphs ----------------------------------------------------------------------------------------------------

    def _capture_all(self, progress: Callable[[int, int], None] | None) -> None:
        longest = self.resolved.max_blocks_per_row
        widths = [longest] if self.device.kind == "cuda" else kv_buckets(longest)
        jobs = [(dims, width) for dims in reversed(self.graphs) for width in reversed(widths)]
        for done, (dims, width) in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs))
            self._replays[dims, width] = self._capture(dims, width)
        if progress is not None and jobs:
            progress(len(jobs), len(jobs))

    def _capture(self, dims: BatchDimensions, width: int) -> Callable[[], Tensor]:
        shape = BatchShape(
            num_tokens=dims.num_tokens,
            num_decode=dims.num_decode,
            num_prefill=dims.num_prefill,
            max_query_len=dims.num_tokens - dims.num_decode if dims.num_prefill else 0,
            num_kv_blocks=width,
        )
        self._stage_padding(dims, shape)
        return self.device.capture(StepFunction(self.model, self.block_size, shape), self._step_inputs(shape))

    def _stage_padding(self, dims: BatchDimensions, shape: BatchShape) -> None:
        """Put a batch of padding alone on the device: capture then writes to the dummy block and nothing else."""
        nobody = np.zeros(0, dtype=np.int64)
        half = self.step_slab.acquire()
        table = RequestTable(1, 1)
        self._stage_rows(half, table, nobody, nobody, nobody, shape)
        self._stage_tokens(half, table, nobody, nobody, nobody, shape)
        if dims.num_prefill:
            first = shape.num_decode
            half.fields["query_len"][first] = shape.num_tokens - first
            half.fields["query_start"][first + 1 : shape.num_rows] = shape.num_tokens
            half.fields["kv_len"][first] = shape.num_tokens - first
            half.fields["batch_row"][first : shape.num_tokens] = first
        self.device.compute.launch(lambda: self.step_slab.upload(half))
        half.copied = self.device.compute.record()
        half.copied.wait()

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
        if source is None:
            logits = logits[:count]
        else:
            self.index_slab.upload(source)
            logits = logits.index_select(0, self.index_slab.device_fields["logits_row"][:count])
        rows = self.columns.sampling_rows(first, end, needs)
        sampled = self.sampler.sample(logits, rows, needs)
        self.sampler.accept(rows, sampled)
        buffers.store(sampled, count)
        self.columns.last_token[first:end] = sampled.token_ids
        rows.position.add_(1)
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
            self.move_slab.upload(half)
            pairs = self.move_slab.device_fields["moves"]
            self.columns.move(pairs[0, :count], pairs[1, :count])

        self._launch(self.device.compute, "compact", work)
        half.copied = self.device.compute.record()


FROM_SAMPLE = -1
"""In ``token_ids``: take the row's newest sampled token, which is on the device only."""


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Block-table entries that the device does not know yet, [m] each."""

    rows: Rows
    cols: Rows
    ids: NDArray[np.int32]


class StepFunction:
    """One forward as a function of tensors alone, for a fixed shape: what is run eagerly, traced and captured."""

    def __init__(self, model: Model, block_size: int, shape: BatchShape) -> None:
        self._model = model
        self._block_size = block_size
        self._shape = shape
        self._tensors_a_layer = [len(state.shapes) for state in model.cache_layout()]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Logits, [L, V]; ``inputs`` as :meth:`Runner._step_inputs` gives them."""
        token_ids, positions, token_row, batch_row, table_row, query_start, query_len, kv_len, logits_idx = inputs[:9]
        last_token, block_table, *flat = inputs[9:]
        ids = torch.where(token_ids == FROM_SAMPLE, last_token.index_select(0, token_row), token_ids)
        column = torch.div(positions, self._block_size, rounding_mode="floor")
        block = block_table[token_row, column].to(torch.int64)
        batch = ForwardBatch(
            token_ids_T=ids,
            positions_T=positions,
            row_T=batch_row,
            slots_T=block * self._block_size + positions % self._block_size,
            block_table_NK=block_table.index_select(0, table_row)[:, : self._shape.num_kv_blocks].to(torch.int64),
            query_start_N=query_start,
            query_len_N=query_len,
            kv_len_N=kv_len,
            logits_idx_L=logits_idx,
            shape=self._shape,
        )
        return self._model(batch, _grouped(flat, self._tensors_a_layer))


def _grouped(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[LayerCache]:
    layers, at = [], 0
    for size in sizes:
        layers.append(tuple(flat[at : at + size]))
        at += size
    return layers


def make_caches(model: Model, device: Device, num_blocks: int, block_size: int) -> list[LayerCache]:
    """Zeroed cache tensors of every layer, [num_blocks, block_size, *per-token shape]."""
    return [
        tuple(
            device.zeros((num_blocks, block_size, *shape), dtype)
            for shape, dtype in zip(state.shapes, state.dtypes, strict=True)
        )
        for state in model.cache_layout()
    ]


def _step_fields(max_requests: int, max_tokens: int, block_size: int) -> list[Field]:
    rows = ("table_row", "query_start", "query_len", "kv_len", "logits_idx", "new_row")
    tokens = ("token_ids", "positions", "token_row", "batch_row")
    max_new_blocks = max_requests + -(-max_tokens // block_size)
    return [
        *(Field(name, (max_requests,), torch.int64) for name in rows),
        Field("new_ints", (max_requests, NUM_INTS), torch.int64),
        Field("new_floats", (max_requests, NUM_FLOATS), torch.float32),
        Field("block_row", (max_new_blocks,), torch.int64),
        Field("block_col", (max_new_blocks,), torch.int64),
        Field("block_id", (max_new_blocks,), torch.int32),
        *(Field(name, (max_tokens,), torch.int64) for name in tokens),
    ]


def _batch_rows(dims: BatchDimensions, shape: BatchShape) -> Rows:
    """Batch row of each real row: decode rows first, padding behind them, then prefill rows."""
    first_prefill = max(dims.num_decode, shape.num_decode)
    return np.concatenate(
        [np.arange(dims.num_decode), np.arange(first_prefill, first_prefill + dims.num_prefill)]
    ).astype(np.int64)


def _prompt_rows(table: RequestTable, prefill_rows: Rows) -> list[PromptRow]:
    """Prefill rows that still owe prompt log probabilities; a one-token prompt has none to compute."""
    found = []
    for row in prefill_rows.tolist():
        request = table.requests[row]
        assert request is not None
        wanted = request.params.prompt_logprobs
        if wanted is not None and not request.prompt_logprobs and len(request.prompt_ids) > 1:
            found.append(PromptRow(request, 0, len(request.prompt_ids) - 1, wanted))
    return found
