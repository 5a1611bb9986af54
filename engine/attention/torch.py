"""Attention in plain torch: the reference backend, on every device and in every float type.

Letters: T tokens, N batch rows, P prefill rows, C tiles of prefill queries, Q queries of a tile, K block-table
columns, S = K * block_size keys, H query heads, G key/value heads, D head size.

Every index is a tensor, so a trace of this code holds for all batches of one ``BatchShape``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import HeadSizes, PlannerLimits
from engine.batch import BatchShape, ForwardBatch
from engine.device import Device
from engine.kernels.torch import append
from engine.models.base import LayerCache

_GATHER_COST = 8
"""Gathering a tile's keys costs about as much as attending to them with this many queries (measured on the CPU)."""


class TorchAttention:
    """Gathers each row's keys and values out of the paged cache, then masked softmax attention.

    Scores, softmax and sums are float32 at least. Keys that a row may not see are never read as such: their index is
    bent to an entry which this forward wrote, because a masked weight of 0 times a NaN left in a block is NaN.
    """

    name = "torch"

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def make_planner(self, device: Device, limits: PlannerLimits, sizes: HeadSizes) -> None:
        """Nothing to plan: every index is made on the device."""

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
        plan = self._plan_for(batch, cache)
        keys, values = (torch.flatten(tensor, 0, 1) for tensor in cache)
        parts = []
        if plan.decode is not None:
            q_NHD = q_THD if plan.prefill is None else q_THD[: batch.shape.num_decode]
            parts.append(_decode(q_NHD, keys, values, plan.decode, scale, window))
        if plan.prefill is not None:
            parts.append(_prefill(q_THD, keys, values, plan.prefill, scale, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _plan_for(self, batch: ForwardBatch, cache: LayerCache) -> _Plan:
        """The index tensors that all layers of one forward share.

        The same batch may be run again with new contents in its tensors. A forward uses each layer's cache once, so
        a cache that this plan has met marks the next forward, and the indices are computed anew.
        """
        plan, key = self._plan, cache[0].data_ptr()
        if plan is None or plan.batch is not batch or key in plan.met:
            plan = self._plan = _Plan.of(batch, cache)
        plan.met.add(key)
        return plan


@dataclass(eq=False, slots=True)
class _Keys:
    """Which cache entries some rows read, and which of them their queries see."""

    slot_NS: Tensor
    """[N, S] cache entry of each key."""
    key_pos_S: Tensor
    """[S] position of each key in its sequence."""
    query_pos_NQ1: Tensor
    """[N, Q, 1] position of each query."""
    first_key: int = 0
    """Keys before it are seen by no query but their own."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """[N, 1, Q, S] bool, True where a query sees a key: none after it, of the others the last ``window``."""
        if window not in self._masks:
            visible_NQS = self.key_pos_S <= self.query_pos_NQ1
            if self.first_key:
                is_own_NQS = self.key_pos_S == self.query_pos_NQ1
                visible_NQS = visible_NQS & ((self.key_pos_S >= self.first_key) | is_own_NQS)
            if window is not None:
                visible_NQS = visible_NQS & (self.key_pos_S > self.query_pos_NQ1 - window)
            self._masks[window] = visible_NQS[:, None]
        return self._masks[window]


@dataclass(eq=False, slots=True)
class _PrefillPlan:
    """Prefill queries cut into tiles of one row each, so that short rows do not pay for the longest."""

    count: int
    """C."""
    token_x: Tensor
    """[C * Q] token index of each query; any token where a place holds none."""
    place_t: Tensor
    """[T - num_decode] where each prefill token is found in [C * Q]; for padding tokens, anywhere in it."""
    keys: _Keys


@dataclass(eq=False, slots=True)
class _Plan:
    """Index tensors of one forward."""

    batch: ForwardBatch
    decode: _Keys | None
    prefill: _PrefillPlan | None
    met: set[int] = field(default_factory=set)
    """Addresses of the caches of the layers that have run."""

    @classmethod
    def of(cls, batch: ForwardBatch, cache: LayerCache) -> _Plan:
        num_blocks, block_size = cache[0].shape[:2]
        columns, device = batch.shape.num_kv_blocks, batch.positions_T.device
        key_pos_S = torch.arange(columns * block_size, device=device)
        offset_B = torch.arange(block_size, device=device)
        slot_NS = (batch.block_table_NK[:, :, None] * block_size + offset_B).flatten(1)
        return cls(
            batch,
            _decode_keys(batch, slot_NS, key_pos_S) if batch.shape.num_decode else None,
            _prefill_plan(batch, slot_NS, key_pos_S, (num_blocks - 1) * block_size)
            if batch.shape.num_tokens > batch.shape.num_decode
            else None,
        )


def _gather(entries: Tensor, slot_NS: Tensor, rows: int) -> Tensor:
    """[N, G, S, D], a view on memory ordered [N, S, G, D]."""
    gathered_NSGD: Tensor = entries.index_select(0, slot_NS.flatten()).unflatten(0, (rows, -1))
    return gathered_NSGD.transpose(1, 2)


def _decode_keys(batch: ForwardBatch, slot_NS: Tensor, key_pos_S: Tensor) -> _Keys:
    rows = batch.shape.num_decode
    position_N1 = batch.positions_T[:rows, None]
    # The row's own entry, and all behind it, come from the slot that it writes in this forward.
    slot_NS = torch.where(key_pos_S < position_N1, slot_NS[:rows], batch.slots_T[:rows, None])
    return _Keys(slot_NS, key_pos_S, position_N1[:, :, None], batch.first_key)


def _decode(q_NHD: Tensor, keys: Tensor, values: Tensor, plan: _Keys, scale: float, window: int | None) -> Tensor:
    """One query token a row; returns [num_decode, H, D]. Query heads that share a key head stand in for queries."""
    rows, kv_heads = plan.slot_NS.shape[0], keys.shape[1]
    out_NGRD = scaled_dot_product_attention(
        q_NHD.unflatten(1, (kv_heads, -1)),
        _gather(keys, plan.slot_NS, rows),
        _gather(values, plan.slot_NS, rows),
        attn_mask=plan.mask(window),
        scale=scale,
    )
    return out_NGRD.flatten(1, 2)


def _prefill_plan(batch: ForwardBatch, slot_NS: Tensor, key_pos_S: Tensor, dummy_slot: int) -> _PrefillPlan:
    first, num_tokens = batch.shape.num_decode, batch.shape.num_tokens
    size, count = tile_size(batch.shape)
    device = key_pos_S.device
    length_P, start_P = batch.query_len_N[first:], batch.query_start_N[first:]
    tiles_P = torch.div(length_P + (size - 1), size, rounding_mode="floor")
    end_P = tiles_P.cumsum(0)
    tile_C = torch.arange(count, device=device)
    # Tiles left over fall to the last row, behind its end.
    row_C = torch.searchsorted(end_P, tile_C, right=True).clamp(max=batch.shape.num_prefill - 1)
    begin_P = end_P - tiles_P
    offset_CQ = ((tile_C - begin_P[row_C]) * size)[:, None] + torch.arange(size, device=device)
    token_CQ = (start_P[row_C, None] + offset_CQ).clamp(max=num_tokens - 1)
    slot_CS = slot_NS[first:][row_C]
    is_cached_CS = (key_pos_S < batch.kv_len_N[first:][row_C, None]) & (slot_CS < dummy_slot)
    slot_CS = torch.where(is_cached_CS, slot_CS, batch.slots_T[token_CQ[:, :1]])

    row_t = batch.row_T[first:] - first
    offset_t = torch.arange(first, num_tokens, device=device) - start_P[row_t]
    place_t = (begin_P[row_t] * size + offset_t).clamp(0, count * size - 1)
    keys = _Keys(slot_CS, key_pos_S, batch.positions_T[token_CQ][:, :, None], batch.first_key)
    return _PrefillPlan(count, token_CQ.flatten(), place_t, keys)


def _prefill(
    q_THD: Tensor, keys: Tensor, values: Tensor, plan: _PrefillPlan, scale: float, window: int | None
) -> Tensor:
    """Several query tokens a row, in tiles; returns [T - num_decode, H, D]."""
    q_CQHD = q_THD.index_select(0, plan.token_x).unflatten(0, (plan.count, -1))
    out_CHQD = scaled_dot_product_attention(
        q_CQHD.transpose(1, 2),
        _gather(keys, plan.keys.slot_NS, plan.count),
        _gather(values, plan.keys.slot_NS, plan.count),
        attn_mask=plan.keys.mask(window),
        scale=scale,
        enable_gqa=True,
    )
    return out_CHQD.transpose(1, 2).flatten(0, 1).index_select(0, plan.place_t)


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
