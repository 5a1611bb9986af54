# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""What a forward over decode rows with drafts reads, made by one kernel: some 25 small torch kernels otherwise.

Letters: N decode rows (padding included), W tokens a row, T = N * W tokens, S = W - 1 drafts, K block-table columns,
R rows of the request table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class DraftInputs(NamedTuple):
    """All int64, on the device."""

    token_ids: Tensor
    """[T]."""
    positions: Tensor
    """[T]; 0 for padding."""
    slots: Tensor
    """[T] block id * block_size + offset."""
    before: Tensor
    """[T] the same of the position before; a first token's own."""
    block_table: Tensor
    """[N, K]."""
    kv_len: Tensor
    """[N] this forward's tokens included."""
    state_from: Tensor | None
    """[N]; None where none was given."""


def draft_inputs(
    token_ids: Tensor,
    kv_len: Tensor,
    table_row: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    length: Tensor,
    accepted: Tensor,
    block_table: Tensor,
    state_from: Tensor | None,
    *,
    block_size: int,
    num_kv_blocks: int,
    counts_lengths: bool,
) -> DraftInputs:
    """Inputs of W tokens a row.

    Args:
        token_ids: [T] int64; -1: the row's newest sampled token, -2 and less: its first draft and so on.
        kv_len: [N] int64 as staged, these tokens included.
        table_row: [N] int64, the row of the columns that each batch row is; R for padding.
        last_token: [R + 1] int64, strided.
        drafts: [R + 1, S] int64, contiguous rows.
        length: [R + 1] int64, tokens whose ids are known.
        accepted: [R + 1] int64; below 0 counts as 0.
        block_table: [R + 1, C] int32, contiguous rows.
        state_from: [N] int64, where the states of each row begin; None: it is left alone.
        block_size: Tokens of a block.
        num_kv_blocks: K.
        counts_lengths: Lengths are those of ``length``, and states go on ``accepted`` further; else as staged.
    """
    rows, width = table_row.shape[0], drafts.shape[1] + 1
    made = torch.empty((4, rows * width), dtype=torch.int64, device=token_ids.device)
    gathered = torch.empty((rows, num_kv_blocks), dtype=torch.int64, device=token_ids.device)
    advances = counts_lengths and state_from is not None
    counted = torch.empty((2, rows), dtype=torch.int64, device=token_ids.device) if counts_lengths else (kv_len, kv_len)
    draft_inputs_kernel[(rows,)](
        token_ids,
        kv_len,
        table_row,
        kv_len if state_from is None else state_from,
        last_token,
        drafts,
        length,
        accepted,
        block_table,
        made[0],
        made[1],
        made[2],
        made[3],
        counted[0],
        counted[1],
        gathered,
        last_token.stride(0),
        drafts.stride(0),
        block_table.stride(0),
        block_table.shape[0] - 1,
        num_kv_blocks,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_SIZE=block_size,
        BLOCK_K=min(1024, max(16, triton.next_power_of_2(block_table.shape[1]))),
        COUNTS=counts_lengths,
        ADVANCES=advances,
        num_warps=1,
    )
    return DraftInputs(
        token_ids=made[0],
        positions=made[1],
        slots=made[2],
        before=made[3],
        block_table=gathered,
        kv_len=counted[0],
        state_from=counted[1] if advances else state_from,
    )


@triton.jit(do_not_specialize=["K"])  # eager forwards have one more whenever the longest row opens a block
def draft_inputs_kernel(
    token_ids,
    kv_len,
    table_row,
    state_from,
    last_token,
    drafts,
    length,
    accepted,
    block_table,
    out_ids,
    out_positions,
    out_slots,
    out_before,
    out_kv_len,
    out_state_from,
    out_table,
    last_stride,
    drafts_stride,
    table_stride,
    dummy_row,
    K,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNTS: tl.constexpr,
    ADVANCES: tl.constexpr,
):
    """One program a row."""
    n = tl.program_id(0)
    row = tl.load(table_row + n)
    is_real = row != dummy_row
    end = tl.load(kv_len + n)
    if COUNTS:
        end = tl.where(is_real, tl.load(length + row) + (WIDTH - 1), end)
        tl.store(out_kv_len + n, end)
    if ADVANCES:
        further = tl.maximum(tl.load(accepted + row), 0)
        tl.store(out_state_from + n, tl.load(state_from + n) + further)

    place = tl.arange(0, BLOCK_W)
    is_token = place < WIDTH
    staged = tl.load(token_ids + n * WIDTH + place, mask=is_token, other=0)
    newest = tl.load(last_token + row * last_stride)
    draft = tl.load(drafts + row * drafts_stride + (-2 - staged), mask=is_token & (staged < -1), other=0)
    token = tl.where(staged == -1, newest, tl.where(staged < -1, draft, staged))
    tl.store(out_ids + n * WIDTH + place, token, mask=is_token)

    position = tl.where(is_real, end - WIDTH + place, 0)
    tl.store(out_positions + n * WIDTH + place, position, mask=is_token)
    entries = block_table + row * table_stride
    block = tl.load(entries + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    tl.store(out_slots + n * WIDTH + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_token)
    before = tl.maximum(position - 1, 0)
    block = tl.load(entries + before // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    tl.store(out_before + n * WIDTH + place, block * BLOCK_SIZE + before % BLOCK_SIZE, mask=is_token)

    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        known = tl.load(entries + column, mask=column < K, other=0).to(tl.int64)
        tl.store(out_table + n.to(tl.int64) * K + column, known, mask=column < K)
