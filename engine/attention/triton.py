"""Paged attention in Triton: split-KV decode and flash prefill, with all lengths on the device and no host planning.

Letters: T tokens, N batch rows, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention import triton_kernels
from engine.attention.base import AttentionPlanner, HeadSizes, PlannerLimits
from engine.batch import ForwardBatch
from engine.device import Device
from engine.errors import ConfigError
from engine.kernels.torch import append
from engine.kernels.triton import overlapped, power_of_two
from engine.models.base import LayerCache

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How decode attention is cut into programs."""

    tile: int
    """Keys of one pass."""
    num_warps: int
    num_stages: int
    """Passes whose loads are in flight at once."""
    programs: int
    """Rows are split until there are about this many."""
    max_splits: int = 32


def decode_tile_for(programs: int) -> DecodeTile:
    """What was fastest on an H200 (``benchmarks/gpu_kernels.py``) for so many pairs of a row and a key head."""
    if programs >= 512:
        return DecodeTile(tile=64, num_warps=4, num_stages=3, programs=programs)
    if programs >= 128:
        return DecodeTile(tile=32, num_warps=2, num_stages=4, programs=768)
    return DecodeTile(tile=64, num_warps=4, num_stages=4, programs=512)


class TritonAttention:
    """Implements :class:`engine.attention.base.Attention` for bfloat16 and float16 on CUDA."""

    name = "triton"

    def __init__(self, decode_tile: DecodeTile | None = None) -> None:
        self._tile = decode_tile

    def make_planner(self, device: Device, limits: PlannerLimits, sizes: HeadSizes) -> AttentionPlanner | None:
        """Nothing to plan: the kernels find each row's work on the device."""
        return None

    def __call__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See :class:`engine.attention.base.Attention`."""
        append(cache, k_TGD, v_TGD, batch.slots_T)
        return self.attend(q_THD, cache, batch, scale=scale, window=window)

    def attend(
        self, q_THD: Tensor, cache: LayerCache, batch: ForwardBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """See :class:`engine.attention.base.Attention`."""
        check_supported(q_THD, cache)
        check_contiguous(batch, cache)
        shape = batch.shape
        q_THD = q_THD.contiguous()
        # What no row of decode or of drafts has may be padding, which is left out and must be finite all the same.
        is_covered = shape.num_tokens == shape.num_decode + shape.num_wide * shape.wide_width
        out_THD = torch.empty_like(q_THD) if is_covered else torch.zeros_like(q_THD)
        if shape.num_decode:
            self.decode(q_THD, cache, batch, out_THD, scale=scale, window=window)
        if shape.num_wide:
            decode(q_THD, cache, batch, out_THD, scale=scale, window=window, tile=self._tile, queries=shape.wide_width)
        if shape.num_prefill > shape.num_wide:
            self.prefill(q_THD, cache, batch, out_THD, scale=scale, window=window)
        return out_THD

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
        """Attention of the decode rows into the first ``num_decode`` tokens of ``out``."""
        decode(q_THD, cache, batch, out_THD, scale=scale, window=window, tile=self._tile)

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
        """Attention of the rows behind those into their tokens of ``out``; padding tokens are left alone."""
        prefill(q_THD, cache, batch, out_THD, scale=scale, window=window)


def check_supported(q_THD: Tensor, cache: LayerCache) -> None:
    """ConfigError for what these kernels do not compute; it names the reference, which does."""
    if q_THD.dtype not in DTYPES:
        raise ConfigError(
            f"the Triton and FlashInfer kernels compute in bfloat16 and float16, got {q_THD.dtype}; "
            "use attention_backend='torch' or dtype='bfloat16'"
        )
    if q_THD.shape[2] > MAX_HEAD_DIM:
        raise ConfigError(
            f"the Triton kernels take head_dim up to {MAX_HEAD_DIM}, got {q_THD.shape[2]}; "
            "use attention_backend='torch'"
        )


def check_contiguous(batch: ForwardBatch, cache: LayerCache) -> None:
    """Kernels get bare addresses, so elements must lie where indices say."""
    per_row = (batch.query_start_N, batch.query_len_N, batch.kv_len_N, batch.slots_T)
    assert all(tensor.is_contiguous() for tensor in (*per_row, *cache)), "lengths, slots and caches must be contiguous"
    assert batch.block_table_NK.stride(1) == 1, "a row of the block table must be contiguous"


def decode(
    q_THD: Tensor,
    cache: LayerCache,
    batch: ForwardBatch,
    out_THD: Tensor,
    *,
    scale: float,
    window: int | None,
    tile: DecodeTile | None = None,
    queries: int = 1,
) -> None:
    """Attention of decode rows, or of wide ones, into the first tokens of ``out``.

    Args:
        q_THD: Queries; row i has tokens [i * queries, (i + 1) * queries), its newest.
        cache: Keys and values, this forward's written.
        batch: Lengths, slots and block tables.
        out_THD: Written in place.
        scale: Factor on the scores.
        window: Keys a query sees, its own included; None: all.
        tile: How to cut the work; None: :func:`decode_tile_for`.
        queries: Query tokens of every row; more than one: of the wide rows.
    """
    rows, block_size = batch.shape.num_decode if queries == 1 else batch.shape.num_wide, cache[0].shape[1]
    _, heads, head_dim = q_THD.shape
    kv_heads = cache[0].shape[2]
    group = heads // kv_heads
    tile = tile or decode_tile_for(rows * kv_heads)
    longest = batch.shape.num_kv_blocks * block_size
    # Powers of two, since every other number of splits is compiled anew while rows grow.
    splits = min(tile.max_splits, max(1, tile.programs // (rows * kv_heads)), power_of_two(-(-longest // tile.tile)))
    options = decode_options(tile, group, queries, kv_heads, head_dim, window is not None, splits)
    partial = partial_log = None
    if splits > 1:
        places = rows * kv_heads * splits * group * queries
        partial = torch.empty((places, head_dim), dtype=torch.float32, device=q_THD.device)
        partial_log = torch.empty(places, dtype=torch.float32, device=q_THD.device)
    table_NK = batch.block_table_NK
    triton_kernels.decode_kernel[(kv_heads, splits, rows)](
        q_THD,
        *cache,
        table_NK,
        batch.slots_T,
        batch.kv_len_N,
        out_THD,
        partial,
        partial_log,
        scale * math.log2(math.e),
        window or 0,
        table_NK.stride(0),
        BLOCK_SIZE=block_size,
        FIRST_KEY=batch.first_key,
        BLOCK_H=max(16, power_of_two(group * queries)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )
    if splits > 1:
        triton_kernels.combine_kernel[(kv_heads, group * queries, rows)](
            batch.kv_len_N,
            out_THD,
            partial,
            partial_log,
            window or 0,
            BLOCK_S=power_of_two(splits),
            num_warps=1 if splits <= 8 else 4,
            **options,
        )


def decode_options(
    tile: DecodeTile, group: int, queries: int, kv_heads: int, head_dim: int, has_window: bool, splits: int
) -> dict[str, Any]:
    """Compile-time constants of the decode and combine kernels."""
    return {
        "GROUP": group,
        "QUERIES": queries,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HAS_WINDOW": has_window,
        "SPLITS": splits,
        "BLOCK_D": max(16, power_of_two(head_dim)),
        "TILE": tile.tile,
        **overlapped(),
    }


def prefill(
    q_THD: Tensor, cache: LayerCache, batch: ForwardBatch, out_THD: Tensor, *, scale: float, window: int | None
) -> None:
    """Attention of the prefill rows that are not wide into their tokens of ``out``; padding tokens are left alone."""
    shape, block_size = batch.shape, cache[0].shape[1]
    first, rows = shape.num_decode + shape.num_wide, shape.num_prefill - shape.num_wide
    _, heads, head_dim = q_THD.shape
    kv_heads = cache[0].shape[2]
    block_d = max(16, power_of_two(head_dim))
    block_q = 128 if shape.max_query_len > 64 else 64
    table_NK = batch.block_table_NK
    # A row's last tile may be short, so there are at most this many.
    tiles = (shape.num_tokens - shape.num_decode - shape.num_wide * shape.wide_width) // block_q + rows
    triton_kernels.prefill_kernel[(heads, tiles)](
        q_THD,
        *cache,
        table_NK,
        batch.query_start_N,
        batch.query_len_N,
        batch.kv_len_N,
        out_THD,
        scale * math.log2(math.e),
        window or 0,
        table_NK.stride(0),
        first,
        rows,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=window is not None,
        FIRST_KEY=batch.first_key,
        BLOCK_P=power_of_two(rows),
        BLOCK_Q=block_q,
        BLOCK_D=block_d,
        TILE=64,
        num_warps=8 if block_q == 128 else 4,
        num_stages=2 if block_d > 128 else 3,
    )
