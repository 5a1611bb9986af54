"""Where the rows of a batch stand in the forward that runs it, and which blocks are new to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.batch import BatchShape
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


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Block-table entries that the device does not know yet, [m] each."""

    rows: Rows
    cols: Rows
    ids: NDArray[np.int32]
