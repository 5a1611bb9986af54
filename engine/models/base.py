"""What the engine asks of a model: its cache layout, and one forward over a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.device import Device

if TYPE_CHECKING:
    from engine.attention.base import AttentionPlanner, PlannerLimits

LayerCache = tuple[Tensor, ...]
"""The tensors of one layer state. Paged: each [num_blocks + 1, block_size, *per-token shape], the last block the dummy.
Of slots: each [num_slots + 1, *shape], the last slot the dummy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedState:
    """A layer state that grows by one entry a token and lives in KV blocks."""

    shapes: tuple[tuple[int, ...], ...]
    """Per-token shape of each tensor, for attention ((num_kv_heads, head_dim), (num_kv_heads, head_dim))."""
    dtypes: tuple[torch.dtype, ...]
    """One dtype a tensor."""

    def bytes_per_token(self) -> int:
        """Cache bytes of one token in this layer."""
        return sum(
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """A layer state of fixed size, one slot a row: what a recurrence remembers (convolution columns, SSM state).

    A row's forward starts from the state of slot ``batch.state_from_N`` (from zeros where the row has no tokens before
    it) and leaves the state behind its last token in slot ``batch.state_to_N``.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor of one slot."""
    dtypes: tuple[torch.dtype, ...]
    """One dtype a tensor."""

    def bytes_per_slot(self) -> int:
        """Bytes of one slot in this layer."""
        return sum(
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


LayerState = PagedState | SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """How the states of recurrent layers are kept."""

    replay_width: int = 0
    """W: a decode row's forward of W tokens leaves its slot as it was before them, and beside it what the recurrence
    read of them, for the row's next forward to replay those that were accepted. 0: it leaves the states behind them."""
    dtype: torch.dtype | None = None
    """Of what sums up over a sequence, in slots; None: the model's choice."""


PLAIN_STATES = StateOptions()


@runtime_checkable
class Model(Protocol):
    """A torch module with these members. ``forward`` must not branch on tensor values (see ``engine/graphs.py``).

    ``forward`` writes the step's entries into paged ``caches`` at ``batch.slots_T`` and reads rows back through
    ``batch.block_table_NK`` (states of slots: see :class:`SlotState`); it returns logits, shape [L, vocab_size], on the
    batch's device. It may branch on ``batch.shape`` only, synchronises nothing, and keeps no state between calls but
    the caches.
    """

    vocab_size: int
    max_position: int
    """Longest sequence the checkpoint was made for."""

    def cache_layout(self) -> Sequence[LayerState]:
        """One state a layer that caches, in the order ``forward`` takes ``caches``."""
        ...

    def __call__(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Logits, shape [L, vocab_size]."""
        ...


@runtime_checkable
class DraftingModel(Model, Protocol):
    """A model with draft heads (multi-token prediction), one a depth; each is a layer with keys and values of its own.

    Head k at position p takes the hidden state of position p - 1 (the model's own, after its last norm, for k = 0; that
    of head k - 1 else) and the token at p, and tells of the token at p + 1. So its entries lie at positions from k + 1
    on, ``batch.first_key``, and depend on tokens up to their own: blocks can be shared. The engine keeps the hidden
    states in paged memory beside them.
    """

    num_draft_heads: int
    hidden_size: int

    def draft_layout(self) -> Sequence[PagedState]:
        """The state of each head, as :meth:`cache_layout` gives those of the other layers."""
        ...

    def forward_hidden(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Logits [L, V], as calling the model gives them, and hidden states of all tokens [T, E]."""
        ...

    def draft(self, head: int, before_TE: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Hidden states of one head [T, E]; writes its entries to ``cache`` at ``batch.slots_T``.

        Args:
            head: Which.
            before_TE: Hidden states of the positions before the tokens.
            batch: Tokens, positions and rows.
            cache: Of this head.
        """
        ...

    def draft_logits(self, head: int, hidden_LE: Tensor) -> Tensor:
        """Logits [L, V] of one head's hidden states."""
        ...


@runtime_checkable
class RemembersDrafts(Protocol):
    """A model with draft heads that can leave out of one what nobody reads."""

    def remember(self, head: int, before_TE: Tensor, batch: ForwardBatch, cache: LayerCache) -> None:
        """What :meth:`DraftingModel.draft` writes, and no more: of the last head in use, behind a forward."""
        ...


@runtime_checkable
class RecurrentModel(Model, Protocol):
    """A model whose states of slots can be kept in several ways.

    With ``replay_width`` its forwards go by ``batch.shape.num_replayed`` and ``batch.replayed_V``.
    """

    def state_layout(self, options: StateOptions) -> Sequence[LayerState]:
        """:meth:`cache_layout` with states kept as ``options`` say.

        Raises:
            ConfigError: its backend cannot keep them so.
        """
        ...


@runtime_checkable
class PlansPrefill(Protocol):
    """A model that lets its attention backend plan prefill rows. Without this method nothing is planned."""

    def make_planner(self, device: Device, limits: PlannerLimits) -> AttentionPlanner | None:
        """For one engine on this model; None where the backend plans nothing.

        Raises:
            ConfigError: the backend cannot run this model with these limits.
        """
        ...
