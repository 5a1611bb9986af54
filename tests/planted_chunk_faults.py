"""Faults of prompts read in chunks; as ``planted_faults``."""

from __future__ import annotations

from typing import Any

from engine import admission as admission_module
from engine import runner as runner_module
from engine.admission import RequestQueue
from engine.columns import DeviceColumns
from engine.controller import Controller
from engine.results import PendingForward
from engine.table import RequestTable
from tests.planted_faults import Fault, Patch, fixed_host_column, wrap


def sample_of_a_partial_chunk_used(patch: Patch) -> None:
    patch.setattr(PendingForward, "num_sampled", property(lambda pending: int((pending.table_rows >= 0).sum())))


def position_repeated_at_a_seam(patch: Patch) -> None:
    def stage(real: Any, half: Any, table: Any, layout: Any, dummy_row: int) -> None:
        real(half, table, layout, dummy_row)
        for i, row in enumerate(layout.table_rows.tolist()):
            if table.is_prefill[row] and table.chunk_done[row]:
                half.fields["positions"][half.fields["query_start"][layout.batch_rows[i]]] -= 1

    wrap(patch, runner_module, "stage_tokens", stage)


def partial_row_in_a_hole(patch: Patch) -> None:
    def keep(real: Any, self: RequestTable, alive: Any) -> Any:
        row = self.partial_row
        if row is None:
            return real(self, alive)
        end, self.chunk_end[row] = int(self.chunk_end[row]), self.prompt_len[row]
        moves = real(self, alive)
        if moves.new_row[row] >= 0:
            self.chunk_end[moves.new_row[row]] = end
        return moves

    wrap(patch, RequestTable, "keep", keep)


def prompt_logprobs_shifted_at_a_seam(patch: Patch) -> None:
    def owing(real: Any, table: Any, rows: Any) -> Any:
        found = real(table, rows)
        for prompt in found:
            prompt.first -= prompt.first > 1
        return found

    wrap(patch, runner_module, "rows_owing_prompt_logprobs", owing)


def seam_told_of_another_token(patch: Patch) -> None:
    def stage(real: Any, half: Any, layout: Any, prompt_rows: Any) -> Any:
        idx, targets = real(half, layout, prompt_rows)
        for prompt in prompt_rows:
            if prompt.first + prompt.count < len(prompt.request.prompt_ids):
                targets[prompt.start + prompt.count - 1] = 0
        return idx, targets

    wrap(patch, runner_module, "stage_prompt_rows", stage)


def blocks_of_a_chunk_from_column_zero(patch: Patch) -> None:
    def blocks(real: Any, self: Controller, row: int) -> Any:
        rows, columns, ids = real(self, row)
        return rows, columns - (columns[0] if columns.size else 0), ids

    wrap(patch, Controller, "_blocks_of_chunk", blocks)


def block_at_a_seam_entered_late(patch: Patch) -> None:
    def blocks(real: Any, self: Controller, row: int) -> Any:
        rows, columns, ids = real(self, row)
        is_first = not self.table.chunk_done[row]
        return (rows, columns, ids) if is_first else (rows[1:], columns[1:], ids[1:])

    wrap(patch, Controller, "_blocks_of_chunk", blocks)


def chunk_read_again(patch: Patch) -> None:
    def begin(real: Any, self: RequestTable, row: int, *rest: Any) -> None:
        done = int(self.chunk_done[row])
        real(self, row, *rest)
        self.chunk_done[row] = done

    wrap(patch, RequestTable, "begin_chunk", begin)


def admission_behind_a_partial_chunk(patch: Patch) -> None:
    def forward(real: Any, self: RequestQueue) -> Any:
        return real(self)[0], self._max_batch_tokens - self._table.num_active

    wrap(patch, RequestQueue, "_next_forward", forward)


def lone_token_left(patch: Patch) -> None:
    def size(real: Any, remaining: int, budget: int, *, chunked: bool = True) -> int:
        return min(remaining, budget) if chunked else int(real(remaining, budget, chunked=False))

    wrap(patch, admission_module, "chunk_size", size)


def rows_moved_one_by_one(patch: Patch) -> None:
    def move(real: Any, self: DeviceColumns, source: Any, target: Any) -> None:
        for place in reversed(range(source.shape[0])):
            real(self, source[place : place + 1], target[place : place + 1])

    wrap(patch, DeviceColumns, "move", move)


CHUNKS = {"chunked_prefill": True, "max_batch_tokens": 8}

CHUNK_FAULTS = [
    Fault("sample of a partial chunk used", sample_of_a_partial_chunk_used, CHUNKS),
    Fault("position repeated at a seam", position_repeated_at_a_seam, CHUNKS),
    Fault("partial row in a hole", partial_row_in_a_hole, CHUNKS),
    Fault("prompt log probabilities shifted at a seam", prompt_logprobs_shifted_at_a_seam, CHUNKS),
    Fault("seam told of another token", seam_told_of_another_token, CHUNKS),
    Fault("blocks of a chunk from column zero", blocks_of_a_chunk_from_column_zero, CHUNKS),
    Fault("block at a seam entered late", block_at_a_seam_entered_late, CHUNKS),
    Fault("chunk read again", chunk_read_again, CHUNKS),
    Fault("admission behind a partial chunk", admission_behind_a_partial_chunk, CHUNKS),
    Fault("lone token left", lone_token_left, CHUNKS),
    Fault("rows moved one by one", rows_moved_one_by_one, CHUNKS),
    *(
        Fault(f"host column {name} does not move", fixed_host_column(name), CHUNKS)
        for name in ("chunk_done", "chunk_end")
    ),
]
