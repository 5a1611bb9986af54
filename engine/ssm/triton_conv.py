"""Launching the Triton kernels of Mamba2's convolution.

Letters: T tokens of the batch, D decode rows, Z states taken, C convolution channels, K convolution width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.kernels.triton import overlapped, power_of_two
from engine.ssm import triton_kernels
from engine.ssm.plan import Taken


def conv_decode(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, conv_state: Tensor, batch: ForwardBatch, out_TC: Tensor
) -> None:
    """Convolution of the decode rows into the first D rows of ``out``; moves their histories on by a token."""
    channels, width = weight_CK.shape
    assert conv_state.shape[2] == width - 1, "rows of one token are not replayed"
    block = 256
    triton_kernels.conv_decode_kernel[(batch.shape.num_decode, -(-channels // block))](
        x_TC,
        weight_CK,
        bias_C,
        conv_state,
        batch.state_from_N,
        batch.state_to_N,
        batch.query_len_N,
        batch.kv_len_N,
        out_TC,
        x_TC.stride(0),
        C=channels,
        K=width,
        HAS_BIAS=bias_C is not None,
        BLOCK_C=block,
        BLOCK_K=power_of_two(width - 1),
        num_warps=4,
        **overlapped(),
    )


def conv_prefill(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, conv_state: Tensor, batch: ForwardBatch, out_TC: Tensor
) -> None:
    """Convolution of the tokens behind rows that step, padding too, into theirs of ``out``; writes no history."""
    channels, width = weight_CK.shape
    first, block = batch.shape.num_stepping_tokens, 1024
    triton_kernels.conv_prefill_kernel[(batch.shape.num_tokens - first, -(-channels // block))](
        x_TC,
        weight_CK,
        bias_C,
        conv_state,
        batch.state_from_N,
        batch.row_T,
        batch.query_start_N,
        batch.query_len_N,
        batch.kv_len_N,
        out_TC,
        x_TC.stride(0),
        first,
        C=channels,
        K=width,
        LENGTH=conv_state.shape[2],
        HAS_BIAS=bias_C is not None,
        BLOCK_C=block,
        num_warps=4,
    )


def conv_histories(x_TC: Tensor, conv_state: Tensor, batch: ForwardBatch, taken: Taken) -> Tensor:
    """[Z, C, remembered] inputs before the next token of each state taken, for its slot; writes no slot."""
    count, (channels, remembered) = taken.row_Z.shape[0], conv_state.shape[1:]
    out_ZCk = torch.empty((count, channels, remembered), dtype=conv_state.dtype, device=conv_state.device)
    block = 256
    triton_kernels.conv_history_kernel[(count, -(-channels // block))](
        x_TC,
        conv_state,
        batch.state_from_N,
        batch.query_start_N,
        batch.query_len_N,
        batch.kv_len_N,
        taken.row_Z,
        taken.after_Z,
        out_ZCk,
        x_TC.stride(0),
        C=channels,
        LENGTH=remembered,
        BLOCK_C=block,
        BLOCK_K=power_of_two(remembered),
        num_warps=4,
    )
    return out_ZCk
