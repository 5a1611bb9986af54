"""Experts of several ranks on one axis."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.expert_load import ExpertLoad
from workbench.expert_load_of_ranks import ranks_expert_load


def load(*rows: list[int]) -> ExpertLoad:
    return ExpertLoad(np.array(rows, dtype=np.int64), tuple(range(len(rows))))


def test_what_all_routers_sent_to_an_expert_adds_up() -> None:
    ranks = ranks_expert_load([load([1, 2, 3, 4], [0, 0, 0, 8]), load([9, 0, 1, 0], [0, 0, 8, 0])])

    assert ranks.load.counts.tolist() == [[10, 2, 4, 4], [0, 0, 8, 8]]
    assert ranks.rank_loads.tolist() == [[12, 8], [0, 16]]
    assert ranks.rank_imbalances.tolist() == pytest.approx([1.2, 2.0])


def test_the_ranks_own_counts_are_left_as_they_are() -> None:
    own = load([1, 2])
    ranks_expert_load([own, load([5, 5])])
    assert own.counts.tolist() == [[1, 2]]


def test_the_map_has_a_line_where_a_ranks_experts_begin() -> None:
    ranks = ranks_expert_load([load([1, 2, 3, 4]), load([0, 0, 0, 0])])
    html = ranks._repr_html_()

    assert html.count("border-left:2px solid") == 2 + 2  # heads and the one layer
    assert "expert 2 of rank 1: 3 tokens" in html
    assert "tokens by rank 3 · 7, imbalance 1.40" in html
    assert "rank 1: experts 2 to 3" in str(ranks)


def test_without_tokens_it_says_so() -> None:
    assert "run the session" in ranks_expert_load([load([0, 0]), load([0, 0])])._repr_html_()


def test_loads_of_different_models_are_refused() -> None:
    with pytest.raises(ValueError, match="one model"):
        ranks_expert_load([load([1, 2]), load([1, 2, 3])])
    with pytest.raises(ValueError, match="one model"):
        ranks_expert_load([])
    with pytest.raises(ValueError, match="a rank each"):
        ranks_expert_load([load([1, 2, 3]), load([1, 2, 3])])
