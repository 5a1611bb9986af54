"""Where a packed batch's rows read and write: the index tensors that all state-space layers of a forward share.

Letters: T tokens of the batch, N batch rows, M snapshots, Z = N + M states taken, J chunks, Q tokens of a chunk. Rows
that step token by token come first (``shape.num_stepping_rows``); P prefill rows are those behind them here, t their
tokens with padding, and P + M states are taken of them.

Every index is a tensor, so a trace of this code holds for all batches of one ``BatchShape``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import BatchShape, ForwardBatch

_CHUNK_COST = 16
"""A chunk's states cost about as much as this many of its tokens."""


@dataclass(eq=False, slots=True)
class Taken:
    """States that leave a forward: behind the last token of rows, and where snapshots are wanted."""

    row_Z: Tensor
    """[Z] batch row."""
    after_Z: Tensor
    """[Z] query tokens of the row behind which the state is taken; 0 for padding."""
    slot_Z: Tensor
    """[Z] where it goes; no slot twice but the dummy."""

    def of_prefill(self, shape: BatchShape) -> Taken:
        """Without those of the rows in front."""
        first = shape.num_stepping_rows
        return Taken(self.row_Z[first:], self.after_Z[first:], self.slot_Z[first:])


@dataclass(eq=False, slots=True)
class PrefillChunks:
    """Prefill tokens cut into chunks of one row each, so that short rows do not pay for the longest.

    Places without a token lie behind their row's last one. Outputs see what is before them only, and states are taken
    behind tokens, so nothing sees what such places hold.
    """

    shape: tuple[int, int]
    """(J, Q)."""
    token_x: Tensor
    """[J * Q] token index of each place; of a place without a token, the row's last."""
    place_t: Tensor
    """[t] where each prefill token is found in [J * Q]; for padding tokens, anywhere in it."""
    row_J: Tensor
    """[J] prefill row (from 0), the last one for chunks left over."""
    chunk_Z: Tensor
    """[Z] chunk in which a state is taken."""
    place_Z: Tensor
    """[Z] place in that chunk behind which it is taken."""


class Plan:
    """Index tensors of one forward, each made when a layer first asks for it."""

    def __init__(self, batch: ForwardBatch) -> None:
        assert batch.state_from_N is not None, "a model with slots needs batches that name them"
        assert batch.state_to_N is not None, "a model with slots needs batches that name them"
        self.batch = batch
        self.from_N = batch.state_from_N
        """[N] slot a row goes on from."""
        self.to_N = batch.state_to_N
        """[N] slot that its state goes to."""
        self.met: set[int] = set()
        """Addresses of the states of the layers that have run."""

    @cached_property
    def is_fresh_N(self) -> Tensor:
        """[N] whether a row starts from zeros; so do rows without tokens, as the dummy slot may hold anything."""
        return (self.batch.kv_len_N == self.batch.query_len_N) | (self.batch.query_len_N == 0)

    @cached_property
    def rejected_N(self) -> Tensor:
        """[N] tokens of its last forward that a replayed row's history ends with and that do not stand; else 0."""
        shape, count_V = self.batch.shape, self.batch.replayed_V
        assert count_V is not None, "replayed rows need to be told how many tokens"
        rejected_V = torch.where(count_V > 0, shape.wide_width - count_V, 0)
        return functional.pad(rejected_V, (0, shape.num_rows - shape.num_replayed))

    @cached_property
    def taken(self) -> Taken:
        """Of all rows, then of snapshots."""
        batch, row_N = self.batch, torch.arange(self.batch.shape.num_rows, device=self.to_N.device)
        if batch.snapshots is None:
            return Taken(row_N, batch.query_len_N, self.to_N)
        rows = (row_N, batch.snapshots.row_M.clamp(batch.shape.num_stepping_rows, batch.shape.num_rows - 1))
        after, slots = (batch.query_len_N, batch.snapshots.after_M), (self.to_N, batch.snapshots.slot_M)
        return Taken(torch.cat(rows), torch.cat(after), torch.cat(slots))

    @cached_property
    def chunks(self) -> PrefillChunks:
        """Of a batch with prefill rows."""
        return _chunks(self.batch, self.taken.of_prefill(self.batch.shape))

    @cached_property
    def kept_PW(self) -> Tensor | None:
        """[P, 1 + longest] slot that takes a snapshot behind so many tokens of a prefill row, -1: none.

        What column 0 holds is padding's. None without snapshots.
        """
        if self.batch.snapshots is None:
            return None
        shape, (row_M, after_M, slot_M) = self.batch.shape, self.batch.snapshots
        width, count = 1 + shape.max_query_len, shape.num_scanned_rows
        kept_x = torch.full((count * width,), -1, dtype=torch.int64, device=slot_M.device)
        row_M = (row_M - shape.num_stepping_rows).clamp(0, count - 1)
        return kept_x.index_copy_(0, row_M * width + after_M, slot_M).view(-1, width)


class Planner:
    """Makes one plan a forward, on whatever layer runs first."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def plan_for(self, batch: ForwardBatch, state: Tensor) -> Plan:
        """The plan that all layers of one forward share.

        The same batch may be run again with new contents in its tensors. A forward uses each layer's state once, so
        a state that this plan has met marks the next forward, and the indices are computed anew.
        """
        plan, key = self._plan, state.data_ptr()
        if plan is None or plan.batch is not batch or key in plan.met:
            plan = self._plan = Plan(batch)
        plan.met.add(key)
        return plan


def _chunks(batch: ForwardBatch, taken: Taken) -> PrefillChunks:
    first, num_tokens = batch.shape.num_stepping_rows, batch.shape.num_tokens
    size, count = chunk_size(batch.shape)
    device = taken.row_Z.device
    length_P, start_P = batch.query_len_N[first:], batch.query_start_N[first:]
    chunks_P = torch.div(length_P + (size - 1), size, rounding_mode="floor")
    end_P = chunks_P.cumsum(0)
    begin_P = end_P - chunks_P
    chunk_J = torch.arange(count, device=device)
    # Chunks left over fall to the last row, behind its end.
    row_J = torch.searchsorted(end_P, chunk_J, right=True).clamp(max=batch.shape.num_scanned_rows - 1)
    offset_JQ = ((chunk_J - begin_P[row_J]) * size)[:, None] + torch.arange(size, device=device)
    length_J1, start_J1 = length_P[row_J, None], start_P[row_J, None]
    # Not the token that comes there: padding may hold anything, and a weight of 0 times NaN is NaN.
    token_JQ = (start_J1 + torch.minimum(offset_JQ, length_J1 - 1)).clamp(0, num_tokens - 1)

    first_token = batch.shape.num_stepping_tokens
    row_t = batch.row_T[first_token:] - first
    offset_t = torch.arange(first_token, num_tokens, device=device) - start_P[row_t]
    place_t = (begin_P[row_t] * size + offset_t).clamp(0, count * size - 1)
    last_Z = (taken.after_Z - 1).clamp(min=0)
    chunk_Z = begin_P[taken.row_Z - first] + torch.div(last_Z, size, rounding_mode="floor")
    return PrefillChunks(
        shape=(count, size),
        token_x=token_JQ.flatten(),
        place_t=place_t,
        row_J=row_J,
        chunk_Z=chunk_Z.clamp(max=count - 1),
        place_Z=last_Z % size,
    )


def chunk_size(shape: BatchShape) -> tuple[int, int]:
    """Tokens of one chunk, and how many chunks the prefill rows of ``shape`` can need.

    Smaller chunks waste fewer places on rows that do not fill theirs, but each makes states of its own.
    """
    tokens, longest = shape.num_tokens - shape.num_stepping_tokens, max(1, shape.max_query_len)
    rows = min(shape.num_scanned_rows, tokens)

    def count(size: int) -> int:
        return max(1, min(shape.num_scanned_rows * -(-longest // size), (tokens - rows) // size + rows))

    sizes = [size for size in (8, 16, 32, 64) if size < longest] + [min(longest, 64)]
    best = min(sizes, key=lambda size: count(size) * (size + _CHUNK_COST))
    return best, count(best)
