"""Mamba2's operations as Triton kernels: one pass over the state for decode rows. For CUDA, in any type but float64.

Letters: T tokens of the batch, D decode rows, C convolution channels, K convolution width, H heads, P head size,
G groups, S state size, I = H * P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.errors import ConfigError
from engine.kernels.triton import overlapped, power_of_two
from engine.ssm import triton_kernels
from engine.ssm.base import (
    KeptInputs,
    MixedParts,
    MixerWeights,
    ScanInputs,
    ScanWeights,
    mix_by_parts,
    scan_inputs,
)
from engine.ssm.plan import Plan, Planner
from engine.ssm.triton_chunk_kernel import chunk_scan_kernel
from engine.ssm.triton_conv import conv_decode, conv_histories, conv_prefill
from engine.ssm.triton_replay import conv_replayed, replay_states
from engine.ssm.triton_step import step_rows
from engine.ssm.triton_tiles import Tiles, num_parts, scan_sizes

__all__ = ["DTYPES", "Tiles", "TritonStateSpace"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonStateSpace:
    """Implements :class:`engine.ssm.base.StateSpace`.

    Decode rows take one pass over their states, and so do replayed rows, and prefill rows where all are short, as when
    drafts are verified. A few decode rows alone have convolution and gate in that pass. Longer ones take the chunked
    form, a program a row and head from its first chunk to its last.
    """

    name = "triton"
    can_replay = True
    has_gate = True
    """Whether decode rows' outputs are gated where they are made."""

    def __init__(self, tiles: Tiles | None = None) -> None:
        self._tiles = tiles or Tiles()
        self._planner = Planner()

    def conv(
        self, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, conv_state: Tensor, batch: ForwardBatch
    ) -> Tensor:
        check_supported(x_TC, conv_state)
        out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        shape = batch.shape
        has_prefill = shape.num_scanned_rows > 0
        # What prefill rows' slots remember is read, for outputs and new histories, before any is written.
        if has_prefill:
            taken = self._planner.plan_for(batch, conv_state).taken.of_prefill(batch.shape)
            conv_prefill(x_TC, weight_CK, bias_C, conv_state, batch, out_TC)
            new_ZCk = conv_histories(x_TC, conv_state, batch, taken)
        if shape.num_decode:
            conv_decode(x_TC, weight_CK, bias_C, conv_state, batch, out_TC)
        if shape.num_replayed:
            conv_replayed(x_TC, weight_CK, bias_C, conv_state, batch, out_TC)
        if has_prefill:
            conv_state.index_copy_(0, taken.slot_Z, new_ZCk)
        return out_TC

    def scan(
        self,
        inputs: ScanInputs,
        weights: ScanWeights,
        ssm_state: Tensor,
        batch: ForwardBatch,
        kept: KeptInputs | None = None,
    ) -> Tensor:
        x_THP, shape = inputs.x_THP, batch.shape
        check_supported(x_THP, ssm_state)
        has_prefill = shape.num_scanned_rows > 0
        # Prefill leaves out padding tokens, whose outputs must be finite all the same.
        make = torch.zeros if has_prefill else torch.empty
        y_THP = make(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
        if has_prefill:
            self.prefill(inputs, weights, ssm_state, self._planner.plan_for(batch, ssm_state), y_THP)
        if shape.num_decode:
            self.update(inputs, weights, ssm_state, batch, y_THP)
        if shape.num_replayed:
            assert kept is not None, "replayed rows need what their slots keep"
            replay_states(inputs, weights, ssm_state, kept, batch, y_THP, self._tiles)
        return y_THP

    def prefill(self, inputs: ScanInputs, weights: ScanWeights, ssm_state: Tensor, plan: Plan, y_THP: Tensor) -> None:
        """The scan of the prefill rows behind those that step, outputs into their tokens of ``y``."""
        if plan.batch.shape.max_query_len <= self._tiles.walk_limit:
            walk_states(inputs, weights, ssm_state, plan, y_THP, self._tiles)
        else:
            scan_chunks(inputs, weights, ssm_state, plan, y_THP, self._tiles)

    def update(
        self, inputs: ScanInputs, weights: ScanWeights, ssm_state: Tensor, batch: ForwardBatch, y_THP: Tensor
    ) -> None:
        """Move the decode rows' states on by a token, outputs into the first D of ``y``."""
        update_states(inputs, weights, ssm_state, batch, y_THP, self._tiles)

    def mix(
        self,
        parts: MixedParts,
        weights: MixerWeights,
        conv_state: Tensor,
        ssm_state: Tensor,
        batch: ForwardBatch,
        kept: KeptInputs | None = None,
    ) -> Tensor:
        rows, is_normed = batch.shape.num_decode, weights.norm_weight_I is not None
        is_step = 0 < rows <= self._tiles.step_limit if is_normed else self.has_gate
        if not is_step or rows != batch.shape.num_tokens:
            return mix_by_parts(self, parts, weights, conv_state, ssm_state, batch, kept)
        check_supported(parts.conv_TC, conv_state)
        check_supported(parts.conv_TC, ssm_state)
        if is_normed:
            return step_rows(parts, weights, conv_state, ssm_state, batch, self._tiles)
        mixed_TC = self.conv(parts.conv_TC, weights.conv_weight_CK, weights.conv_bias_C, conv_state, batch)
        inputs = scan_inputs(mixed_TC, parts.dt_TH, weights.num_groups, ssm_state)
        y_THP = torch.empty(inputs.x_THP.shape, dtype=mixed_TC.dtype, device=mixed_TC.device)
        update_states(inputs, weights.scan, ssm_state, batch, y_THP, self._tiles, gate_TI=parts.gate_TI)
        return y_THP.flatten(1)

    def gated_norm(self, y_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, num_groups: int, eps: float) -> Tensor:
        tokens, inner = y_TI.shape
        size = inner // num_groups
        assert y_TI.stride(1) == gate_TI.stride(1) == 1, "rows must be of neighbouring elements"
        out_TI = torch.empty((tokens, inner), dtype=y_TI.dtype, device=y_TI.device)
        block = power_of_two(size)
        triton_kernels.gated_norm_kernel[(tokens, num_groups)](
            y_TI,
            gate_TI,
            weight_I,
            out_TI,
            y_TI.stride(0),
            gate_TI.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
            **overlapped(),
        )
        return out_TI


def check_supported(x: Tensor, state: Tensor) -> None:
    """ConfigError for what these kernels do not compute; it names the reference, which does."""
    if x.dtype not in DTYPES:
        raise ConfigError(f"the Triton kernels compute in bfloat16, float16 and float32, got {x.dtype}; use 'torch'")
    assert state.is_contiguous(), "a state tensor is addressed by slot"
    assert x.stride(-1) == 1, "rows must be of neighbouring elements"


def update_states(
    inputs: ScanInputs,
    weights: ScanWeights,
    ssm_state: Tensor,
    batch: ForwardBatch,
    y_THP: Tensor,
    tiles: Tiles,
    gate_TI: Tensor | None = None,
) -> None:
    """The recurrence of the decode rows, one pass over their states; outputs into the first D of ``y``.

    Args:
        inputs: Of at least D tokens, the first being the decode rows'.
        weights: Of the layer.
        ssm_state: [num_slots + 1, H, P, S], contiguous; written in place. The last slot is the dummy.
        batch: Rows and slots.
        y_THP: Contiguous.
        tiles: How to cut the work.
        gate_TI: Rows of neighbouring elements; its SiLU multiplies the outputs.
    """
    assert gate_TI is None or gate_TI.stride(1) == 1, "rows must be of neighbouring elements"
    grid = (num_parts(ssm_state, tiles.block_p), batch.shape.num_decode)
    triton_kernels.state_update_kernel[grid](
        *inputs,
        *weights[:3],
        ssm_state,
        batch.state_from_N,
        batch.state_to_N,
        batch.query_len_N,
        batch.kv_len_N,
        gate_TI,
        y_THP,
        *(each.stride(0) for each in inputs),
        gate_TI.stride(0) if gate_TI is not None else 0,
        *weights.dt_limits,
        ssm_state.shape[0] - 1,
        HAS_GATE=gate_TI is not None,
        num_warps=tiles.num_warps,
        **scan_sizes(inputs, ssm_state, tiles.block_p),
    )


def walk_states(
    inputs: ScanInputs, weights: ScanWeights, ssm_state: Tensor, plan: Plan, y_THP: Tensor, tiles: Tiles
) -> None:
    """The recurrence of the prefill rows, token by token; states of their ends and snapshots into their slots.

    Args:
        inputs: Of all tokens.
        weights: Of the layer.
        ssm_state: As for :func:`update_states`.
        plan: Of the batch.
        y_THP: Contiguous; outputs of padding tokens are left alone.
        tiles: How to cut the work.
    """
    grid = (num_parts(ssm_state, tiles.block_p), plan.batch.shape.num_scanned_rows)
    triton_kernels.state_walk_kernel[grid](
        *_prefill_arguments(inputs, weights, ssm_state, plan, y_THP),
        HAS_KEPT=plan.kept_PW is not None,
        num_warps=tiles.num_warps,
        **scan_sizes(inputs, ssm_state, tiles.block_p),
    )


def scan_chunks(
    inputs: ScanInputs, weights: ScanWeights, ssm_state: Tensor, plan: Plan, y_THP: Tensor, tiles: Tiles
) -> None:
    """The same as :func:`walk_states`, a chunk at a time: products for tensor cores, in TF32.

    Three of them stand in for a product of float32, which TF32 would round to 11 bits; half types have no more.
    """
    grid = (num_parts(ssm_state, tiles.chunk_block_p), plan.batch.shape.num_scanned_rows)
    chunk_scan_kernel[grid](
        *_prefill_arguments(inputs, weights, ssm_state, plan, y_THP),
        HAS_KEPT=plan.kept_PW is not None,
        Q=max(16, min(tiles.chunk, power_of_two(plan.batch.shape.max_query_len))),
        PRECISION="tf32x3" if inputs.x_THP.dtype == torch.float32 else "tf32",
        num_warps=tiles.chunk_warps,
        num_stages=1,
        **scan_sizes(inputs, ssm_state, tiles.chunk_block_p, least=16),
    )


def _prefill_arguments(
    inputs: ScanInputs, weights: ScanWeights, ssm_state: Tensor, plan: Plan, y_THP: Tensor
) -> tuple[Any, ...]:
    """What both kernels of prefill rows read, in their order."""
    batch, shape = plan.batch, plan.batch.shape
    return (
        *inputs,
        *weights[:3],
        ssm_state,
        plan.from_N,
        plan.to_N,
        batch.query_start_N,
        batch.query_len_N,
        batch.kv_len_N,
        plan.kept_PW,
        y_THP,
        *(each.stride(0) for each in inputs),
        *weights.dt_limits,
        ssm_state.shape[0] - 1,
        shape.num_stepping_rows,
        1 + shape.max_query_len,
    )
