"""The attention interface: attend over the paged cache, after this step's keys and values are written to it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.batch import ForwardBatch
from engine.models.base import LayerCache


class Attention(Protocol):
    """One backend. Letters: T tokens, H query heads, G key/value heads, D head size."""

    name: str

    def __call__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cache: LayerCache,
        batch: ForwardBatch,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Causal attention of every token over its own row.

        Writes ``k`` and ``v`` to ``cache`` at ``batch.slots_T`` first. Enqueues only: no host wait, and no
        branch on lengths but through ``batch.shape``.

        Args:
            q_THD: Queries, [T, H, D], after RoPE.
            k_TGD: Keys, [T, G, D], after RoPE; G divides H.
            v_TGD: Values, [T, G, D].
            cache: (keys, values), each [num_blocks + 1, block_size, G, D].
            batch: Positions, block table and lengths of this forward.
            scale: Factor on the scores.
            window: Keys a query sees, its own included; None: all.

        Returns:
            [T, H, D], dtype of ``q_THD``. Rows of padding tokens are finite and otherwise undefined.
        """
        ...

    def attend(
        self, q_THD: Tensor, cache: LayerCache, batch: ForwardBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """The same where keys and values of this forward are in ``cache`` already, written with the rotation."""
        ...
