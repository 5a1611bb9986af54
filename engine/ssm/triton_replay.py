"""Launching the Triton kernels of replayed rows; see ``base.py`` for what they compute.

Letters: T tokens of the batch, V replayed rows, W tokens of each, C convolution channels, K convolution width, H heads,
P head size, S state size.
"""

from __future__ import annotations

from torch import Tensor

from engine.batch import ForwardBatch
from engine.kernels.triton import overlapped, power_of_two
from engine.ssm import triton_replay_kernels
from engine.ssm.base import KeptInputs, ScanInputs, ScanWeights
from engine.ssm.triton_tiles import Tiles, num_parts, scan_sizes


def conv_replayed(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, conv_state: Tensor, batch: ForwardBatch, out_TC: Tensor
) -> None:
    """Convolution of the replayed rows into the first V * W rows of ``out``; moves their histories on by W inputs.

    Args:
        x_TC: Inputs; rows of neighbouring elements.
        weight_CK: Contiguous.
        bias_C: Of the channels.
        conv_state: [num_slots + 1, C, K - 2 + W], contiguous; written in place.
        batch: Rows and slots.
        out_TC: Contiguous.
    """
    (channels, width), tokens = weight_CK.shape, batch.shape.wide_width
    assert conv_state.shape[2] == width - 2 + tokens, "a history ends with all tokens of the last forward"
    block = 256
    triton_replay_kernels.conv_replay_kernel[(batch.shape.num_replayed, -(-channels // block))](
        x_TC,
        weight_CK,
        bias_C,
        conv_state,
        batch.state_from_N,
        batch.state_to_N,
        batch.replayed_V,
        batch.query_len_N,
        batch.kv_len_N,
        out_TC,
        x_TC.stride(0),
        C=channels,
        K=width,
        W=tokens,
        HAS_BIAS=bias_C is not None,
        BLOCK_C=block,
        BLOCK_K=power_of_two(width - 1),
        num_warps=4,
        **overlapped(),
    )


def replay_states(
    inputs: ScanInputs,
    weights: ScanWeights,
    ssm_state: Tensor,
    kept: KeptInputs,
    batch: ForwardBatch,
    y_THP: Tensor,
    tiles: Tiles,
) -> None:
    """The recurrence of the replayed rows, one pass over their states; outputs into the first V * W of ``y``.

    Args:
        inputs: Of at least V * W tokens, the first being the replayed rows'.
        weights: Of the layer.
        ssm_state: [num_slots + 1, H, P, S], contiguous; written in place. The last slot is the dummy.
        kept: Of the slots; read by one kernel, then written by another.
        batch: Rows and slots.
        y_THP: Contiguous.
        tiles: How to cut the work.
    """
    shape, dummy_slot = batch.shape, ssm_state.shape[0] - 1
    triton_replay_kernels.state_replay_kernel[(num_parts(ssm_state, tiles.replay_block_p), shape.num_replayed)](
        *inputs,
        *weights[:3],
        ssm_state,
        *kept,
        batch.state_from_N,
        batch.state_to_N,
        batch.replayed_V,
        batch.query_len_N,
        batch.kv_len_N,
        y_THP,
        *(each.stride(0) for each in inputs),
        *weights.dt_limits,
        dummy_slot,
        W=shape.wide_width,
        num_warps=tiles.replay_warps,
        **scan_sizes(inputs, ssm_state, tiles.replay_block_p),
    )
    own = (inputs.x_THP, inputs.dt_TH, inputs.B_TGS)
    sizes, block = [each[0].numel() for each in own], 1024
    triton_replay_kernels.keep_inputs_kernel[(shape.num_stepping_tokens, -(-max(sizes) // block))](
        *own,
        *kept,
        batch.state_to_N,
        *(each.stride(0) for each in own),
        dummy_slot,
        XS=sizes[0],
        DTS=sizes[1],
        BS=sizes[2],
        W=shape.wide_width,
        BLOCK=block,
        num_warps=4,
        **overlapped(),
    )
