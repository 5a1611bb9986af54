"""The scan of prefill rows in plain torch, in the chunked form of state-space duality.

Letters: t prefill tokens with their padding, P prefill rows, Z states taken, J chunks (I where it counts sources),
Q tokens of a chunk (L where it counts targets), H heads, G groups, R = H / G heads of a group, V head size,
S state size.

Within a chunk every token attends to those before it; between chunks a state is handed on. Decays are exponentials of
sums over the tokens between two places, each summed for itself: a difference of running sums would lose the small
steps behind the large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.ssm.base import ScanInputs, ScanWeights
from engine.ssm.plan import PrefillChunks


def exact_type(tensor: Tensor) -> torch.dtype:
    """The float type that sums and states are kept in beside ``tensor``."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def time_steps(dt_TH: Tensor, weights: ScanWeights) -> Tensor:
    """softplus(dt + bias) within the limits, in the exact type."""
    return functional.softplus(dt_TH.to(exact_type(dt_TH)) + weights.dt_bias_H).clamp(*weights.dt_limits)


class ChunkedScan(NamedTuple):
    """What the chunked form gives."""

    y_tHV: Tensor
    """Outputs of the prefill tokens, in the exact type; of padding tokens finite and undefined."""
    state_ZHVS: Tensor
    """States taken."""


@dataclass(eq=False, slots=True)
class _Chunks:
    """The inputs, a chunk a row, and the decays between places."""

    x_JQGRV: Tensor
    dtx_JQGRV: Tensor
    """x times its time step: what enters the state along B."""
    B_JQGS: Tensor
    C_JQGS: Tensor
    decay_JGRLQ: Tensor
    """Factor on what enters at place q when it is seen at place l; 0 for l < q."""
    from_start_JLGR: Tensor
    """Factor on the chunk's first state when it is seen at place l."""
    total_JH: Tensor
    """Logarithm of the decay over the whole chunk."""


def chunked_scan(inputs: ScanInputs, weights: ScanWeights, before_PHVS: Tensor, chunks: PrefillChunks) -> ChunkedScan:
    """Scan the prefill rows of a batch.

    Args:
        inputs: Of all tokens of the batch.
        weights: Of the layer.
        before_PHVS: State before each row's first token, in the exact type.
        chunks: How the rows are cut.
    """
    parts = _cut(inputs, weights, chunks)
    score_JGLQ = torch.einsum("jlgs,jqgs->jglq", parts.C_JQGS, parts.B_JQGS)
    within_JLGRV = torch.einsum("jgrlq,jqgrv->jlgrv", score_JGLQ[:, :, None] * parts.decay_JGRLQ, parts.dtx_JQGRV)
    first_JGRVS = _first_states(parts, before_PHVS, chunks.row_J)
    carried_JLGRV = torch.einsum("jlgs,jgrvs->jlgrv", parts.C_JQGS, first_JGRVS) * parts.from_start_JLGR[..., None]
    skipped_JLGRV = parts.x_JQGRV * weights.d_H.unflatten(0, parts.x_JQGRV.shape[2:4])[:, :, None]
    y_xHV = (within_JLGRV + carried_JLGRV + skipped_JLGRV).flatten(0, 1).flatten(1, 2)
    return ChunkedScan(y_xHV.index_select(0, chunks.place_t), _taken_states(parts, first_JGRVS, chunks))


def _cut(inputs: ScanInputs, weights: ScanWeights, chunks: PrefillChunks) -> _Chunks:
    wide = exact_type(inputs.x_THP)
    groups, heads = inputs.B_TGS.shape[1], inputs.x_THP.shape[1]

    def cut(tensor: Tensor) -> Tensor:
        found: Tensor = tensor.index_select(0, chunks.token_x).unflatten(0, chunks.shape)
        return found.to(wide)

    x_JQHV = cut(inputs.x_THP)
    dt_JQH = time_steps(cut(inputs.dt_TH), weights)
    step_JQH = dt_JQH * -torch.exp(weights.a_log_H)
    grouped = (groups, heads // groups)
    return _Chunks(
        x_JQGRV=x_JQHV.unflatten(2, grouped),
        dtx_JQGRV=(x_JQHV * dt_JQH[..., None]).unflatten(2, grouped),
        B_JQGS=cut(inputs.B_TGS),
        C_JQGS=cut(inputs.C_TGS),
        decay_JGRLQ=torch.exp(_sums_between(step_JQH.transpose(1, 2))).unflatten(1, grouped),
        from_start_JLGR=torch.exp(step_JQH.cumsum(1)).unflatten(2, grouped),
        total_JH=step_JQH.sum(1),
    )


def _sums_between(step_xQ: Tensor) -> Tensor:
    """[..., L, Q] sums of the steps behind place q up to place l; minus infinity for l < q."""
    size = step_xQ.shape[-1]
    is_later_LQ = torch.ones(size, size, dtype=torch.bool, device=step_xQ.device).tril(-1)
    steps_xLQ = step_xQ[..., :, None].expand(*step_xQ.shape, size).masked_fill(~is_later_LQ, 0.0)
    return steps_xLQ.cumsum(-2).masked_fill(is_later_LQ.t(), float("-inf"))


def _first_states(parts: _Chunks, before_PHVS: Tensor, row_J: Tensor) -> Tensor:
    """[J, G, R, V, S] state before each chunk: its row's first one and what earlier chunks of the row add, decayed."""
    to_end_JQGR = parts.decay_JGRLQ[:, :, :, -1].permute(0, 3, 1, 2)
    added_JGRVS = torch.einsum("jqgrv,jqgs->jgrvs", parts.dtx_JQGRV * to_end_JQGR[..., None], parts.B_JQGS)
    weight_HJI, weight_HJ = _handed_on(parts.total_JH, row_J)
    added_HIx = added_JGRVS.flatten(1, 2).flatten(2).transpose(0, 1)
    handed_JHx = torch.bmm(weight_HJI, added_HIx).transpose(0, 1)
    before_JHx = before_PHVS.flatten(2).index_select(0, row_J) * weight_HJ.t()[..., None]
    return (handed_JHx + before_JHx).reshape(added_JGRVS.shape)


def _handed_on(total_JH: Tensor, row_J: Tensor) -> tuple[Tensor, Tensor]:
    """What is left, before chunk j, of what chunk i added: [H, J, I]; and of the row's first state: [H, J]."""
    count = total_JH.shape[0]
    is_before_JI = torch.ones(count, count, dtype=torch.bool, device=row_J.device).tril(-1)
    is_before_JI = is_before_JI & (row_J[:, None] == row_J)
    from_first_JH = is_before_JI.to(total_JH.dtype) @ total_JH
    # Row j of the shifted sums ends with the chunk before j, as a state is handed to j before j's own decay.
    shifted_HJ = functional.pad(total_JH.t()[:, :-1], (1, 0))
    between_HJI = functional.pad(_sums_between(shifted_HJ)[:, :, 1:], (0, 1), value=float("-inf"))
    return torch.exp(between_HJI.masked_fill(~is_before_JI, float("-inf"))), torch.exp(from_first_JH.t())


def _taken_states(parts: _Chunks, first_JGRVS: Tensor, chunks: PrefillChunks) -> Tensor:
    """[Z, H, V, S] states behind the places where they are taken."""
    chunk_Z, place_Z = chunks.chunk_Z, chunks.place_Z
    decay_ZQGR = parts.decay_JGRLQ.permute(0, 3, 4, 1, 2)[chunk_Z, place_Z]
    dtx_ZQGRV = parts.dtx_JQGRV.index_select(0, chunk_Z) * decay_ZQGR[..., None]
    added_ZGRVS = torch.einsum("zqgrv,zqgs->zgrvs", dtx_ZQGRV, parts.B_JQGS.index_select(0, chunk_Z))
    kept_ZGR = parts.from_start_JLGR[chunk_Z, place_Z]
    return (added_ZGRVS + first_JGRVS.index_select(0, chunk_Z) * kept_ZGR[..., None, None]).flatten(1, 2)
