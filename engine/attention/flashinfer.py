"""Paged attention with FlashInfer's XQA kernel for decode rows: lengths on the device, nothing planned on the host.

Prefill rows take the Triton kernel: FlashInfer's prefill wrappers want a plan made on the host for each batch.
XQA is compiled by nvcc when a combination of type, head size, group and block size is first used (some ten seconds).
"""

from __future__ import annotations

import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache
from torch import Tensor

from engine.attention.triton import TritonAttention
from engine.batch import ForwardBatch
from engine.errors import ConfigError
from engine.models.base import LayerCache

BLOCK_SIZES = (16, 32, 64, 128)
WORKSPACE_BYTES = 128 << 20
"""8 MiB of semaphores, which the kernel wants zeroed once and leaves zeroed, and room for partial results."""


class FlashInferAttention(TritonAttention):
    """Implements :class:`engine.attention.base.Attention` for bfloat16 and float16 on CUDA from Hopper on."""

    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[int, Tensor] = {}
        self._indices: tuple[ForwardBatch, Tensor, Tensor] | None = None

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
        """See :meth:`engine.attention.triton.TritonAttention.decode`."""
        _check_sizes(q_THD, cache)
        rows, block_size = batch.shape.num_decode, cache[0].shape[1]
        table_NK, kv_len_N = self._indices_for(batch)
        xqa_batch_decode_with_kv_cache(
            q_THD[:rows],
            (cache[0], cache[1]),
            self._workspace(q_THD.device),
            table_NK,
            kv_len_N,
            batch.shape.num_kv_blocks * block_size,
            bmm1_scale=scale,
            window_left=-1 if window is None else window - 1,
            out=out_THD[:rows],
            kv_layout="NHD",
            enable_pdl=False,
        )

    def _indices_for(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Block table and lengths of the decode rows in int32, made once for the layers of a forward."""
        if self._indices is None or self._indices[0] is not batch:
            rows = batch.shape.num_decode
            table_NK, kv_len_N = batch.block_table_NK[:rows], batch.kv_len_N[:rows]
            self._indices = (batch, table_NK.to(torch.int32), kv_len_N.to(torch.int32))
        return self._indices[1], self._indices[2]

    def _workspace(self, device: torch.device) -> Tensor:
        """One a stream, since engines that share a model may run at the same time; made outside of captures."""
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[stream]


def _check_sizes(q_THD: Tensor, cache: LayerCache) -> None:
    head_dim, block_size = q_THD.shape[2], cache[0].shape[1]
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
