"""Attention in plain torch: the reference backend, on every device and in every float type.

Letters: T tokens, N batch rows, P prefill rows, C tiles of prefill queries, Q queries of a tile, K block-table
columns, S = K * block_size keys, H query heads, G key/value heads, R = H / G heads that share one, D head size.

Every index is a tensor, so a trace of this code holds for all batches of one ``BatchShape``. The same index tensors
are built again in each layer: a frozen trace merges them, and eager they cost little beside the matrix products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import BatchShape, ForwardBatch
from engine.models.base import LayerCache

_GATHER_COST = 8
"""Gathering a tile's keys costs about as much as attending to them with this many queries (measured on the CPU)."""


class TorchAttention:
    """Gathers each row's keys and values out of the paged cache, then masked softmax attention.

    Scores, softmax and sums are float32 at least. Keys that a row may not see are never read as such: their index is
    bent to an entry which this forward wrote, because a masked weight of 0 times a NaN left in a block is NaN.
    """

    name = "torch"

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
        key_cache, value_cache = cache
        key_cache.view(-1, *k_TGD.shape[1:]).index_copy_(0, batch.slots_T, k_TGD)
        value_cache.view(-1, *v_TGD.shape[1:]).index_copy_(0, batch.slots_T, v_TGD)
        shape = batch.shape
        parts = []
        if shape.num_decode:
            parts.append(_decode(q_THD[: shape.num_decode], cache, batch, scale, window))
        if shape.num_prefill:
            parts.append(_prefill(q_THD, cache, batch, scale, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(q_NHD: Tensor, cache: LayerCache, batch: ForwardBatch, scale: float, window: int | None) -> Tensor:
    """One query token a row; returns [num_decode, H, D]."""
    rows, heads, head_dim = q_NHD.shape
    block_size, kv_heads = cache[0].shape[1:3]
    position_N1 = batch.positions_T[:rows, None]
    key_pos_S = _key_positions(batch, block_size)
    slot_NS = torch.where(
        key_pos_S < position_N1,
        _table_slots(batch.block_table_NK[:rows], block_size),
        batch.slots_T[:rows, None],
    )
    visible_NS = _visible(key_pos_S, position_N1, window)
    out_NGRD = scaled_dot_product_attention(
        q_NHD.view(rows, kv_heads, heads // kv_heads, head_dim),
        _gather(cache[0], slot_NS),
        _gather(cache[1], slot_NS),
        attn_mask=visible_NS[:, None, None, :],
        scale=scale,
    )
    return out_NGRD.reshape(rows, heads, head_dim)


class _Tiles(NamedTuple):
    """Prefill queries cut into tiles of one row each, so that short rows do not pay for the longest."""

    row_C: Tensor
    """[C] batch row of each tile; tiles left over name the last row and hold no query."""
    token_CQ: Tensor
    """[C, Q] token index of each query; where ``is_query_CQ`` is False, any token."""
    is_query_CQ: Tensor
    """[C, Q] whether the place holds a query of its row."""
    place_t: Tensor
    """[T - num_decode] where each prefill token is found in [C * Q]; padding tokens anywhere in it."""


def _prefill(q_THD: Tensor, cache: LayerCache, batch: ForwardBatch, scale: float, window: int | None) -> Tensor:
    """Several query tokens a row, in tiles; returns [T - num_decode, H, D]."""
    block_size = cache[0].shape[1]
    tiles = _tiles(batch)
    # A place without a query looks at key 0 only, so that its softmax has something to normalise.
    position_CQ = torch.where(tiles.is_query_CQ, batch.positions_T[tiles.token_CQ], 0)

    key_pos_S = _key_positions(batch, block_size)
    slot_CS = _table_slots(batch.block_table_NK[tiles.row_C], block_size)
    dummy_slot = (cache[0].shape[0] - 1) * block_size
    is_cached_CS = (key_pos_S < batch.kv_len_N[tiles.row_C, None]) & (slot_CS < dummy_slot)
    slot_CS = torch.where(is_cached_CS, slot_CS, batch.slots_T[tiles.token_CQ[:, :1]])

    q_CQHD = q_THD.index_select(0, tiles.token_CQ.flatten()).view(*tiles.token_CQ.shape, *q_THD.shape[1:])
    out_CHQD = scaled_dot_product_attention(
        q_CQHD.transpose(1, 2),
        _gather(cache[0], slot_CS),
        _gather(cache[1], slot_CS),
        attn_mask=_visible(key_pos_S, position_CQ[:, :, None], window)[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return out_CHQD.transpose(1, 2).reshape(-1, *q_THD.shape[1:]).index_select(0, tiles.place_t)


def _tiles(batch: ForwardBatch) -> _Tiles:
    first, num_tokens = batch.shape.num_decode, batch.shape.num_tokens
    size, count = tile_size(batch.shape)
    device = batch.positions_T.device
    query_len_P, query_start_P = batch.query_len_N[first:], batch.query_start_N[first:]
    tiles_P = torch.div(query_len_P + (size - 1), size, rounding_mode="floor")
    end_P = tiles_P.cumsum(0)
    tile_C = torch.arange(count, device=device)
    row_C = torch.searchsorted(end_P, tile_C, right=True).clamp(max=query_len_P.shape[0] - 1)
    begin_P = end_P - tiles_P
    offset_CQ = ((tile_C - begin_P[row_C]) * size)[:, None] + torch.arange(size, device=device)

    row_t = batch.row_T[first:] - first
    offset_t = torch.arange(first, num_tokens, device=device) - query_start_P[row_t]
    return _Tiles(
        row_C=row_C + first,
        token_CQ=(query_start_P[row_C, None] + offset_CQ).clamp(max=num_tokens - 1),
        is_query_CQ=offset_CQ < query_len_P[row_C, None],
        place_t=(begin_P[row_t] * size + offset_t).clamp(0, count * size - 1),
    )


def tile_size(shape: BatchShape) -> tuple[int, int]:
    """Queries of one tile, and how many tiles the prefill rows of ``shape`` can need.

    Smaller tiles waste fewer places on rows that do not fill theirs, but each tile gathers its row's keys anew.
    """
    tokens, longest = shape.num_tokens - shape.num_decode, shape.max_query_len
    rows = min(shape.num_prefill, tokens)

    def count(size: int) -> int:
        return min(shape.num_prefill * -(-longest // size), (tokens - rows) // size + rows)

    sizes = [size for size in (16, 32, 64, 128, 256, 512, 1024) if size < longest] + [longest]
    best = min(sizes, key=lambda size: count(size) * (size + _GATHER_COST))
    return best, count(best)


def _key_positions(batch: ForwardBatch, block_size: int) -> Tensor:
    """[S] position of each gathered key in its sequence."""
    return torch.arange(batch.block_table_NK.shape[1] * block_size, device=batch.positions_T.device)


def _table_slots(block_table_NK: Tensor, block_size: int) -> Tensor:
    """[N, S] cache entry of each key."""
    offset_B = torch.arange(block_size, device=block_table_NK.device)
    return (block_table_NK[:, :, None] * block_size + offset_B).flatten(1)


def _visible(key_pos: Tensor, query_pos: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees: none after it, and of those up to it the last ``window``."""
    visible = key_pos <= query_pos
    return visible if window is None else visible & (key_pos > query_pos - window)


def _gather(cache: Tensor, slot_NS: Tensor) -> Tensor:
    """Cache entries as [N, G, S, D], a view on memory ordered [N, S, G, D]."""
    kv_heads, head_dim = cache.shape[2:]
    entries = cache.view(-1, kv_heads * head_dim).index_select(0, slot_NS.flatten())
    return entries.view(*slot_NS.shape, kv_heads, head_dim).transpose(1, 2)
