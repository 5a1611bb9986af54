"""A launched forward and what its sampling brings back: the hand-overs between the phases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchDimensions
from engine.device import Device, Event
from engine.layout import are_neighbours
from engine.plan import Plan
from engine.sampling.base import Sampled
from engine.table import Rows
from tracing.records import BatchInfo

PromptValues = tuple[Tensor, Tensor, Tensor]
"""Chosen log probability [L], top ids [L, n], top log probabilities [L, n] of a prompt's tokens but the first."""


@dataclass(slots=True)
class Logits:
    """Filled by the forward in stream order; only launched work may look inside."""

    rows: Tensor | None = None
    """[N, V], one row a real batch row, padding behind."""
    prompt: Tensor | None = None
    """[extra, V] of rows that want prompt log probabilities."""
    in_graph: bool = False
    """Whether ``rows`` is a graph's own output, which a captured draw reads where it lies. Known on the host."""


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
    is_in_order: bool
    """Whether ``table_rows`` are neighbours in ascending order, so that logits rows stand as table rows do."""
    info: BatchInfo
    """The same for the record."""

    def follow(self, new_row: Rows) -> None:
        """Keep up with a compaction: ``new_row[old]`` is a row's place now, -1 where it was dropped."""
        live = self.table_rows >= 0
        self.table_rows[live] = new_row[self.table_rows[live]]
        survivors = self.table_rows[self.table_rows >= 0]
        self.is_in_order = np.array_equal(survivors, self.table_rows[: survivors.size]) and are_neighbours(survivors)

    @property
    def partial_key(self) -> int | None:
        """Generation of the row whose prompt it reads in part: its sample means nothing."""
        return self.plan.partial_key

    @property
    def num_sampled(self) -> int:
        """Rows still there whose sample means something: all but a partial one. They stand in front of the others."""
        live = self.table_rows >= 0
        if self.partial_key is not None:
            live &= self.keys != self.partial_key
        return int(np.count_nonzero(live))

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
    version: int
    """Of the table it was drawn for; while that is the table's, every row has the owner it had."""
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
        self.ints_view = self.ints[1].numpy()
        """The host half, made once: a view costs more than reading it."""
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
