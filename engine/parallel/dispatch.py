"""How tokens come to the experts of other ranks, and results back.

Letters: T tokens of this rank, A tokens of every rank (agreed, at least T), N ranks, I inputs and outputs of an expert,
K experts of a token, P pairs of a token with an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.parallel.operators import NOBODY, gather_tokens, joined, split, sum_over_ranks
from engine.parallel.ranks import Ranks

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From tokens, numbers of experts among those that are here, and weights, to the weighted sums; [T, I]."""


class Dispatch(Protocol):
    """One way; the same on all ranks."""

    def __call__(
        self,
        x_TI: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        is_real_T: Tensor | None,
        expert_tokens: int,
        compute: Compute,
    ) -> Tensor:
        """[T, I]: each token's weighted sum over its experts, whichever rank has them; zeros for padding.

        Args:
            x_TI: Tokens, padding included.
            ids_TK: Their experts, [T, K] int64, of all there are.
            weights_TK: Their weights.
            is_real_T: [T] bool; None: all are real.
            expert_tokens: A.
            compute: Runs the experts that are here.
        """
        ...


class GatherDispatch:
    """Every rank gets all ranks' tokens, computes what its experts add to them, and the parts are summed.

    Sizes depend on A alone, so it can be traced and captured. Two collectives a layer: N A rows of tokens, experts and
    weights in one gather, N A rows of results in one reduce-scatter.
    """

    def __init__(self, ranks: Ranks, part: range) -> None:
        """See the class; ``part`` are the numbers of the experts that are here."""
        self._ranks = ranks.name
        self._part = part

    def __call__(
        self,
        x_TI: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        is_real_T: Tensor | None,
        expert_tokens: int,
        compute: Compute,
    ) -> Tensor:
        num_tokens = x_TI.shape[0]
        assert num_tokens <= expert_tokens, "ranks agreed on fewer tokens than this one has"
        if is_real_T is not None:
            ids_TK = torch.where(is_real_T[:, None], ids_TK, NOBODY)
        x_SI, ids_SK, weights_SK = gather_tokens(x_TI, ids_TK, weights_TK, expert_tokens, self._ranks)
        part = self._part
        is_here_SK = (ids_SK >= part.start) & (ids_SK < part.stop)
        local_SK = torch.where(is_here_SK, ids_SK - part.start, len(part))  # nobody here
        out_SI = compute(x_SI, local_SK, torch.where(is_here_SK, weights_SK, 0))
        return sum_over_ranks(out_SI, self._ranks)[:num_tokens]


class ExchangeDispatch:
    """Each token goes to the ranks of its experts, and only there; results come back and are summed at home.

    Sums are made in the order of the experts, as on one rank. How many tokens go where is known only at run time and
    waited for on the host, so no graph can hold it.
    """

    def __init__(self, ranks: Ranks, part: range) -> None:
        """See the class; ``part`` are the numbers of the experts that are here."""
        self._ranks = ranks
        self._part = part

    def __call__(
        self,
        x_TI: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        is_real_T: Tensor | None,
        expert_tokens: int,
        compute: Compute,
    ) -> Tensor:
        ids_P, top_k = ids_TK.flatten(), ids_TK.shape[1]
        rank_P = torch.div(ids_P, len(self._part), rounding_mode="floor")
        if is_real_T is not None:
            rank_P = torch.where(is_real_T.repeat_interleave(top_k), rank_P, self._ranks.size)
        order_P = rank_P.argsort(stable=True)
        counts = torch.bincount(rank_P, minlength=self._ranks.size + 1).tolist()[: self._ranks.size]
        order_P = order_P[: sum(counts)]
        id_P1 = ids_P.index_select(0, order_P)[:, None] - (rank_P.index_select(0, order_P) * len(self._part))[:, None]
        there, took = self._ranks.exchange(joined(x_TI.index_select(0, order_P // top_k), id_P1), counts)
        x_QI, id_Q1 = split(there, (x_TI, id_P1))
        ones_Q1 = torch.ones_like(id_Q1, dtype=weights_TK.dtype)
        done_QI = compute(x_QI, id_Q1, ones_Q1) if len(x_QI) else x_QI
        back_PI, _ = self._ranks.exchange(done_QI, took)
        out_PI = x_TI.new_zeros((ids_P.shape[0], x_TI.shape[1])).index_copy_(0, order_P, back_PI)
        out_TKI = out_PI.view(-1, top_k, x_TI.shape[1]).to(weights_TK.dtype)
        return (out_TKI * weights_TK[..., None]).sum(1).to(x_TI.dtype)


def bind_ranks(model: object, ranks: Ranks | None, kind: str) -> None:
    """Let the experts of a model work with those on other ranks; None: it is used alone.

    Args:
        model: Built with a part of the experts (:func:`engine.parallel.shard.building`).
        ranks: Whose part it is.
        kind: ``all_gather`` or ``all_to_all``.

    Raises:
        ConfigError: it has no experts, or not this rank's.
    """
    modules = model.modules() if isinstance(model, nn.Module) else [model]
    layers: list[Any] = [module for module in modules if hasattr(module, "dispatch")]
    if ranks is None:
        for layer in layers:
            if layer.shard.size > 1:
                raise ConfigError(
                    f"the model holds the experts of rank {layer.shard.rank} of {layer.shard.size} only; set "
                    f"expert_parallel={layer.shard.size}, or load it whole"
                )
            layer.dispatch = None
        return
    if not layers:
        raise ConfigError(f"expert_parallel={ranks.size}: the model has no experts; run engines of their own instead")
    make = GatherDispatch if kind == "all_gather" else ExchangeDispatch
    for layer in layers:
        if (layer.shard.rank, layer.shard.size) != (ranks.rank, ranks.size):
            raise ConfigError(
                f"expert_parallel={ranks.size}: the model holds the experts of rank {layer.shard.rank} of "
                f"{layer.shard.size}, not those of rank {ranks.rank} of {ranks.size}; load it with that shard"
            )
        layer.dispatch = make(ranks, layer.part)
    model.ranks_name = ranks.name  # type: ignore[attr-defined]
