"""FlashInfer's filters and then our draw.

FlashInfer's own sampling kernels mix the row into the random stream and keep every one of several equal tokens at a
border. So only its filters are used here, to find where top-k and top-p cut; which of several equals stay, and the
draw, are the reference's, on the same integer weights. Rows without filters are drawn by the Triton kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampling import filters
from engine.sampling.base import SamplingNeeds, SamplingRows
from engine.sampling.torch import filter_scores
from engine.sampling.triton import TritonSampler


class FlashInferSampler(TritonSampler):
    """The same stream, edge rules and weights as the reference; float64 goes the reference's way.

    Where FlashInfer's float32 sums put a border one token elsewhere, the draw is flagged by ``near_boundary``.
    """

    name = "flashinfer"

    def _filter(
        self, scores_NV: Tensor, highest_N: Tensor, greedy_N: Tensor, rows: SamplingRows, needs: SamplingNeeds
    ) -> filters.Candidates:
        borders = FlashInferBorders() if scores_NV.dtype == torch.float32 else filters.NO_BORDERS
        return filter_scores(scores_NV, highest_N, greedy_N, rows, needs, borders)


class FlashInferBorders:
    """Implements :class:`engine.sampling.filters.Borders` by FlashInfer's threshold kernels; waits for nothing."""

    def top_k(self, left: filters.Candidates, top_k_N: Tensor) -> Tensor:
        """The largest key that ``top_k_mask_logits`` keeps."""
        from flashinfer.sampling import top_k_mask_logits

        vocab_size = left.scores_NV.shape[1]
        bound_N = torch.where(top_k_N > 0, top_k_N, vocab_size).clamp(max=vocab_size).to(torch.int32)
        return _last_key(left, top_k_mask_logits(left.filtered_scores(), bound_N) > -torch.inf)

    def top_p(self, left: filters.Candidates, top_p_N: Tensor) -> Tensor:
        """The largest key that ``top_p_renorm_probs`` keeps."""
        from flashinfer.sampling import top_p_renorm_probs

        weights_NV = left.weights_NV.to(torch.float32)
        shares_NV = weights_NV / weights_NV.sum(-1, keepdim=True)
        return _last_key(left, top_p_renorm_probs(shares_NV, top_p_N.contiguous()) > 0)


def _last_key(left: filters.Candidates, kept_NV: Tensor) -> Tensor:
    return torch.where(kept_NV, left.keys_NV, -1).amax(-1, keepdim=True)
