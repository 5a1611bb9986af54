from __future__ import annotations

import pytest
import torch

from engine.sampling import filters


def candidates(weights: list[int], scores: list[float] | None = None) -> filters.Candidates:
    """Hand-made: weights of any small size, scores falling with the id unless given."""
    x = torch.tensor([scores or [-float(i) for i in range(len(weights))]])
    return filters.make_candidates(x)._replace(weights_NV=torch.tensor([weights]))


class TestTopP:
    @pytest.mark.parametrize(("top_p", "kept"), [(0.3, 1), (1 / 3, 2), (0.5, 2), (0.66, 2), (0.67, 3), (0.99, 3)])
    def test_a_share_between_two_weights_takes_the_next(self, top_p: float, kept: int) -> None:
        # 1 / 3 is above a third in float32.
        left = filters.apply_top_p(candidates([1, 1, 1]), torch.tensor([top_p]), 1e-5)

        assert left.weights_NV.tolist() == [[1] * kept + [0] * (3 - kept)]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_scores_that_differ_in_their_last_bit_are_told_apart(self, dtype: torch.dtype) -> None:
        # The radix search must look at every bit of a score.
        base = torch.full((5,), -3.0, dtype=dtype)
        for i in range(5):
            for _ in range((2, 0, 4, 1, 3)[i]):
                base[i] = base[i].nextafter(torch.tensor(0.0, dtype=dtype))
        for kept in range(1, 6):
            left = filters.make_candidates(base[None])._replace(weights_NV=torch.ones(1, 5, dtype=torch.int64))
            left = filters.apply_top_p(left, torch.tensor([kept / 5 - 0.01]), 0.0)
            assert left.kept_NV is not None
            assert set(left.kept_NV[0].nonzero()[:, 0].tolist()) == set([2, 4, 0, 3, 1][:kept])


class TestTopK:
    @pytest.mark.parametrize("way", [5, filters.SHORT_TOP_K + 1])
    def test_both_ways_to_the_border_keep_the_same(self, way: int) -> None:
        scores = [-2.0, -1.0, -2.0, 0.0, -2.0, -torch.inf]
        for top_k, kept in [(1, [3]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])]:
            left = filters.apply_top_k(candidates([1] * 6, scores), torch.tensor([top_k]), way, 1e-5)
            assert left.weights_NV[0].nonzero()[:, 0].tolist() == kept


class TestDraw:
    @pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.24, 1), (0.25, 3), (0.74, 3), (0.75, 4), (1 - 2**-53, 4)])
    def test_takes_the_first_id_whose_sum_exceeds_the_point(self, u: float, token: int) -> None:
        left = candidates([0, 1, 0, 2, 1, 0])

        assert filters.draw(left, torch.tensor([u], dtype=torch.float64), 0.0)[0].tolist() == [token]

    @pytest.mark.parametrize("total", [1, 3, 2**42, 2**52 + 1, 2**53 + 1, 2**60 + 7, 2**62 - 1])
    def test_the_largest_uniform_stays_below_every_total(self, total: int) -> None:
        left = candidates([total, 0, 0])

        assert filters.draw(left, torch.tensor([1 - 2**-53], dtype=torch.float64), 0.0)[0].tolist() == [0]

    def test_is_exact_for_a_large_vocabulary(self) -> None:
        # A float32 running sum would stall long before the end.
        num = 1 << 18
        left = filters.make_candidates(torch.zeros(1, num))
        picks = [0, 1, 77_777, num // 2, num - 1]
        drawn = [filters.draw(left, torch.tensor([(i + 0.5) / num], dtype=torch.float64), 0.0)[0].item() for i in picks]

        assert drawn == picks

    def test_refuses_a_vocabulary_whose_sum_could_overflow(self) -> None:
        with pytest.raises(AssertionError, match="vocabulary"):
            filters.make_candidates(torch.zeros(1, filters.MAX_VOCAB + 1))
