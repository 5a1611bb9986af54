"""Where the rows of a batch stand in the forward that runs it, and which blocks are new to the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.batch import BatchDimensions, BatchShape
from engine.table import Rows


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a batch's real rows stand among the launched ones."""

    table_rows: Rows
    """[n] table row of each real batch row."""
    batch_rows: Rows
    """[n] its place among the ``shape.num_rows`` launched rows."""
    query_len: NDArray[np.int64]
    """[n] its query tokens."""
    shape: BatchShape


@dataclass(slots=True)
class DecodeBatch:
    """What stays as it is from step to step while the same rows decode: worked out once, then only looked up."""

    version: int
    """Of the table whose rows these are."""
    table_rows: Rows
    """[n] ascending."""
    select: slice | Rows
    """The same as an index into a column; a slice where they lie side by side, which is a view and no copy."""
    dims: BatchDimensions
    graph: BatchDimensions | None
    miss_reason: str | None
    keys: NDArray[np.int64]
    """[n] generation of each row."""
    request_ids: tuple[str, ...]
    layouts: dict[BatchShape, Layout] = field(default_factory=dict)

    def layout(self, shape: BatchShape) -> Layout:
        """Of these rows in ``shape``; the same object every time."""
        found = self.layouts.get(shape)
        if found is None:
            places = np.arange(self.table_rows.size)
            query_len = np.full(self.table_rows.size, shape.decode_width, dtype=np.int64)
            found = self.layouts[shape] = Layout(self.table_rows, places, query_len, shape)
        return found


def are_neighbours(rows: Rows) -> bool:
    """Whether each row is the one before plus one."""
    return bool(rows.size == 0 or (rows[-1] - rows[0] == rows.size - 1 and (rows[1:] > rows[:-1]).all()))


def as_index(rows: Rows) -> slice | Rows:
    """Ascending ``rows`` as a slice where they lie side by side."""
    if rows.size and rows[-1] - rows[0] == rows.size - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Block-table entries that the device does not know yet, [m] each."""

    rows: Rows
    cols: Rows
    ids: NDArray[np.int32]


NO_ROWS_AT_ALL: Rows = np.zeros(0, dtype=np.int64)
NO_NEW_BLOCKS = NewBlocks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))
