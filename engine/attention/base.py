"""The attention interface: attend over the paged cache, after this step's keys and values are written to it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch, PrefillPlan
from engine.device import Device
from engine.models.base import LayerCache


class HeadSizes(NamedTuple):
    """What the attention of a model works on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class PlannerLimits(NamedTuple):
    """What an engine may ask of a planner."""

    block_size: int
    max_rows: int
    """Batch rows of a forward."""
    max_blocks_per_row: int


class PrefillRows(NamedTuple):
    """Prefill rows of one forward, as the host knows them. P rows; R rows and C columns of a block table."""

    query_len_P: NDArray[np.int64]
    """[P] query tokens; 0 for a padding row, of which nothing else counts."""
    kv_len_P: NDArray[np.int64]
    """[P] cached tokens, this forward's included."""
    table_row_P: NDArray[np.int64]
    """[P] its row in ``block_ids_RC``."""
    block_ids_RC: NDArray[np.int32]
    """[R, C] block ids; only those that a row's ``kv_len`` needs are read."""


class AttentionPlanner(Protocol):
    """Plans the prefill rows of one engine's forwards, for a backend whose kernels want lengths on the host.

    It belongs to the engine and not to the backend, as engines that share a model run at the same time.
    """

    def plan(self, shape: BatchShape, rows: PrefillRows, *, is_captured: bool) -> PrefillPlan:
        """Settle how the next forward of ``shape`` attends to its prefill rows; called in ``prepare``.

        Enqueues copies on the compute stream, behind the forwards launched so far and before the next one. Waits for
        nothing but a copy out of the host memory that it is about to write, as :meth:`engine.staging.Slab.acquire`.

        Args:
            shape: Of the forward, padding included.
            rows: Its prefill rows.
            is_captured: Whether a graph runs it. The first such plan of a shape comes before the capture and has all
                tokens of the shape; a replay reads the plan made last.

        Returns:
            What the forward runs with; for a graph, what it is captured with. Good until the next plan is made.
        """
        ...


class Attention(Protocol):
    """One backend. Letters: T tokens, H query heads, G key/value heads, D head size."""

    name: str

    def make_planner(self, device: Device, limits: PlannerLimits, sizes: HeadSizes) -> AttentionPlanner | None:
        """What plans for one engine; None where there is nothing to plan.

        Raises:
            ConfigError: the backend cannot run these sizes at all.
        """
        ...

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
