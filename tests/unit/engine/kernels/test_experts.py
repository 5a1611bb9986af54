"""Tokens meet their experts' weights and no others, however many there are and wherever they all want to go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import TorchKernels
from engine.kernels.experts import combine, cut, experts_grouped, group, most_blocks
from engine.kernels.torch import relu2, swiglu


def plain_grouped_mm(rows_SA: Tensor, matrix_XAB: Tensor, end_X: Tensor) -> Tensor:
    """What ``torch._grouped_mm`` computes: a loop over experts, in the given dtype."""
    assert end_X.dtype == torch.int32
    out, begin = [], 0
    for matrix, end in zip(matrix_XAB, end_X.tolist(), strict=True):
        out.append(rows_SA[begin:end] @ matrix)
        begin = end
    nobody = torch.full((rows_SA.shape[0] - begin, matrix_XAB.shape[2]), torch.nan, dtype=rows_SA.dtype)
    return torch.cat([*out, nobody])


def torch_grouped_mm(rows_SA: Tensor, matrix_XAB: Tensor, end_X: Tensor) -> Tensor:
    """The real one, which computes no float64."""
    return torch._grouped_mm(rows_SA.float(), matrix_XAB.float(), offs=end_X).to(rows_SA.dtype)


def routes(num_tokens: int, num_experts: int, top_k: int, wish: str, seed: int = 0) -> Tensor:
    """[T, K] experts: of anyone's choice, or as uneven as they can be."""
    generator = torch.Generator().manual_seed(seed)
    if wish == "any":
        return torch.rand((num_tokens, num_experts), generator=generator).argsort(1)[:, :top_k]
    numbers = torch.arange(num_experts - top_k, num_experts) if wish == "the last" else torch.arange(top_k)
    return numbers.flip(0).expand(num_tokens, -1).contiguous()


def by_hand(
    x_TI: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_XUI: Tensor, down_XIF: Tensor, activate: Callable
) -> Tensor:
    out_TI = torch.zeros_like(x_TI)
    for token, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            out_TI[token] += weight * (down_XIF[expert] @ activate((up_XUI[expert] @ x_TI[token])[None])[0])
    return out_TI


SIZES = [(1, 8, 2), (4, 8, 2), (5, 8, 2), (3, 1, 1), (64, 4, 4), (50, 16, 3), (200, 3, 2), (7, 60, 4)]
"""Tokens, experts, experts of a token; below, at and above as many pairs as experts."""


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("wish", ["any", "the first", "the last"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_every_way_equals_a_loop(num_tokens: int, num_experts: int, top_k: int, wish: str, activation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    activate, inner_rows = (swiglu, 40) if activation == "swiglu" else (relu2, 20)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x_TI, ids_TK = random(num_tokens, 24), routes(num_tokens, num_experts, top_k, wish)
    arguments = (x_TI, ids_TK, random(num_tokens, top_k), random(num_experts, inner_rows, 24) / 5)
    arguments = (*arguments, random(num_experts, 24, 20) / 5)
    expected = by_hand(*arguments, activate)

    found = TorchKernels().experts(*arguments, activation)
    grouped = experts_grouped(*arguments, activate, plain_grouped_mm, combine)
    single = experts_grouped(*arguments, activate, torch_grouped_mm, combine)

    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grouped, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(single, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_a_pair_that_is_nobodys_here_adds_nothing(num_tokens: int, num_experts: int, top_k: int) -> None:
    """As where the other experts are on other ranks; what stands in its place may be anything."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ids_TK = routes(num_tokens, num_experts, top_k, "any")
    is_here_TK = torch.rand(ids_TK.shape, generator=generator) < 0.4
    x_TI, weights_TK = random(num_tokens, 24), torch.where(is_here_TK, random(num_tokens, top_k), 0)
    up_XUI, down_XIF = random(num_experts, 40, 24) / 5, random(num_experts, 24, 20) / 5
    expected = by_hand(x_TI, ids_TK, weights_TK, up_XUI, down_XIF, swiglu)
    arguments = (x_TI, torch.where(is_here_TK, ids_TK, num_experts), weights_TK, up_XUI, down_XIF)

    found = TorchKernels().experts(*arguments, "swiglu")
    grouped = experts_grouped(*arguments, swiglu, plain_grouped_mm, combine)

    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grouped, expected, atol=1e-12, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.integers(1, 9).flatmap(
        lambda top_k: st.lists(st.permutations(range(9)).map(lambda order: order[:top_k]), min_size=1, max_size=40)
    )
)
def test_every_pair_has_a_place_of_its_own_in_a_block_of_its_expert(ids: list[list[int]]) -> None:
    ids_TK = torch.tensor(ids)
    num_tokens, top_k = ids_TK.shape

    blocks, groups = cut(ids_TK, 9), group(ids_TK, 9)

    places = blocks.place_TK.flatten()
    num_blocks, size = blocks.token_NB.shape
    assert len(set(places.tolist())) == num_tokens * top_k
    assert torch.equal(blocks.expert_N[places // size], ids_TK.flatten())
    assert torch.equal(blocks.token_NB.flatten()[places], torch.arange(num_tokens).repeat_interleave(top_k))
    assert num_blocks * size < 2 * num_tokens * top_k + 9
    sorted_S = ids_TK.flatten()[groups.pair_S]
    assert (sorted_S.diff() >= 0).all()
    assert torch.equal(groups.pair_S[groups.place_S], torch.arange(num_tokens * top_k))
    assert groups.end_X.tolist() == [int((ids_TK <= expert).sum()) for expert in range(9)]


@pytest.mark.parametrize(("num_pairs", "num_experts", "size"), [(1, 8, 1), (9, 8, 2), (100, 8, 13), (100, 3, 40)])
def test_no_routes_need_more_blocks_than_there_are(num_pairs: int, num_experts: int, size: int) -> None:
    in_use = min(num_pairs, num_experts)
    worst = [1] * (in_use - 1) + [num_pairs - in_use + 1]

    assert sum(-(-count // size) for count in worst) <= most_blocks(num_pairs, num_experts, size)


def test_a_token_of_nan_spoils_no_other() -> None:
    generator = torch.Generator().manual_seed(1)
    x_TI = torch.randn((30, 24), generator=generator, dtype=torch.float64)
    up, down = torch.randn((4, 40, 24), generator=generator).double(), torch.randn((4, 24, 20)).double()
    ids_TK, weights_TK = routes(30, 4, 2, "any"), torch.rand((30, 2), dtype=torch.float64)
    expected = TorchKernels().experts(x_TI, ids_TK, weights_TK, up, down, "swiglu")
    x_TI[0] = float("nan")  # also what padded places of blocks hold
    x_TI[7] = float("inf")

    found = TorchKernels().experts(x_TI, ids_TK, weights_TK, up, down, "swiglu")

    others = [token for token in range(30) if token not in (0, 7)]
    torch.testing.assert_close(found[others], expected[others], atol=0.0, rtol=0.0)


def test_weights_are_gathered_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = [torch.randn(shape, generator=generator).double() for shape in ((30, 24), (30, 2), (9, 40, 24))]
    x_TI, weights_TK, up = arguments
    down, ids_TK = torch.randn((9, 24, 20), generator=generator).double(), routes(30, 9, 2, "any")
    whole = TorchKernels().experts(x_TI, ids_TK, weights_TK, up, down, "swiglu")

    for count in (1, 40 * 24 * 4):
        monkeypatch.setattr("engine.kernels.experts._GATHERED", count)
        parts = TorchKernels().experts(x_TI, ids_TK, weights_TK, up, down, "swiglu")
        torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0.0)
