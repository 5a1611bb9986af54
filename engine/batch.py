"""What one forward reads: the batch as device tensors, and its static shape.

Letters: T tokens (padded), N batch rows (padded), K block-table columns, L logits rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, order=True, slots=True, kw_only=True)
class BatchDimensions:
    """How much one forward carries.

    Sorts by tokens first, so in a sorted list of captured graphs the first one
    that fits is the one that wastes the fewest tokens on padding (I49).
    """

    num_tokens: int
    """Query tokens of all rows together; at least one for each row."""
    num_prefill: int
    """Rows still reading their prompt."""
    num_decode: int
    """Rows adding one token each."""

    @property
    def num_rows(self) -> int:
        """Batch rows, decode and prefill."""
        return self.num_prefill + self.num_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The Python integers a forward may branch on. Everything else is tensors, so a trace stays valid.

    Batch rows come decode first, then prefill. A model's decode row i has exactly one token, at token index i.
    """

    num_tokens: int
    """T."""
    num_decode: int
    """Batch rows [0, num_decode) are decode rows."""
    num_prefill: int
    """Batch rows [num_decode, N) are prefill rows."""
    max_query_len: int
    """Upper bound of the query tokens of a prefill row; 0 without prefill rows."""
    num_kv_blocks: int
    """K: upper bound of the blocks any row of this batch reads."""
    decode_width: int = 1
    """Tokens of a decode row: decode row i has those from i * width on. Models see rows of several tokens as prefill
    rows (:meth:`for_model`)."""
    num_snapshots: int = 0
    """M: states kept besides those of the rows' ends, padding included."""
    num_wide: int = 0
    """Of a model's prefill rows the first so many are decode rows of ``wide_width`` tokens each: row i has those from
    i * wide_width on, and there are no decode rows beside them. For kernels that are faster for knowing it."""
    wide_width: int = 0
    """Tokens of each of them; 0 without any."""
    expert_tokens: int = 0
    """With experts on other ranks: tokens that every rank gives them, padding included, at least ``num_tokens``; 0:
    there are no other ranks."""
    replays: bool = False
    """Whether the recurrent states of the wide rows are those before their last forward
    (:attr:`ForwardBatch.replayed_V`); else states are stored behind every token."""

    @property
    def num_rows(self) -> int:
        """N."""
        return self.num_decode + self.num_prefill

    @property
    def num_replayed(self) -> int:
        """V: the wide rows, where their states are replayed."""
        return self.num_wide if self.replays else 0

    @property
    def num_stepping_rows(self) -> int:
        """Batch rows in front whose recurrences go on token by token: decode rows, or replayed ones."""
        return self.num_decode + self.num_replayed

    @property
    def num_stepping_tokens(self) -> int:
        """Their tokens, the first of the batch."""
        return self.num_decode + self.num_replayed * self.wide_width

    @property
    def num_scanned_rows(self) -> int:
        """Rows behind those."""
        return self.num_rows - self.num_stepping_rows

    @property
    def num_logits(self) -> int:
        """L: one row for each token of a decode row, one for each prefill row."""
        return self.num_decode * self.decode_width + self.num_prefill

    def for_model(self, *, replays: bool = False) -> BatchShape:
        """The same forward without decode rows of several tokens; ``replays``: they are to be replayed."""
        if self.decode_width == 1:
            return self
        longest = max(self.max_query_len, self.decode_width if self.num_decode else 0)
        return replace(
            self,
            num_decode=0,
            num_prefill=self.num_rows,
            max_query_len=longest,
            decode_width=1,
            num_wide=self.num_decode,
            wide_width=self.decode_width if self.num_decode else 0,
            replays=replays,
        )


class PrefillPlan(Protocol):
    """How one forward attends to its prefill rows, settled on the host by an attention backend that plans."""

    def attend(self, q_tHD: Tensor, cache: tuple[Tensor, ...], out_tHD: Tensor, *, scale: float) -> None:
        """Attention without a window of the t tokens behind the decode rows, into ``out``; padding is left alone."""
        ...


class Snapshots(NamedTuple):
    """States that a forward keeps besides those of its rows' ends: for prefixes that others may share.

    Letter M: snapshots of this forward, padding included. All int64 [M] on the compute device.
    """

    row_M: Tensor
    """Batch row it is taken of; a prefill row."""
    after_M: Tensor
    """Query tokens of that row in this forward behind which the state is taken: in [1, query_len], 0 for padding,
    which stores whatever is at hand."""
    slot_M: Tensor
    """Slot that it goes to; the dummy slot for padding. No slot twice but the dummy, and none that a row of this
    forward names, but for the one that its own row goes on from: that is read before it is written."""


class RoutingTape(NamedTuple):
    """Where layers with experts note which they chose, and what they are told to choose.

    Letters: L such layers, K experts of a token.
    """

    kept_SLK: Tensor
    """[slots of all blocks, L, K] int16: the choices of the token whose cache entry lies in that slot."""
    slots_T: Tensor
    """[T] as :attr:`ForwardBatch.slots_T`."""
    given_TLK: Tensor | None
    """[T, L, K] int16 experts to use; negative: the router chooses. None: it always does."""

    def given_to(self, layer: int) -> Tensor | None:
        """[T, K] what one layer is told."""
        return None if self.given_TLK is None else self.given_TLK[:, layer]

    def note(self, layer: int, ids_TK: Tensor) -> None:
        """Keep what one layer uses; only enqueues."""
        self.kept_SLK[:, layer].index_copy_(0, self.slots_T, ids_TK.to(self.kept_SLK.dtype))


class ForwardBatch(NamedTuple):
    """Inputs of one base forward, all int64 on the compute device unless said otherwise.

    Padding tokens belong to the last rows, have position 0 and write to the dummy block;
    padding rows read the dummy block with kv_len 1 (decode) or their padding tokens (prefill).
    """

    token_ids_T: Tensor
    """[T] input ids."""
    positions_T: Tensor
    """[T] position in the sequence, from 0."""
    row_T: Tensor
    """[T] batch row of each token."""
    slots_T: Tensor
    """[T] where the token's cache entry goes: block id * block_size + offset."""
    block_table_NK: Tensor
    """[N, K] block ids; entries past a row's length name the dummy block."""
    query_start_N: Tensor
    """[N] token index of the row's first query token."""
    query_len_N: Tensor
    """[N] query tokens of the row."""
    kv_len_N: Tensor
    """[N] cached tokens of the row, this forward's included."""
    logits_idx_L: Tensor
    """[L] token index whose hidden state becomes logits row l."""
    shape: BatchShape
    """Static integers."""
    prefill_plan: PrefillPlan | None = None
    """Of the prefill rows; None where there are none, or the backend plans nothing."""
    state_from_N: Tensor | None = None
    """[N] slot whose state the row goes on from. Not to be read where ``kv_len == query_len``: such a row starts from
    zeros, whatever its slot holds. None for models without slots."""
    state_to_N: Tensor | None = None
    """[N] slot that the state behind the row's last query token goes to; the dummy slot for padding rows. Mostly the
    same as ``state_from_N``; decode rows always have the same. None for models without slots."""
    snapshots: Snapshots | None = None
    """Of prefill rows, where a prefix cache keeps states."""
    replayed_V: Tensor | None = None
    """[V] of the rows in front (``shape.num_replayed``): how many tokens of its last forward, of which the slot keeps
    what the recurrence read, a row has to read once more before its own; 0 where its state is the one behind its last
    token. None where nothing is replayed."""
    is_real_T: Tensor | None = None
    """[T] bool, False for padding. None for models that do not ask for it (``wants_real_tokens``)."""
    routing: RoutingTape | None = None
    """Where choices of experts are recorded or replayed; None: nowhere."""
    first_key: int = 0
    """Keys before this position are seen by no query but their own: a draft layer has no entries there."""

    def logits_rows(self, hidden_TE: Tensor) -> Tensor:
        """The hidden states that become logits, [L, E]: all of them, as they are, where every row decodes one token."""
        is_all = self.shape.decode_width == 1 and self.shape.num_decode == self.shape.num_tokens
        return hidden_TE if is_all else hidden_TE.index_select(0, self.logits_idx_L)
