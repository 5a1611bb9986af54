"""Mamba2's scan by the Triton operations of mamba-ssm (2.3.2.post1): a second opinion on the kernels of our own.

Letters: T tokens of the batch, D decode rows, P prefill rows, L longest prefill row, Z states taken, H heads,
G groups, V head size, S state size.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.ssm import triton_kernels
from engine.ssm.base import NO_LIMITS, ScanInputs, ScanWeights
from engine.ssm.chunked import time_steps
from engine.ssm.plan import Plan
from engine.ssm.torch import gather_states
from engine.ssm.triton import TritonStateSpace
from engine.ssm.triton_tiles import Tiles

_CHUNK = 256
"""Tokens of a chunk in mamba-ssm's scan; its own models use this."""


def _operations() -> tuple[Any, Any]:
    """mamba-ssm's decode step and chunked scan.

    Importing the package asks for its CUDA extension, which these do not need and which is seldom built.
    """
    sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return selective_state_update, mamba_chunk_scan_combined


class MambaSsmStateSpace(TritonStateSpace):
    """Convolution and gated norm are ours, as mamba-ssm's want a CUDA extension.

    Its chunked scan takes the states between chunks in the activations' type, and gives states of rows' ends only: a
    forward that keeps snapshots takes our kernel.
    """

    name = "mamba_ssm"
    can_replay = False
    has_gate = False

    def __init__(self) -> None:
        super().__init__(Tiles(step_limit=0))
        self._step, self._chunk_scan = _operations()

    def update(
        self, inputs: ScanInputs, weights: ScanWeights, ssm_state: Tensor, batch: ForwardBatch, y_THP: Tensor
    ) -> None:
        rows = batch.shape.num_decode
        assert batch.state_from_N is not None
        slot_D = batch.state_from_N[:rows]
        dummy = ssm_state.shape[0] - 1
        zero_fresh(ssm_state, batch)
        x_DHV, dt_DH, B_DGS, C_DGS = (each[:rows] for each in inputs)
        is_plain = weights.dt_limits == NO_LIMITS
        # It knows no limits, so where there are some the time steps are made beforehand.
        dt_DH = dt_DH if is_plain else time_steps(dt_DH, weights)
        bias_H = weights.dt_bias_H if is_plain else torch.zeros_like(weights.dt_bias_H)
        heads, size, states = ssm_state.shape[1:]
        y_THP[:rows] = self._step(
            ssm_state,
            x_DHV,
            dt_DH[:, :, None].expand(-1, -1, size),
            -torch.exp(weights.a_log_H)[:, None, None].expand(heads, size, states),
            B_DGS,
            C_DGS,
            weights.d_H[:, None].expand(heads, size),
            dt_bias=bias_H[:, None].expand(heads, size),
            dt_softplus=is_plain,
            state_batch_indices=torch.where(slot_D == dummy, -1, slot_D),  # below 0 it moves no state
        )

    def prefill(self, inputs: ScanInputs, weights: ScanWeights, ssm_state: Tensor, plan: Plan, y_THP: Tensor) -> None:
        first = plan.batch.shape.num_decode
        if plan.batch.snapshots is not None:
            super().prefill(inputs, weights, ssm_state, plan, y_THP)
            return
        # One sequence a row, padded: packed sequences would all start from one state, and zeros after the first.
        token_PL, is_token_PL, place_t = padded_rows(plan.batch)
        x_PLHV, dt_PLH, B_PLGS, C_PLGS = (each[token_PL] for each in inputs)
        # A time step of 0 leaves the state as it is.
        dt_PLH = time_steps(dt_PLH, weights).masked_fill(~is_token_PL[:, :, None], 0.0)
        y_PLHV, state_PHVS = self._chunk_scan(
            x_PLHV,
            dt_PLH,
            -torch.exp(weights.a_log_H),
            B_PLGS,
            C_PLGS,
            _CHUNK,
            D=weights.d_H,
            initial_states=gather_states(ssm_state, plan, first),
            return_final_states=True,
        )
        y_THP[first:] = y_PLHV.flatten(0, 1).index_select(0, place_t)
        ssm_state.index_copy_(0, plan.to_N[first:], state_PHVS.to(ssm_state.dtype))


def padded_rows(batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill rows side by side.

    Returns:
        [P, L] token index of each place; [P, L] whether it holds a token, else it repeats one of the row's; and where
        each token behind the decode rows is found in [P * L], for padding tokens anywhere in it.
    """
    shape, first = batch.shape, batch.shape.num_decode
    longest, device = max(1, shape.max_query_len), batch.row_T.device
    start_P1, length_P1 = batch.query_start_N[first:, None], batch.query_len_N[first:, None]
    offset_L = torch.arange(longest, device=device)
    token_PL = (start_P1 + torch.minimum(offset_L, length_P1 - 1)).clamp(0, shape.num_tokens - 1)
    row_t = batch.row_T[first:] - first
    offset_t = torch.arange(first, shape.num_tokens, device=device) - start_P1[row_t, 0]
    return token_PL, offset_L < length_P1, row_t * longest + offset_t.clamp(0, longest - 1)


def zero_fresh(ssm_state: Tensor, batch: ForwardBatch) -> None:
    """Zeros in the slots of decode rows that start anew, since the step goes on from whatever a slot holds."""
    size, block = ssm_state[0].numel(), 4096
    triton_kernels.zero_fresh_kernel[(batch.shape.num_decode, -(-size // block))](
        ssm_state, batch.state_from_N, batch.query_len_N, batch.kv_len_N, SIZE=size, BLOCK=block, num_warps=4
    )
