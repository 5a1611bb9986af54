"""Prefill rows by FlashInfer's paged FA3 kernels, whose work is divided on the host before each forward.

A plan is a list of tiles for each multiprocessor, made by FlashInfer and copied to a workspace that the kernel reads.
All forwards of an engine run on one stream, and so do these copies: one workspace and one set of lists serve every
graph and the eager forwards, each new plan overwriting the one before behind the forward that read it. On the host
there are two of each, since a copy out of one may still be queued when the next plan is made (I30).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from engine.attention.base import HeadSizes, PlannerLimits, PrefillRows
from engine.attention.block_lists import BlockLists, block_lists
from engine.batch import BatchShape
from engine.device import Device, Event
from engine.models.base import LayerCache
from engine.staging import Halves

HEAD_DIMS = (64, 128, 256)
"""What FA3 is written for. FlashInfer's ready-made kernels are those of 64 and 128 in bfloat16; others compile."""
INT_WORKSPACE_BYTES = 8 << 20
"""FlashInfer's own choice: 28 bytes a tile of 128 queries and head, at most 4096 tiles a head."""


def is_planned(device: Device, sizes: HeadSizes) -> bool:
    """Whether FA3 runs here. FlashInfer's FA2 does on any GPU, but in graphs wants up to a GB for partial results."""
    return sizes.head_dim in HEAD_DIMS and torch.cuda.get_device_capability(device.torch_device)[0] == 9


class FlashInferPlan:
    """Implements :class:`engine.batch.PrefillPlan`."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def attend(self, q_tHD: Tensor, cache: LayerCache, out_tHD: Tensor, *, scale: float) -> None:
        # The plan has a factor of 1 on the scores; it is multiplied by this one.
        self._wrapper.run(q_tHD, (cache[0], cache[1]), q_scale=scale, out=out_tHD)


class FlashInferPlanner:
    """Implements :class:`engine.attention.base.AttentionPlanner`."""

    def __init__(self, device: Device, limits: PlannerLimits, sizes: HeadSizes) -> None:
        self._device = device
        self._block_size = limits.block_size
        self._sizes = sizes
        self._halves = Halves(_HostHalf(device, limits), _HostHalf(device, limits))
        self._lists = _Lists(device.zeros, limits)
        self._workspace = device.zeros(INT_WORKSPACE_BYTES, torch.uint8)
        self._no_partial_results = device.zeros(16, torch.uint8)  # FA3 keeps none, but a tensor is asked for
        self._eager = self._make_wrapper()
        self._captured: dict[BatchShape, Any] = {}
        self._load_kernels()

    def _load_kernels(self) -> None:
        """Plan a row of one token, so that kernels are loaded, or compiled, before the first request comes."""
        one = np.ones(1, dtype=np.int64)
        shape = BatchShape(num_tokens=1, num_decode=0, num_prefill=1, max_query_len=1, num_kv_blocks=1)
        self.plan(shape, PrefillRows(one, one, one - 1, np.zeros((1, 1), dtype=np.int32)), is_captured=False)

    def plan(self, shape: BatchShape, rows: PrefillRows, *, is_captured: bool) -> FlashInferPlan:
        lists = block_lists(rows, self._block_size)
        wrapper = self._wrapper_of(shape) if is_captured else self._eager
        half = self._halves.acquire()
        half.lists.fill(lists)
        self._device.compute.launch(lambda: self._plan(wrapper, half, lists.block_ids.size, shape))
        half.copied = self._device.compute.record()
        return FlashInferPlan(wrapper)

    @property
    def num_waits(self) -> int:
        """How often the host had to wait for a copy before planning; 0 in a healthy run (I33)."""
        return self._halves.num_waits

    def _wrapper_of(self, shape: BatchShape) -> Any:
        """The one that is captured, and planned with before every replay."""
        if shape not in self._captured:
            lists, rows = self._lists, shape.num_prefill
            self._captured[shape] = self._make_wrapper(
                use_cuda_graph=True,
                qo_indptr_buf=lists.query_indptr[: rows + 1],
                paged_kv_indptr_buf=lists.block_indptr[: rows + 1],
                paged_kv_indices_buf=lists.block_ids,
                paged_kv_last_page_len_buf=lists.last_block_len[:rows],
            )
        return self._captured[shape]

    def _make_wrapper(self, **options: Any) -> Any:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(self._no_partial_results, "NHD", backend="fa3", **options)
        wrapper._int_workspace_buffer = self._workspace  # instead of 8 MiB for each graph
        return wrapper

    def _plan(self, wrapper: Any, half: _HostHalf, num_blocks: int, shape: BatchShape) -> None:
        """Divide the work, and enqueue the copies of it and of the lists."""
        rows, lists, sizes = shape.num_prefill, half.lists, self._sizes
        # The wrapper copies block ids from the host only by waiting, so it is given them on the device.
        block_ids = self._lists.block_ids[:num_blocks]
        block_ids.copy_(lists.block_ids[:num_blocks], non_blocking=True)
        wrapper._pin_memory_int_workspace_buffer = half.workspace  # its only one may still be read by the last copy
        wrapper.plan(
            lists.query_indptr[: rows + 1],
            lists.block_indptr[: rows + 1],
            block_ids,
            lists.last_block_len[:rows],
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            self._block_size,
            causal=True,
            sm_scale=1.0,
            q_data_type=sizes.dtype,
            seq_lens=lists.kv_len[:rows],
            max_token_per_sequence=shape.max_query_len,
        )


class _Lists:
    """Room for the block lists of the largest forward, int32."""

    def __init__(self, zeros: Callable[[int, torch.dtype], Tensor], limits: PlannerLimits) -> None:
        rows = limits.max_rows
        self.query_indptr = zeros(rows + 1, torch.int32)
        self.block_indptr = zeros(rows + 1, torch.int32)
        self.block_ids = zeros(rows * limits.max_blocks_per_row, torch.int32)
        self.last_block_len = zeros(rows, torch.int32)
        self.kv_len = zeros(rows, torch.int32)

    def fill(self, lists: BlockLists) -> None:
        """Write ``lists``; on the host."""
        for name, values in lists._asdict().items():
            getattr(self, name).numpy()[: values.size] = values


class _HostHalf:
    """What the copies of one plan are made from, in pinned memory."""

    def __init__(self, device: Device, limits: PlannerLimits) -> None:
        self.lists = _Lists(device.host, limits)
        self.workspace = device.host(INT_WORKSPACE_BYTES, torch.uint8)
        self.copied: Event | None = None
        """Behind the last copies out of this half."""
