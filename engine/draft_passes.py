"""The device's side of drafting where nothing but tokens is wanted: rows by index, so that graphs can run it.

A plain row (greedy, or drawn by temperature alone) needs no state of its own between the tokens of one verification: a
token depends on its logits, seed and position only. So all tokens of all rows are drawn at once.

Letters: n rows, W tokens a row, S = W - 1 drafts, V vocabulary, T tokens of a draft pass, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch
from engine.columns import LAST_TOKEN, POSITION, DeviceColumns
from engine.models.base import DraftingModel, LayerCache
from engine.sampling.base import RowColumns, Sampler, SamplingNeeds
from engine.step_function import slots_before

Draw = Callable[[int, Tensor], Tensor]
"""From (head, logits [n, V]) to drafts [n]."""


def verify_plain(
    columns: DeviceColumns,
    rows_n: Tensor,
    logits_row_nW: Tensor,
    drafts_n: Tensor,
    logits: Tensor,
    sampler: Sampler,
    needs: SamplingNeeds,
    results_W3R: Tensor,
    foreseen_SR: Tensor,
    accepted_R: Tensor,
) -> None:
    """Draw every token of plain rows, accept drafts, and bring the rows up to date.

    Args:
        columns: Of all rows.
        rows_n: [n] int64 table rows; the dummy row stands for padding.
        logits_row_nW: [n, W] int64, which logits each token is drawn from.
        drafts_n: [n] int64 drafts of each row; those behind are accepted by nobody.
        logits: [L, V].
        sampler: Draws.
        needs: Plain ones.
        results_W3R: [W, 3, R] int64: token ids, bad, near boundary of the first n columns are written.
        foreseen_SR: [W - 1, R] int64, likewise: the drafts, whatever a row without any has there.
        accepted_R: [R] int64, likewise.
    """
    assert columns.drafts is not None
    assert columns.length is not None
    assert columns.accepted is not None
    count, width = logits_row_nW.shape
    place_W = torch.arange(width, device=rows_n.device)
    own = RowColumns(columns.ints.index_select(0, rows_n), columns.floats.index_select(0, rows_n))
    each = RowColumns(own.ints.repeat_interleave(width, 0), own.floats.repeat_interleave(width, 0))
    each.ints[:, POSITION] += place_W.repeat(count)
    results = torch.empty((3, count * width), dtype=torch.int64, device=rows_n.device)
    draw_plain(sampler, logits, logits_row_nW.flatten(), each, results, needs)
    results_3nW = results.view(3, count, width)
    token_nW, bad_nW = results_3nW[0], results_3nW[1]
    foreseen_nS = columns.drafts.index_select(0, rows_n)
    accepted_n = count_accepted(token_nW, foreseen_nS, (bad_nW[:, :-1] == 0) & (place_W[:-1] < drafts_n[:, None]))
    own.ints[:, LAST_TOKEN] = token_nW.gather(1, accepted_n[:, None])[:, 0]
    own.ints[:, POSITION] += accepted_n + 1
    columns.ints.index_copy_(0, rows_n, own.ints)
    columns.length.index_copy_(0, rows_n, columns.length.index_select(0, rows_n) + accepted_n + 1)
    columns.accepted.index_copy_(0, rows_n, torch.where(drafts_n > 0, accepted_n, -1))
    results_W3R[:, :, :count] = results_3nW.permute(2, 0, 1)
    foreseen_SR[:, :count] = foreseen_nS.T
    accepted_R[:count] = accepted_n


def count_accepted(token_nW: Tensor, foreseen_nS: Tensor, may_nS: Tensor) -> Tensor:
    """[n] drafts accepted of each row: those before the first that is not the token drawn in its place.

    Args:
        token_nW: Drawn tokens.
        foreseen_nS: Drafts of all but the first of them.
        may_nS: bool, False where a draft is none.
    """
    is_borne_out_nS = (token_nW[:, :-1] == foreseen_nS) & may_nS
    return is_borne_out_nS.to(torch.int64).cumprod(1).sum(1)


def draw_plain(
    sampler: Sampler,
    logits: Tensor,
    sources_n: Tensor | None,
    rows: RowColumns,
    results_3n: Tensor,
    needs: SamplingNeeds,
) -> None:
    """Draw one token for each of ``rows``, whose columns are copies, into token ids, bad, near boundary [3, n]."""
    if sampler.draw_in_place(logits, sources_n, rows, results_3n, needs):
        return
    chosen = logits if sources_n is None else logits.index_select(0, sources_n)
    sampled = sampler.sample(chosen, DeviceColumns.plain_rows(rows), needs)
    results_3n[0], results_3n[1], results_3n[2] = sampled.token_ids, sampled.bad, sampled.near_boundary


def draft_pass(
    model: DraftingModel,
    columns: DeviceColumns,
    rows_n: Tensor,
    caches: Sequence[LayerCache],
    draw: Draw,
    *,
    num_blocks: int,
    block_size: int,
    num_drafts: int,
    is_shared: bool = False,
) -> None:
    """Let each head in turn foresee a token behind the newest one of each row, and keep them in ``columns.drafts``.

    Args:
        model: Its heads.
        columns: Of all rows.
        rows_n: [n] int64; the dummy row stands for padding.
        caches: Of the heads: hidden states and entries of each, in turn.
        draw: Chooses.
        num_blocks: Columns of the block table that are read.
        block_size: Tokens of a block.
        num_drafts: Heads in use.
        is_shared: Whether other ranks hold experts of the heads; all then run for equally many rows.
    """
    assert columns.drafts is not None
    assert columns.length is not None
    # The dummy row's length grows with every pass, and must not lead behind its one block.
    newest_n = torch.where(rows_n == columns.dummy_row, 0, columns.length.index_select(0, rows_n) - 1)
    token_nI = columns.ints[:, LAST_TOKEN].index_select(0, rows_n)[:, None]
    for head in range(num_drafts):
        batch = _batch(columns, rows_n, newest_n, token_nI, num_blocks, block_size, first_key=head + 1)
        if is_shared:
            batch = batch._replace(shape=replace(batch.shape, expert_tokens=batch.shape.num_tokens))
        if getattr(model, "wants_real_tokens", False):
            batch = batch._replace(is_real_T=(rows_n != columns.dummy_row).repeat_interleave(head + 1))
        (states,), cache = caches[2 * head : 2 * head + 2]
        row_T = rows_n.repeat_interleave(head + 1)
        before_T = slots_before(batch.positions_T, row_T, columns.block_table, block_size)
        hidden_TE = model.draft(head, states.flatten(0, 1).index_select(0, before_T), batch, cache)
        if head + 1 < num_drafts:
            above = caches[2 * head + 2][0].flatten(0, 1)
            above.index_copy_(0, batch.slots_T, hidden_TE.to(above.dtype))
        drawn_n = draw(head, model.draft_logits(head, batch.logits_rows(hidden_TE)))
        columns.drafts[:, head].index_copy_(0, rows_n, drawn_n)
        token_nI = torch.cat([token_nI, drawn_n[:, None]], dim=1)


def _batch(
    columns: DeviceColumns,
    rows_n: Tensor,
    newest_n: Tensor,
    token_nI: Tensor,
    num_blocks: int,
    block_size: int,
    *,
    first_key: int,
) -> ForwardBatch:
    """The newest token of each row and the drafts behind it, so many as there are so far."""
    count, width = token_nI.shape
    device, table = newest_n.device, columns.block_table.index_select(0, rows_n)[:, :num_blocks]
    row_n = torch.arange(count, device=device)
    positions_T = (newest_n[:, None] + torch.arange(width, device=device)).flatten()
    row_T = row_n.repeat_interleave(width)
    column_T = torch.div(positions_T, block_size, rounding_mode="floor")
    block_T = table[row_T, column_T.clamp(max=num_blocks - 1)].to(torch.int64)
    block_T = torch.where(column_T < num_blocks, block_T, columns.dummy_block)
    is_decode = width == 1
    return ForwardBatch(
        token_ids_T=token_nI.flatten(),
        positions_T=positions_T,
        row_T=row_T,
        slots_T=block_T * block_size + positions_T % block_size,
        block_table_NK=table.to(torch.int64),
        query_start_N=row_n * width,
        query_len_N=torch.full_like(newest_n, width),
        kv_len_N=newest_n + width,
        logits_idx_L=row_n * width + width - 1,
        shape=BatchShape(
            num_tokens=count * width,
            num_decode=count if is_decode else 0,
            num_prefill=0 if is_decode else count,
            max_query_len=0 if is_decode else width,
            num_kv_blocks=num_blocks,
            num_wide=0 if is_decode else count,
            wide_width=0 if is_decode else width,
        ),
        first_key=first_key,
    )
