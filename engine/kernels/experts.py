"""How (token, expert) pairs are brought together by expert and taken apart again, in plain torch.

Letters: T tokens, K experts of a token, S = T K pairs, X experts, I inputs and outputs of an expert, U rows of its
first projection, F its inner size, N blocks of B pairs of one expert each.

No size depends on a tensor's values, and nothing is read on the host, so all of it can be traced and captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_GATHERED = 1 << 27
"""Weights that :func:`experts_in_blocks` gathers at a time."""


class Groups(NamedTuple):
    """All pairs in order of their expert, those of one expert in order of their tokens."""

    pair_S: Tensor
    """[S] int64, which pair (token * K + k) stands at each place."""
    place_S: Tensor
    """[S] int64, at which place each pair stands."""
    end_X: Tensor
    """[X] int64, the place behind the last pair of each expert."""


def group(ids_TK: Tensor, num_experts: int) -> Groups:
    """Sort the pairs by expert."""
    expert_S, pair_S = ids_TK.flatten().sort(stable=True)
    places = torch.arange(pair_S.shape[0], device=pair_S.device)
    numbers_X = torch.arange(num_experts, device=pair_S.device)
    return Groups(
        pair_S=pair_S,
        place_S=torch.empty_like(pair_S).scatter_(0, pair_S, places),
        end_X=torch.searchsorted(expert_S, numbers_X, right=True),
    )


class Blocks(NamedTuple):
    """The pairs in blocks of one expert each; blocks are padded with pairs of token 0 that nobody asks for."""

    expert_N: Tensor
    """[N] int64, each block's expert; any for blocks without a pair."""
    token_NB: Tensor
    """[N, B] int64, each place's token."""
    place_TK: Tensor
    """[T, K] int64, each pair's place in [N * B]."""


def cut(ids_TK: Tensor, num_experts: int) -> Blocks:
    """Blocks of one pair where there are fewer pairs than experts, else of as many as an expert has on average."""
    num_tokens, top_k = (int(size) for size in ids_TK.shape)
    num_pairs, device = num_tokens * top_k, ids_TK.device
    places = torch.arange(num_pairs, device=device)
    present_TK = ids_TK.clamp(max=num_experts - 1)  # nobody's pairs are computed like others', and count nothing
    if num_pairs <= num_experts:
        return Blocks(present_TK.flatten(), (places // top_k)[:, None], places.view(num_tokens, top_k))
    size = -(-num_pairs // num_experts)
    groups = group(ids_TK, num_experts)
    start_X = torch.cat((groups.end_X.new_zeros(1), groups.end_X[:-1]))
    blocks_X = (groups.end_X - start_X + size - 1) // size
    end_X = blocks_X.cumsum(0)
    expert_S = present_TK.flatten()
    first_S = ((end_X - blocks_X) * size - start_X).index_select(0, expert_S)
    place_S = groups.place_S + first_S
    num_blocks = most_blocks(num_pairs, num_experts, size)
    token_P = torch.zeros(num_blocks * size, dtype=torch.int64, device=device).scatter_(0, place_S, places // top_k)
    expert_N = torch.searchsorted(end_X, torch.arange(num_blocks, device=device), right=True)
    return Blocks(
        expert_N=expert_N.clamp(max=num_experts - 1),
        token_NB=token_P.view(num_blocks, size),
        place_TK=place_S.view(num_tokens, top_k),
    )


def most_blocks(num_pairs: int, num_experts: int, size: int) -> int:
    """Blocks of ``size`` that any choice of experts can need: each expert in use may leave one all but empty."""
    return (num_pairs + min(num_pairs, num_experts) * (size - 1)) // size


def experts_in_blocks(
    x_TI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_XUI: Tensor,
    down_XIF: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """See :meth:`engine.kernels.base.Kernels.experts`: each block's weights are gathered, then multiplied as a batch.

    The blocks have at most about twice as many places as there are pairs, and weights.
    """
    num_experts, inner_rows, inputs = (int(size) for size in up_XUI.shape)
    blocks = cut(ids_TK, num_experts)
    num_blocks, size = (int(size) for size in blocks.token_NB.shape)
    x_NBI = x_TI.index_select(0, blocks.token_NB.flatten()).view(num_blocks, size, inputs)
    step = max(1, _GATHERED // (inner_rows * inputs))
    parts = []
    for begin in range(0, num_blocks, step):
        expert_N = blocks.expert_N[begin : begin + step]
        inner_NBU = x_NBI[begin : begin + step] @ up_XUI.index_select(0, expert_N).transpose(1, 2)
        parts.append(activate(inner_NBU) @ down_XIF.index_select(0, expert_N).transpose(1, 2))
    out_PI = torch.cat(parts).flatten(0, 1)
    return combine(out_PI, blocks.place_TK, weights_TK)


def experts_grouped(
    x_TI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_XUI: Tensor,
    down_XIF: Tensor,
    activate: Callable[[Tensor], Tensor],
    grouped_mm: Callable[[Tensor, Tensor, Tensor], Tensor],
    combine: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The same by a product of sorted pairs in which each expert's rows meet its weights.

    Args:
        x_TI: As all down to ``down``, see :meth:`engine.kernels.base.Kernels.experts`.
        ids_TK: Experts of each token.
        weights_TK: Their weights.
        up_XUI: First projections.
        down_XIF: Second projections.
        activate: [S, U] to [S, F].
        grouped_mm: Of (rows [S, A], matrices [X, A, B], end_X int32) to [S, B]: the rows from end[x - 1] to end[x],
            which is left out, times matrix x.
        combine: As :func:`combine`.
    """
    groups = group(ids_TK, up_XUI.shape[0])
    end_X = groups.end_X.to(torch.int32)
    x_SI = x_TI.index_select(0, groups.pair_S // ids_TK.shape[1])
    inner_SF = activate(grouped_mm(x_SI, up_XUI.transpose(1, 2), end_X))
    out_SI = grouped_mm(inner_SF, down_XIF.transpose(1, 2), end_X)
    return combine(out_SI, groups.place_S.view(ids_TK.shape), weights_TK)


def combine(out_PI: Tensor, place_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, I]: the rows at each token's places times their weights, summed in the weights' dtype, in that order.

    What has weight 0 adds nothing, whatever stands there.
    """
    out_TKI: Tensor = out_PI.index_select(0, place_TK.flatten()).unflatten(0, place_TK.shape)
    weight_TK1 = weights_TK[..., None]
    weighted_TKI = torch.where(weight_TK1 == 0, 0, out_TKI.to(weights_TK.dtype) * weight_TK1)
    return weighted_TKI.sum(1).to(out_PI.dtype)
