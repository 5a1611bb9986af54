"""The partial row in the table: it stays the last live one under every compaction, on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.columns import DeviceColumns
from engine.device import make_device
from engine.request import Request, RequestTimings, SamplingParams
from engine.table import Moves, RequestTable, fill_holes

MAX_ROWS, MAX_BLOCKS = 9, 5


def make_request(key: int) -> Request:
    return Request(
        key=key,
        request_id=f"r{key}",
        prompt_ids=(1,) * 12,
        params=SamplingParams(),
        seed=0,
        max_new_tokens=4,
        timings=RequestTimings(0),
    )


def make_table(num_rows: int, *, is_partial: bool) -> RequestTable:
    """Rows with values of their own in every column; the last one partial or whole."""
    table = RequestTable(MAX_ROWS, MAX_BLOCKS)
    for key in range(num_rows):
        is_last = key == num_rows - 1
        blocks = np.arange(1 + key % MAX_BLOCKS, dtype=np.int32) + 10 * key
        table.add(make_request(key), blocks, prefill_len=12, chunk=(0, 5) if is_last and is_partial else None)
        table.is_prefill[key] = is_last
        for name in ("kv_len", "num_output", "state_slot", "num_accepted"):
            getattr(table, name)[key] = 100 * key + len(name)
    return table


@dataclass(frozen=True)
class Case:
    """A table and which of its rows survive."""

    alive: tuple[bool, ...]
    is_partial: bool

    @property
    def partial_survives(self) -> bool:
        return self.is_partial and self.alive[-1]


CASES = st.builds(
    Case, alive=st.lists(st.booleans(), min_size=1, max_size=MAX_ROWS).map(tuple), is_partial=st.booleans()
)


def kept(case: Case) -> tuple[RequestTable, dict[int, dict[str, Any]], Moves]:
    table = make_table(len(case.alive), is_partial=case.is_partial)
    before = {int(table.key[row]): row_values(table, row) for row in range(table.num_live)}
    moves = table.keep(np.array(case.alive, dtype=np.bool_))
    return table, before, moves


def row_values(table: RequestTable, row: int) -> dict[str, Any]:
    return {name: column[row].tolist() for name, column in table.columns()}


class TestKeep:
    @given(case=CASES)
    def test_leaves_a_partial_row_the_last_one(self, case: Case) -> None:
        table, _, _ = kept(case)

        last = table.num_live - 1
        assert table.partial_row == (last if case.partial_survives else None)
        if case.partial_survives:
            assert table.key[last] == len(case.alive) - 1

    @given(case=CASES)
    def test_closes_the_holes_as_ever_for_all_other_rows(self, case: Case) -> None:
        """I10; with a partial row, the survivor that stood in its place takes the hole it would have filled."""
        table, _, _ = kept(case)

        wanted = fill_holes(np.array(case.alive, dtype=np.bool_)).tolist()
        found = table.key[: table.num_live].tolist()
        if not case.partial_survives:
            assert found == wanted
            return
        partial = len(case.alive) - 1
        differing = [(a, b) for a, b in zip(found, wanted, strict=True) if a != b]
        assert differing in ([], [(wanted[-1], partial), (partial, wanted[-1])])

    @given(case=CASES)
    def test_moves_every_column_with_its_request(self, case: Case) -> None:
        """I11, I3: also where what leaves a place moves into another one."""
        table, before, moves = kept(case)

        for row in range(table.num_live):
            request = table.requests[row]
            assert request is not None
            assert request.row == row
            assert row_values(table, row) == before[request.key]
        assert len(set(moves.target.tolist())) == moves.target.size
        for key, is_alive in enumerate(case.alive):
            place = int(moves.new_row[key])
            assert place == (table.key.tolist().index(key) if is_alive else -1)
        assert all(request is None for request in table.requests[table.num_live :])
        assert (table.key[table.num_live :] == -1).all()

    @given(case=CASES)
    def test_is_followed_by_the_device_columns(self, case: Case) -> None:
        """Source and target rows may overlap; a copy row by row would lose the one written over."""
        columns = DeviceColumns(
            make_device("inline"), max_requests=MAX_ROWS, max_blocks=MAX_BLOCKS, dummy_block=999, vocab_size=7
        )
        n = len(case.alive)
        columns.output_counts = torch.arange((MAX_ROWS + 1) * 7, dtype=torch.int32).reshape(-1, 7)
        columns.ints[:n] = torch.arange(n)[:, None] * 10 + torch.arange(columns.ints.shape[1])
        columns.floats[:n] = columns.ints[:n, :1].float() + 0.5
        columns.block_table[:n] = torch.arange(n, dtype=torch.int32)[:, None]
        held = [column.clone() for column in columns._all()]

        table, _, moves = kept(case)
        columns.move(torch.from_numpy(moves.source), torch.from_numpy(moves.target))

        keys = table.key[: table.num_live].tolist()
        for before, after in zip(held, columns._all(), strict=True):
            assert torch.equal(after[: table.num_live], before[keys])

    def test_swaps_where_the_partial_row_would_have_filled_a_hole(self) -> None:
        _, _, moves = kept(Case(alive=(True, False, True, True), is_partial=True))

        assert dict(zip(moves.source.tolist(), moves.target.tolist(), strict=True)) == {2: 1, 3: 2}


class TestBeginChunk:
    def test_goes_on_where_the_last_one_ended_with_more_blocks(self) -> None:
        table = make_table(3, is_partial=True)
        held = table.block_ids[2, :3].tolist()
        version = table.version

        table.begin_chunk(2, 9, np.array([77, 78], dtype=np.int32))

        assert (table.chunk_done[2], table.chunk_end[2], table.block_count[2]) == (5, 9, 5)
        assert table.block_ids[2].tolist() == [*held, 77, 78]
        assert table.partial_row == 2
        table.begin_chunk(2, 12, np.zeros(0, dtype=np.int32))
        assert table.partial_row is None
        assert table.version == version  # no row came, went or moved
