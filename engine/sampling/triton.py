"""The reference sampler with a fast path on CUDA: rows without filters or penalties are drawn by one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.request import GREEDY_TEMPERATURE
from engine.sampling.base import RowColumns, SamplingNeeds
from engine.sampling.torch import BOUNDARY_TOLERANCE, TorchSampler

_BLOCK = 8192
_WARPS = 16


class TritonSampler(TorchSampler):
    """Same order of processing, same stream, same weights; see :mod:`engine.sampling.triton_draw`.

    The two paths may differ where an exponential rounds differently, which ``near_boundary`` counts.
    """

    name = "triton"

    def draw_in_place(
        self, logits_NV: Tensor, sources_n: Tensor | None, columns: RowColumns, results: Tensor, needs: SamplingNeeds
    ) -> bool:
        """See :meth:`engine.sampling.base.Sampler.draw_in_place`."""
        if not needs.is_plain or logits_NV.dtype == torch.float64:
            return False
        from engine.sampling.triton_draw import draw_rows_kernel

        rows = columns.ints.shape[0]
        draw_rows_kernel[(rows,)](
            logits_NV,
            sources_n,
            columns.ints,
            columns.floats,
            results,
            logits_NV.shape[1],
            logits_NV.stride(0),
            results.shape[1],
            BOUNDARY_TOLERANCE[torch.float32],
            GREEDY_TEMPERATURE,
            HAS_SOURCES=sources_n is not None,
            ANY_RANDOM=not needs.all_greedy,
            NUM_INTS=columns.ints.shape[1],
            NUM_FLOATS=columns.floats.shape[1],
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
        return True
