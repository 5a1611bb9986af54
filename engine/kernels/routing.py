"""From a router's scores to the experts of each token and their weights, in plain torch.

Letters: T tokens, X experts, K experts of a token, C groups of experts, G experts of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Routing(Enum):
    """How a token's scores become K experts and their weights."""

    SOFTMAX = "softmax"
    """Softmax over all experts; the K likeliest, weighted by probability (Mixtral, Qwen)."""
    TOPK_SOFTMAX = "topk-softmax"
    """The K highest scores; softmax over these alone (Granite)."""
    SIGMOID = "sigmoid"
    """Sigmoid of each score; the K best of sigmoid + correction bias, inside the best groups, weighted by sigmoid alone
    (GLM-4, DeepSeek-V3, Nemotron-H)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """All of a router but its parameters."""

    routing: Routing
    top_k: int
    renormalise: bool
    """Divide the K weights by their sum; SIGMOID adds 1e-20 to it. Without meaning for TOPK_SOFTMAX."""
    scaling: float
    """Factor on the K weights, last."""
    num_groups: int = 1
    """C, of neighbouring experts; SIGMOID only. A group's value is the sum of its two best."""
    top_groups: int = 1
    """Groups that experts are chosen from."""

    @property
    def has_groups(self) -> bool:
        """Whether groups leave experts out."""
        return self.top_groups < self.num_groups

    @property
    def floor(self) -> float:
        """Added to the sum that weights are divided by."""
        return 1e-20 if self.routing is Routing.SIGMOID else 0.0


def route(score_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """See :meth:`engine.kernels.base.Kernels.route`."""
    score_TX = score_TX.to(wide(score_TX.dtype))
    if rule.routing is Routing.TOPK_SOFTMAX:
        best_TK, ids_TK = first_largest(score_TX, rule.top_k)
        return ids_TK, _scaled(best_TK.softmax(-1), rule)
    if rule.routing is Routing.SOFTMAX:
        best_TK, ids_TK = first_largest(score_TX.softmax(-1), rule.top_k)
        return ids_TK, _weights(best_TK, rule)
    plain_TX = score_TX.sigmoid()
    choice_TX = plain_TX if bias_X is None else plain_TX + bias_X
    if rule.has_groups:
        choice_TX = _inside_best_groups(choice_TX, rule)
    _, ids_TK = first_largest(choice_TX, rule.top_k)
    return ids_TK, _weights(plain_TX.gather(1, ids_TK), rule)


def weights_at(score_TX: Tensor, ids_TK: Tensor, rule: RoutingRule) -> Tensor:
    """[T, K] what :func:`route` weighs experts by, of experts that somebody else has chosen.

    Args:
        score_TX: As there; a correction bias changes the choice alone.
        ids_TK: [T, K] int64, no two of a token alike.
        rule: The router's.
    """
    score_TX = score_TX.to(wide(score_TX.dtype))
    if rule.routing is Routing.TOPK_SOFTMAX:
        return _scaled(score_TX.gather(1, ids_TK).softmax(-1), rule)
    likely_TX = score_TX.softmax(-1) if rule.routing is Routing.SOFTMAX else score_TX.sigmoid()
    return _weights(likely_TX.gather(1, ids_TK), rule)


def _inside_best_groups(choice_TX: Tensor, rule: RoutingRule) -> Tensor:
    """Minus infinity for experts of all other groups."""
    choice_TCG: Tensor = choice_TX.unflatten(1, (rule.num_groups, -1))
    two_TC2, _ = first_largest(choice_TCG, 2)
    _, best_TM = first_largest(two_TC2.sum(-1), rule.top_groups)
    groups_C = torch.arange(rule.num_groups, device=best_TM.device)
    is_in_TC = (best_TM[..., None] == groups_C).any(1)
    masked_TCG: Tensor = choice_TCG.masked_fill(~is_in_TC[..., None], float("-inf"))
    return masked_TCG.flatten(1)


def _weights(best_TK: Tensor, rule: RoutingRule) -> Tensor:
    return _scaled(best_TK / (best_TK.sum(-1, keepdim=True) + rule.floor) if rule.renormalise else best_TK, rule)


def _scaled(weights_TK: Tensor, rule: RoutingRule) -> Tensor:
    return weights_TK if rule.scaling == 1.0 else weights_TK * rule.scaling


def first_largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of the last dimension, largest first, and their places; of equals the first.

    ``topk`` leaves the order of equals open, so that two runs, or two devices, could choose other experts.
    """
    values, places = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What weights of experts are computed in: float32, in a float64 model float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
