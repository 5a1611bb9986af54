"""Tokens that come of drafts are distributed as those that do not: chi-square of pairs of neighbours, over many seeds.

With the same seeds they would be the same tokens, which says nothing of what is drawn; here every answer has a seed of
its own. A token behind an accepted draft must follow the token before it, so faults show in pairs that are drawn
together, and hardly in single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import EngineConfig, SamplingParams, draft_passes
from engine.columns import POSITION
from engine.engine import Engine
from engine.models.loader import LoadedModel
from tests.changed_shapes import TWO_LAYERS, changed_shape

NUM_IDS, NUM_SEEDS, NUM_TOKENS = 6, 2000, 4
CHANCE = 1e-5
"""That a right engine's seeds would fail; they are fixed, so it passes or fails for good."""
PROMPT = [1, 4, 2, 5, 3]
PLAIN = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True, detokenize=False)
RICH = PLAIN.replace(logprobs=0)
"""Verified token by token, where plain rows are verified at once."""


@cache
def model() -> LoadedModel:
    """A hybrid with two random draft heads, and so few ids that pairs of them can be counted."""
    return changed_shape("tiny-hybrid", torch.float32, **TWO_LAYERS, vocab_size=NUM_IDS)


def drawn(drafts: int, *, first_seed: int, params: SamplingParams = PLAIN, **options: Any) -> NDArray[np.int64]:
    """[seeds, tokens] of as many requests, all with one prompt."""
    config = EngineConfig(
        device="inline", speculative_tokens=drafts, max_requests=500, max_sequence_length=32, **options
    )
    wanted = [params.replace(seed=first_seed + number) for number in range(NUM_SEEDS)]
    with Engine(model(), config) as engine:
        outputs = engine.generate([PROMPT] * NUM_SEEDS, wanted, progress=False)
        accepted = engine.counters.drafts_accepted
        assert not drafts or accepted[0] > 0.05 * NUM_SEEDS, "hardly a draft was accepted, so nothing was tried"
    return np.array([output.token_ids for output in outputs])


@cache
def undrafted() -> NDArray[np.int64]:
    return drawn(0, first_seed=0)


def pairs(tokens_NT: NDArray[np.int64], place: int) -> NDArray[np.int64]:
    """How often each pair of ids stands at ``place`` and behind it."""
    return np.bincount(tokens_NT[:, place] * NUM_IDS + tokens_NT[:, place + 1], minlength=NUM_IDS**2)


def chi_square(first: NDArray[np.int64], second: NDArray[np.int64]) -> tuple[float, int]:
    """Pearson's statistic of two samples over the same cells, and its degrees of freedom; no sample may be empty.

    Cells of fewer than ten in both together are one cell.
    """
    both = np.stack([first, second]).astype(np.float64)
    is_rare = both.sum(0) < 10
    both = np.concatenate([both[:, ~is_rare], both[:, is_rare].sum(1, keepdims=True)], axis=1)
    both = both[:, both.sum(0) > 0]
    expected = both.sum(1, keepdims=True) * both.sum(0) / both.sum()
    return float(((both - expected) ** 2 / expected).sum()), both.shape[1] - 1


def threshold(freedom: int) -> float:
    """What a chi-square exceeds with :data:`CHANCE` (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + NormalDist().inv_cdf(1 - CHANCE) * spread**0.5) ** 3)


def check_same(tokens_NT: NDArray[np.int64]) -> None:
    """Against answers without drafts; the message has the statistic, its degrees of freedom and the threshold."""
    for place in range(NUM_TOKENS - 1):
        statistic, freedom = chi_square(pairs(undrafted(), place), pairs(tokens_NT, place))
        limit = threshold(freedom)
        told = f"tokens {place + 1} and {place + 2}: chi-square {statistic:.1f} with {freedom} degrees of freedom"
        assert statistic < limit, f"{told} exceeds {limit:.1f}"
        assert freedom > 20, f"{told}: too few pairs came up to tell anything"


@pytest.mark.parametrize(("drafts", "params"), [(1, PLAIN), (2, PLAIN), (2, RICH)], ids=["1", "2", "2, one by one"])
def test_pairs_of_tokens_come_as_often_with_drafts_as_without(drafts: int, params: SamplingParams) -> None:
    check_same(drawn(drafts, first_seed=NUM_SEEDS * (1 + drafts), params=params))


def accept_all(token_nW: Tensor, foreseen_nS: Tensor, may_nS: Tensor) -> Tensor:
    """Also drafts that were not drawn: what follows them follows another token than the one that is given."""
    return may_nS.to(torch.int64).cumprod(1).sum(1)


def accept_likely(token_nW: Tensor, foreseen_nS: Tensor, may_nS: Tensor) -> Tensor:
    """As rejection sampling without its second draw would: a draft that is not the token passes in every other row."""
    is_kept_nS = (token_nW[:, :-1] == foreseen_nS) | (torch.arange(token_nW.shape[0]) % 2 == 0)[:, None]
    return (is_kept_nS & may_nS).to(torch.int64).cumprod(1).sum(1)


@pytest.mark.parametrize("fault", [accept_all, accept_likely])
def test_accepting_a_draft_that_was_not_drawn_is_found(
    fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_passes, "count_accepted", fault)
    with pytest.raises(AssertionError, match=r"chi-square \d+\.\d with \d+ degrees of freedom exceeds"):
        check_same(drawn(2, first_seed=NUM_SEEDS))


def test_drawing_all_tokens_of_a_step_with_one_uniform_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = draft_passes.draw_plain

    def draw_plain(sampler: Any, logits: Tensor, sources: Tensor | None, rows: Any, *rest: Any) -> None:
        if sources is not None:  # a verification: three draws a row
            rows.ints[:, POSITION] = rows.ints[::3, POSITION].repeat_interleave(3)
        right(sampler, logits, sources, rows, *rest)

    monkeypatch.setattr(draft_passes, "draw_plain", draw_plain)
    with pytest.raises(AssertionError, match="exceeds"):
        check_same(drawn(2, first_seed=NUM_SEEDS))


@pytest.mark.parametrize("freedom", [10, 36, 100])
def test_the_threshold_is_exceeded_with_the_chance_that_is_named(freedom: int) -> None:
    """Of an even chi-square the tail is a Poisson distribution's beginning."""
    half = threshold(freedom) / 2
    tail = sum(math.exp(k * math.log(half) - half - math.lgamma(k + 1)) for k in range(freedom // 2))
    assert tail == pytest.approx(CHANCE, rel=0.3)
