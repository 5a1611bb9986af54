"""Verifying drafts and making new ones, on the device: what stands in place of sampling with draft heads.

Every row of a pending forward has as many logits rows as tokens: the newest token's, and one for each draft, which tell
what may follow it. From each, in turn, a token is drawn with the request's own parameters, seed and position, as if
there were no drafts; a draft is accepted if it is the token drawn before it. So what is emitted are plain draws of the
model, and acceptance changes no token (I41); it only says how many come of one forward.

Drafts are drawn with the same parameters and the same uniform as the token they foresee: where the head's distribution
is the model's, they are the same token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch
from engine.columns import LAST_TOKEN, POSITION, DeviceColumns
from engine.config import ResolvedConfig
from engine.device import Device, Event
from engine.models.base import DraftingModel, LayerCache
from engine.results import PendingForward, PromptValues, ResultBuffers
from engine.sample_launcher import Launch, fetch_prompts, sample_prompts
from engine.sampling.base import Sampler, SamplingNeeds
from engine.staging import Field, HostSlab, Slab
from engine.step_function import slots_before
from engine.table import RequestTable


@dataclass(slots=True)
class Verified:
    """A verification's results on their way to the host.

    Letters: W = drafts + 1 tokens a row at most, n rows.
    """

    pending: PendingForward
    first_row: int
    num_rows: int
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
        self.accepted = (device.zeros(max_requests, torch.int64), device.host(max_requests, torch.int64))
        self.accepted_view = self.accepted[1].numpy()

    def fetch(self, num_logprobs: int | None) -> None:
        """Copy stream: device to host, all but the counts."""
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
    ) -> None:
        config = resolved.config
        self.columns = columns
        self.sampler = sampler
        self._device = device
        self._model = model
        self._launch = launch
        self._width = config.decode_width
        self._block_size = config.block_size
        self._processed = resolved.config.logprobs_mode == "processed"
        self._needs: tuple[tuple[int, int, int], tuple[SamplingNeeds, SamplingNeeds]] | None = None
        fields = [Field("logits_row", (config.max_requests, self._width), torch.int64)]
        fields.append(Field("num_drafts", (config.max_requests,), torch.int64))
        self.index_slab = Slab(device, fields)
        rows = config.max_requests
        self._buffers = tuple(VerifyBuffers(device, rows, self._width) for _ in range(2))
        self._next = 0

    # -- verify ----------------------------------------------------------------------------------------------------

    def launch_verify(self, pending: PendingForward, table: RequestTable) -> Verified:
        """Draw from the pending logits and start the copies; returns at once. Partial rows are left out."""
        first, end = table.num_paused, table.num_paused + pending.num_sampled
        needs, _ = self._sampling_needs(table, first, end)
        half, num_drafts = self._stage(pending, first, end)
        buffers = self._buffers[self._next]
        self._next ^= 1
        if needs.num_logprobs is not None:
            for step in buffers.steps:
                step.widen(needs.num_logprobs)
        values: list[PromptValues] = []
        fetched: list[PromptValues] = []
        compute, copy = self._device.compute, self._device.copy
        self._launch(compute, "verify", lambda: self._verify(pending, first, end, needs, half, buffers, values))
        verified = half.copied = compute.record()
        copy.wait_for(verified)
        self._launch(copy, "fetch_accepted", lambda: buffers.accepted[1].copy_(buffers.accepted[0], non_blocking=True))
        accepted_ready = copy.record()
        self._launch(copy, "fetch", lambda: self._fetch(buffers, needs, values, fetched))
        return Verified(
            pending=pending,
            first_row=first,
            num_rows=end - first,
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
        half = self.index_slab.acquire()
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
        half: HostSlab,
        buffers: VerifyBuffers,
        values: list[PromptValues],
    ) -> None:
        half.upload()
        if first == end:
            sample_prompts(pending, values)
            return
        logits, count, columns = pending.logits.rows, end - first, self.columns
        assert logits is not None
        assert columns.drafts is not None
        assert columns.length is not None
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
        sample_prompts(pending, values)

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

    def launch_draft(self, verified: Verified, table: RequestTable, caches: list[LayerCache]) -> None:
        """Let the draft heads foresee what follows each row's newest token; returns at once.

        Args:
            verified: Whose rows.
            table: They stand there as they did in :meth:`launch_verify`.
            caches: Of the heads: hidden states and entries of each, in turn.
        """
        first, end = verified.first_row, verified.first_row + verified.num_rows
        if first == end:
            return
        _, needs = self._sampling_needs(table, first, end)
        num_blocks = int(table.block_count[first:end].max())
        self._launch(self._device.compute, "draft", lambda: self._draft(first, end, num_blocks, needs, caches))

    def _draft(self, first: int, end: int, num_blocks: int, needs: SamplingNeeds, caches: list[LayerCache]) -> None:
        columns, model = self.columns, self._model
        assert columns.drafts is not None
        assert columns.length is not None
        newest_n = columns.length[first:end] - 1
        tokens_nI = columns.ints[first:end, LAST_TOKEN][:, None]
        for head in range(self._width - 1):
            batch = self._draft_batch(first, end, num_blocks, newest_n, tokens_nI, first_key=head + 1)
            (states,), cache = caches[2 * head : 2 * head + 2]
            row_T = torch.arange(first, end, device=newest_n.device).repeat_interleave(head + 1)
            before_T = slots_before(batch.positions_T, row_T, columns.block_table, self._block_size)
            hidden_TE = model.draft(head, states.flatten(0, 1).index_select(0, before_T), batch, cache)
            if head + 2 < self._width:
                above = caches[2 * head + 2][0].flatten(0, 1)
                above.index_copy_(0, batch.slots_T, hidden_TE.to(above.dtype))
            logits_nV = model.draft_logits(head, hidden_TE.index_select(0, batch.logits_idx_L))
            rows = columns.sampling_rows(first, end, needs)
            drawn = self.sampler.sample(logits_nV, rows._replace(position=rows.position + head), needs)
            columns.drafts[first:end, head] = drawn.token_ids
            tokens_nI = torch.cat([tokens_nI, drawn.token_ids[:, None]], dim=1)

    def _draft_batch(
        self, first: int, end: int, num_blocks: int, newest_n: Tensor, tokens_nI: Tensor, *, first_key: int
    ) -> ForwardBatch:
        """The newest token of each row and the drafts behind it, so many as there are so far."""
        count, width = tokens_nI.shape
        device, table = newest_n.device, self.columns.block_table[first:end, :num_blocks]
        ones_n = torch.ones_like(newest_n)
        positions_T = (newest_n[:, None] + torch.arange(width, device=device)).flatten()
        row_T = torch.arange(count, device=device).repeat_interleave(width)
        column_T = torch.div(positions_T, self._block_size, rounding_mode="floor")
        inside_T = column_T < num_blocks
        block_T = table[row_T, column_T.clamp(max=num_blocks - 1)].to(torch.int64)
        block_T = torch.where(inside_T, block_T, self.columns.dummy_block)
        is_decode = width == 1
        return ForwardBatch(
            token_ids_T=tokens_nI.flatten(),
            positions_T=positions_T,
            row_T=row_T,
            slots_T=block_T * self._block_size + positions_T % self._block_size,
            block_table_NK=table.to(torch.int64),
            query_start_N=torch.arange(count, device=device) * width,
            query_len_N=ones_n * width,
            kv_len_N=newest_n + width,
            logits_idx_L=torch.arange(count, device=device) * width + width - 1,
            shape=BatchShape(
                num_tokens=count * width,
                num_decode=count if is_decode else 0,
                num_prefill=0 if is_decode else count,
                max_query_len=0 if is_decode else width,
                num_kv_blocks=num_blocks,
            ),
            first_key=first_key,
        )
