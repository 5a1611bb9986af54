# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Triton kernels of paged attention. Lengths and block tables are read on the device; nothing is planned on the host.

Capital parameters are compile-time constants. ``scale_log2`` is the score factor times log2(e), so that exponentials
are powers of two. A key is masked before its value is used, and entries behind a row's end are never read.
USE_PDL is explained in ``engine/kernels/triton_elementwise.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def share_of_split(first, length, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Keys of one split: an equal share of the keys seen, in whole tiles. Splits behind the last share have none."""
    return tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE


@triton.jit(do_not_specialize=["table_stride"])  # it grows with the longest row, and 1 or 16 would compile anew
def decode_kernel(
    q,
    keys,
    values,
    block_table,
    slots,
    kv_len,
    out,
    partial,
    partial_log,
    scale_log2,
    window,
    table_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row, key head and split: the row's QUERIES newest tokens and GROUP query heads as one matrix.

    Key heads lie on the fastest axis, so that programs that run together read neighbouring memory.
    Where there are several splits, what each found goes to ``partial`` and :func:`combine_kernel` takes the mean: a
    counter that lets the last program do it measured 1 to 1.4 µs slower than that kernel does when it starts early.
    """
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(kv_len + row).to(tl.int32)
    lane = tl.arange(0, BLOCK_H)
    query = lane // GROUP
    last_seen = length - QUERIES + query
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - QUERIES + 1 - window, 0)
    share = share_of_split(first, length, SPLITS, TILE)
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    if begin >= end:
        return
    column = tl.arange(0, BLOCK_D)
    has_column = column < HEAD_DIM
    head = kv_head * GROUP + lane % GROUP
    is_real = lane < GROUP * QUERIES
    place = ((row * QUERIES + query).to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
    inside = is_real[:, None] & has_column[None, :]
    q_tile = tl.load(q + place, mask=inside, other=0.0)
    newest = tl.load(slots + row * QUERIES + QUERIES - 1)
    top = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_cached = position < end
        block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE, mask=is_cached, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        slot = tl.where(position == length - 1, newest, slot)
        entry = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        is_entry = is_cached[:, None] & has_column[None, :]
        key = tl.load(keys + entry, mask=is_entry, other=0.0)
        score = tl.dot(q_tile, tl.trans(key)) * scale_log2
        seen = is_cached[None, :] & (position[None, :] <= last_seen[:, None])
        if HAS_WINDOW:
            seen = seen & (position[None, :] > last_seen[:, None] - window)
        if FIRST_KEY > 0:
            seen = seen & ((position[None, :] >= FIRST_KEY) | (position[None, :] == last_seen[:, None]))
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A query of several may see no key of this split yet: keep its maximum usable.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 1)
        value = tl.load(values + entry, mask=is_entry, other=0.0)
        weighted = tl.dot(weight.to(value.dtype), value, weighted * keep[:, None])
        top = new_top
    if SPLITS == 1:
        tl.store(out + place, (weighted / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        pair = row * KV_HEADS + kv_head
        at = (pair * SPLITS + split).to(tl.int64) * (GROUP * QUERIES) + lane
        share_out = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(partial + at[:, None] * HEAD_DIM + column[None, :], share_out, mask=inside)
        tl.store(partial_log + at, top + tl.log2(total), mask=is_real)


@triton.jit
def combine_kernel(
    kv_len,
    out,
    partial,
    partial_log,
    window,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a query token and head: the weighted mean of what its splits found."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head, lane = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(kv_len + row).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - QUERIES + 1 - window, 0)
    share = share_of_split(first, length, SPLITS, TILE)
    split = tl.arange(0, BLOCK_S)
    has_keys = (split < SPLITS) & (first + split * share < length)
    at = ((row * KV_HEADS + kv_head) * SPLITS + split).to(tl.int64) * (GROUP * QUERIES) + lane
    log = tl.load(partial_log + at, mask=has_keys, other=float("-inf"))
    column = tl.arange(0, BLOCK_D)
    inside = has_keys[:, None] & (column < HEAD_DIM)[None, :]
    found = tl.load(partial + at[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    weight = tl.exp2(log - tl.max(log, 0))
    mean = tl.sum(found * weight[:, None], 0) / tl.sum(weight, 0)
    place = (row * QUERIES + lane // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + lane % GROUP
    tl.store(out + place * HEAD_DIM + column, mean.to(out.dtype.element_ty), mask=column < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride", "first_row", "num_rows"])
def prefill_kernel(
    q,
    keys,
    values,
    block_table,
    query_start,
    query_len,
    kv_len,
    out,
    scale_log2,
    window,
    table_stride,
    first_row,
    num_rows,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program BLOCK_Q queries of a row and a query head; the rows' tiles are numbered through.

    The host knows only how many tiles there are at most, so each program finds its row by the lengths; those left
    over end at once.
    """
    head = tl.program_id(0)
    lane = tl.arange(0, BLOCK_P)
    lengths = tl.load(query_len + first_row + lane, mask=lane < num_rows, other=0).to(tl.int32)
    tiles = tl.cdiv(lengths, BLOCK_Q)
    is_before = tl.cumsum(tiles, 0) <= tl.program_id(1)
    place_of_row = tl.sum(is_before.to(tl.int32), 0)
    if place_of_row >= num_rows:
        return
    offset = (tl.program_id(1) - tl.sum(tl.where(is_before, tiles, 0), 0)) * BLOCK_Q
    row = first_row + place_of_row
    count = tl.load(query_len + row).to(tl.int32)
    length = tl.load(kv_len + row).to(tl.int32)
    lane = offset + tl.arange(0, BLOCK_Q)
    last_seen = length - count + lane
    column = tl.arange(0, BLOCK_D)
    has_column = column < HEAD_DIM
    token = tl.load(query_start + row) + lane
    place = (token.to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
    inside = (lane < count)[:, None] & has_column[None, :]
    q_tile = tl.load(q + place, mask=inside, other=0.0)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - count + offset + 1 - window, 0)
    end = tl.minimum(length, length - count + offset + BLOCK_Q)
    top = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_cached = position < end
        block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE, mask=is_cached, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        entry = (slot * KV_HEADS + head // GROUP)[:, None] * HEAD_DIM + column[None, :]
        is_entry = is_cached[:, None] & has_column[None, :]
        key = tl.load(keys + entry, mask=is_entry, other=0.0)
        score = tl.dot(q_tile, tl.trans(key)) * scale_log2
        seen = is_cached[None, :] & (position[None, :] <= last_seen[:, None])
        if HAS_WINDOW:
            seen = seen & (position[None, :] > last_seen[:, None] - window)
        if FIRST_KEY > 0:
            seen = seen & ((position[None, :] >= FIRST_KEY) | (position[None, :] == last_seen[:, None]))
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 1)
        value = tl.load(values + entry, mask=is_entry, other=0.0)
        weighted = tl.dot(weight.to(value.dtype), value, weighted * keep[:, None])
        top = new_top
    tl.store(out + place, (weighted / total[:, None]).to(out.dtype.element_ty), mask=inside)
