"""Launches the sampling of a pending forward and brings its results to the host; waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchShape
from engine.columns import LAST_TOKEN, POSITION, DeviceColumns
from engine.config import ResolvedConfig
from engine.device import Device, Stream, Timing, Work
from engine.request import SamplingParams
from engine.results import PendingForward, PromptValues, ResultBuffers, SampleResult
from engine.sampling.base import Sampler, SamplingNeeds
from engine.sampling.logprobs import prompt_logprobs
from engine.staging import Field, HostSlab, Slab
from engine.table import RequestTable


class Launch(Protocol):
    """Enqueues named work on a stream and lets the recorder know."""

    def __call__(self, stream: Stream, name: str, work: Work) -> Timing | None: ...


class SampleLauncher:
    """Owns the sampler, the buffers results pass through, and on CUDA the captured draws.

    A draw of plain rows (greedy, or by temperature alone) from a captured forward is a graph of its own: its kernels
    read that forward's logits where they always lie, and write rows that no request has in place of padding.
    """

    def __init__(
        self, *, resolved: ResolvedConfig, device: Device, columns: DeviceColumns, sampler: Sampler, launch: Launch
    ) -> None:
        max_requests = resolved.config.max_requests
        self.sampler = sampler
        self._device = device
        self.columns = columns
        self._launch = launch
        self._processed = resolved.config.logprobs_mode == "processed"
        self._needs: tuple[tuple[int, int, int], SamplingNeeds] | None = None
        self.index_slab = Slab(device, [Field("logits_row", (max_requests,), torch.int64)])
        self._results = (ResultBuffers(device, max_requests), ResultBuffers(device, max_requests))
        self._next_result = 0
        self._draws: dict[tuple[BatchShape, bool, int], Work] = {}
        """By the forward's shape, whether all rows are greedy, and the result buffers."""
        self._fetches: dict[int, Work] = {}
        """Copies of tokens alone, by the result buffers."""

    def launch(self, pending: PendingForward, table: RequestTable) -> SampleResult:
        """Sample the pending logits for every row of it that is there and start the copy; returns at once.

        A partial row is left out: its chunk's last token is not its prompt's, and no draw, count or position of its
        stream may come of it. Rows that entered since stand behind and are not in these logits.
        """
        first, end = table.num_paused, table.num_paused + pending.num_sampled
        needs = self._sampling_needs(table, first, end)
        source = self._stage_logits_rows(pending, first, end)
        number, buffers = self._next_result, self._results[self._next_result]
        self._next_result ^= 1
        if needs.num_logprobs is not None:
            buffers.widen(needs.num_logprobs)
        values: list[PromptValues] = []
        fetched: list[PromptValues] = []
        draw = None
        if source is None and first == 0 and needs.is_plain and pending.logits.in_graph:
            draw = self._draws.get((pending.plan.shape, needs.all_greedy, number))
        compute, copy = self._device.compute, self._device.copy
        self._launch(
            compute, "sample", draw or (lambda: self._sample(pending, first, end, needs, source, buffers, values))
        )
        sampled = compute.record()
        if source is not None:
            source.copied = sampled
        copy.wait_for(sampled)
        fetch = self._fetches.get(number) if needs.is_plain and pending.plan.extra_idx is None else None
        self._launch(copy, "fetch", fetch or (lambda: self._fetch(buffers, needs, values, fetched)))
        return SampleResult(
            pending=pending,
            first_row=first,
            num_rows=end - first,
            version=table.version,
            keys=table.key[first:end].copy(),
            num_logprobs=needs.num_logprobs,
            ready=copy.record(),
            buffers=buffers,
            prompt_values=fetched,
            on_device=values,
        )

    def _sampling_needs(self, table: RequestTable, first: int, end: int) -> SamplingNeeds:
        key = (table.version, first, end)
        if self._needs is None or self._needs[0] != key:
            params = [request.params for request in table.requests[first:end] if request is not None]
            self._needs = (key, SamplingNeeds.of(params, self._processed))
        return self._needs[1]

    def _stage_logits_rows(self, pending: PendingForward, first: int, end: int) -> HostSlab | None:
        """Which logits row each table row samples from; None where they agree, and nothing needs sending."""
        rows = pending.table_rows
        count = end - first
        if pending.is_in_order and rows.size >= count and (count == 0 or rows[0] == first):
            return None
        half = self.index_slab.acquire()
        live = (rows >= 0) & (rows < end)
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
        if count and not self.sampler.draw_in_place(logits, sources, columns, buffers.ints[0], needs):
            logits = logits[:count] if sources is None else logits.index_select(0, sources)
            rows = self.columns.sampling_rows(first, end, needs)
            sampled = self.sampler.sample(logits, rows, needs)
            self.sampler.accept(rows, sampled)
            buffers.store(sampled, count)
            columns.ints[:, LAST_TOKEN] = sampled.token_ids
            columns.ints[:, POSITION] += 1
        sample_prompts(pending, values)

    def _fetch(
        self,
        buffers: ResultBuffers,
        needs: SamplingNeeds,
        values: list[PromptValues],
        fetched: list[PromptValues],
    ) -> None:
        buffers.fetch(needs.num_logprobs)
        fetch_prompts(self._device, values, fetched)

    # -- graphs ----------------------------------------------------------------------------------------------------

    def capture_fetches(self) -> None:
        """Capture the copies of plain results: launching a graph costs the host less than a copy."""
        for number, buffers in enumerate(self._results):

            def fetch(buffers: ResultBuffers = buffers) -> Tensor:
                buffers.fetch(None)
                return buffers.ints[1]

            self._fetches[number] = self._device.capture(fetch, (), {})

    def capture(self, shape: BatchShape, replay: Callable[[], Tensor]) -> None:
        """Capture the plain draws from the logits of a captured decode forward; blocks. Nothing may be live yet.

        Does nothing where the sampler does not draw them in place.
        """
        for is_greedy in (True, False):
            needs = SamplingNeeds.of([SamplingParams(temperature=0.0 if is_greedy else 1.0)], self._processed)
            for number, buffers in enumerate(self._results):
                draw = self._captured_draw(shape, replay, needs, buffers)
                if draw is None:
                    return
                self._draws[shape, is_greedy, number] = draw

    def _captured_draw(
        self, shape: BatchShape, replay: Callable[[], Tensor], needs: SamplingNeeds, buffers: ResultBuffers
    ) -> Work | None:
        logits: list[Tensor] = []
        self._device.compute.launch(lambda: logits.append(replay()))
        columns = self.columns.rows(0, shape.num_decode)
        results = buffers.ints[0]
        done: list[bool] = []

        def draw(logits_NV: Tensor) -> Tensor:
            done.append(self.sampler.draw_in_place(logits_NV, None, columns, results, needs))
            return results

        self._device.compute.launch(lambda: draw(logits[0]))
        if not done[0]:
            return None
        return self._device.capture(draw, (logits[0],), {})

    def clear(self) -> None:
        """Forget what was captured."""
        self._draws.clear()
        self._fetches.clear()


def fetch_prompts(device: Device, values: list[PromptValues], fetched: list[PromptValues]) -> None:
    """Copy stream: prompt log probabilities to the host, into ``fetched``."""

    def to_host(source: Tensor) -> Tensor:
        return device.host(tuple(source.shape), source.dtype).copy_(source, non_blocking=True)

    for chosen, top_ids, top_values in values:
        fetched.append((to_host(chosen), to_host(top_ids), to_host(top_values)))


def sample_prompts(pending: PendingForward, values: list[PromptValues]) -> None:
    """Log probabilities of the prompt tokens that the pending forward tells of, appended to ``values``."""
    if pending.logits.prompt is None or pending.plan.extra_targets is None:
        return
    targets = pending.plan.extra_targets.to(pending.logits.prompt.device, non_blocking=True)
    for prompt in pending.plan.prompt_rows:
        part = slice(prompt.start, prompt.start + prompt.count)
        values.append(prompt_logprobs(pending.logits.prompt[part], targets[part], prompt.num_logprobs))
