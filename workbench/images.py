"""What the host's state looks like at one border, as copies that stay as they are.

Taken at every border while changes are recorded, so a copy is made only of what differs from the image before; arrays
are shared with it otherwise. Nothing on the device is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.controller import Iteration
from engine.engine import Engine
from engine.plan import Plan, batch_rows_of
from engine.request import Request
from engine.results import PendingForward, SampleResult
from engine.speculative import Verified
from engine.staging import HostSlab
from engine.table import RequestTable
from workbench.snapshot import RowView, progress_text

Array = NDArray[Any]

ROW_FIELDS = ("table_row", "query_start", "query_len", "kv_len", "row_block")
TOKEN_FIELDS = ("token_ids", "positions")
"""Staged fields that are kept: those a person can tell a wrong step by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableImage:
    """The live rows of the request table; every array has one entry a row."""

    version: int
    num_paused: int
    request_ids: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    skipped: tuple[int, ...]
    """Tokens that a prefix hit spared each request when it was admitted first."""
    columns: Mapping[str, Array]
    block_ids: Array
    """[n, most blocks held], -1 past a row's blocks."""

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return len(self.request_ids)

    @property
    def rows(self) -> tuple[RowView, ...]:
        """The same as a snapshot shows it, but for tokens and text."""
        output, most, kv_len = (self.columns[name].tolist() for name in ("num_output", "max_output", "kv_len"))
        return tuple(
            RowView(
                row=row,
                state=self.state(row),
                request_id=request_id,
                prompt_tokens=self.prompt_tokens[row],
                output_tokens=output[row],
                max_tokens=most[row],
                kv_len=kv_len[row],
                num_cached_tokens=self.skipped[row],
                progress=self._progress(row),
                blocks=self.blocks(row),
            )
            for row, request_id in enumerate(self.request_ids)
        )

    def row_of(self) -> dict[int, int]:
        """Row of each request, by its key."""
        return {key: row for row, key in enumerate(self.columns["key"].tolist())}

    def blocks(self, row: int) -> tuple[int, ...]:
        """Blocks that a row holds, in order."""
        return tuple(self.block_ids[row, : int(self.columns["block_count"][row])].tolist())

    def state(self, row: int) -> str:
        """``paused``, ``prefill`` or ``decode``."""
        if row < self.num_paused:
            return "paused"
        return "prefill" if self.columns["is_prefill"][row] else "decode"

    def chunk(self, row: int) -> tuple[int, int, int]:
        """Where a prefill row's present chunk begins and ends, and the length of its prompt."""
        done, end, length = (int(self.columns[name][row]) for name in ("chunk_done", "chunk_end", "prompt_len"))
        return done, end, length

    def _progress(self, row: int) -> str:
        return progress_text(*self.chunk(row), self.skipped[row]) if self.state(row) == "prefill" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingImage:
    """A launched forward that nobody has sampled."""

    iteration: int
    request_ids: tuple[str, ...]
    table_rows: Array
    """Row now of each batch row; -1: dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedImage:
    """What one half of the step slab was staged with."""

    half: int
    """0 or 1."""
    iteration: int
    request_ids: tuple[str, ...]
    batch_rows: Array
    """Batch row of each request; the others are padding."""
    fields: Mapping[str, Array]
    """Row fields [batch rows], token fields [tokens], padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedImage:
    """A verification, by request."""

    drafts: Mapping[str, int]
    """Drafts that were verified: none of a prompt's row."""
    accepted: Mapping[str, int] | None
    """Of those, the accepted ones; None until rewind has waited for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderImage:
    """The host's state behind a phase, or before the first phase of an iteration."""

    table: TableImage
    pending: PendingImage | None
    num_free_blocks: int
    num_waiting: int
    staged: StagedImage | None
    """What this iteration staged; None before its prepare."""
    overwritten: StagedImage | None
    """What the same half was staged with before: two forwards old, read by nobody any more."""
    sampled: tuple[str, ...] | None
    """Requests whose sampled ids are on their way or there; None before sample or verify."""
    verified: VerifiedImage | None
    """What verify drew for those, with drafting; None before it."""
    tokens: Mapping[str, tuple[int, ...]]
    """The newest tokens of each request that resolve gave any: one, with drafting also the accepted drafts."""
    former_tokens: Mapping[str, tuple[int, ...]]
    """Those of the iteration before."""
    ended: Mapping[str, str]
    """Finish reason of each request whose end this iteration found."""
    outputs: tuple[tuple[str, bool], ...]
    """Outputs made: request, and whether it was its last."""


class Photographer:
    """Takes images of one engine; each shares with the one before what did not change."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table: TableImage | None = None
        self._halves: dict[int, int] = {}
        self._staged: dict[int, StagedImage] = {}
        self._tokens: Mapping[str, tuple[int, ...]] = {}

    def take(self, iteration: Iteration, before: BorderImage | None) -> BorderImage:
        """The state now.

        Args:
            iteration: In hand.
            before: The image at the border before, in the same iteration.
        """
        engine = self._engine
        self._table = take_table(engine.table, self._table)
        staged, overwritten = (None, None) if before is None else (before.staged, before.overwritten)
        if staged is None and iteration.plan is not None:
            staged = self._staged_image(iteration.plan, iteration.index)
            overwritten, self._staged[staged.half] = self._staged.get(staged.half), staged
        tokens, former = ({}, {}) if before is None else (before.tokens, before.former_tokens)
        if len(tokens) != len(iteration.advanced):
            table = None if before is None else before.table
            tokens, former = _newest_tokens(iteration, table), self._tokens
            self._tokens = tokens
        return BorderImage(
            table=self._table,
            pending=_pending_image(engine.pending, before.pending if before is not None else None),
            num_free_blocks=engine.pool.num_free,
            num_waiting=engine.queue.num_waiting,
            staged=staged,
            overwritten=overwritten,
            sampled=_sampled_ids(iteration.sampled or iteration.verified),
            verified=None if iteration.verified is None else _verified_image(iteration, iteration.verified),
            tokens=tokens,
            former_tokens=former,
            ended={request.request_id: request.finish_reason or "" for request in iteration.ended},
            outputs=tuple((output.request_id, output.finished) for output in iteration.outputs),
        )

    def _staged_image(self, plan: Plan, iteration: int) -> StagedImage:
        shape, fields = plan.shape, plan.half.fields
        kept = {name: fields[name][: shape.num_rows].astype(np.int32) for name in ROW_FIELDS}
        kept |= {name: fields[name][: shape.num_tokens].astype(np.int32) for name in TOKEN_FIELDS}
        return StagedImage(
            half=self._index_of(plan.half),
            iteration=iteration,
            request_ids=plan.request_ids,
            batch_rows=batch_rows_of(plan.dims, shape),
            fields=kept,
        )

    def _index_of(self, half: HostSlab) -> int:
        return self._halves.setdefault(id(half), len(self._halves) % 2)


def take_table(table: RequestTable, before: TableImage | None) -> TableImage:
    """Copy the live rows, sharing with ``before`` every array that is equal."""
    n = table.num_live
    held = table.block_ids[:n, : int(table.block_count[:n].max()) if n else 0]
    if before is None or (before.version, before.num_paused) != (table.version, table.num_paused):
        requests: list[Request] = table.live_requests()
        request_ids = tuple(request.request_id for request in requests)
        prompt_tokens = tuple(len(request.prompt_ids) for request in requests)
        return TableImage(
            version=table.version,
            num_paused=table.num_paused,
            request_ids=request_ids,
            prompt_tokens=prompt_tokens,
            skipped=tuple(request.num_cached_tokens for request in requests),
            columns={name: column[:n].copy() for name, column in table.columns() if name != "block_ids"},
            block_ids=held.copy(),
        )
    columns = {
        name: _shared(before.columns[name], column[:n]) for name, column in table.columns() if name != "block_ids"
    }
    blocks = _shared(before.block_ids, held)
    if blocks is before.block_ids and all(columns[name] is before.columns[name] for name in columns):
        return before
    return TableImage(
        version=before.version,
        num_paused=before.num_paused,
        request_ids=before.request_ids,
        prompt_tokens=before.prompt_tokens,
        skipped=before.skipped,
        columns=columns,
        block_ids=blocks,
    )


def _shared(before: Array, now: Array) -> Array:
    """``before`` where both are equal; comparing bytes takes a tenth of what ``array_equal`` takes on short columns."""
    return before if before.shape == now.shape and before.tobytes() == now.tobytes() else now.copy()


def _pending_image(pending: PendingForward | None, before: PendingImage | None) -> PendingImage | None:
    if pending is None:
        return None
    if before is not None and before.iteration == pending.iteration:
        rows = _shared(before.table_rows, pending.table_rows)
        if rows is before.table_rows:
            return before
        return PendingImage(iteration=pending.iteration, request_ids=pending.request_ids, table_rows=rows)
    return PendingImage(
        iteration=pending.iteration, request_ids=pending.request_ids, table_rows=pending.table_rows.copy()
    )


def _sampled_ids(sampled: SampleResult | Verified | None) -> tuple[str, ...] | None:
    """Requests of the consumed forward but for one whose prompt is read in part: of that nothing is sampled."""
    if sampled is None:
        return None
    end = sampled.first_row + sampled.num_rows
    rows = zip(sampled.pending.request_ids, sampled.pending.table_rows.tolist(), strict=True)
    return tuple(request_id for request_id, row in rows if row < end)


def _verified_image(iteration: Iteration, verified: Verified) -> VerifiedImage:
    """By request, as the rows stood when it was launched."""
    first, end = verified.first_row, verified.first_row + verified.num_rows
    rows = zip(verified.pending.request_ids, verified.pending.table_rows.tolist(), strict=True)
    place_of = {request_id: row - first for request_id, row in rows if first <= row < end}
    given = iteration.num_tokens
    return VerifiedImage(
        drafts={request_id: int(verified.num_drafts[place]) for request_id, place in place_of.items()},
        accepted=None
        if given is None
        else {request_id: int(given[place]) - 1 for request_id, place in place_of.items()},
    )


def _newest_tokens(iteration: Iteration, before: TableImage | None) -> Mapping[str, tuple[int, ...]]:
    """Of each request that got any in resolve; ``before`` tells how many it had."""
    advanced = [request for request in iteration.advanced if request.output_ids]
    if iteration.verified is None or before is None:
        return {request.request_id: (request.output_ids[-1],) for request in advanced}
    row_of, had = before.row_of(), before.columns["num_output"]
    return {
        request.request_id: tuple(request.output_ids[int(had[row_of[request.key]]) :])
        for request in advanced
        if request.key in row_of
    }
