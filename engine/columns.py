"""Per-row state on the device: block tables, sampling parameters, the newest token, penalty counts.

    R + 1 rows; row R is the dummy row that padding uses.   C = blocks a row, V = vocabulary, K = ids of the widest row
        block_table    [R+1, C]  int32    the dummy block past a row's length
        ints           [R+1, 5]  int64    last_token, position, seed, top_k, min_tokens
        floats         [R+1, 6]  float32  temperature, top_p, min_p, presence, frequency, repetition
        stop_ids       [R+1, K]  int64    banned before min_tokens; V where unused      (made when first needed)
        bias_ids       [R+1, K]  int64    V where unused                                (made when first needed)
        bias_values    [R+1, K]  float32                                                (made when first needed)
        output_counts  [R+1, V]  int32    generated tokens                              (made when first needed)
        prompt_mask    [R+1, V]  bool     tokens of the prompt                          (made when first needed)
        drafts         [R+1, S]  int64    what may follow last_token       (S draft tokens a step; None without any)
        length         [R+1]     int64    tokens whose ids are known, last_token's too                (the same)
        accepted       [R+1]     int64    drafts accepted when it was verified last; -1 behind a prompt       (the same)

Rows are written when a request gets its row and otherwise only by the sampler (last_token, position, output_counts)
and by moves. All methods but the constructor run inside launched work, in stream order, and wait for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device import Device
from engine.layout import NewBlocks
from engine.request import GREEDY_TEMPERATURE, Request, SamplingParams
from engine.sampling.base import RowColumns, SamplingNeeds, SamplingRows
from engine.sampling.rng import to_int64

LAST_TOKEN, POSITION, SEED, TOP_K, MIN_TOKENS = range(5)
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
NUM_INTS, NUM_FLOATS = 5, 6


def row_ints(request: Request) -> tuple[int, ...]:
    """A new row's ``ints``; the random stream goes on where the request's output stands."""
    params = request.params
    top_k = 0 if params.top_k < 0 else params.top_k
    return (0, len(request.output_ids), to_int64(request.seed), top_k, params.min_tokens)


def row_floats(params: SamplingParams) -> tuple[float, ...]:
    """A new row's ``floats``."""
    temperature = 0.0 if params.temperature < GREEDY_TEMPERATURE else params.temperature
    return (
        temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )


@dataclass(slots=True)
class WideRows:
    """Columns of new rows that do not fit the slab, staged in fresh host tensors; None where no row has them."""

    stop_ids: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    prompt_mask: Tensor | None = None
    output_counts: Tensor | None = None
    shared_blocks: tuple[Tensor, Tensor, Tensor] | None = None
    """Rows, columns and ids of the blocks that new rows share, [m] each: int64, int64, int32."""


class DeviceColumns:
    """See the module's text for the map."""

    def __init__(
        self,
        device: Device,
        *,
        max_requests: int,
        max_blocks: int,
        dummy_block: int,
        vocab_size: int,
        num_drafts: int = 0,
    ) -> None:
        self._device = device
        self.dummy_row = max_requests
        self.dummy_block = dummy_block
        self.vocab_size = vocab_size
        self.block_table = device.zeros((max_requests + 1, max_blocks), torch.int32)
        self._table_view = None if self.block_table.is_cuda else self.block_table.numpy()
        self.ints = device.zeros((max_requests + 1, NUM_INTS), torch.int64)
        self.floats = device.zeros((max_requests + 1, NUM_FLOATS), torch.float32)
        self.drafts = device.zeros((max_requests + 1, num_drafts), torch.int64) if num_drafts else None
        self.length = device.zeros((max_requests + 1,), torch.int64) if num_drafts else None
        self.accepted = device.zeros((max_requests + 1,), torch.int64) if num_drafts else None
        device.compute.launch(self._fill_at_first)  # on that stream, where they were zeroed
        self.stop_ids: Tensor | None = None
        self.bias_ids: Tensor | None = None
        self.bias_values: Tensor | None = None
        self.output_counts: Tensor | None = None
        self.prompt_mask: Tensor | None = None

    def _fill_at_first(self) -> None:
        self.block_table.fill_(self.dummy_block)
        if self.accepted is not None:
            self.accepted.fill_(-1)

    @property
    def last_token(self) -> Tensor:
        """[R+1] int64, the newest sampled token of each row; the next forward's input."""
        return self.ints[:, LAST_TOKEN]

    def stage_wide(self, requests: Sequence[Request], rows: Sequence[int], eos: Sequence[int]) -> WideRows:
        """Host tensors for the wide columns of new rows; called on the host in ``prepare``."""
        staged = WideRows()
        params = [request.params for request in requests]
        if any(p.min_tokens > 0 for p in params):
            staged.stop_ids = self._padded([banned_ids(p, eos) if p.min_tokens else () for p in params])
        if any(p.logit_bias for p in params):
            staged.bias_ids = self._padded([tuple(p.logit_bias or ()) for p in params])
            values = self._device.host(tuple(staged.bias_ids.shape), torch.float32).zero_()
            for i, p in enumerate(params):
                bias = list((p.logit_bias or {}).values())
                values[i, : len(bias)] = torch.tensor(bias)
            staged.bias_values = values
        if any(p.has_penalties for p in params):
            staged.prompt_mask, staged.output_counts = self._histories(requests)
        return staged

    def stage_shared(self, rows: Sequence[int], blocks: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Tensor, Tensor]:
        """Host tensors for the blocks that new rows share with others: ``blocks[i]`` are the first ones of row i."""
        sizes = [one.size for one in blocks]
        staged = [self._device.host((sum(sizes),), dtype) for dtype in (torch.int64, torch.int64, torch.int32)]
        staged[0].numpy()[:] = np.repeat(np.asarray(rows, dtype=np.int64), sizes)
        staged[1].numpy()[:] = np.concatenate([np.arange(size) for size in sizes])
        staged[2].numpy()[:] = np.concatenate(blocks)
        return staged[0], staged[1], staged[2]

    def _padded(self, ids: Sequence[Sequence[int]]) -> Tensor:
        padded = np.full((len(ids), max(1, max(map(len, ids)))), self.vocab_size, dtype=np.int64)
        for i, row in enumerate(ids):
            padded[i, : len(row)] = row
        return self._on_host(padded)

    def _histories(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        mask = np.zeros((len(requests), self.vocab_size), dtype=np.bool_)
        counts = np.zeros((len(requests), self.vocab_size), dtype=np.int32)
        for i, request in enumerate(requests):
            mask[i, list(request.prompt_ids)] = True
            np.add.at(counts[i], np.asarray(request.output_ids, dtype=np.int64), 1)
        return self._on_host(mask), self._on_host(counts)

    def _on_host(self, values: NDArray[Any]) -> Tensor:
        """A copy that the device can read while the host goes on: from ordinary memory it would make the host wait."""
        plain = torch.from_numpy(values)
        return self._device.host(tuple(plain.shape), plain.dtype).copy_(plain)

    def write_rows(
        self, rows: Tensor, ints: Tensor, floats: Tensor, wide: WideRows, lengths: Tensor | None = None
    ) -> None:
        """Start ``rows`` [n]: parameters set, block table all dummy but for shared blocks, no history.

        ``lengths`` [n] int64 are the tokens that their prefills read.
        """
        if self.length is not None and lengths is not None:
            self.length.index_copy_(0, rows, lengths)
        if self.accepted is not None:
            self.accepted.index_fill_(0, rows, -1)
        self.ints.index_copy_(0, rows, ints)
        self.floats.index_copy_(0, rows, floats)
        self.block_table.index_fill_(0, rows, self.dummy_block)
        if wide.shared_blocks is not None:
            at_rows, at_cols, ids = (part.to(self.block_table.device, non_blocking=True) for part in wide.shared_blocks)
            self.block_table.index_put_((at_rows, at_cols), ids)
        self.stop_ids = self._write_wide(self.stop_ids, rows, wide.stop_ids, self.vocab_size, torch.int64)
        self.bias_ids = self._write_wide(self.bias_ids, rows, wide.bias_ids, self.vocab_size, torch.int64)
        self.bias_values = self._write_wide(self.bias_values, rows, wide.bias_values, 0, torch.float32)
        self.output_counts = self._write_wide(self.output_counts, rows, wide.output_counts, 0, torch.int32)
        self.prompt_mask = self._write_wide(self.prompt_mask, rows, wide.prompt_mask, 0, torch.bool)

    def _write_wide(
        self, column: Tensor | None, rows: Tensor, values: Tensor | None, empty: int, dtype: torch.dtype
    ) -> Tensor | None:
        if column is None and values is None:
            return None
        width = max(column.shape[1] if column is not None else 0, values.shape[1] if values is not None else 0)
        if column is None or column.shape[1] < width:
            grown = torch.full((self.dummy_row + 1, width), empty, dtype=dtype, device=self._device.torch_device)
            if column is not None:
                grown[:, : column.shape[1]] = column
            column = grown
        column.index_fill_(0, rows, empty)
        if values is not None:
            column[:, : values.shape[1]].index_copy_(0, rows, values.to(column.device, non_blocking=True))
        return column

    def add_blocks(self, rows: Tensor, cols: Tensor, blocks: Tensor, known: NewBlocks) -> None:
        """Enter new blocks: ``block_table[rows[i], cols[i]] = blocks[i]``; int64, int64, int32, all [m].

        On the CPU devices the host's copy of the same numbers, ``known``, is entered instead: a few assignments that
        keep the interpreter, where torch would let go of it and wait to get it back from a busy scheduler.
        """
        if self._table_view is not None:
            self._table_view[known.rows, known.cols] = known.ids
        else:
            self.block_table.index_put_((rows, cols), blocks)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Row ``source[i]`` goes to ``target[i]`` in every column, all at once; int64 [m], no target twice."""
        for column in self._all():
            column.index_copy_(0, target, column.index_select(0, source))

    def fill_free(self, first: int, value: int) -> None:
        """Debug mode: overwrite every column of the free rows ``[first, R)``; floats by NaN, flags by True."""
        for column in self._all():
            column[first : self.dummy_row].fill_(math.nan if column.is_floating_point() else value)

    def _all(self) -> list[Tensor]:
        """Every column there is; what moves one moves all (I11)."""
        columns = (
            self.block_table,
            self.ints,
            self.floats,
            self.stop_ids,
            self.bias_ids,
            self.bias_values,
            self.output_counts,
            self.prompt_mask,
            self.drafts,
            self.length,
            self.accepted,
        )
        return [column for column in columns if column is not None]

    def rows(self, first: int, end: int) -> RowColumns:
        """Rows ``[first, end)`` of both matrices, as views."""
        return RowColumns(self.ints[first:end], self.floats[first:end])

    @staticmethod
    def plain_rows(rows: RowColumns) -> SamplingRows:
        """What the sampler reads of plain rows."""
        ints, floats = rows
        return SamplingRows(
            temperature=floats[:, TEMPERATURE],
            top_k=ints[:, TOP_K],
            top_p=floats[:, TOP_P],
            min_p=floats[:, MIN_P],
            seed=ints[:, SEED],
            position=ints[:, POSITION],
            min_tokens=ints[:, MIN_TOKENS],
            presence=floats[:, PRESENCE],
            frequency=floats[:, FREQUENCY],
            repetition=floats[:, REPETITION],
        )

    def sampling_rows(self, first: int, end: int, needs: SamplingNeeds) -> SamplingRows:
        """What the sampler reads of rows ``[first, end)``: views, wide columns only where ``needs`` says so."""
        plain = self.plain_rows(self.rows(first, end))

        def wide(column: Tensor | None, needed: bool) -> Tensor | None:
            return column[first:end] if needed and column is not None else None

        return plain._replace(
            stop_ids=wide(self.stop_ids, needs.min_tokens),
            bias_ids=wide(self.bias_ids, needs.bias),
            bias_values=wide(self.bias_values, needs.bias),
            output_counts=wide(self.output_counts, needs.penalties),
            prompt_mask=wide(self.prompt_mask, needs.penalties),
        )


def banned_ids(params: SamplingParams, eos: Sequence[int]) -> tuple[int, ...]:
    """The ids that end a request, which ``min_tokens`` forbids: the set masked is the set that ends."""
    ends = () if params.ignore_eos else tuple(eos)
    return tuple(dict.fromkeys(ends + tuple(params.stop_token_ids or ())))
