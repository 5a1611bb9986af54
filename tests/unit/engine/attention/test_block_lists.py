"""Prefill rows as lists of blocks, against a loop over the rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.base import PrefillRows
from engine.attention.block_lists import block_lists

NOBODY = 99
"""A table row that does not exist, as that of padding rows."""


def prefill_rows(lengths: list[tuple[int, int]], block_size: int, *, seed: int = 0) -> PrefillRows:
    """(cached before, query tokens) of each row, shuffled over a table; rows without queries are padding."""
    rng = np.random.default_rng(seed)
    longest = max((cached + queries for cached, queries in lengths), default=0)
    columns = -(-longest // block_size) + 1
    table = rng.permutation(len(lengths) * columns).astype(np.int32).reshape(-1, columns)
    rows = rng.permutation(len(lengths))
    query_len = np.array([queries for _, queries in lengths], dtype=np.int64)
    kv_len = np.array([cached + queries for cached, queries in lengths], dtype=np.int64)
    return PrefillRows(query_len, np.where(query_len, kv_len, 1), np.where(query_len, rows, NOBODY), table)


class TestBlockLists:
    @given(
        lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=6),
        block_size=st.sampled_from([1, 4, 16]),
        seed=st.integers(0, 9),
    )
    def test_name_every_block_that_a_row_reads_in_order(
        self, lengths: list[tuple[int, int]], block_size: int, seed: int
    ) -> None:
        rows = prefill_rows(lengths, block_size, seed=seed)

        lists = block_lists(rows, block_size)

        token = 0
        for row, (cached, queries) in enumerate(lengths):
            tokens = cached + queries if queries else 0
            first, end = lists.block_indptr[row], lists.block_indptr[row + 1]
            blocks = -(-tokens // block_size)
            wanted = rows.block_ids_RC[rows.table_row_P[row], :blocks] if queries else []
            assert lists.block_ids[first:end].tolist() == list(wanted)
            assert lists.kv_len[row] == tokens == max(blocks - 1, 0) * block_size + lists.last_block_len[row]
            assert (lists.last_block_len[row] > 0) == bool(tokens)
            assert lists.query_indptr[row] == token
            token += queries
        assert lists.query_indptr[-1] == token
        assert lists.block_indptr[-1] == lists.block_ids.size

    def test_of_padding_alone_are_empty(self) -> None:
        lists = block_lists(prefill_rows([(0, 0), (3, 0)], 4), 4)

        assert lists.block_ids.size == 0
        assert lists.query_indptr.tolist() == lists.block_indptr.tolist() == [0, 0, 0]
        assert lists.last_block_len.tolist() == lists.kv_len.tolist() == [0, 0]

    def test_read_a_full_last_block_as_full(self) -> None:
        lists = block_lists(prefill_rows([(0, 8), (4, 5)], 4), 4)

        assert lists.last_block_len.tolist() == [4, 1]
        assert np.diff(lists.block_indptr).tolist() == [2, 3]
