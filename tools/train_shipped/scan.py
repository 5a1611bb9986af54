"""The state-space recurrence of Mamba2, all tokens at once (for training) and one token at a time.

Letters: B sequences, T tokens, H heads, G groups, R = H / G heads of a group, P head size, X = R P, S state size,
J chunks (I where it counts sources), L target places of a chunk, Q source places.

    state = state * exp(dt A) + dt x B^T        y = state C + D x
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def scan_all(
    x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, B_BTGS: Tensor, C_BTGS: Tensor, d_H: Tensor, chunk: int
) -> Tensor:
    """Outputs [B, T, H, P] in ``dt``'s dtype, from a state of zeros.

    Within a chunk every token attends to those before it, between chunks a state is handed on. Large products are
    computed in ``x``'s dtype, sums of logarithms and the hand-over in ``dt``'s.

    Args:
        x_BTHP: Inputs.
        dt_BTH: Time steps, positive.
        a_H: A, negative.
        B_BTGS: Input maps, by group.
        C_BTGS: Output maps.
        d_H: Skip weights.
        chunk: Tokens of a chunk; a T that is no multiple is filled up.
    """
    length, exact, fast = x_BTHP.shape[1], dt_BTH.dtype, x_BTHP.dtype
    groups, head_size = B_BTGS.shape[2], x_BTHP.shape[3]
    filled = [x_BTHP * dt_BTH[..., None], dt_BTH * a_H, B_BTGS, C_BTGS]
    if length % chunk:  # a place with dt = 0 neither decays the state nor adds to it
        filled = [functional.pad(part, (0, 0) * (part.ndim - 2) + (0, -length % chunk)) for part in filled]
    dtx_BJQHP, log_BJQH, B_BJQGS, C_BJLGS = (part.unflatten(1, (-1, chunk)) for part in filled)
    B_BJGQS, C_BJGLS = B_BJQGS.transpose(2, 3), C_BJLGS.transpose(2, 3)
    sum_BJHQ = log_BJQH.transpose(2, 3).cumsum(-1)

    future_LQ = torch.ones(chunk, chunk, dtype=torch.bool, device=x_BTHP.device).triu(1)
    decay_BJHLQ = (sum_BJHQ[..., :, None] - sum_BJHQ[..., None, :]).masked_fill(future_LQ, float("-inf")).exp()
    score_BJGLQ = C_BJGLS @ B_BJGQS.transpose(-1, -2)
    mixed_BJHLQ = (score_BJGLQ[:, :, :, None] * decay_BJHLQ.unflatten(2, (groups, -1))).to(fast).flatten(2, 3)
    within_BJHLP = mixed_BJHLQ @ dtx_BJQHP.to(fast).transpose(2, 3)

    # The heads of a group share B and C, so that one product serves them all.
    to_end_BJQH = (sum_BJHQ[..., -1:] - sum_BJHQ).exp().transpose(2, 3)
    ending_BJQGX = (dtx_BJQHP * to_end_BJQH[..., None]).to(fast).flatten(3).unflatten(3, (groups, -1))
    added_BJGSX = (B_BJGQS.transpose(-1, -2) @ ending_BJQGX.transpose(2, 3)).to(exact)
    first_BJGSX = _first_states(added_BJGSX, sum_BJHQ[..., -1], head_size)
    carried_BJLGX = (C_BJGLS @ first_BJGSX.to(fast)).transpose(2, 3)
    carried_BJLHP = carried_BJLGX.flatten(3).unflatten(3, (-1, head_size)) * sum_BJHQ.exp().transpose(2, 3)[..., None]

    y_BTHP: Tensor = (within_BJHLP.transpose(2, 3) + carried_BJLHP).flatten(1, 2)[:, :length]
    return y_BTHP + x_BTHP * d_H[:, None]


def _first_states(added_BJGSX: Tensor, total_BJH: Tensor, head_size: int) -> Tensor:
    """The state before each chunk, from what every chunk adds and the logarithm of its whole decay."""
    num, groups = added_BJGSX.shape[1:3]
    total_BHJ = total_BJH.transpose(1, 2)
    sum_BHJ = total_BHJ.cumsum(-1)
    # What chunk i adds decays over the chunks i + 1 .. j - 1 before chunk j sees it.
    log_BHJI = (sum_BHJ - total_BHJ)[..., :, None] - sum_BHJ[..., None, :]
    later_JI = torch.ones(num, num, dtype=torch.bool, device=added_BJGSX.device).triu(0)
    decay_BGRJI = log_BHJI.masked_fill(later_JI, float("-inf")).exp().unflatten(1, (groups, -1))
    added_BJGSRP: Tensor = added_BJGSX.unflatten(4, (-1, head_size))
    first_BGRJSP: Tensor = torch.einsum("bgrji,bigsrp->bgrjsp", decay_BGRJI, added_BJGSRP)
    return first_BGRJSP.permute(0, 3, 1, 4, 2, 5).flatten(4)


def scan_one(
    state_BHPS: Tensor, x_BHP: Tensor, dt_BH: Tensor, a_H: Tensor, B_BGS: Tensor, C_BGS: Tensor, d_H: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: outputs [B, H, P] and the next state, both in the state's dtype."""
    heads_a_group = x_BHP.shape[1] // B_BGS.shape[1]
    B_BHS, C_BHS = (maps.to(state_BHPS.dtype).repeat_interleave(heads_a_group, dim=1) for maps in (B_BGS, C_BGS))
    x_BHP = x_BHP.to(state_BHPS.dtype)
    decay_BH = (dt_BH * a_H).exp()
    state_BHPS = state_BHPS * decay_BH[..., None, None] + (x_BHP * dt_BH[..., None])[..., None] * B_BHS[:, :, None]
    return (state_BHPS @ C_BHS[..., None]).squeeze(-1) + x_BHP * d_H[:, None], state_BHPS
