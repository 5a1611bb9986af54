"""Verifying drafts and making new ones, on the device: what stands in place of sampling with draft heads.

Every row of a pending forward has as many logits rows as tokens: the newest token's, and one for each draft, which tell
what may follow it. From each, in turn, a token is drawn with the request's own parameters, seed and position, as if
there were no drafts; a draft is accepted if it is the token drawn before it. So what is emitted are plain draws of the
model, and acceptance changes no token (I41); it only says how many come of one forward.

Drafts are drawn with the same parameters and the same uniform as the token they foresee: where the head's distribution
is the model's, they are the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.batch import BatchShape
from engine.columns import LAST_TOKEN, POSITION, DeviceColumns
from engine.config import ResolvedConfig
from engine.device import Device, Event, Work
from engine.draft_passes import Draw, draft_pass, draw_plain, verify_plain
from engine.models.base import DraftingModel, LayerCache
from engine.parallel.log import Issuing
from engine.parallel.ranks import Ranks
from engine.request import SamplingParams
from engine.results import PendingForward, PromptValues, ResultBuffers
from engine.sample_launcher import Launch, fetch_prompts, sample_prompts
from engine.sampling.base import RowColumns, Sampler, SamplingNeeds
from engine.staging import Field, HostSlab, Slab
from engine.table import RequestTable


@dataclass(slots=True)
class Verified:
    """A verification's results on their way to the host.

    Letters: W = drafts + 1 tokens a row at most, n rows.
    """

    pending: PendingForward
    first_row: int
    num_rows: int
    version: int
    """Of the table when it was launched."""
    keys: NDArray[np.int64]
    """[n] generation of each row."""
    num_drafts: NDArray[np.int64]
    """[n] drafts of each row that were verified: all or, where its prompt was read, none."""
    num_logprobs: int | None
    accepted_ready: Event
    """Behind the copy of the accepted counts."""
    ready: Event
    """Behind all copies."""
    buffers: VerifyBuffers
    prompt_values: list[PromptValues]
    on_device: list[PromptValues]

    @property
    def has_decode(self) -> bool:
        """Whether anything could be accepted at all."""
        return bool(self.num_drafts.any())

    def accepted(self) -> NDArray[np.int64]:
        """[n] accepted drafts of each row; waits for them, and for nothing behind them.

        Raises:
            DeviceError: the forward or the verification raised.
        """
        self.accepted_ready.wait()
        return self.buffers.accepted_view[: self.num_rows].copy()

    def foreseen(self) -> NDArray[np.int64]:
        """[W - 1, n] the drafts that were verified, -1 where a row had none; a copy, to be made behind :meth:`wait`."""
        drafts = self.buffers.foreseen_view[:, : self.num_rows]
        return np.where(np.arange(len(drafts))[:, None] < self.num_drafts, drafts, -1)

    def wait(self) -> None:
        """Block until everything has arrived.

        Raises:
            DeviceError: the forward, the sampler or a copy raised.
        """
        self.ready.wait()


class VerifyBuffers:
    """One of two sets of fixed tensors that verifications pass through: one :class:`ResultBuffers` a token."""

    def __init__(self, device: Device, max_requests: int, width: int) -> None:
        self.steps = [ResultBuffers(device, max_requests) for _ in range(width)]
        self.tokens = (
            device.zeros((width, 4, max_requests), torch.int64),
            device.host((width, 4, max_requests), torch.int64),
        )
        """[W, 4, R] token id, bad, near boundary, draft in its place: what is fetched of plain rows, in one piece."""
        self.tokens_view = self.tokens[1].numpy()
        """The same on the host; a step's ``ints_view`` is the part of its place."""
        self.results = self.tokens[0][:, :3]
        self.foreseen = self.tokens[0][:-1, 3]
        """[W - 1, R] verified drafts, whatever a row without any has there."""
        self.foreseen_view = self.tokens_view[:-1, 3]
        for i, step in enumerate(self.steps):
            step.ints = (self.tokens[0][i], self.tokens[1][i])
            step.ints_view = self.tokens_view[i]
        self.accepted = (device.zeros(max_requests, torch.int64), device.host(max_requests, torch.int64))
        self.accepted_view = self.accepted[1].numpy()

    def fetch_accepted(self) -> None:
        """Copy stream: the counts to the host."""
        self.accepted[1].copy_(self.accepted[0], non_blocking=True)

    def fetch(self, num_logprobs: int | None) -> None:
        """Copy stream: everything else to the host."""
        if num_logprobs is None:
            self.tokens[1].copy_(self.tokens[0], non_blocking=True)
            return
        for step in self.steps:
            step.fetch(num_logprobs)


class Speculator:
    """Owns the buffers of verifications and runs the draft heads; waits for nothing."""

    def __init__(
        self,
        *,
        resolved: ResolvedConfig,
        device: Device,
        model: DraftingModel,
        columns: DeviceColumns,
        sampler: Sampler,
        launch: Launch,
        ranks: Ranks | None = None,
    ) -> None:
        config = resolved.config
        self.columns = columns
        self.sampler = sampler
        self._device = device
        self._model = model
        self._launch = launch
        self._ranks = ranks
        self._width = config.decode_width
        self._block_size = config.block_size
        self._processed = resolved.config.logprobs_mode == "processed"
        self._needs: tuple[tuple[int, int, int], tuple[SamplingNeeds, SamplingNeeds]] | None = None
        fields = [Field("logits_row", (config.max_requests, self._width), torch.int64)]
        fields += [Field(name, (config.max_requests,), torch.int64) for name in ("num_drafts", "row")]
        self.index_slab = Slab(device, fields)
        rows = config.max_requests
        self._buffers = tuple(VerifyBuffers(device, rows, self._width) for _ in range(2))
        self._next = 0
        self._verify_graphs: dict[tuple[BatchShape, bool, int], Work] = {}
        """By the forward's shape, whether all rows are greedy, and the buffers."""
        self._draft_graphs: dict[tuple[BatchShape, bool], Work] = {}

    # -- verify ----------------------------------------------------------------------------------------------------

    def launch_verify(self, pending: PendingForward, table: RequestTable) -> Verified:
        """Draw from the pending logits and start the copies; returns at once. Partial rows are left out."""
        first, end = table.num_paused, table.num_paused + pending.num_sampled
        needs, _ = self._sampling_needs(table, first, end)
        half, num_drafts = self._stage(pending, first, end)
        number, buffers = self._next, self._buffers[self._next]
        self._next ^= 1
        if needs.num_logprobs is not None:
            for step in buffers.steps:
                step.widen(needs.num_logprobs)
        values: list[PromptValues] = []
        fetched: list[PromptValues] = []
        compute, copy = self._device.compute, self._device.copy
        graph = None
        if needs.is_plain and pending.logits.in_graph:
            graph = self._verify_graphs.get((pending.plan.shape, needs.all_greedy, number))
        work = graph or partial(self._verify, pending, first, end, needs, buffers, values)
        self._launch(compute, "verify", lambda: (half.upload(), work()))
        verified = half.copied = compute.record()
        copy.wait_for(verified)
        self._launch(copy, "fetch_accepted", buffers.fetch_accepted)
        accepted_ready = copy.record()
        self._launch(copy, "fetch", lambda: self._fetch(buffers, needs, values, fetched))
        return Verified(
            pending=pending,
            first_row=first,
            num_rows=end - first,
            version=table.version,
            keys=table.key[first:end].copy(),
            num_drafts=num_drafts,
            num_logprobs=needs.num_logprobs,
            accepted_ready=accepted_ready,
            ready=copy.record(),
            buffers=buffers,
            prompt_values=fetched,
            on_device=values,
        )

    def _sampling_needs(self, table: RequestTable, first: int, end: int) -> tuple[SamplingNeeds, SamplingNeeds]:
        """Of the rows' tokens, and of their drafts, of which nobody wants log probabilities."""
        key = (table.version, first, end)
        if self._needs is None or self._needs[0] != key:
            params = [request.params for request in table.requests[first:end] if request is not None]
            drafts = [one.replace(logprobs=None) if one.logprobs is not None else one for one in params]
            both = SamplingNeeds.of(params, self._processed), SamplingNeeds.of(drafts, self._processed)
            self._needs = (key, both)
        return self._needs[1]

    def _stage(self, pending: PendingForward, first: int, end: int) -> tuple[HostSlab, NDArray[np.int64]]:
        """The logits rows of each table row, one a token, and how many drafts it has."""
        rows, width, num_decode = pending.table_rows, self._width, pending.dims.num_decode
        half, padded = self.index_slab.acquire(), max(end - first, pending.plan.shape.num_decode)
        half.fields["logits_row"][:padded] = half.fields["num_drafts"][:padded] = 0
        half.fields["row"][:padded] = self.columns.dummy_row
        half.fields["row"][: end - first] = np.arange(first, end)
        live = np.flatnonzero((rows >= first) & (rows < end))
        at, is_decode = rows[live] - first, live < num_decode
        begin = np.where(is_decode, live * width, num_decode * width + live - num_decode)
        count = np.where(is_decode, width, 1)
        half.fields["logits_row"][at] = begin[:, None] + np.minimum(np.arange(width), count[:, None] - 1)
        num_drafts = np.zeros(end - first, dtype=np.int64)
        num_drafts[at] = count - 1
        half.fields["num_drafts"][: end - first] = num_drafts
        return half, num_drafts

    def _verify(
        self,
        pending: PendingForward,
        first: int,
        end: int,
        needs: SamplingNeeds,
        buffers: VerifyBuffers,
        values: list[PromptValues],
    ) -> None:
        if first == end:
            sample_prompts(pending, values)
            return
        logits, count, columns = pending.logits.rows, end - first, self.columns
        assert logits is not None
        if needs.is_plain:
            self._verify_plain(count, logits, needs, buffers)
            sample_prompts(pending, values)
            return
        assert columns.drafts is not None
        assert columns.length is not None
        assert columns.accepted is not None
        buffers.foreseen[:, :count] = columns.drafts[first:end].T
        fields = self.index_slab.device_fields
        index_nW, drafts_n = fields["logits_row"][:count], fields["num_drafts"][:count]
        ints = columns.ints[first:end]
        is_alive = torch.ones_like(drafts_n, dtype=torch.bool)
        accepted = torch.zeros_like(drafts_n)
        for i, step in enumerate(buffers.steps):
            rows = columns.sampling_rows(first, end, needs)
            sampled = self.sampler.sample(logits.index_select(0, index_nW[:, i]), rows, needs)
            self.sampler.accept(rows, sampled._replace(bad=sampled.bad | ~is_alive))
            step.store(sampled, count)
            ints[:, LAST_TOKEN] = torch.where(is_alive, sampled.token_ids, ints[:, LAST_TOKEN])
            ints[:, POSITION] += is_alive
            if i + 1 < self._width:
                is_borne_out = (sampled.token_ids == columns.drafts[first:end, i]) & ~sampled.bad
                is_alive = is_alive & is_borne_out & (i < drafts_n)
                accepted += is_alive
        buffers.accepted[0][:count] = accepted
        columns.length[first:end] += accepted + 1
        columns.accepted[first:end] = torch.where(drafts_n > 0, accepted, -1)
        sample_prompts(pending, values)

    def _verify_plain(self, count: int, logits: Tensor, needs: SamplingNeeds, buffers: VerifyBuffers) -> None:
        fields = self.index_slab.device_fields
        verify_plain(
            self.columns,
            fields["row"][:count],
            fields["logits_row"][:count],
            fields["num_drafts"][:count],
            logits,
            self.sampler,
            needs,
            buffers.results,
            buffers.foreseen,
            buffers.accepted[0],
        )

    def _fetch(
        self,
        buffers: VerifyBuffers,
        needs: SamplingNeeds,
        values: list[PromptValues],
        fetched: list[PromptValues],
    ) -> None:
        buffers.fetch(needs.num_logprobs)
        fetch_prompts(self._device, values, fetched)

    # -- draft -----------------------------------------------------------------------------------------------------

    def launch_draft(
        self, verified: Verified, table: RequestTable, caches: list[LayerCache], num_rows: int = 0
    ) -> None:
        """Let the draft heads foresee what follows each row's newest token; returns at once.

        Args:
            verified: Whose rows.
            table: They stand there as they did in :meth:`launch_verify`.
            caches: Of the heads: hidden states and entries of each, in turn.
            num_rows: With other ranks, for how many rows they run on all of them; padding is added.
        """
        first, end = verified.first_row, verified.first_row + verified.num_rows
        if first == end:
            return
        padding = max(0, num_rows - (end - first))
        _, needs = self._sampling_needs(table, first, end)
        work: Work | None = None
        is_as_wide = num_rows in (0, verified.pending.plan.shape.num_decode)
        if needs.is_plain and verified.pending.logits.in_graph and is_as_wide:
            work = self._draft_graphs.get((verified.pending.plan.shape, needs.all_greedy))
        if work is None:
            num_blocks = int(table.block_count[first:end].max())
            work = partial(self._draft, first, end, padding, num_blocks, needs, caches)
        self._launch(self._device.compute, "draft", work)

    def _draft(
        self, first: int, end: int, padding: int, num_blocks: int, needs: SamplingNeeds, caches: list[LayerCache]
    ) -> None:
        def draw(head: int, logits_nV: Tensor) -> Tensor:
            rows = self.columns.sampling_rows(first, end, needs)
            rows = rows._replace(position=rows.position + head)
            drawn = self.sampler.sample(logits_nV[: end - first], rows, needs).token_ids
            return functional.pad(drawn, (0, padding)) if padding else drawn

        rows_n = torch.arange(first, end, device=self.columns.ints.device)
        if padding:
            rows_n = functional.pad(rows_n, (0, padding), value=self.columns.dummy_row)
        self._draft_rows(rows_n, num_blocks, caches, draw)

    def launch_dummy(self, num_rows: int, caches: list[LayerCache]) -> None:
        """Run the draft heads for padding alone, since other ranks do; nothing is drawn, and nobody's rows change."""
        device, dummy_row = self.columns.ints.device, self.columns.dummy_row

        def draw(head: int, logits_nV: Tensor) -> Tensor:
            return torch.zeros(logits_nV.shape[0], dtype=torch.int64, device=logits_nV.device)

        def work() -> None:
            rows_n = torch.full((num_rows,), dummy_row, dtype=torch.int64, device=device)
            self._draft_rows(rows_n, 1, caches, draw)

        self._launch(self._device.compute, "dummy_draft", work)

    def _draft_rows(self, rows_n: Tensor, num_blocks: int, caches: list[LayerCache], draw: Draw) -> None:
        draft_pass(
            self._model,
            self.columns,
            rows_n,
            caches,
            draw,
            num_blocks=num_blocks,
            block_size=self._block_size,
            num_drafts=self._width - 1,
            is_shared=self._ranks is not None,
        )

    # -- graphs ----------------------------------------------------------------------------------------------------

    def capture(self, shape: BatchShape, replay: Callable[[], Tensor], caches: list[LayerCache]) -> None:
        """Capture verification and drafting of plain rows behind a captured decode forward; blocks.

        Nothing may be live yet: rows are drawn for.

        Args:
            shape: Of the forward; it has no prefill rows.
            replay: The forward, which returns its logits where they always lie.
            caches: As for :meth:`launch_draft`.
        """
        logits: list[Tensor] = []
        self._device.compute.launch(lambda: logits.append(replay()))
        self._stage_nobody(shape)
        for is_greedy in (True, False):
            needs = SamplingNeeds.of([SamplingParams(temperature=0.0 if is_greedy else 1.0)], self._processed)
            for number, buffers in enumerate(self._buffers):
                verify = self._captured_verify(shape, logits[0], needs, buffers)
                self._verify_graphs[shape, is_greedy, number] = verify
            self._draft_graphs[shape, is_greedy] = self._captured_draft(shape, needs, caches)

    def _stage_nobody(self, shape: BatchShape) -> None:
        half = self.index_slab.acquire()
        for name, value in (("logits_row", 0), ("num_drafts", 0), ("row", self.columns.dummy_row)):
            half.fields[name][: shape.num_decode] = value
        self._device.compute.launch(half.upload)
        half.copied = self._device.compute.record()

    def _captured_verify(self, shape: BatchShape, logits: Tensor, needs: SamplingNeeds, buffers: VerifyBuffers) -> Work:
        def verify(logits: Tensor) -> Tensor:
            self._verify_plain(shape.num_decode, logits, needs, buffers)
            return buffers.accepted[0]

        return self._device.capture(verify, (logits,), {})

    def _captured_draft(self, shape: BatchShape, needs: SamplingNeeds, caches: list[LayerCache]) -> Work:
        columns, count = self.columns, shape.num_decode
        rows_n = self.index_slab.device_fields["row"][:count]
        results = self._device.zeros((3, count), torch.int64)

        def draw(head: int, logits_nV: Tensor) -> Tensor:
            rows = RowColumns(columns.ints.index_select(0, rows_n), columns.floats.index_select(0, rows_n))
            rows.ints[:, POSITION] += head
            draw_plain(self.sampler, logits_nV, None, rows, results, needs)
            return results[0]

        def draft(rows_n: Tensor) -> Tensor:
            self._draft_rows(rows_n, columns.block_table.shape[1], caches, draw)
            return rows_n

        if self._ranks is None:
            return self._device.capture(draft, (rows_n,), {})
        with self._ranks.log.capturing() as issued:

            def noted(rows_n: Tensor) -> Tensor:
                issued.clear()  # it is run to warm up first; the graph is the last run
                return draft(rows_n)

            return Issuing(self._device.capture(noted, (rows_n,), {}), issued)

    def clear(self) -> None:
        """Forget what was captured."""
        self._verify_graphs.clear()
        self._draft_graphs.clear()
