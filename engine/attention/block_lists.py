"""Prefill rows as lists of blocks, one row after another: what paged prefill kernels take instead of a block table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.attention.base import PrefillRows


class BlockLists(NamedTuple):
    """P rows. Row i has places [indptr[i], indptr[i + 1]) of what an ``indptr`` counts; a padding row has none."""

    query_indptr: NDArray[np.int64]
    """[P + 1] into the query tokens."""
    block_indptr: NDArray[np.int64]
    """[P + 1] into ``block_ids``."""
    block_ids: NDArray[np.int32]
    """[block_indptr[P]] blocks, a row's in order of position."""
    last_block_len: NDArray[np.int64]
    """[P] tokens in the row's last block, 1 to block_size; 0 for a padding row."""
    kv_len: NDArray[np.int64]
    """[P] tokens in all its blocks."""


def block_lists(rows: PrefillRows, block_size: int) -> BlockLists:
    """List the blocks that each row reads."""
    kv_len = np.where(rows.query_len_P > 0, rows.kv_len_P, 0)
    count = -(-kv_len // block_size)
    real = np.flatnonzero(count)
    column = np.arange(count.max(initial=0))
    held = rows.block_ids_RC[:, : column.size][rows.table_row_P[real]]
    return BlockLists(
        query_indptr=_indptr(rows.query_len_P),
        block_indptr=_indptr(count),
        block_ids=held[column < count[real, None]],
        last_block_len=kv_len - np.maximum(count - 1, 0) * block_size,
        kv_len=kv_len,
    )


def _indptr(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths)))
