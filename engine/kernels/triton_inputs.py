# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""What a decode forward reads, made by one kernel from the staged slab: about ten small torch kernels otherwise.

Letters: N decode rows (padding included), K block-table columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class DecodeInputs(NamedTuple):
    """All int64, on the device."""

    token_ids: Tensor
    """[N]."""
    positions: Tensor
    """[N]."""
    slots: Tensor
    """[N] block id * block_size + offset."""
    block_table: Tensor
    """[N, K]."""


def decode_inputs(
    token_ids: Tensor,
    kv_len: Tensor,
    table_row: Tensor,
    row_block: Tensor,
    last_token: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_kv_blocks: int,
) -> DecodeInputs:
    """Inputs of one token a row.

    Args:
        token_ids: [N] int64; negative: the row's newest sampled token.
        kv_len: [N] int64, this token included.
        table_row: [N] int64, the row of ``last_token`` and ``block_table`` that each batch row is.
        row_block: [N] int64, the block a row's token opens, entered into ``block_table`` here; negative: none.
        last_token: [R + 1] int64, strided.
        block_table: [R + 1, C] int32, contiguous rows.
        block_size: Tokens of a block.
        num_kv_blocks: K.
    """
    rows = token_ids.shape[0]
    made = torch.empty((3, rows), dtype=torch.int64, device=token_ids.device)
    gathered = torch.empty((rows, num_kv_blocks), dtype=torch.int64, device=token_ids.device)
    decode_inputs_kernel[(rows,)](
        token_ids,
        kv_len,
        table_row,
        row_block,
        last_token,
        block_table,
        made[0],
        made[1],
        made[2],
        gathered,
        last_token.stride(0),
        block_table.stride(0),
        num_kv_blocks,
        BLOCK_SIZE=block_size,
        BLOCK_K=min(1024, max(16, triton.next_power_of_2(block_table.shape[1]))),
        num_warps=1,
    )
    return DecodeInputs(made[0], made[1], made[2], gathered)


@triton.jit(do_not_specialize=["K"])  # eager forwards have one more whenever the longest row opens a block
def decode_inputs_kernel(
    token_ids,
    kv_len,
    table_row,
    row_block,
    last_token,
    block_table,
    out_ids,
    out_positions,
    out_slots,
    out_table,
    last_stride,
    table_stride,
    K,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a row."""
    n = tl.program_id(0)
    row = tl.load(table_row + n)
    token = tl.load(token_ids + n)
    newest = tl.load(last_token + row * last_stride)
    tl.store(out_ids + n, tl.where(token < 0, newest, token))

    position = tl.load(kv_len + n) - 1
    tl.store(out_positions + n, position)

    opened = tl.load(row_block + n)
    column = position // BLOCK_SIZE
    entry = block_table + row * table_stride + column
    block = tl.where(opened < 0, tl.load(entry).to(tl.int64), opened)
    tl.store(out_slots + n, block * BLOCK_SIZE + position % BLOCK_SIZE)

    for start in range(0, K, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        known = tl.load(block_table + row * table_stride + place, mask=place < K, other=0).to(tl.int64)
        known = tl.where((place == column) & (opened >= 0), opened, known)
        tl.store(out_table + n.to(tl.int64) * K + place, known, mask=place < K)
    tl.store(entry, opened.to(tl.int32), mask=opened >= 0)
