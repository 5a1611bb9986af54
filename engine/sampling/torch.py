"""The reference sampler: plain torch, every device, float32 or float64.

Fixed shapes, no branch on a tensor's value, no copy between host and device, so that it can run behind a
pending forward and inside a captured graph. The order of processing is in :mod:`engine.sampling.base`.
Letters: n rows, V vocabulary, K columns of an id list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.request import GREEDY_TEMPERATURE
from engine.sampling import filters
from engine.sampling.base import RowColumns, Sampled, SamplingNeeds, SamplingRows
from engine.sampling.logprobs import token_logprobs
from engine.sampling.rng import DrawKind, uniform

BOUNDARY_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Rounding that counts as numeric error: a share of the total for sums, a difference for scores. About a
hundred float32 roundings of a probability; float64 is bounded by the weights' own 2**-42."""


class TorchSampler:
    """Implements :class:`engine.sampling.base.Sampler`. Stateless: one instance serves any number of streams."""

    name = "torch"

    def sample(self, logits_NV: Tensor, rows: SamplingRows, needs: SamplingNeeds) -> Sampled:
        """See :meth:`engine.sampling.base.Sampler.sample`."""
        assert logits_NV.shape[0] == rows.seed.shape[0], f"{logits_NV.shape[0]} logits, {rows.seed.shape[0]} rows"
        scores_NV = adjust_logits(_widen(logits_NV), rows, needs)
        highest_N, token_N = scores_NV.max(-1)  # the first index among equals; NaN wins, so it is never missed
        bad_N = ~highest_N.isfinite()
        near_N = torch.zeros_like(bad_N)
        if not needs.all_greedy:
            greedy_N = is_greedy(rows)
            left = self._filter(scores_NV, highest_N, greedy_N, rows, needs)
            tolerance = BOUNDARY_TOLERANCE[scores_NV.dtype]
            drawn_N, near_N = filters.draw(left, uniform(rows.seed, rows.position, DrawKind.TARGET), tolerance)
            token_N = torch.where(greedy_N, token_N, drawn_N)
            near_N = near_N & ~greedy_N & ~bad_N
            if needs.processed_logprobs:
                scores_NV = left.filtered_scores()
        elif needs.processed_logprobs:
            scores_NV = scores_NV - highest_N[:, None]  # rounded as in a batch with drawn rows: the same order of ties
        token_N = torch.where(bad_N, 0, token_N)
        logprobs = _logprobs(scores_NV if needs.processed_logprobs else logits_NV, token_N, needs)
        return Sampled(token_N, bad_N, *logprobs, near_N)

    def _filter(
        self, scores_NV: Tensor, highest_N: Tensor, greedy_N: Tensor, rows: SamplingRows, needs: SamplingNeeds
    ) -> filters.Candidates:
        return filter_scores(scores_NV, highest_N, greedy_N, rows, needs, filters.NO_BORDERS)

    def draw_in_place(
        self, logits_NV: Tensor, sources_n: Tensor | None, columns: RowColumns, results: Tensor, needs: SamplingNeeds
    ) -> bool:
        """The reference has one way only, :meth:`sample`."""
        return False

    def accept(self, rows: SamplingRows, sampled: Sampled) -> None:
        """See :meth:`engine.sampling.base.Sampler.accept`."""
        if rows.output_counts is not None:
            ones = (~sampled.bad).to(rows.output_counts.dtype)
            rows.output_counts.scatter_add_(1, sampled.token_ids[:, None], ones[:, None])


def is_greedy(rows: SamplingRows) -> Tensor:
    """[n] bool. The threshold itself counts as greedy here: values just below it round to it in float32."""
    return (rows.temperature <= GREEDY_TEMPERATURE) | (rows.top_k == 1)


def _widen(logits_NV: Tensor) -> Tensor:
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.to(torch.float32)


def adjust_logits(scores_NV: Tensor, rows: SamplingRows, needs: SamplingNeeds) -> Tensor:
    """Bias, penalties and the ban of ending ids, in this order.

    Args:
        scores_NV: [n, V], float32 or float64; only read.
        rows: Their parameters.
        needs: What to look at.

    Returns:
        The adjusted scores; ``scores_NV`` itself where nothing is to be done.
    """
    if needs.bias and rows.bias_ids is not None:
        assert rows.bias_values is not None
        scores_NV = _add_at(scores_NV, rows.bias_ids, rows.bias_values)
    if needs.penalties:
        scores_NV = _penalise(scores_NV, rows)
    if needs.min_tokens and rows.stop_ids is not None:
        is_early_N1 = (rows.position < rows.min_tokens)[:, None]
        scores_NV = _add_at(scores_NV, rows.stop_ids, torch.where(is_early_N1, -torch.inf, 0.0))
    return scores_NV


def _add_at(scores_NV: Tensor, ids_NK: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` (broadcast to [n, K]) at ``ids``; padding (id V) adds 0 to the last id."""
    is_real_NK = ids_NK < scores_NV.shape[1]
    values_NK = torch.where(is_real_NK, values.to(scores_NV.dtype), 0.0)
    return scores_NV.scatter_add(1, torch.where(is_real_NK, ids_NK, scores_NV.shape[1] - 1), values_NK)


def _penalise(scores_NV: Tensor, rows: SamplingRows) -> Tensor:
    counts_NV = rows.output_counts
    assert counts_NV is not None, "penalties need output_counts"
    was_made_NV = counts_NV > 0
    was_seen_NV = was_made_NV if rows.prompt_mask is None else was_made_NV | rows.prompt_mask
    dtype = scores_NV.dtype
    largest = torch.finfo(torch.float32).max  # what a float32 column made infinite or 0 would turn zeros into NaN
    repetition_N1 = rows.repetition.clamp(1 / largest, largest).to(dtype)[:, None]
    factor_NV = torch.where(was_seen_NV, repetition_N1, 1.0)
    scores_NV = scores_NV.clamp(min=0.0) / factor_NV + scores_NV.clamp(max=0.0) * factor_NV
    presence_NV = torch.where(was_made_NV, rows.presence.to(dtype)[:, None], 0.0)
    return scores_NV - presence_NV - rows.frequency.to(dtype)[:, None] * counts_NV


def filter_scores(
    scores_NV: Tensor,
    highest_N: Tensor,
    greedy_N: Tensor,
    rows: SamplingRows,
    needs: SamplingNeeds,
    borders: filters.Borders,
) -> filters.Candidates:
    """Temperature and filters; greedy rows pass with temperature 1 and unfiltered, for processed logprobs.

    Args:
        scores_NV: [n, V], adjusted, float32 or float64.
        highest_N: Their maximum, same dtype; subtracted before dividing so that no temperature can overflow.
        greedy_N: [n] bool.
        rows: Temperatures and filters.
        needs: Which filters any row uses.
        borders: Finds where a filter cuts, if something faster than the reference does.
    """
    dtype = scores_NV.dtype
    # The clamp: -inf over an infinite temperature would be NaN.
    temperature_N = torch.where(greedy_N, 1.0, rows.temperature).to(dtype).clamp(max=torch.finfo(torch.float32).max)
    left = filters.make_candidates((scores_NV - highest_N[:, None]) / temperature_N[:, None])
    tolerance = BOUNDARY_TOLERANCE[dtype]
    if needs.min_p:
        left = filters.apply_min_p(left, torch.where(greedy_N, 0.0, rows.min_p), tolerance)
    if needs.top_k:
        top_k_N = torch.where(greedy_N, 0, rows.top_k)
        left = filters.apply_top_k(left, top_k_N, needs.max_top_k, tolerance, borders.top_k(left, top_k_N))
    if needs.top_p:
        top_p_N = torch.where(greedy_N, 1.0, rows.top_p)
        left = filters.apply_top_p(left, top_p_N, tolerance, borders.top_p(left, top_p_N))
    return left


def _logprobs(
    scores_NV: Tensor, token_N: Tensor, needs: SamplingNeeds
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if needs.num_logprobs is None:
        return None, None, None
    chosen_N, top_ids, top_values = token_logprobs(scores_NV, token_N, needs.num_logprobs)
    if needs.num_logprobs == 0:
        return chosen_N, None, None
    return chosen_N, top_ids, top_values
