"""A few decode rows' mixer between its two projections in two kernels. For CUDA.

Letters: D decode rows, C convolution channels, K convolution width, H heads, P head size, I = H * P, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.kernels.triton import overlapped, power_of_two
from engine.ssm import triton_step_kernels
from engine.ssm.base import MixedParts, MixerWeights
from engine.ssm.triton_tiles import Tiles, num_parts, step_block_p


def step_rows(
    parts: MixedParts,
    weights: MixerWeights,
    conv_state: Tensor,
    ssm_state: Tensor,
    batch: ForwardBatch,
    tiles: Tiles,
) -> Tensor:
    """:meth:`engine.ssm.base.StateSpace.mix` of decode rows and nothing else; [D, I].

    Args:
        parts: Of D tokens.
        weights: Of the layer.
        conv_state: [num_slots + 1, C, K - 1], contiguous; written in place.
        ssm_state: [num_slots + 1, H, P, S], contiguous; written in place. The last slot is the dummy.
        batch: Rows and slots.
        tiles: How to cut the work.
    """
    gate_TI, x_TC, dt_TH = parts
    rows, channels = x_TC.shape
    _, heads, head_dim, state_size = ssm_state.shape
    width, groups = weights.conv_weight_CK.shape[1], weights.num_groups
    assert conv_state.shape[2] == width - 1, "rows of one token are not replayed"
    assert x_TC.stride(1) == gate_TI.stride(1) == dt_TH.stride(1) == 1, "rows must be of neighbouring elements"
    slots = (batch.state_from_N, batch.state_to_N, batch.query_len_N, batch.kv_len_N)
    gated_DI = torch.empty((rows, heads * head_dim), dtype=torch.float32, device=x_TC.device)
    block_p = step_block_p(ssm_state, rows, tiles)
    triton_step_kernels.step_kernel[(num_parts(ssm_state, block_p), rows)](
        x_TC,
        dt_TH,
        gate_TI,
        weights.conv_weight_CK,
        weights.conv_bias_C,
        *weights.scan[:3],
        conv_state,
        ssm_state,
        *slots,
        gated_DI,
        x_TC.stride(0),
        dt_TH.stride(0),
        gate_TI.stride(0),
        *weights.scan.dt_limits,
        ssm_state.shape[0] - 1,
        H=heads,
        P=head_dim,
        G=groups,
        S=state_size,
        K=width,
        HAS_BIAS=weights.conv_bias_C is not None,
        BLOCK_P=block_p,
        BLOCK_S=power_of_two(state_size),
        BLOCK_K=power_of_two(width - 1),
        num_warps=tiles.num_warps,
        **overlapped(),
    )
    out_DI = torch.empty((rows, heads * head_dim), dtype=x_TC.dtype, device=x_TC.device)
    block, size = 256, heads * head_dim // groups
    triton_step_kernels.norm_and_history_kernel[(groups + -(-channels // block), rows)](
        gated_DI,
        weights.norm_weight_I,
        out_DI,
        weights.norm_eps,
        x_TC,
        conv_state,
        *slots,
        x_TC.stride(0),
        C=channels,
        K=width,
        NORMS=groups,
        SIZE=size,
        BLOCK=power_of_two(size),
        BLOCK_C=block,
        BLOCK_K=power_of_two(width - 1),
        num_warps=4,
        **overlapped(),
    )
    return out_DI
