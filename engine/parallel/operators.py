"""The device's collectives as torch operators, so that a traced forward issues them each time it runs.

They take the name of the :class:`~engine.parallel.ranks.Ranks` they belong to: a trace can hold no Python object.

Letters: T tokens, I their size, K experts of a token, N ranks, A tokens that every rank gives, B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.ranks import ranks_named

NOBODY = -1
"""In place of an expert: padding goes to none."""

_library = torch.library.Library("workbench", "DEF")


def _gather(x_TI: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_tokens: int, ranks: str) -> tuple[Tensor, ...]:
    mine_TB = joined(x_TI, ids_TK.to(torch.int32), weights_TK)
    padding = num_tokens - x_TI.shape[0]
    if padding:
        mine_TB = functional.pad(mine_TB, (0, 0, 0, padding), value=255)  # NOBODY in every number of an expert
        mine_TB[-padding:, : x_TI.dtype.itemsize * x_TI.shape[1]] = 0
    all_ = ranks_named(ranks).gather(mine_TB)
    x, ids, weights = split(all_, (x_TI, ids_TK.to(torch.int32), weights_TK))
    return x, ids.to(torch.int64), weights


def _sum(x: Tensor, ranks: str) -> Tensor:
    return ranks_named(ranks).sum(x)


_library.define(
    "gather_tokens(Tensor x, Tensor ids, Tensor weights, int num_tokens, str ranks) -> (Tensor, Tensor, Tensor)"
)
_library.define("sum_ranks(Tensor x, str ranks) -> Tensor")
_library.impl("gather_tokens", _gather, "CompositeExplicitAutograd")
_library.impl("sum_ranks", _sum, "CompositeExplicitAutograd")


def gather_tokens(
    x_TI: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_tokens: int, ranks: str
) -> tuple[Tensor, Tensor, Tensor]:
    """All ranks' tokens, [N A, I], with the numbers of their experts and weights, [N A, K]; rank 0's first.

    In one collective. What pads a rank's tokens to A are zeros that go to ``NOBODY``.

    Args:
        x_TI: This rank's.
        ids_TK: int64.
        weights_TK: Any type.
        num_tokens: A.
        ranks: The name of this rank's connection.
    """
    return cast(
        tuple[Tensor, Tensor, Tensor],
        torch.ops.workbench.gather_tokens(x_TI, ids_TK, weights_TK, num_tokens, ranks),
    )


def sum_over_ranks(x: Tensor, ranks: str) -> Tensor:
    """See :meth:`engine.parallel.ranks.Ranks.sum`."""
    return cast(Tensor, torch.ops.workbench.sum_ranks(x, ranks))


# -- one tensor of bytes in place of several ---------------------------------------------------------------------------


def joined(*parts: Tensor) -> Tensor:
    """[T, B] uint8 of several tensors of T rows."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def split(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What :func:`joined` made, of any number of rows; ``like`` gives widths and types."""
    sizes = [one.shape[1] * one.dtype.itemsize for one in like]
    parts = packed.split(sizes, dim=1)
    return [part.contiguous().view(one.dtype) for part, one in zip(parts, like, strict=True)]
