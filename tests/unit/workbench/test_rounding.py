"""How far a token is from being chosen, and what rounding explains of it: on distributions small enough to see."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.request import SamplingParams
from engine.sampling import filters
from engine.sampling.base import SamplingNeeds, SamplingRows
from engine.sampling.torch import filter_scores
from workbench.rounding import NUM_DEVIATIONS, Choice, Miss, Values

NOISE = 0.01


def choice(scores: Any, uniform: float = 0.5, noise: float = NOISE, **params: Any) -> Choice:
    return Choice(
        scores_V=np.asarray(scores, dtype=np.float64), noise=noise, params=SamplingParams(**params), uniform=uniform
    )


def logits_of(*shares: float) -> Values:
    logits: Values = np.log(np.asarray(shares))
    return logits


def is_explained(miss: Miss) -> bool:
    return miss.distance <= miss.tolerance


class TestGreedy:
    def test_distance_is_the_gap_to_the_best_logit(self) -> None:
        assert choice([1.0, 4.0, 3.5, 3.75], temperature=0.0).miss(2).distance == 0.5

    def test_each_of_a_near_tie_of_three_is_within_rounding(self) -> None:
        near_tie = choice([4.0, 3.99, 3.98, 3.0], temperature=0.0)

        assert [is_explained(near_tie.miss(token)) for token in range(4)] == [True, True, True, False]

    def test_tolerance_is_a_stated_number_of_deviations_of_four_errors(self) -> None:
        assert choice([1.0, 2.0], temperature=0.0).miss(0).tolerance == pytest.approx(NUM_DEVIATIONS * 2 * NOISE)

    def test_top_k_of_one_is_greedy(self) -> None:
        assert choice([1.0, 4.0], top_k=1).miss(0).distance == 3.0

    def test_a_forbidden_token_is_infinitely_far(self) -> None:
        assert choice([1.0, -math.inf], temperature=0.0).miss(1).distance == math.inf


class TestDraw:
    @pytest.mark.parametrize(("token", "distance"), [(0, 0.35), (1, 0.05), (2, 0.0), (3, 0.2)])
    def test_distance_is_from_the_random_number_to_the_tokens_share(self, token: int, distance: float) -> None:
        drawn = choice(logits_of(0.2, 0.3, 0.25, 0.25), uniform=0.55)

        assert drawn.miss(token).distance == pytest.approx(distance, abs=1e-12)

    def test_a_near_border_excuses_its_neighbours_and_no_other_token(self) -> None:
        at_border = choice(logits_of(0.2, 0.3, 0.25, 0.25), uniform=0.5001)

        assert [is_explained(at_border.miss(token)) for token in range(4)] == [False, True, True, False]

    def test_distance_is_under_the_requests_temperature(self) -> None:
        sharper = choice(logits_of(0.2, 0.8), uniform=0.5, temperature=0.5)

        assert sharper.miss(0).distance == pytest.approx(0.5 - 0.04 / 0.68)

    @pytest.mark.parametrize("size", [2, 2000])
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_tolerance_is_what_noise_moves_a_border_by(self, size: int, temperature: float) -> None:
        rng = np.random.default_rng(size)
        scores = rng.normal(size=size)
        border = size // 2
        moved = (scores + rng.normal(scale=NOISE, size=(4000, size))) / temperature
        shares = np.exp(moved)
        sums = shares[:, :border].sum(-1) / shares.sum(-1)

        below = choice(scores, uniform=0.0, temperature=temperature).miss(border)

        assert below.tolerance == pytest.approx(NUM_DEVIATIONS * math.sqrt(2) * sums.std(), rel=0.1)

    def test_without_noise_nothing_is_tolerated(self) -> None:
        exact = choice(logits_of(0.2, 0.8), uniform=0.2001, noise=0.0)

        assert exact.miss(0).distance > exact.miss(0).tolerance == 0.0
        assert exact.miss(1).distance == 0.0


FILTERS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.74},
    {"min_p": 0.634},
]
"""Each keeps the first three of ``EDGE``, the third by a hair."""
EDGE = logits_of(0.3, 0.25, 0.1905, 0.19, 0.0695)


class TestFilters:
    @pytest.mark.parametrize("params", FILTERS, ids=str)
    def test_a_token_that_a_filter_drops_for_sure_is_infinitely_far(self, params: dict[str, Any]) -> None:
        assert choice(EDGE, uniform=0.99, **params).miss(4).distance == math.inf

    @pytest.mark.parametrize("params", FILTERS, ids=str)
    def test_a_token_that_rounding_might_let_pass_is_not(self, params: dict[str, Any]) -> None:
        at_end = {"uniform": 0.99, **params}

        assert choice(EDGE, **at_end).miss(3).distance == 0.0
        assert choice(EDGE, noise=0.0, **at_end).miss(3).distance == math.inf

    def test_the_last_that_top_k_keeps_is_sure_where_no_rival_is_near(self) -> None:
        drawn = choice(logits_of(0.2, 0.4, 0.2, 0.1, 0.1), uniform=0.2501, top_k=3)

        assert drawn.miss(0).distance == pytest.approx(0.0001, abs=1e-9)
        assert drawn.miss(2).distance == pytest.approx(0.75 - 0.2501)

    def test_the_best_is_sure_to_pass_where_a_filter_lets_only_it_pass(self) -> None:
        """Else its near rival, which rounding may let pass, would have the whole share to itself."""
        drawn = choice(logits_of(0.5, 0.499, 0.001), uniform=0.25, min_p=0.9999)

        assert drawn.miss(0).distance == 0.0
        assert drawn.miss(1).distance == pytest.approx(0.5 / 0.999 - 0.25)

    @pytest.mark.parametrize("params", FILTERS, ids=str)
    def test_shares_are_of_what_the_filters_leave(self, params: dict[str, Any]) -> None:
        drawn = choice(EDGE, uniform=0.2, noise=0.0, **params)

        assert drawn.miss(0).distance == 0.0
        assert drawn.miss(1).distance == pytest.approx(0.3 / 0.7405 - 0.2)

    @pytest.mark.parametrize(
        "params",
        [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}],
        ids=str,
    )
    @pytest.mark.parametrize("spread", [1.0, 3.0], ids=["flat", "peaked"])
    def test_what_the_sampler_draws_from_noisy_logits_is_explained_and_another_draw_seldom_is(
        self, params: dict[str, Any], spread: float
    ) -> None:
        rng = np.random.default_rng(5)
        unexplained, excused = 0, []
        for _ in range(300):
            exact, uniform = rng.normal(scale=spread, size=200), float(rng.random())
            one, again = (exact + rng.normal(scale=NOISE, size=200) for _ in range(2))
            judged = choice(again, uniform, temperature=0.8, **params)
            right = sampled(one, uniform, judged.params)
            other = sampled(one, float(rng.random()), judged.params)
            unexplained += not is_explained(judged.miss(right))
            excused += [is_explained(judged.miss(other))] if other != right else []

        assert unexplained == 0
        assert len(excused) > 100
        assert sum(excused) < 0.2 * len(excused)


def sampled(logits: Values, uniform: float, params: SamplingParams) -> int:
    """What the engine's own filters and draw make of these logits."""
    scores = torch.tensor(logits)[None]
    rows = SamplingRows(
        temperature=torch.tensor([params.temperature]),
        top_k=torch.tensor([params.top_k]),
        top_p=torch.tensor([params.top_p]),
        min_p=torch.tensor([params.min_p]),
        **{name: torch.zeros(1, dtype=torch.int64) for name in ("seed", "position", "min_tokens")},
        **{name: torch.zeros(1) for name in ("presence", "frequency", "repetition")},
    )
    is_greedy = torch.tensor([False])
    left = filter_scores(scores, scores.amax(-1), is_greedy, rows, SamplingNeeds.of([params]), filters.NO_BORDERS)
    token, _ = filters.draw(left, torch.tensor([uniform], dtype=torch.float64), 0.0)
    return int(token)
