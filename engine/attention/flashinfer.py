"""Paged attention by FlashInfer: XQA for decode rows, and for prefill rows its paged kernels with a plan.

XQA reads lengths on the device and needs nothing planned on the host; it is compiled by nvcc when a combination of
type, head size, group and block size is first used (some ten seconds). What is not planned takes the Triton kernel:
layers with a window, models that make no planner, and GPUs or head sizes that ``flashinfer_prefill.py`` leaves out.

So do decode batches for which XQA would give a row and head to several programs, up to half the multiprocessors in rows
and heads. Up to FlashInfer 0.6.16 each of these programs writes its part to the output, and the one that adds the parts
up may have written before: on a GPU shared by several processes, outputs were wrong now and then
(flashinfer-ai/flashinfer, pull request 4161).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache
from torch import Tensor

from engine.attention.base import AttentionPlanner, HeadSizes, PlannerLimits
from engine.attention.flashinfer_prefill import FlashInferPlanner, is_planned
from engine.attention.triton import TritonAttention
from engine.batch import ForwardBatch
from engine.device import Device
from engine.errors import ConfigError
from engine.models.base import LayerCache

BLOCK_SIZES = (16, 32, 64, 128)
WORKSPACE_BYTES = 128 << 20
"""8 MiB of semaphores, which the kernel wants zeroed once and leaves zeroed, and room for partial results."""


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeRows:
    """Index tensors that the layers of one forward share."""

    batch: ForwardBatch
    table_NK: Tensor
    """[num_decode, K] int32."""
    kv_len_N: Tensor
    """[num_decode] int32."""
    met: set[int] = field(default_factory=set)
    """Addresses of the caches of the layers that have run."""


class FlashInferAttention(TritonAttention):
    """Implements :class:`engine.attention.base.Attention` for bfloat16 and float16 on CUDA from Hopper on."""

    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[int, Tensor] = {}
        self._rows: _DecodeRows | None = None

    def make_planner(self, device: Device, limits: PlannerLimits, sizes: HeadSizes) -> AttentionPlanner | None:
        """See :class:`engine.attention.base.Attention`."""
        check_sizes(sizes.head_dim, limits.block_size)
        return FlashInferPlanner(device, limits, sizes) if is_planned(device, sizes) else None

    def decode(
        self,
        q_THD: Tensor,
        cache: LayerCache,
        batch: ForwardBatch,
        out_THD: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """See :meth:`engine.attention.triton.TritonAttention.decode`; what draft heads see, Triton attends to."""
        count, (block_size, kv_heads, head_dim) = batch.shape.num_decode, cache[0].shape[1:]
        check_sizes(head_dim, block_size)
        if batch.first_key or is_shared(count, kv_heads, q_THD.device):
            super().decode(q_THD, cache, batch, out_THD, scale=scale, window=window)
            return
        rows = self._rows_of(batch, cache)
        xqa_batch_decode_with_kv_cache(
            q_THD[:count],
            (cache[0], cache[1]),
            self._workspace(q_THD.device),
            rows.table_NK,
            rows.kv_len_N,
            batch.shape.num_kv_blocks * block_size,
            bmm1_scale=scale,
            window_left=-1 if window is None else window - 1,
            out=out_THD[:count],
            kv_layout="NHD",
            enable_pdl=False,
        )

    def prefill(
        self,
        q_THD: Tensor,
        cache: LayerCache,
        batch: ForwardBatch,
        out_THD: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> None:
        """See :meth:`engine.attention.triton.TritonAttention.prefill`."""
        if batch.prefill_plan is None or window is not None or batch.first_key:
            super().prefill(q_THD, cache, batch, out_THD, scale=scale, window=window)
            return
        first = batch.shape.num_decode
        batch.prefill_plan.attend(q_THD[first:], cache, out_THD[first:], scale=scale)

    def _rows_of(self, batch: ForwardBatch, cache: LayerCache) -> _DecodeRows:
        """The index tensors of this forward's decode rows, made by its first layer.

        The same batch may be run again with new contents in its tensors. A forward uses each layer's cache once, so
        a cache that was met before marks the next forward.
        """
        rows, key = self._rows, cache[0].data_ptr()
        if rows is None or rows.batch is not batch or key in rows.met:
            count = batch.shape.num_decode
            table_NK, kv_len_N = batch.block_table_NK[:count], batch.kv_len_N[:count]
            rows = self._rows = _DecodeRows(batch, table_NK.to(torch.int32), kv_len_N.to(torch.int32))
        rows.met.add(key)
        return rows

    def _workspace(self, device: torch.device) -> Tensor:
        """One a stream, since engines that share a model may run at the same time; made outside of captures."""
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[stream]


def is_shared(rows: int, kv_heads: int, device: torch.device) -> bool:
    """Whether XQA has several programs for a row and head, of which only the last to end has the result."""
    return 2 * rows * kv_heads <= _multiprocessors(device)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_sizes(head_dim: int, block_size: int) -> None:
    """ConfigError for what XQA does not compute; it names the option and a backend that does."""
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"attention_backend='flashinfer' needs block_size in {', '.join(map(str, BLOCK_SIZES))}, got {block_size}; "
            "change it or use attention_backend='triton'"
        )
    if head_dim % 16 or head_dim > 256:
        raise ConfigError(
            f"attention_backend='flashinfer' takes head_dim in multiples of 16 up to 256, got {head_dim}; "
            "use attention_backend='triton'"
        )
