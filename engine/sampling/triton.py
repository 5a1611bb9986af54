"""The reference sampler with a fast path on CUDA: rows without filters or penalties are drawn by kernels of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.request import GREEDY_TEMPERATURE
from engine.sampling.base import RowColumns, SamplingNeeds
from engine.sampling.torch import BOUNDARY_TOLERANCE, TorchSampler

_BLOCK = 4096
_WARPS = 8
_MOST_PARTS = 64
_PROGRAMS = 512
"""How many all rows together are divided into: about four for each multiprocessor."""


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
        from engine.kernels.triton_products import overlapped
        from engine.sampling.triton_draw import highest_kernel, settle_kernel, weigh_kernel

        rows, vocab = columns.ints.shape[0], logits_NV.shape[1]
        share, parts = divided(rows, vocab)
        tops, sums = torch.empty((2, rows, _MOST_PARTS), dtype=torch.int64, device=logits_NV.device)
        read = {"V": vocab, "stride": logits_NV.stride(0), "share": share}
        options = {
            "HAS_SOURCES": sources_n is not None,
            "MOST_PARTS": _MOST_PARTS,
            "BLOCK": _BLOCK,
            "num_warps": _WARPS,
            **overlapped(),
        }
        of_columns = {"NUM_INTS": columns.ints.shape[1], "NUM_FLOATS": columns.floats.shape[1]}
        highest_kernel[rows, parts](logits_NV, sources_n, tops, **read, **options)
        if not needs.all_greedy:
            weigh_kernel[rows, parts](
                logits_NV,
                sources_n,
                *columns,
                tops,
                sums,
                **read,
                greedy_below=GREEDY_TEMPERATURE,
                **of_columns,
                **options,
            )
        settle_kernel[rows,](
            logits_NV,
            sources_n,
            *columns,
            results,
            tops,
            sums,
            **read,
            max_rows=results.shape[1],
            tolerance=BOUNDARY_TOLERANCE[torch.float32],
            greedy_below=GREEDY_TEMPERATURE,
            ANY_RANDOM=not needs.all_greedy,
            **of_columns,
            **options,
        )
        return True


def divided(rows: int, vocab: int) -> tuple[int, int]:
    """Columns of a part, a multiple of the kernels' blocks, and parts of a row."""
    blocks = -(-vocab // _BLOCK)
    wanted = min(blocks, _MOST_PARTS, max(1, _PROGRAMS // rows))
    share = -(-blocks // wanted) * _BLOCK
    return share, -(-vocab // share)
