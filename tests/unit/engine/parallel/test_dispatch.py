"""How tokens come to the experts of other ranks: every pair once, padding never, sums as on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.parallel.dispatch import ExchangeDispatch, GatherDispatch
from engine.parallel.local import LocalRanks
from tests.rank_world import on_ranks

NUM_EXPERTS, TOP_K, WIDTH = 8, 3, 4
TOKENS = [5, 2]
"""Of each rank, padding included."""
AGREED = 6
GENERATOR = torch.Generator().manual_seed(4)
X = [torch.randn((count, WIDTH), generator=GENERATOR, dtype=torch.float64) for count in TOKENS]
IDS = [torch.rand((count, NUM_EXPERTS), generator=GENERATOR).argsort(1)[:, :TOP_K] for count in TOKENS]
WEIGHTS = [torch.rand((count, TOP_K), generator=GENERATOR, dtype=torch.float64) + 0.1 for count in TOKENS]
IS_REAL = [torch.tensor([True, True, True, False, False]), torch.tensor([True, True])]


def factor(expert: Tensor) -> Tensor:
    """What an expert does to a token: times its number, and one more."""
    return (expert + 1).to(torch.float64)


def expected(rank: int) -> Tensor:
    """The sums that one rank with all experts would come to; zeros for padding."""
    sums = X[rank] * (WEIGHTS[rank] * factor(IDS[rank])).sum(1, keepdim=True)
    return torch.where(IS_REAL[rank][:, None], sums, 0)


def dispatched(kind: Any, seen: dict[int, list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
    def run(ranks: LocalRanks) -> Tensor:
        count = NUM_EXPERTS // ranks.size
        part = range(ranks.rank * count, (ranks.rank + 1) * count)

        def compute(x_TI: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            seen.setdefault(ranks.rank, []).append((ids_TK, weights_TK))
            is_here_TK = ids_TK < count
            sums: Tensor = (
                torch.where(is_here_TK, factor(ids_TK + part.start), torch.nan).nan_to_num() * weights_TK
            ).sum(1)
            return x_TI * sums[:, None]

        rank = ranks.rank
        return kind(ranks, part)(X[rank], IDS[rank], WEIGHTS[rank], IS_REAL[rank], AGREED, compute)  # type: ignore[no-any-return]

    return on_ranks(2, run)


@pytest.mark.parametrize("kind", [GatherDispatch, ExchangeDispatch])
def test_every_token_gets_the_sum_of_all_its_experts(kind: Any) -> None:
    found = dispatched(kind, {})

    for rank in range(2):
        torch.testing.assert_close(found[rank], expected(rank), atol=1e-12, rtol=1e-12)


def test_a_gather_computes_each_pair_on_one_rank_and_padding_on_none() -> None:
    """Of 12 gathered tokens five are real; the others are padding of a batch, or of what was agreed on."""
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    dispatched(GatherDispatch, seen)

    (ids, weights), (other_ids, other_weights) = seen[0][0], seen[1][0]
    is_here, is_there = ids < 4, other_ids < 4
    assert ids.shape == (2 * AGREED, TOP_K)
    assert not (is_here & is_there).any()
    real = torch.tensor([0, 1, 2, AGREED, AGREED + 1])
    assert (is_here | is_there)[real].all()
    assert int((is_here | is_there).sum()) == len(real) * TOP_K
    assert not weights[~is_here].any()
    assert not other_weights[~is_there].any()


def test_an_exchange_moves_real_pairs_only() -> None:
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    dispatched(ExchangeDispatch, seen)

    assert sum(ids.shape[0] for calls in seen.values() for ids, _ in calls) == 5 * TOP_K


@pytest.mark.parametrize("kind", [GatherDispatch, ExchangeDispatch])
def test_a_rank_of_padding_alone_takes_part(kind: Any) -> None:
    before = IS_REAL[1]
    IS_REAL[1] = torch.tensor([False, False])
    try:
        found = dispatched(kind, {})
        torch.testing.assert_close(found[0], expected(0), atol=1e-12, rtol=1e-12)
        assert not found[1].any()
    finally:
        IS_REAL[1] = before
