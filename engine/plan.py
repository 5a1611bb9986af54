"""What ``prepare`` decides for one forward, and how it is staged in the slab the device reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import BatchDimensions, BatchShape, PrefillPlan
from engine.columns import NUM_FLOATS, NUM_INTS, WideRows, row_floats, row_ints
from engine.layout import NO_NEW_BLOCKS, DecodeBatch, Layout, NewBlocks
from engine.prefix_cache import StagedSnapshot
from engine.request import Request
from engine.staging import Field, HostSlab
from engine.step_function import FROM_DRAFT, FROM_SAMPLE, NO_BLOCK
from engine.table import RequestTable, Rows

SNAPSHOTS_PER_ROW = 3
"""Most snapshots that a forward makes of one prefill row; see :meth:`PrefixCache.boundaries`."""


@dataclass(slots=True)
class PromptRow:
    """A prefill row whose prompt log probabilities are wanted: its part of the extra logits rows."""

    request: Request
    start: int
    """First extra logits row."""
    first: int
    """The prompt token whose likelihood the first of them tells: the one behind the first that the forward reads."""
    count: int
    """Prompt tokens that the forward's tokens tell of; the last of a prompt tells of output."""
    num_logprobs: int


@dataclass(slots=True)
class Plan:
    """What ``prepare`` decided and staged, and ``forward`` launches."""

    table_rows: Rows
    """[n] table row of each real batch row, decode before prefill."""
    dims: BatchDimensions
    """Real size."""
    graph: BatchDimensions | None
    """The captured size it runs in; None is eager."""
    miss_reason: str | None
    shape: BatchShape
    """Size launched, padding included."""
    half: HostSlab
    keys: NDArray[np.int64]
    """[n] generation of each row."""
    request_ids: tuple[str, ...]
    is_in_order: bool
    """Whether ``table_rows`` are neighbours in ascending order."""
    partial_key: int | None = None
    """Generation of the row whose prompt it reads in part."""
    new_rows: int = 0
    new_blocks: NewBlocks = NO_NEW_BLOCKS
    """Entries to make before the forward; it makes those of its decode rows itself where it can."""
    wide: WideRows | None = None
    prompt_rows: Sequence[PromptRow] = ()
    extra_idx: Tensor | None = None
    extra_targets: Tensor | None = None
    prefill_plan: PrefillPlan | None = None
    """What an eager forward attends to its prefill rows with; a graph has its own."""


def restage_decode(half: HostSlab, table: RequestTable, batch: DecodeBatch, layout: Layout) -> bool:
    """Advance a half that was staged for this very layout; False: stage it anew.

    In steady decode only lengths and positions change, by the steps since this half was last used; with stored states
    also the places that rows go on from, which :func:`stage_states` stages.
    """
    if half.layout is not layout:
        return False
    count, width = batch.dims.num_decode, layout.shape.decode_width
    kv_len = half.fields["kv_len"][:count]
    kv_len[:] = table.kv_len[batch.select]
    positions = half.fields["positions"][: count * width].reshape(count, width)
    np.add(kv_len[:, None], np.arange(-width, 0), out=positions)
    return True


def stage_row_blocks(half: HostSlab, batch: DecodeBatch, shape: BatchShape, new_blocks: NewBlocks) -> None:
    """Stage new blocks beside the decode rows that take them, for forwards that enter them themselves."""
    row_block = half.fields["row_block"]
    row_block[: shape.num_decode] = NO_BLOCK
    if new_blocks.rows.size:
        row_block[np.searchsorted(batch.table_rows, new_blocks.rows)] = new_blocks.ids


def stage_rows(half: HostSlab, table: RequestTable, layout: Layout, dummy_row: int) -> None:
    """Stage the per-row fields; padding rows read the dummy row."""
    f, shape, at = half.fields, layout.shape, layout.batch_rows
    n = shape.num_rows
    f["table_row"][:n] = dummy_row
    f["table_row"][at] = layout.table_rows
    f["kv_len"][:n] = 1
    lengths = f["query_len"][:n]
    lengths[:] = 0
    lengths[: shape.num_decode] = f["kv_len"][: shape.num_decode] = shape.decode_width
    f["kv_len"][at] = table.kv_len[layout.table_rows]
    lengths[at] = layout.query_len
    np.cumsum(lengths, out=f["query_start"][:n])
    f["query_start"][:n] -= lengths
    f["row_block"][:n] = NO_BLOCK
    f["logits_idx"][: shape.num_logits] = 0
    ends = (f["query_start"][:n] + lengths - 1)[at]
    if shape.decode_width == 1:
        f["logits_idx"][: at.size] = ends
        return
    num_decode = int(np.count_nonzero(at < shape.num_decode))  # every token of theirs, then the prefill rows' last ones
    places = ends[:num_decode, None] + np.arange(1 - shape.decode_width, 1)
    f["logits_idx"][: places.size] = places.ravel()
    f["logits_idx"][places.size : places.size + at.size - num_decode] = ends[num_decode:]


def stage_states(
    half: HostSlab,
    table: RequestTable,
    layout: Layout,
    dummy_slot: int,
    *,
    states_per_row: int = 1,
    counts_lengths: bool = False,
) -> None:
    """Stage where each row's recurrent state comes from and goes to; padding rows use the dummy slot.

    A row's slot may be a group of ``states_per_row``: a decode row's forward leaves the state behind its token i in the
    i-th, so that taking back rejected drafts is going on from an earlier one. A prompt's goes to the first. Where the
    device ``counts_lengths``, it adds the accepted drafts itself.
    """
    f, n, rows, width = half.fields, layout.shape.num_rows, layout.table_rows, states_per_row
    own, snapshot, is_prefill = table.state_slot[rows] * width, table.state_from[rows], table.is_prefill[rows]
    accepted = 0 if counts_lengths or width == 1 else table.num_accepted[rows]
    f["state_to"][:n] = f["state_from"][:n] = dummy_slot
    f["state_to"][layout.batch_rows] = own + np.where(is_prefill, 0, width - 1)
    f["state_from"][layout.batch_rows] = np.where(is_prefill & (snapshot >= 0), snapshot, own + accepted)


def rejectable_states(table: RequestTable, layout: Layout, states_per_row: int) -> list[tuple[int, int, int]]:
    """(batch row, tokens read, slot) behind each token of the decode rows but the last: a draft may be rejected."""
    width, found = states_per_row, []
    for row, place in zip(layout.table_rows.tolist(), layout.batch_rows.tolist(), strict=True):
        if not table.is_prefill[row]:
            own = int(table.state_slot[row]) * width
            found += [(place, i + 1, own + i) for i in range(width - 1)]
    return found


def stage_snapshots(
    half: HostSlab,
    layout: Layout,
    snapshots: Sequence[StagedSnapshot],
    dummy_slot: int,
    rejectable: Sequence[tuple[int, int, int]] = (),
) -> None:
    """Stage the states that the forward keeps besides; those that it has room for and nobody wants go to the dummy."""
    f, m = half.fields, layout.shape.num_snapshots
    f["snap_row"][:m] = f["snap_after"][:m] = 0
    f["snap_slot"][:m] = dummy_slot
    if layout.shape.num_prefill:
        f["snap_row"][:m] = layout.shape.num_decode
    place = dict(zip(layout.table_rows.tolist(), layout.batch_rows.tolist(), strict=True))
    kept = [(place[staged.row], staged.after, staged.slot) for staged in snapshots]
    for i, (row, after, slot) in enumerate((*rejectable, *kept)):
        f["snap_row"][i], f["snap_after"][i], f["snap_slot"][i] = row, after, slot


def stage_tokens(half: HostSlab, table: RequestTable, layout: Layout, dummy_row: int) -> None:
    """Stage the per-token fields, after :func:`stage_rows`; padding tokens belong to the last row and the dummy."""
    f, shape, t = half.fields, layout.shape, layout.shape.num_tokens
    f["token_ids"][:t] = 0
    f["positions"][:t] = 0
    f["token_row"][:t] = dummy_row
    width = shape.decode_width
    f["batch_row"][:t] = shape.num_rows - 1
    f["batch_row"][: shape.num_decode * width] = np.repeat(np.arange(shape.num_decode), width)
    is_prefill = table.is_prefill[layout.table_rows]
    starts = f["query_start"][layout.batch_rows]
    decoding = np.flatnonzero(~is_prefill)
    rows = layout.table_rows[decoding]
    for i in range(width):  # the newest token, then its drafts
        at = starts[decoding] + i
        f["token_ids"][at] = FROM_SAMPLE if i == 0 else FROM_DRAFT + 1 - i
        f["positions"][at] = table.kv_len[rows] - width + i
        f["token_row"][at] = rows
        f["batch_row"][at] = layout.batch_rows[decoding]
    for i in np.flatnonzero(is_prefill).tolist():
        row, tokens = int(layout.table_rows[i]), slice(int(starts[i]), int(starts[i] + layout.query_len[i]))
        request = table.requests[row]
        assert request is not None
        done, end = int(table.chunk_done[row]), int(table.chunk_end[row])
        f["token_ids"][tokens] = (*request.prompt_ids, *request.output_ids)[done:end]
        f["positions"][tokens] = np.arange(done, end)
        f["token_row"][tokens] = row
        f["batch_row"][tokens] = layout.batch_rows[i]


def stage_new(half: HostSlab, new: Sequence[Request], new_blocks: NewBlocks) -> None:
    """Stage new rows' parameters and new block-table entries."""
    f, m = half.fields, new_blocks.rows.size
    if m:
        f["block_row"][:m] = new_blocks.rows
        f["block_col"][:m] = new_blocks.cols
        f["block_id"][:m] = new_blocks.ids
    if new:
        f["new_row"][: len(new)] = [request.row for request in new]
        f["new_ints"][: len(new)] = [row_ints(request) for request in new]
        f["new_floats"][: len(new)] = [row_floats(request.params) for request in new]
        f["new_length"][: len(new)] = [request.num_tokens for request in new]


def stage_prompt_rows(
    half: HostSlab, layout: Layout, prompt_rows: Sequence[PromptRow]
) -> tuple[Tensor | None, Tensor | None]:
    """Extra logits rows for prompt log probabilities: token indices and targets, [extra] int64; None without any."""
    if not prompt_rows:
        return None, None
    starts = half.fields["query_start"][layout.batch_rows]
    start_of = dict(zip(layout.table_rows.tolist(), starts.tolist(), strict=True))
    idx: list[NDArray[np.int64]] = []
    targets: list[int] = []
    for prompt in prompt_rows:
        assert prompt.request.row is not None
        start = start_of[prompt.request.row]
        prompt.start = len(targets)
        idx.append(np.arange(start, start + prompt.count))
        targets.extend(prompt.request.prompt_ids[prompt.first : prompt.first + prompt.count])
    return torch.from_numpy(np.concatenate(idx)), torch.tensor(targets, dtype=torch.int64)


def stage_padding(half: HostSlab, shape: BatchShape, dummy_row: int, dummy_slot: int = 0) -> None:
    """Stage a batch of padding alone, for capture: it writes to the dummy block and slot and nothing else."""
    nobody = np.zeros(0, dtype=np.int64)
    layout = Layout(nobody, nobody, nobody, shape)
    table = RequestTable(1, 1)
    stage_rows(half, table, layout, dummy_row)
    stage_tokens(half, table, layout, dummy_row)
    stage_states(half, table, layout, dummy_slot)
    stage_snapshots(half, layout, (), dummy_slot)
    if shape.num_prefill:  # all tokens to the first prefill row, so that the kernels see real lengths
        first, f = shape.num_decode, half.fields
        token = first * shape.decode_width
        f["query_len"][first] = f["kv_len"][first] = shape.num_tokens - token
        f["query_start"][first + 1 : shape.num_rows] = shape.num_tokens
        f["batch_row"][token : shape.num_tokens] = first


def step_fields(
    max_requests: int, max_tokens: int, block_size: int, decode_width: int = 1
) -> tuple[list[Field], tuple[int, int, int]]:
    """What a forward is staged in, and how many fields its parts have: of rows, seldom used, of tokens.

    A step of decode rows uses little of the first and the last, which are as long as the largest batch.
    """
    rows = ["table_row", "query_start", "query_len", "kv_len", "row_block", "new_row", "new_length"]
    rows += ["state_from", "state_to"]
    num_snapshots = max_requests * max(SNAPSHOTS_PER_ROW, decode_width - 1)
    snapshots = ("snap_row", "snap_after", "snap_slot")
    tokens = ("token_ids", "positions", "token_row", "batch_row")
    max_new_blocks = 2 * max_requests + -(-max_tokens // block_size)
    seldom = [
        *(Field(name, (num_snapshots,), torch.int64) for name in snapshots),
        Field("new_ints", (max_requests, NUM_INTS), torch.int64),
        Field("new_floats", (max_requests, NUM_FLOATS), torch.float32),
        Field("block_row", (max_new_blocks,), torch.int64),
        Field("block_col", (max_new_blocks,), torch.int64),
        Field("block_id", (max_new_blocks,), torch.int32),
    ]
    if decode_width == 1:
        rows += ["logits_idx"]
    else:
        seldom.insert(0, Field("logits_idx", (max_requests * decode_width,), torch.int64))
    of_rows = [Field(name, (max_requests,), torch.int64) for name in rows]
    of_tokens = [Field(name, (max_tokens,), torch.int64) for name in tokens]
    return [*of_rows, *seldom, *of_tokens], (len(of_rows), len(seldom), len(of_tokens))


def batch_rows_of(dims: BatchDimensions, shape: BatchShape) -> Rows:
    """Batch row of each real row: decode rows first, padding behind them, then prefill rows."""
    first_prefill = max(dims.num_decode, shape.num_decode)
    return np.concatenate(
        [np.arange(dims.num_decode), np.arange(first_prefill, first_prefill + dims.num_prefill)]
    ).astype(np.int64)


def rows_owing_prompt_logprobs(table: RequestTable, prefill_rows: Rows) -> list[PromptRow]:
    """Prefill rows whose tokens tell of prompt log probabilities that are owed; a one-token prompt has none."""
    found = []
    for row in prefill_rows.tolist():
        request = table.requests[row]
        assert request is not None
        wanted, length = request.params.prompt_logprobs, len(request.prompt_ids)
        if wanted is None or len(request.prompt_logprobs) == length:
            continue
        first = int(table.chunk_done[row]) + 1
        count = min(int(table.chunk_end[row]) + 1, length) - first
        if count > 0:
            found.append(PromptRow(request, 0, first, count, wanted))
    return found
