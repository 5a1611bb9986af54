"""Mamba2's operations in plain torch: the reference, on every device and in every float type.

Letters: T tokens of the batch, D decode rows, F replayed rows, W tokens of each of them, N batch rows, P prefill rows,
Z states taken, C convolution channels, K convolution width, H heads, G groups, V head size, S state size, I = H * V.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import ForwardBatch
from engine.ssm.base import KeptInputs, MixedParts, MixerWeights, ScanInputs, ScanWeights, mix_by_parts
from engine.ssm.chunked import chunked_scan, exact_type, time_steps
from engine.ssm.plan import Plan, Planner


class TorchStateSpace:
    """Implements :class:`engine.ssm.base.StateSpace`. All states are gathered before any is written."""

    name = "torch"
    can_replay = True

    def __init__(self) -> None:
        self._planner = Planner()

    def conv(
        self, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, conv_state: Tensor, batch: ForwardBatch
    ) -> Tensor:
        plan = self._planner.plan_for(batch, conv_state)
        width, wide = weight_CK.shape[1], exact_type(x_TC)
        known = known_inputs(x_TC, conv_state, plan)
        offset_T = torch.arange(batch.shape.num_tokens, device=x_TC.device) - batch.query_start_N[batch.row_T]
        weight_KC, remembered = weight_CK.t().to(wide), conv_state.shape[2]
        out_TC = known[input_entry(plan, batch.row_T, offset_T, remembered)].to(wide) * weight_KC[-1]
        for back in range(1, width):
            out_TC = out_TC + known[input_entry(plan, batch.row_T, offset_T - back, remembered)] * weight_KC[-1 - back]
        if bias_C is not None:
            out_TC = out_TC + bias_C
        write_history(known, conv_state, plan, 0)
        return functional.silu(out_TC).to(x_TC.dtype)

    def scan(
        self,
        inputs: ScanInputs,
        weights: ScanWeights,
        ssm_state: Tensor,
        batch: ForwardBatch,
        kept: KeptInputs | None = None,
    ) -> Tensor:
        plan = self._planner.plan_for(batch, ssm_state)
        shape, first = batch.shape, batch.shape.num_stepping_rows
        before_NHVS = gather_states(ssm_state, plan, 0).to(exact_type(inputs.x_THP))
        y, states = [], []
        if shape.num_decode:
            y_DHV, after_DHVS = step_scan(ScanInputs(*(each[:first] for each in inputs)), weights, before_NHVS[:first])
            y.append(y_DHV)
            states.append(after_DHVS)
        if shape.num_replayed:
            assert kept is not None, "replayed rows need what their slots keep"
            accepted_FHVS = replayed_states(kept, weights, before_NHVS[:first], plan)
            states.append(accepted_FHVS)
            y.append(walk_scan(inputs, weights, accepted_FHVS, shape.wide_width))
            keep_inputs(kept, inputs, plan)
        if shape.num_scanned_rows:
            chunked = chunked_scan(inputs, weights, before_NHVS[first:], plan.chunks)
            y.append(chunked.y_tHV)
            states.append(chunked.state_ZHVS)
        ssm_state.index_copy_(0, plan.taken.slot_Z, torch.cat(states).to(ssm_state.dtype))
        return torch.cat(y).to(inputs.x_THP.dtype)

    def mix(
        self,
        parts: MixedParts,
        weights: MixerWeights,
        conv_state: Tensor,
        ssm_state: Tensor,
        batch: ForwardBatch,
        kept: KeptInputs | None = None,
    ) -> Tensor:
        return mix_by_parts(self, parts, weights, conv_state, ssm_state, batch, kept)

    def gated_norm(self, y_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, num_groups: int, eps: float) -> Tensor:
        wide = exact_type(y_TI)
        gated_TGx = (y_TI.to(wide) * functional.silu(gate_TI.to(wide))).unflatten(1, (num_groups, -1))
        normed_TGx: Tensor = gated_TGx * torch.rsqrt(gated_TGx.pow(2).mean(-1, keepdim=True) + eps)
        return (normed_TGx.flatten(1) * weight_I).to(y_TI.dtype)


def step_scan(inputs: ScanInputs, weights: ScanWeights, before_DHVS: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row: its outputs, [D, H, V], and the states behind it, both in the exact type."""
    wide, heads = exact_type(inputs.x_THP), inputs.x_THP.shape[1]
    x_DHV, dt_DH = inputs.x_THP.to(wide), time_steps(inputs.dt_TH, weights)
    per_group = heads // inputs.B_TGS.shape[1]
    B_DHS, C_DHS = (each.to(wide).repeat_interleave(per_group, dim=1) for each in (inputs.B_TGS, inputs.C_TGS))
    decay_DH = torch.exp(dt_DH * -torch.exp(weights.a_log_H))
    added_DHVS = (x_DHV * dt_DH[..., None])[..., None] * B_DHS[:, :, None]
    after_DHVS = before_DHVS * decay_DH[..., None, None] + added_DHVS
    y_DHV = torch.matmul(after_DHVS, C_DHS[..., None])[..., 0] + x_DHV * weights.d_H[:, None]
    return y_DHV, after_DHVS


def replayed_states(kept: KeptInputs, weights: ScanWeights, before_FHVS: Tensor, plan: Plan) -> Tensor:
    """States of the replayed rows behind those tokens of their last forwards that stand; [F, H, V, S].

    What is kept of the others is not looked at: it may be another row's, or nothing.
    """
    count_F, state_FHVS = plan.batch.replayed_V, before_FHVS
    assert count_F is not None, "replayed rows need to be told how many tokens"
    from_F = plan.from_N[: count_F.shape[0]]
    x_FWHV, dt_FWH, B_FWGS = (each.index_select(0, from_F) for each in kept)
    for place in range(x_FWHV.shape[1]):
        B_FGS = B_FWGS[:, place]
        _, after_FHVS = step_scan(ScanInputs(x_FWHV[:, place], dt_FWH[:, place], B_FGS, B_FGS), weights, state_FHVS)
        state_FHVS = torch.where((place < count_F)[:, None, None, None], after_FHVS, state_FHVS)
    return state_FHVS


def walk_scan(inputs: ScanInputs, weights: ScanWeights, before_FHVS: Tensor, width: int) -> Tensor:
    """Outputs of the replayed rows' own tokens, [F * W, H, V]; their states are let go of."""
    count, state_FHVS, found = before_FHVS.shape[0], before_FHVS, []
    for place in range(width):
        own = ScanInputs(*(each[: count * width].unflatten(0, (count, width))[:, place] for each in inputs))
        y_FHV, state_FHVS = step_scan(own, weights, state_FHVS)
        found.append(y_FHV)
    return torch.stack(found, dim=1).flatten(0, 1)


def keep_inputs(kept: KeptInputs, inputs: ScanInputs, plan: Plan) -> None:
    """Leave what the replayed rows' tokens bring to their states in their slots; what was kept there has been read."""
    shape = plan.batch.shape
    for held, own in zip(kept, (inputs.x_THP, inputs.dt_TH, inputs.B_TGS), strict=True):
        own_FWx = own[: shape.num_stepping_tokens].unflatten(0, (shape.num_replayed, shape.wide_width))
        held.index_copy_(0, plan.to_N[: shape.num_replayed], own_FWx.to(held.dtype))


def gather_states(state: Tensor, plan: Plan, first: int) -> Tensor:
    """What rows from ``first`` on start with, [rows, ...]; zeros where nothing comes before, in the exact type."""
    gathered = state.index_select(0, plan.from_N[first:]).to(exact_type(state))
    is_fresh_N = plan.is_fresh_N[first:].view(-1, *[1] * (state.dim() - 1))
    return gathered.masked_fill(is_fresh_N, 0.0)


def known_inputs(x_TC: Tensor, conv_state: Tensor, plan: Plan) -> Tensor:
    """This forward's convolution inputs, and those that its rows' slots remember; [T + N * remembered, C]."""
    history_NCk = conv_state.index_select(0, plan.from_N).masked_fill(plan.is_fresh_N[:, None, None], 0.0)
    return torch.cat((x_TC, history_NCk.transpose(1, 2).flatten(0, 1)))


def input_entry(plan: Plan, row: Tensor, offset: Tensor, remembered: int) -> Tensor:
    """Index into :func:`known_inputs` of the input ``offset`` tokens behind the row's first one; negative: before."""
    shape = plan.batch.shape
    own = (plan.batch.query_start_N[row] + offset).clamp(0, shape.num_tokens - 1)
    place = remembered + offset
    if shape.num_replayed:
        place = place - plan.rejected_N[row]
    history = shape.num_tokens + row * remembered + place.clamp(0, remembered - 1)
    return torch.where(offset >= 0, own, history)


def write_history(known: Tensor, conv_state: Tensor, plan: Plan, first: int) -> None:
    """Write the last inputs behind each state taken of rows from ``first`` on, as many as slots remember."""
    remembered = conv_state.shape[2]
    row_Z, after_Z, slot_Z = (each[first:] for each in (plan.taken.row_Z, plan.taken.after_Z, plan.taken.slot_Z))
    offset_Zk = after_Z[:, None] - torch.arange(remembered, 0, -1, device=known.device)
    entry_Zk = input_entry(plan, row_Z[:, None], offset_Zk, remembered)
    conv_state.index_copy_(0, slot_Z, known[entry_Zk].transpose(1, 2).to(conv_state.dtype))
